"""A remote store answers as a folder does; of versions that do not, only `profile.parquet` is copied."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from kvprofile.runtime import BadInput, Fingerprint, ProfileStore
from kvprofile.store.transfer import push
from tests.profile_factory import header, publish_profile

PAIR = {role: Fingerprint.of(header()[role]) for role in ("sender", "receiver")}
MEMORY = fsspec.filesystem("memory")


def test_a_remote_store_is_found_in_and_watched(tmp_path: Path, url: str) -> None:
    watch = ProfileStore(url).watch(**PAIR)
    assert watch.found.why == "the store has no profile"
    other = {**header()["sender"], "weights_sha256": "9" * 64}
    for number, changes in enumerate(({}, {"sender": other})):
        own = {"profile_id": f"profile-{number}", **changes}
        push(str(publish_profile(tmp_path / str(number), samples=2, granularity=(3,), **own)), url)
    assert watch.refresh()
    assert not watch.refresh()
    profile = watch.found.profile
    assert profile is not None
    assert profile.header["profile_id"] == "profile-0"
    assert profile.folder.is_relative_to(tmp_path / "cache")
    found = ProfileStore(url).find(
        sender=Fingerprint.of(other)._replace(config_sha256="8" * 64), receiver=PAIR["receiver"]
    )
    assert found.why == f"{url}/receiver__from__sender/v0002: the sender's config changed since v0002"
    copied = {path.name for path in (tmp_path / "cache").rglob("v0002/*")}
    assert copied == {"profile.parquet", "manifest.json"}


def test_a_rejected_version_may_be_accepted(tmp_path: Path, url: str) -> None:
    folder = publish_profile(tmp_path, samples=2, granularity=(3,))
    (folder / "rejected.json").write_text("{}")
    push(str(folder), url)
    assert "was rejected" in ProfileStore(url).find(**PAIR).why
    MEMORY.pipe_file(f"{url}/receiver__from__sender/v0001/accepted", b"")
    assert ProfileStore(url).find(**PAIR).profile is not None


def test_a_store_that_cannot_be_reached_raises_and_keeps_the_answer(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ProfileStore(url).watch(**PAIR)

    def gone(*_: object, **__: object) -> None:
        raise ConnectionError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(type(MEMORY), "find", gone)
        with pytest.raises(BadInput, match="cannot be used"):
            watch.refresh()
    push(str(publish_profile(tmp_path, samples=2, granularity=(3,))), url)
    assert watch.refresh()
    assert watch.found.profile is not None


def test_a_remote_store_costs_no_torch() -> None:
    program = (
        "import sys\nfrom kvprofile.runtime import ProfileStore\n"
        "print(ProfileStore('memory://nothing').find(sender=None, receiver=None).why)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pydantic', 'rich', 'scipy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["the store has no profile", "[]"]
