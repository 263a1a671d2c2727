"""A cache folder of the tests' own, so that none reads or fills the user's, and remote stores in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVPROFILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(name="url")
def _url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a remote store in memory, not made yet, and a cache of the test's own."""
    memory = fsspec.filesystem("memory")
    monkeypatch.setenv("KVPROFILE_CACHE", str(tmp_path / "cache"))
    yield f"memory://{tmp_path.name}/profiles"
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
