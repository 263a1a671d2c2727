from pathlib import Path

import pytest

from kvprofile.models.cache_dir import cache_dir


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("KVPROFILE_CACHE", "/x/y")
    assert cache_dir() == Path("/x/y")
    monkeypatch.delenv("KVPROFILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/kvprofile")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/u")
    assert cache_dir() == Path("/home/u/.cache/kvprofile")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_dir() == Path("/home/u/Library/Caches/kvprofile")
