"""Remote stores against a real S3 server: two publishers at once, crashes between uploads, flipped bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest

from kvprofile.errors import BadInput
from kvprofile.store.index import ls
from kvprofile.store.reader import load
from kvprofile.store.remote_files import Remote
from kvprofile.store.retention import prune
from kvprofile.store.transfer import pull, push
from kvprofile.store.verify import verify
from tests.profile_factory import publish_profile
from tests.store.s3_server import s3_server

pytestmark = pytest.mark.slow

PAIR = "receiver__from__sender"


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as environment, pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        patched.setitem(fsspec.config.conf, "s3", json.loads(environment["FSSPEC_S3"]))
        yield
        fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture(name="url")
def _url(server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVPROFILE_CACHE", str(tmp_path / "cache"))
    bucket = f"profiles-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/team"


def made(tmp_path: Path, number: int = 1) -> Path:
    created_at = f"2026-01-{number:02d}T00:00:00Z"
    return publish_profile(
        tmp_path / "local", samples=2, granularity=(3,), profile_id=f"profile-{number}", created_at=created_at
    )


def push_together(folder: Path, url: str, start: Any) -> None:
    start.wait(60)
    push(str(folder), url)


def push_and_die(folder: Path, url: str, uploads: int) -> None:
    original = Remote.upload

    def few(self: Remote, local: Path, name: str) -> None:
        nonlocal uploads
        if uploads == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        uploads -= 1
        original(self, local, name)

    Remote.upload = few  # type: ignore[method-assign]
    push(str(folder), url)


def test_published_read_verified_pulled(tmp_path: Path, url: str) -> None:
    folder = made(tmp_path)
    place = push(str(folder), url).place
    assert place == f"{url}/{PAIR}/v0001"
    assert load(url).measurements().equals(load(folder).measurements())
    assert [entry.path for entry in ls(url)] == [place]
    assert verify(url) == (1, [])
    assert push(str(folder), url).already_there
    assert verify(Path(pull(url, str(tmp_path / "pulled")).place).parent.parent) == (1, [])


def test_the_server_decides_between_two_creations(url: str) -> None:
    remote = Remote(url)
    assert remote.create("x", b"one")
    assert not remote.create("x", b"two")
    assert remote.create("x", b"one"), "an answer that got lost is asked for again"
    assert remote.read("x") == b"one"


def test_two_publishers_at_once_get_two_numbers(tmp_path: Path, url: str) -> None:
    folders = [made(tmp_path, number) for number in (1, 2)]
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    processes = [context.Process(target=push_together, args=(folder, url, start)) for folder in folders]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    entries = ls(url)
    assert [entry.version for entry in entries] == [1, 2]
    assert {entry.profile_id for entry in entries} == {"profile-1", "profile-2"}
    assert verify(url) == (2, [])


def test_a_publisher_killed_between_uploads_leaves_a_claim(tmp_path: Path, url: str) -> None:
    push(str(made(tmp_path)), url)
    context = multiprocessing.get_context("spawn")
    for number, uploads in enumerate((0, 3), start=2):
        process = context.Process(target=push_and_die, args=(made(tmp_path, number), url, uploads))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        assert load(url).header["profile_id"] == "profile-1"
    verdict = verify(url)
    assert (verdict.checked, verdict.sound) == (1, True)
    assert [one.path[-5:] for one in verdict.findings] == ["v0002", "v0003"]
    assert all("not published" in one.what for one in verdict.findings)
    place = push(str(made(tmp_path, 4)), url).place
    assert place.endswith("v0004")
    assert prune(url, 5, really=True).removals == [], "they may still be at work"
    gone = prune(url, 5, really=True, now=datetime.now(UTC) + timedelta(days=2)).removals
    assert [one.path[-5:] for one in gone] == ["v0002", "v0003"]
    assert verify(url) == (2, [])


def test_old_versions_are_removed(tmp_path: Path, url: str) -> None:
    for number in range(1, 4):
        push(str(made(tmp_path, number)), url)
    assert len(prune(url, 1, really=False).removals) == 2
    prune(url, 1, really=True)
    assert {name.split("/")[1] for name in Remote(url).files()} == {"v0003"}
    assert load(url).header["profile_id"] == "profile-3"


def test_a_flipped_byte_is_found_when_it_arrives(tmp_path: Path, url: str) -> None:
    place = push(str(made(tmp_path)), url).place
    s3 = fsspec.filesystem("s3")
    content = bytearray(s3.cat_file(f"{place}/measurements.parquet"))
    content[500] ^= 1
    s3.pipe_file(f"{place}/measurements.parquet", bytes(content))
    with pytest.raises(BadInput, match=r"measurements\.parquet is not the file that its manifest names"):
        pull(url, str(tmp_path / "pulled"))
    assert not (tmp_path / "pulled").exists()
    assert next(one.path for one in verify(url).findings if one.severity == "fault") == f"{place}/measurements.parquet"


def test_a_store_whose_name_begins_alike_is_another(tmp_path: Path, url: str) -> None:
    push(str(made(tmp_path)), f"{url}2")
    assert ls(url) == []
    with pytest.raises(BadInput, match="there is no profile at"):
        verify(url)


def test_a_bucket_that_is_not_there(tmp_path: Path, server: None) -> None:
    assert ls("s3://no-such-bucket/x") == []
    with pytest.raises(BadInput, match="no-such-bucket/x cannot be used"):
        push(str(made(tmp_path)), "s3://no-such-bucket/x")
