"""Metrics of the `evaluate` library by name, or by the path of a metric script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvprofile.errors import BadInput

if TYPE_CHECKING:
    from kvprofile.scoring import Metric

_LOWER_IS_BETTER = frozenset(
    {"brier_score", "cer", "character", "charcut_mt", "mae", "mape", "mase", "mse", "perplexity", "smape", "ter", "wer"}
)


def load(name: str) -> Metric:
    """Returns a metric of `evaluate`; its values keep the scale that `evaluate` gives them (some are 0 to 100).

    A metric with several values scores by the one called like itself, else by its first number.

    Raises:
        BadInput: If `evaluate` cannot load it, it needs more than texts and references, or lower values are better.
    """
    import evaluate

    from kvprofile.scoring import Metric

    short = PurePath(name).stem or name
    if short in _LOWER_IS_BETTER:
        raise BadInput(f"{short} of `evaluate` is lower when better, while a loss needs a score that is higher")
    try:
        module = evaluate.load(name, keep_in_memory=True)
    except Exception as error:
        raise BadInput(
            f"`evaluate` cannot load {name!r} ({_brief(error)}); check the name and the connection"
        ) from error

    def score(output: str, references: Sequence[str]) -> float:
        return max((_value(module, short, output, reference) for reference in references), default=0.0)

    try:
        score("a b c d", ["a b c d"])
    except Exception as error:
        raise BadInput(
            f"{name!r} of `evaluate` cannot score one answer against one reference ({_brief(error)})"
        ) from error
    return Metric(short, f"evaluate-{evaluate.__version__}-{str(module._hash or '')[:12]}", score)


def _value(module: Any, name: str, output: str, reference: str) -> float:
    result = module.compute(predictions=[output], references=[reference])
    numbers = {k: float(v) for k, v in result.items() if isinstance(v, int | float) or hasattr(v, "item")}
    if not numbers:
        raise ValueError(f"its result has no number: {', '.join(result)}")
    value = numbers.get(name, next(iter(numbers.values())))
    if not math.isfinite(value):
        raise ValueError(f"its value is {value}")
    return value


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
