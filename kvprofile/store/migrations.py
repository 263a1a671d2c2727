"""Headers of older formats, brought up to this one on reading, one step per format. Needs the standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Header = dict[str, Any]


def migrate(header: Mapping[str, Any]) -> Header:
    """Returns a header of this or an older format as one of this format; what was not recorded is None."""
    migrated = dict(header)
    for step in _STEPS[migrated["format_version"] - 1 :]:
        migrated = step(migrated)
    return migrated


def _from_1(header: Header) -> Header:
    """Format 2 records what a runtime and a scheduler compare: template, config, strategies, and how it was searched."""
    absent = {"template_sha256": None, "config_sha256": None}
    models = {r: {**absent, **header[r]} for r in ("sender", "receiver") if isinstance(header.get(r), Mapping)}
    defaults = {
        "references": "data",
        "search": "exhaustive",
        "resamples": 10_000,
        "bounds": None,
        "strategies": None,
        "end_ids": None,
    }
    return {**defaults, **header, **models, "format_version": 2, "migrated_from": 1}


_STEPS: tuple[Callable[[Header], Header], ...] = (_from_1,)
"""The step from format n to n + 1 at place n - 1."""
