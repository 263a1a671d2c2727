"""ROUGE-L F-measure of Google's `rouge-score`, without stemming.

NOTE: LongBench uses the package `rouge`, whose values differ (other tokens, other treatment of sentences); do not
compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Any


def version() -> str:
    return f"rouge-score-{metadata.version('rouge-score')}-unstemmed"


def score(output: str, references: Sequence[str]) -> float:
    """Returns the best ROUGE-L F-measure over the references, 0 to 1."""
    return max((float(_scorer().score(r, output)["rougeL"].fmeasure) for r in references), default=0.0)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)
