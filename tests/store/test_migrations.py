"""Profiles of older formats are read as ones of this format; the fixtures were written by the code of their time."""

from pathlib import Path

import pytest

from kvprofile.limits import parse_loss
from kvprofile.report.frontier import frontier_blocks
from kvprofile.runtime import load_profile
from kvprofile.store.migrations import migrate
from kvprofile.store.reader import load
from kvprofile.store.schema import FORMAT_VERSION, missing_header_keys

FORMATS = range(1, FORMAT_VERSION)


@pytest.mark.parametrize("made_by", FORMATS)
def test_every_older_format_is_read(made_by: int) -> None:
    profile = load(Path(__file__).parent / f"format_{made_by}")
    assert profile.header["format_version"] == FORMAT_VERSION
    assert missing_header_keys(profile.header) == []
    assert len(profile.measurements()) > 0
    assert len(profile.samples()) == 4
    (chosen,) = (block.selected for block in frontier_blocks(profile, limit=parse_loss("1%"), metric="f1", task="qa"))
    assert chosen is not None
    assert (chosen["start_layer"], chosen["stop_layer"]) == (2, 4)
    plan = load_profile(profile.folder).choose("1%")
    assert plan is not None
    assert (plan.start_layer, plan.stop_layer) == (2, 4)


def test_format_1_says_what_it_did_not_record() -> None:
    header = load(Path(__file__).parent / "format_1").header
    assert header["sender"]["config_sha256"] is None
    assert header["strategies"] is None
    assert header["search"] == "exhaustive"


def test_what_was_recorded_wins_over_a_default() -> None:
    header = {"format_version": 1, "search": "adaptive", "sender": {"template_sha256": "t"}, "receiver": 3}
    migrated = migrate(header)
    assert migrated["search"] == "adaptive"
    assert migrated["sender"]["template_sha256"] == "t"
    assert migrated["receiver"] == 3, "checked by the reader, not here"
