"""Metrics by name: each scores one answer against its references, best over the references."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvprofile.errors import BadInput, did_you_mean

BUILT_IN = ("code_similarity", "exact_match", "f1", "rouge_l")


class Metric(NamedTuple):
    """A scorer with its identity.

    Attributes:
        name: Value of the `metric` column.
        version: What else decides the values: version of the implementation and of the library behind it.
        score: `(output text, references) -> score`, higher is better; 0 to 1 for the built-in metrics.
    """

    name: str
    version: str
    score: Callable[[str, Sequence[str]], float]

    @property
    def identity(self) -> str:
        return f"{self.name}@{self.version}"


def agreement(metric: Metric, output: str, own: str) -> float:
    """Returns how well an answer agrees with full prefill's own; the same text is full agreement, even where it says nothing."""
    return 1.0 if output == own and metric.name in BUILT_IN else metric.score(output, (own,))


def metric(name: str) -> Metric:
    """Returns the metric called `name`: a built-in one, or one of the `evaluate` library (`bleu` or `evaluate:bleu`).

    Raises:
        BadInput: If there is no such metric, or `evaluate` cannot load it.
    """
    if name in BUILT_IN:
        module = importlib.import_module(f"{__name__}.{name}")
        return Metric(name, module.version(), module.score)
    from kvprofile.scoring.from_evaluate import load

    try:
        return load(name.removeprefix("evaluate:"))
    except BadInput as error:
        hint = did_you_mean(name, BUILT_IN)
        raise BadInput(f'no metric "{name}"{hint}; built in are {", ".join(BUILT_IN)}, and {error}') from error
