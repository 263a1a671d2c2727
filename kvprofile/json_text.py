"""JSON that anybody may have written. Standard library only."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON document.

    Raises:
        ValueError: If it is none, holds NaN or infinity, or nests too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
