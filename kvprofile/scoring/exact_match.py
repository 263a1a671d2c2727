"""Whether a short answer equals a reference after SQuAD's normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from kvprofile.scoring.normalization import normalize


def version() -> str:
    return "1"


def score(output: str, references: Sequence[str]) -> float:
    """Returns 1 if the normalised output equals a normalised reference, else 0."""
    return float(any(normalize(output) == normalize(r) for r in references))
