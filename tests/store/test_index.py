from __future__ import annotations

from pathlib import Path

from kvprofile.store.index import ls
from tests.profile_factory import publish_profile


def test_lists_versions_and_says_what_cannot_be_read(tmp_path: Path) -> None:
    sources = [("qa", "hotpotqa"), ("code", "stdlib")]
    first = publish_profile(tmp_path, samples=2, granularity=(3,), sources=sources)
    second = publish_profile(tmp_path, samples=2, granularity=(3,))
    (second / "profile.parquet").write_bytes(b"PAR1")
    good, bad = ls(tmp_path)
    assert (good.path, good.version, good.sender, good.receiver) == (first, 1, "sender", "receiver")
    assert good.tasks == ("code/stdlib", "qa/hotpotqa")
    assert good.bytes == sum(file.stat().st_size for file in first.iterdir())
    assert good.problem is None
    assert bad.version == 2
    assert bad.problem is not None
    assert "truncated" in bad.problem


def test_no_store_is_an_empty_one(tmp_path: Path) -> None:
    assert ls(tmp_path / "nowhere") == []
    assert ls(tmp_path) == []
