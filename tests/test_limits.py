from __future__ import annotations

from datetime import timedelta

import pytest

from kvprofile.errors import BadInput
from kvprofile.limits import LossLimit, parse_age, parse_loss, parse_rule


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("1%", 1, "%"),
        ("0.5 %", 0.5, "%"),
        (".5pt", 0.5, "pt"),
        ("2 points", 2, "pt"),
        ("0%", 0, "%"),
        ("100%", 100, "%"),
    ],
)
def test_parses(text: str, value: float, unit: str) -> None:
    assert parse_loss(text) == (value, unit)


@pytest.mark.parametrize("text", ["1", "", "%", "-1%", "101%", "nan%", "1e1%", "1%%", "one%", "1% 2"])
def test_refuses_what_is_no_loss(text: str) -> None:
    with pytest.raises(BadInput, match="write 1%"):
        parse_loss(text)


def test_allows_up_to_the_limit_in_its_own_unit() -> None:
    row = {"loss_rel": 1 - 0.72 / 0.80, "loss_points": 8.0}
    assert row["loss_rel"] > 0.1
    assert LossLimit(10, "%").allows(row)
    assert not LossLimit(9.9, "%").allows(row)
    assert LossLimit(8, "pt").allows(row)
    assert not LossLimit(7.9, "pt").allows(row)


def test_allows_a_gain() -> None:
    assert LossLimit(0, "%").allows({"loss_rel": -0.2, "loss_points": -10})


@pytest.mark.parametrize("text", ["10", " 0.1 "])
def test_a_number_without_a_unit_is_told_so(text: str) -> None:
    with pytest.raises(BadInput, match="has no unit; write"):
        parse_loss(text)


def test_rules_by_name() -> None:
    assert [parse_rule(name) for name in ("point", "bound", "certified")] == ["point", "bound", "certified"]
    with pytest.raises(BadInput, match='did you mean "certified"'):
        parse_rule("certify")


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), 10**400])
def test_what_is_no_loss_is_not_allowed(loss: object) -> None:
    for limit in (LossLimit(100, "%"), LossLimit(100, "pt")):
        assert not limit.allows({"loss_rel": loss, "loss_points": loss})
    assert LossLimit(0, "pt").allows({"loss_points": -(10**400)})


def test_ages() -> None:
    hours = {"12h": 12, " 90 d ": 90 * 24, "4w": 4 * 7 * 24}
    assert {text: parse_age(text) for text in hours} == {text: timedelta(hours=n) for text, n in hours.items()}
    for text in ("90", "d", "-1d", "1y", ""):
        with pytest.raises(BadInput, match="is not an age; write 36h, 30d or 8w"):
            parse_age(text)
