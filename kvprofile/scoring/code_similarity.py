"""Edit similarity of the next line of code, after LongBench's `code_sim_score`.

LongBench calls `fuzzywuzzy`, which rounds the ratio to whole per cents and, without python-Levenshtein, takes it from
`difflib`. This takes rapidfuzz's ratio unrounded: it equals LongBench's with python-Levenshtein up to that rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata


def version() -> str:
    return f"1-rapidfuzz-{metadata.version('rapidfuzz')}"


def score(output: str, references: Sequence[str]) -> float:
    """Returns the best similarity of the output's first line of code over the references, 0 to 1."""
    from rapidfuzz import fuzz

    line = first_code_line(output)
    return max((fuzz.ratio(line, reference) / 100 for reference in references), default=0.0)


def first_code_line(output: str) -> str:
    """Returns the first line without a back-tick, `#` or `//`, the empty string if there is none."""
    lines = output.lstrip("\n").split("\n")
    return next((line for line in lines if "`" not in line and "#" not in line and "//" not in line), "")
