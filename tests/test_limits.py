from __future__ import annotations

import pytest

from kvprofile.errors import BadInput
from kvprofile.limits import LossLimit, parse_bandwidth, parse_loss, parse_milliseconds, parse_rule


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


@pytest.mark.parametrize(
    ("text", "bytes_per_ms"),
    [
        ("1Gbps", 125_000),
        ("100Gbps", 12_500_000),
        ("12.5GB/s", 12_500_000),
        (" 10 Gbit/s ", 1_250_000),
        ("8Mbps", 1000),
        ("8kbps", 1),
        (".5Tbps", 62_500_000),
        ("1MB/s", 1000),
    ],
)
def test_parses_bandwidths(text: str, bytes_per_ms: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_ms)


@pytest.mark.parametrize(
    "text", ["", "100", "0Gbps", "-1Gbps", "1Gb", "1gbps", "Gbps", "1e3Gbps", "nanGbps", "1GBps", "1Gbps 2"]
)
def test_refuses_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(BadInput, match="write 100Gbps"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("500ms", 500), ("1.5s", 1500), ("200us", 0.2), ("200µs", 0.2), ("0 ms", 0), (".5 s", 500)],
)
def test_parses_times(text: str, milliseconds: float) -> None:
    assert parse_milliseconds(text) == pytest.approx(milliseconds)


@pytest.mark.parametrize("text", ["", "500", "-1ms", "1min", "ms", "1e3ms", "infms", "1 2ms", f"{'9' * 400}s"])
def test_refuses_what_is_no_time(text: str) -> None:
    with pytest.raises(BadInput, match="write 500ms"):
        parse_milliseconds(text)
