"""Bandwidths, durations and token counts as a user writes them. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvprofile.errors import BadInput

_BYTES_PER_MS = {
    f"{letter}{unit}": size / share
    for letter, size in (("k", 1.0), ("M", 1e3), ("G", 1e6), ("T", 1e9))
    for unit, share in (("bps", 8), ("bit/s", 8), ("B/s", 1))
}
_MS = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}
_LEAST, _MOST = 0.125, 1e12
"""Bytes per millisecond."""
_LONGEST_MS = 1e7
_MOST_TOKENS = 10**8


def parse_bandwidth(text: str) -> float:
    """Returns the bytes per millisecond of a bandwidth such as `10Gbps`, `500 Mbit/s` or `25GB/s`.

    Raises:
        BadInput: If the unit is missing or the bandwidth is not between 1 kbps and 1 PB/s.
    """
    value = _value(text, _BYTES_PER_MS, "a bandwidth", "Gbps (bits) or {0}GB/s (bytes)", "10Gbps or 25GB/s")
    if not _LEAST <= value <= _MOST:
        raise BadInput(f"{text[:40]!r} is not a bandwidth between 1 kbps and 1 PB/s; write 10Gbps or 25GB/s")
    return value


def parse_bandwidths(text: str) -> tuple[float, ...]:
    """Returns the bytes per millisecond of bandwidths such as `1,10,100Gbps`: a unit is also that of the numbers before it.

    Raises:
        BadInput: As `parse_bandwidth`.
    """
    found: list[float] = []
    unit = ""
    for part in reversed(_parts(text)):
        bare = re.fullmatch(r"[\d.]+", part, re.ASCII)
        found.append(parse_bandwidth(part + unit if bare else part))
        unit = unit if bare else part.lstrip("0123456789. ")
    return tuple(dict.fromkeys(reversed(found)))


def parse_milliseconds(text: str) -> float:
    """Returns the milliseconds of a time such as `1ms`, `200us` or `0.5 s`.

    Raises:
        BadInput: If the unit is missing or the time is not between 0 and 1e4 s.
    """
    ms = _value(text, _MS, "a time", "ms or {0}s", "1ms or 200us")
    if ms > _LONGEST_MS:
        raise BadInput(f"{text[:40]!r} is not a time between 0 and 1e4 s; write 1ms or 200us")
    return ms


def parse_tokens(text: str) -> tuple[int, ...]:
    """Returns token counts such as `1024,4096`.

    Raises:
        BadInput: If one is no whole number from 1 on.
    """
    counts = []
    for part in _parts(text):
        if not re.fullmatch(r"\d{1,9}", part, re.ASCII) or not 1 <= int(part) <= _MOST_TOKENS:
            raise BadInput(f"{part[:40]!r} is not a number of tokens; write 1024 or 1024,4096")
        counts.append(int(part))
    return tuple(dict.fromkeys(counts))


def bandwidth_text(gbps: float) -> str:
    """Returns a bandwidth in Gbit/s as `10 Gbps` or `250 Mbps`."""
    unit, size = ("Gbps", 1.0) if gbps >= 1 else ("Mbps", 1e-3)
    value = gbps / size
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def duration_text(ms: float) -> str:
    """Returns milliseconds such as `0.42 ms`, `812 ms` or `12.3 s`."""
    if ms < 999.5:
        return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
    return f"{ms / 1000:.0f} s" if ms >= 100_000 else f"{ms / 1000:.3g} s"


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _value(text: str, units: Mapping[str, float], what: str, more: str, example: str) -> float:
    """Returns a number in the base of `units`; the other arguments are for the sentence that refuses it."""
    shown = text.strip()[:40]
    if re.fullmatch(r"(\d+\.?\d*|\.\d+)", text.strip(), re.ASCII):
        raise BadInput(f"{shown!r} has no unit; write {shown}{more.format(shown)}")
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(\S+)", text.strip(), re.ASCII)
    if not match or match[2] not in units:
        raise BadInput(f"{shown!r} is not {what}; write {example}")
    return float(match[1]) * units[match[2]]
