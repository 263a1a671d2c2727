"""JSON that anybody may have written. Standard library only."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON document.

    Raises:
        ValueError: If it is none, holds NaN, infinity or a fraction beyond a double such as `1e999`, or nests too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word[:40]} in the JSON is larger than any double")
    return number
