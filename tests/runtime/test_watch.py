"""A server keeps its profile current: cheaply, and without ever choosing from half a profile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvprofile.runtime import BadInput, Fingerprint, Policy, ProfileStore, RuntimeProfile, load_profile
from kvprofile.runtime import store as module
from kvprofile.store import reader
from tests.profile_factory import add_timings, add_validation, header, measurements, publish_profile

PAIR = {role: Fingerprint.of(header()[role]) for role in ("sender", "receiver")}


def publish(out: Path, kept: float = 1.0) -> Path:
    """Publishes a version in which full reuse keeps that much of full prefill's score."""
    rows = measurements(samples=2, granularity=(3,), sources=[("qa", "hotpotqa")])
    full = {
        row["sample_id"]: row["value"] for row in rows if (row["strategy"], row["metric"]) == ("full_prefill", "f1")
    }
    for row in rows:
        if (row["strategy"], row["metric"]) == ("full_reuse", "f1"):
            row["value"] = kept * full[row["sample_id"]]
    return publish_profile(out, rows, samples=2, granularity=(3,))


def folder(profile: RuntimeProfile | None) -> Path:
    assert profile is not None
    return profile.folder


def test_a_newer_version_replaces_and_the_old_goes_on(tmp_path: Path) -> None:
    first = publish(tmp_path)
    watch = ProfileStore(tmp_path).watch(**PAIR, task="qa")
    old = watch.found.profile
    assert folder(old) == first
    assert not watch.refresh()
    assert watch.found.profile is old
    second = publish(tmp_path, kept=0.5)
    assert watch.found.profile is old, "looking costs nothing and reads nothing"
    assert watch.refresh()
    new = watch.found.profile
    assert folder(new) == second
    assert old is not None
    assert new is not None
    assert old.choose("1%") is not None
    assert new.choose("1%") is None


def test_a_rejected_version_falls_back_and_comes_back(tmp_path: Path) -> None:
    first, second = publish(tmp_path), publish(tmp_path)
    watch = ProfileStore(tmp_path).watch(**PAIR)
    assert folder(watch.found.profile) == second
    for version in (second, first):
        (version / "rejected.json").write_text("{}")
        assert watch.refresh()
    assert watch.found.profile is None
    assert "was rejected" in watch.found.why
    (first / "rejected.json").unlink()
    assert watch.refresh()
    assert folder(watch.found.profile) == first


def test_versions_of_other_models_change_nothing(tmp_path: Path) -> None:
    publish(tmp_path)
    watch = ProfileStore(tmp_path).watch(**PAIR)
    before = watch.found
    publish_profile(tmp_path, samples=2, granularity=(3,), sender={**header()["sender"], "weights_sha256": "9" * 64})
    assert not watch.refresh()
    assert watch.found is before


def test_a_store_that_is_not_there_yet(tmp_path: Path) -> None:
    watch = ProfileStore(tmp_path / "later").watch(**PAIR)
    assert watch.found.profile is None
    assert not watch.refresh()
    published = publish(tmp_path / "later")
    assert watch.refresh()
    assert folder(watch.found.profile) == published


def test_nothing_is_read_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path)
    watch = ProfileStore(tmp_path).watch(**PAIR)

    def read(*_: Any) -> Any:
        raise AssertionError("a profile was read")

    monkeypatch.setattr(module, "_compare", read)
    assert not watch.refresh()
    publish(tmp_path)
    with pytest.raises(AssertionError, match="was read"):
        watch.refresh()


def test_an_error_that_passes_is_not_kept(tmp_path: Path) -> None:
    first = publish(tmp_path)
    watch = ProfileStore(tmp_path).watch(**PAIR)
    second = publish(tmp_path)
    whole = (second / "profile.parquet").read_bytes()
    (second / "profile.parquet").write_bytes(whole[:100])
    assert watch.refresh()
    assert folder(watch.found.profile) == first, "the older one answers meanwhile"
    assert [one.place for one in watch.found.unread] == [str(second)]
    assert not watch.refresh(), "the same answer again"
    (second / "profile.parquet").write_bytes(whole)
    assert watch.refresh()
    assert folder(watch.found.profile) == second
    assert watch.found.unread == ()


def test_an_error_at_the_first_look_is_not_kept(tmp_path: Path) -> None:
    published = publish(tmp_path)
    whole = (published / "profile.parquet").read_bytes()
    (published / "profile.parquet").write_bytes(whole[:100])
    watch = ProfileStore(tmp_path).watch(**PAIR)
    assert "truncated" in watch.found.why
    (published / "profile.parquet").write_bytes(whole)
    assert watch.refresh()
    assert folder(watch.found.profile) == published


def test_a_later_validation_is_seen(tmp_path: Path) -> None:
    policy = Policy("5%", rule="validated")
    published = publish(tmp_path)
    watch = ProfileStore(tmp_path).watch(**PAIR)

    def plan() -> Any:
        assert watch.found.profile is not None
        return policy.decide(watch.found.profile, 100).plan

    assert plan() is None
    file = add_validation(published, strategy="full_reuse", start_layer=None, stop_layer=None)
    assert watch.refresh()
    assert plan().strategy == "full_reuse"
    assert not watch.refresh()
    file.unlink()
    assert watch.refresh()
    assert plan() is None


def test_what_lies_beside_a_profile_and_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    published = publish(tmp_path)
    add_timings(published)
    reuse = {"strategy": "full_reuse", "start_layer": None, "stop_layer": None}
    files = [
        add_validation(published, 1, **reuse),
        add_validation(published, 2, **reuse),
        published / "timings.parquet",
    ]
    good = [file.read_bytes() for file in files]
    for file in files[1:]:
        file.write_bytes(b"PAR1")
    watch = ProfileStore(tmp_path).watch(**PAIR)
    profile = watch.found.profile
    assert profile is not None
    assert profile.choose("1%") is not None
    assert (len(profile.validations), profile.times) == (1, None)
    assert set(profile.unread) == {"validations/musique-0002.parquet", "timings.parquet"}
    validated = Policy("5%", rule="validated")
    reasons = {one.why_not for one in validated.decide(profile, 100).considered if one.plan}
    assert reasons == {"validations/musique-0002.parquet cannot be read"}, "it may be the one that the plan failed"
    with pytest.raises(BadInput, match=r"timings\.parquet is truncated"):
        load_profile(published)
    for file, content in zip(files, good, strict=True):
        file.write_bytes(content)
    assert watch.refresh()
    whole = watch.found.profile
    assert whole is not None
    assert (len(whole.validations), whole.times is not None, dict(whole.unread)) == (2, True, {})
    assert validated.decide(whole, 100).plan is not None


def test_a_store_that_cannot_be_listed_raises_and_keeps_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path)
    watch = ProfileStore(tmp_path).watch(**PAIR)
    before = watch.found

    def gone(pair: Path) -> Any:
        raise FileNotFoundError(f"{pair} was removed a moment ago")

    with monkeypatch.context() as patched:
        patched.setattr(reader, "versions", gone)
        with pytest.raises(BadInput, match="cannot be listed"):
            watch.refresh()
        with pytest.raises(BadInput, match="cannot be listed"):
            ProfileStore(tmp_path).watch(**PAIR)
    assert watch.found is before
    second = publish(tmp_path)
    assert watch.refresh()
    assert folder(watch.found.profile) == second


def test_threads_choose_while_versions_are_published(tmp_path: Path) -> None:
    """Odd versions have a plan within 1 %, even ones have none; every answer must be whole, and versions never go back."""
    publish(tmp_path)
    watch = ProfileStore(tmp_path).watch(**PAIR)
    done, wrong, seen = threading.Event(), [], [set() for _ in range(4)]

    def serve(versions: set[int]) -> None:
        last = 0
        while not done.is_set():
            profile = watch.found.profile
            version = _version(profile)
            plan = profile.choose("1%", "qa") if profile else None
            if version < last or (plan is not None) != (version % 2 == 1):
                wrong.append((last, version, plan))
            last = version
            versions.add(version)

    def refresh() -> None:
        while not done.is_set():
            watch.refresh()
            done.wait(0.005)

    threads = [threading.Thread(target=serve, args=[one]) for one in seen] + [
        threading.Thread(target=refresh) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    try:
        for version in range(2, 7):
            publish(tmp_path, kept=1.0 if version % 2 else 0.5)
        until = time.monotonic() + 60
        while _version(watch.found.profile) < 6 and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert _version(watch.found.profile) == 6
    assert wrong == []
    assert len(set().union(*seen)) > 1


def _version(profile: RuntimeProfile | None) -> int:
    return int(profile.header["version"]) if profile else 0
