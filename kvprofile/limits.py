"""What a user allows: a loss of `1%` of the receiver's score or `1pt` of a hundred, an age of `30d`. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from kvprofile.errors import BadInput, one_of

Rule = Literal["point", "bound", "certified"]
"""What of a plan must lie within the limit: its measured loss, its upper bound, or its certified upper bound."""

RULES: tuple[Rule, ...] = ("point", "bound", "certified")

BOUND_METHOD = "unseen-worst@1"
"""Identity of the upper bounds in a profile; a reader makes those of other methods anew, or does without."""

_COLUMN_ENDS: dict[Rule, str] = {"point": "", "bound": "_upper", "certified": "_certified"}
ROUNDING = 1e-9
"""Of percents or points, that a limit lets pass."""
_AGE_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


class LossLimit(NamedTuple):
    """At most `value` of loss: `%` is relative to full prefill's mean score, `pt` is in points (score × 100)."""

    value: float
    unit: Literal["%", "pt"]

    def __str__(self) -> str:
        if self.unit == "%":
            return f"{self.value:g}%"
        return f"{self.value:g} point" if self.value == 1 else f"{self.value:g} points"

    def allows(self, row: Mapping[str, Any], rule: Rule = "point") -> bool:
        """Returns whether the loss of a row of a profile is within the limit; one that is not known is not."""
        loss = row.get(self.column(rule))
        return loss is not None and self.measure(loss) <= self.most  # NaN is below nothing

    def measure(self, loss: float) -> float:
        """Returns a loss of a profile in the unit of the limit."""
        return loss * (100 if self.unit == "%" else 1)

    @property
    def most(self) -> float:
        """The largest loss that passes, in the unit of the limit."""
        # 0.72 against 0.80 must pass a limit of 10 % although 1 - 0.72 / 0.80 is a little above 0.1 in floating point.
        return self.value + ROUNDING

    def column(self, rule: Rule = "point") -> str:
        """Returns the name of the value that the limit is for."""
        return f"loss_{'rel' if self.unit == '%' else 'points'}{_COLUMN_ENDS[rule]}"

    @property
    def share(self) -> float:
        """The limit of relative loss as a share, or of loss in points as a difference of scores."""
        return self.value / 100


def parse_loss(text: str) -> LossLimit:
    """Returns the limit written as `1%`, `0.5 %`, `1pt` or `2 points`.

    Raises:
        BadInput: If the unit is missing or the number is not between 0 and 100.
    """
    if not isinstance(text, str) or re.fullmatch(r"\s*[\d.]+\s*", text, re.ASCII):
        raise BadInput(f"{text!r} has no unit; write {text}% (relative) or {text}pt (points)")
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%|pts?|points?)\s*", text, re.ASCII)
    if not match or float(match[1]) > 100:
        raise BadInput(f"{text[:40]!r} is not a loss between 0 and 100; write 1% (relative) or 1pt (points)")
    return LossLimit(float(match[1]), "%" if match[2] == "%" else "pt")


def loss_limit(max_loss: str | LossLimit) -> LossLimit:
    """Returns the limit that a caller gave as a text or made itself.

    Raises:
        BadInput: As `parse_loss`, or if a limit's unit is another or its value no number between 0 and 100.
    """
    if not isinstance(max_loss, LossLimit):
        return parse_loss(max_loss)
    value, unit = max_loss
    if unit not in ("%", "pt") or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise BadInput(f"a limit of {value!r} {unit!r} cannot be; give a number from 0 to 100 and the unit '%' or 'pt'")
    return max_loss


def parse_age(text: str) -> timedelta:
    """Returns the age written as `36h`, `30d` or `8w`.

    Raises:
        BadInput: If it is none.
    """
    match = re.fullmatch(r"\s*(\d{1,5})\s*([hdw])\s*", text, re.ASCII)
    if not match:
        raise BadInput(f"{text[:40]!r} is not an age; write 36h, 30d or 8w")
    return int(match[1]) * _AGE_UNITS[match[2]]


def parse_rule(text: str) -> Rule:
    """Returns the rule of that name.

    Raises:
        BadInput: If there is none.
    """
    return one_of(text, RULES, "rule")
