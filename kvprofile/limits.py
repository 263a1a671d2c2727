"""The loss a user accepts: `1%` of the receiver's own score, or `1pt` of a hundred. Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from kvprofile.errors import BadInput

_ROUNDING = 1e-9


class LossLimit(NamedTuple):
    """At most `value` of loss: `%` is relative to full prefill's mean score, `pt` is in points (score × 100)."""

    value: float
    unit: Literal["%", "pt"]

    def __str__(self) -> str:
        if self.unit == "%":
            return f"{self.value:g}%"
        return f"{self.value:g} point" if self.value == 1 else f"{self.value:g} points"

    def allows(self, row: Mapping[str, Any]) -> bool:
        """Returns whether the measured loss of a row of a profile is within the limit; an unmeasured one is not."""
        loss = row["loss_rel"] if self.unit == "%" else row["loss_points"]
        if loss is None or math.isnan(loss):
            return False
        # 0.72 against 0.80 must pass a limit of 10 % although 1 - 0.72 / 0.80 is a little above 0.1 in floating point.
        return bool(loss * (100 if self.unit == "%" else 1) <= self.value + _ROUNDING)


def parse_loss(text: str) -> LossLimit:
    """Returns the limit written as `1%`, `0.5 %`, `1pt` or `2 points`.

    Raises:
        BadInput: If the unit is missing or the number is not between 0 and 100.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%|pts?|points?)\s*", text, re.ASCII)
    if not match or float(match[1]) > 100:
        raise BadInput(f"{text[:40]!r} is not a loss between 0 and 100; write 1% (relative) or 1pt (points)")
    return LossLimit(float(match[1]), "%" if match[2] == "%" else "pt")
