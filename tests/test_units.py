from __future__ import annotations

import pytest

from kvprofile.cost.timeline import GBPS
from kvprofile.errors import BadInput
from kvprofile.units import (
    bandwidth_text,
    duration_text,
    parse_bandwidth,
    parse_bandwidths,
    parse_milliseconds,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        ("10Gbps", 10),
        (" 2.5 Gbps ", 2.5),
        ("80kbps", 8e-5),
        ("10Gbit/s", 10),
        ("500Mbps", 0.5),
        ("1.6Tbps", 1600),
        ("25GB/s", 200),
        ("800MB/s", 6.4),
        (".5Gbps", 0.5),
    ],
)
def test_bandwidths(text: str, gbps: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(gbps * GBPS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "10GBps",
        "10gbps",
        "1mbps",
        "10 G",
        "-1Gbps",
        "1e3Gbps",
        "nanGbps",
        "١Gbps",
        "0Gbps",
        "9999999999Gbps",
    ],
)
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="write 10Gbps or 25GB/s"):
        parse_bandwidth(text)


def test_a_number_without_a_unit_is_told_so() -> None:
    with pytest.raises(BadInput, match=r"'10' has no unit; write 10Gbps \(bits\) or 10GB/s \(bytes\)"):
        parse_bandwidth("10")
    with pytest.raises(BadInput, match="'100' has no unit"):
        parse_bandwidths("1Gbps,100")
    with pytest.raises(BadInput, match="'5' has no unit; write 5ms or 5s"):
        parse_milliseconds("5")


def test_a_unit_is_also_that_of_the_numbers_before_it() -> None:
    assert parse_bandwidths("1,10,100,200Gbps") == tuple(gbps * GBPS for gbps in (1, 10, 100, 200))
    assert parse_bandwidths("500Mbps, 1 ,10 Gbps,1GB/s") == tuple(gbps * GBPS for gbps in (0.5, 1, 10, 8))
    assert parse_bandwidths("10Gbps,10000Mbps,1Gbps") == (10 * GBPS, GBPS)
    with pytest.raises(BadInput, match="is not a bandwidth"):
        parse_bandwidths("1,,10Gbps")


@pytest.mark.parametrize(("text", "ms"), [("1ms", 1), ("200us", 0.2), ("200 µs", 0.2), ("0.5s", 500), ("0ms", 0)])
def test_durations(text: str, ms: float) -> None:
    assert parse_milliseconds(text) == pytest.approx(ms)


@pytest.mark.parametrize("text", ["", "1m", "-1ms", "1 ms 2", "1e3ms", "99999s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="write 1ms or 200us"):
        parse_milliseconds(text)


def test_token_counts() -> None:
    assert parse_tokens("1024, 4096,1024") == (1024, 4096)
    for text in ("", "0", "-1", "1.5", "1k", "1024,", "9" * 20, "²"):
        with pytest.raises(BadInput, match="write 1024 or 1024,4096"):
            parse_tokens(text)


def test_texts_for_people() -> None:
    assert [bandwidth_text(gbps) for gbps in (0.25, 0.0031, 1, 12.34, 250, 1600)] == [
        *("250 Mbps", "3.1 Mbps", "1 Gbps", "12.3 Gbps", "250 Gbps", "1600 Gbps"),
    ]
    assert [duration_text(ms) for ms in (0, 0.4217, 99.94, 812.4, 999.7, 12_345, 123_456)] == [
        *("0 ms", "0.422 ms", "99.9 ms", "812 ms", "1 s", "12.3 s", "123 s"),
    ]
