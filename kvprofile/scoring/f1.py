"""Token F1 of short answers, as LongBench's `qa_f1_score` computes it (github.com/THUDM/LongBench, metrics.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvprofile.scoring.normalization import normalize


def version() -> str:
    return "1"


def score(output: str, references: Sequence[str]) -> float:
    """Returns the best F1 over the references, 0 to 1.

    Tokens are counted as a multiset: over sets an answer that loops ("Paris Paris Paris") would get full marks.
    """
    return max((_f1(normalize(output).split(), normalize(r).split()) for r in references), default=0.0)


def _f1(output: list[str], reference: list[str]) -> float:
    same = (Counter(output) & Counter(reference)).total()
    if not same:
        return 0.0
    precision, recall = same / len(output), same / len(reference)
    return 2 * precision * recall / (precision + recall)
