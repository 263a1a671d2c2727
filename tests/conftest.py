"""A cache folder of the tests' own, so that none reads or fills the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVPROFILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
