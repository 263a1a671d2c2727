"""Versions that a scheduler rejected are kept to look at, and served by nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvprofile.errors import BadInput
from kvprofile.runtime import Fingerprint, ProfileStore, load_profile
from kvprofile.store.index import ls
from kvprofile.store.reader import load, rejection, resolve
from kvprofile.store.retention import accept, unaccept
from kvprofile.store.soundness import check_version
from tests.profile_factory import header, publish_profile

PAIR = {role: Fingerprint.of(header()[role]) for role in ("sender", "receiver")}


def publish_some(store: Path, *rejected: bool) -> list[Path]:
    folders = []
    for number, reason in enumerate(rejected):
        folder = publish_profile(store, samples=2, granularity=(3,), created_at=f"2026-0{number + 1}-01T00:00:00Z")
        if reason:
            (folder / "rejected.json").write_text(json.dumps({"reason": f"worse by {number} points"}))
        folders.append(folder)
    return folders


def test_the_newest_that_was_not_rejected_is_served(tmp_path: Path) -> None:
    good, bad = publish_some(tmp_path, False, True)
    assert resolve(tmp_path) == good
    assert resolve(good.parent) == good
    profile = ProfileStore(tmp_path).find(**PAIR).profile
    assert profile is not None
    assert profile.folder == good
    assert rejection(good) is None
    assert rejection(bad) == "worse by 1 points"
    assert [entry.rejected for entry in ls(tmp_path)] == [None, "worse by 1 points"]


def test_a_rejected_version_is_read_when_it_is_named(tmp_path: Path) -> None:
    _, bad = publish_some(tmp_path, False, True)
    for path in (bad, bad / "profile.parquet"):
        assert load(path).folder == bad


def test_a_rejected_version_that_somebody_accepted_serves(tmp_path: Path) -> None:
    good, bad = publish_some(tmp_path, False, True)
    assert accept(str(bad)) == bad
    assert rejection(bad) is None
    assert resolve(tmp_path) == bad
    profile = ProfileStore(tmp_path).find(**PAIR).profile
    assert profile is not None
    assert profile.folder == bad
    assert not [one for one in check_version(bad) if one.severity == "fault" and "accepted" in one.path]
    for path, words in ((str(good), "is not rejected"), ("s3://bucket/x", "only a folder can")):
        with pytest.raises(BadInput, match=words):
            accept(path)


def test_an_acceptance_can_be_taken_back(tmp_path: Path) -> None:
    good, bad = publish_some(tmp_path, False, True)
    accept(str(bad))
    assert [(entry.rejected, entry.accepted) for entry in ls(tmp_path)] == [(None, None), (None, "worse by 1 points")]
    assert unaccept(str(bad)) == bad
    assert rejection(bad) == "worse by 1 points"
    assert resolve(tmp_path) == good
    assert [(entry.rejected, entry.accepted) for entry in ls(tmp_path)] == [(None, None), ("worse by 1 points", None)]
    for path, words in ((str(bad), "was not accepted"), (str(good), "was not accepted"), ("s3://b/x", "only a folder")):
        with pytest.raises(BadInput, match=words):
            unaccept(path)


def test_a_runtime_that_names_a_rejected_version_is_told_how_to_accept_it(tmp_path: Path) -> None:
    (bad,) = publish_some(tmp_path, True)
    with pytest.raises(BadInput, match=f"kvprofile store accept {bad}"):
        load_profile(bad)
    accept(str(bad))
    assert load_profile(bad).folder == bad


def test_where_all_are_rejected_it_says_so(tmp_path: Path) -> None:
    folders = publish_some(tmp_path, True, True)
    for path in (tmp_path, folders[0].parent):
        with pytest.raises(BadInput, match=r"all 2 versions in .* are rejected \(the newest: worse by 1 points\)"):
            resolve(path)
    assert ProfileStore(tmp_path).find(**PAIR).why.endswith("v0002 was rejected")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_whatever_the_file_holds_the_version_stays_rejected(tmp_path: Path, content: bytes) -> None:
    good, bad = publish_some(tmp_path, False, True)
    (bad / "rejected.json").write_bytes(content)
    assert rejection(bad) == "rejected.json tells no reason"
    assert resolve(tmp_path) == good
