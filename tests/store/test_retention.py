from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from kvprofile.errors import BadInput
from kvprofile.store import retention
from kvprofile.store.reader import load, resolve, versions
from kvprofile.store.retention import Sorting, accept, pin, prune, sort_out
from tests.profile_factory import publish_profile

NOW = datetime(2026, 1, 31, tzinfo=UTC)
PAIR = "receiver__from__sender"


def made(store: Path, number: int, **changes: object) -> Path:
    """Publishes version `number` on that day of January."""
    own = {"profile_id": f"profile-{number}", "version": number, "created_at": f"2026-01-{number:02d}T00:00:00Z"}
    return publish_profile(store, samples=2, granularity=(3,), **own | changes)


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Path:
    for number in range(1, 7):
        made(tmp_path, number)
    return tmp_path


def left(store: Path) -> list[int]:
    return [number for number, _ in versions(store / PAIR)]


def pruned(store: Path, keep: int, days: int | None = None, really: bool = True) -> list[str]:
    age = None if days is None else timedelta(days=days)
    return [Path(gone.path).name for gone in prune(store, keep, age, really=really, now=NOW).removals]


def test_the_newest_stay(store: Path) -> None:
    before = sorted(path.relative_to(store) for path in store.rglob("*"))
    assert pruned(store, 2, really=False) == ["v0001", "v0002", "v0003", "v0004"]
    assert sorted(path.relative_to(store) for path in store.rglob("*")) == before, "a dry run changes nothing"
    assert pruned(store, 2) == ["v0001", "v0002", "v0003", "v0004"]
    assert left(store) == [5, 6]
    assert not list((store / PAIR).glob(".tmp-*"))
    assert pruned(store, 2) == []


def test_a_number_is_not_given_twice(store: Path) -> None:
    (resolve(store) / "rejected.json").write_text('{"reason": "worse"}')
    pruned(store, 1)
    assert left(store) == [5, 6]
    assert made(store, 7).name == "v0007"


def test_only_old_ones_go(store: Path) -> None:
    assert pruned(store, 1, days=28, really=False) == ["v0001", "v0002", "v0003"]
    assert pruned(store, 5, days=1, really=False) == ["v0001"]
    assert "older than 28 days" in prune(store, 1, timedelta(days=28), really=False, now=NOW).removals[0].why


@pytest.mark.parametrize("created_at", ["yesterday", ""])
def test_a_version_whose_age_is_not_known_is_not_old(tmp_path: Path, created_at: str) -> None:
    made(tmp_path, 1, created_at=created_at)
    made(tmp_path, 2)
    assert pruned(tmp_path, 1, days=1) == []
    assert pruned(tmp_path, 1) == ["v0001"]


def test_what_is_pinned_validated_or_being_measured_stays(store: Path) -> None:
    pair = store / PAIR
    assert pin(str(pair / "v0001"), True) == pair / "v0001"
    (pair / "v0002" / "validations").mkdir()
    (pair / "v0002" / "validations" / "musique-0001.parquet").touch()
    (pair / "v0003" / "validations" / ".run-1").mkdir(parents=True)
    (pair / "v0004" / "sensitivity" / ".run-forward").mkdir(parents=True)
    assert pruned(store, 1, really=False) == ["v0005"]
    assert pruned(store, 1) == ["v0005"]
    pin(str(pair / "v0001"), False)
    pin(str(pair / "v0001"), False)
    assert pruned(store, 1) == ["v0001"]
    assert left(store) == [2, 3, 4, 6]


def test_the_newest_that_was_not_rejected_stays(store: Path) -> None:
    for number in (5, 6):
        (store / PAIR / f"v{number:04d}" / "rejected.json").write_text('{"reason": "worse"}')
    assert pruned(store, 1) == ["v0001", "v0002", "v0003", "v0005"]
    assert load(store).header["profile_id"] == "profile-4"


def test_of_each_recipe_the_newest_that_was_not_rejected_stays(tmp_path: Path) -> None:
    for number, recipe in enumerate("aabbaca", start=1):
        made(tmp_path, number, recipe_sha256=recipe * 64)
    (tmp_path / PAIR / "v0004" / "rejected.json").write_text('{"reason": "worse"}')
    assert pruned(tmp_path, 1) == ["v0001", "v0002", "v0004", "v0005"]
    assert left(tmp_path) == [3, 6, 7]


def test_what_a_kept_version_replaced_stays_but_not_the_whole_line(tmp_path: Path) -> None:
    made(tmp_path, 1)
    for number in range(2, 6):
        made(tmp_path, number, previous=f"profile-{number - 1}")
    assert pruned(tmp_path, 1) == ["v0001", "v0002", "v0003"]
    assert left(tmp_path) == [4, 5]
    assert pruned(tmp_path, 1) == []


def test_what_cannot_be_read_stays_and_counts_for_nothing(store: Path) -> None:
    (store / PAIR / "v0001" / "profile.parquet").write_bytes(b"PAR1")
    (store / PAIR / "v0006" / "profile.parquet").write_bytes(b"PAR1")
    assert pruned(store, 2) == ["v0002", "v0003"]
    assert left(store) == [1, 4, 5, 6]


def test_each_pair_keeps_its_own(store: Path) -> None:
    other = made(store, 7, sender={**load(store).header["sender"], "name": "other"})
    pruned(store, 1)
    assert left(store) == [6]
    assert other.is_dir()


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(store: Path) -> None:
    pair, run = store / PAIR, store / PAIR / "run-0123456789abcdef"
    run.mkdir()
    gone, alive = 2**22 + 1, os.getpid()  # no process has so large a number on Linux
    (pair / ".tmp-killed").mkdir()
    files = {
        run / f".tmp-{gone}-a.parquet": True,
        run / f".tmp-{alive}-b.parquet": False,
        run / "part.parquet": False,
        pair / "v0006" / "validations" / f".tmp-{gone}-c.parquet": True,
    }
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert ".tmp-killed" in pruned(store, 9, really=False)
    later = datetime.now(UTC) + timedelta(hours=2)
    told = [Path(one.path) for one in prune(store, 9, really=False, now=later).removals]
    assert sorted(told) == sorted([pair / ".tmp-killed", *(file for file, goes in files.items() if goes)])
    assert [Path(g.path).name for g in prune(store, 9, really=True).removals] == [".tmp-killed"], (
        "a young file may be on its way"
    )
    removed = {Path(one.path) for one in prune(store, 9, really=True, now=later).removals}
    assert removed == {file for file, goes in files.items() if goes}
    assert {file for file in files if file.exists()} == {file for file, goes in files.items() if not goes}


@pytest.mark.parametrize("by", ["prune", "publish"])
def test_files_and_links_left_in_a_pair_go_too(store: Path, by: str) -> None:
    pair = store / PAIR
    (pair / ".tmp-file").write_bytes(b"12345")
    (pair / ".tmp-link").symlink_to(pair / "v0006")
    if by == "prune":
        assert next((Path(one.path).name, one.bytes) for one in prune(store, 9, really=False).removals) == (
            ".tmp-file",
            5,
        )
        assert pruned(store, 9) == [".tmp-file", ".tmp-link"]
    else:
        made(store, 7)
    assert not list(pair.glob(".tmp-*"))
    assert load(pair / "v0006").header["version"] == 6


def test_a_dry_run_leaves_a_publisher_at_work_alone(store: Path) -> None:
    (store / PAIR / ".tmp-work").mkdir()
    with FileLock(store / PAIR / ".lock"):
        assert pruned(store, 9, really=False) == []
    assert pruned(store, 9, really=False) == [".tmp-work"]


def test_prune_waits_for_a_publisher(store: Path) -> None:
    pruning = threading.Thread(target=pruned, args=(store, 1))
    with FileLock(store / PAIR / ".lock"):
        pruning.start()
        pruning.join(0.3)
        assert pruning.is_alive()
        assert left(store) == [1, 2, 3, 4, 5, 6]
    pruning.join(30)
    assert left(store) == [6]


def test_other_folders_of_a_store_are_not_touched(store: Path) -> None:
    (store / "notes").mkdir()
    made(store / "demo", 1)
    made(store / "demo", 2)
    pruned(store, 1)
    assert list((store / "notes").iterdir()) == []
    assert left(store / "demo") == [1, 2]
    assert not (store / "demo" / ".lock").exists()


def test_bad_input(store: Path) -> None:
    with pytest.raises(BadInput, match="--keep 0 would leave no version"):
        prune(store, 0, really=True)
    with pytest.raises(BadInput, match="there is no store at"):
        prune(store / "nowhere", 1, really=True)


@pytest.mark.parametrize("place", ["pinned", "validations/musique-0001.parquet", "validations/.run-1/x.parquet"])
@pytest.mark.parametrize("when", ["after the look", "at the last moment"])
def test_what_came_meanwhile_stays(store: Path, place: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, version, renamed = Path.rename, store / PAIR / "v0002", []

    def come() -> None:
        (version / place).parent.mkdir(parents=True, exist_ok=True)
        (version / place).touch()

    def slow(*arguments: Any) -> Sorting:
        found = sort_out(*arguments)
        come()
        return found

    def late(self: Path, target: Path) -> Path:
        renamed.append(self)
        if self == version:
            come()
        return rename(self, target)

    if when == "after the look":
        monkeypatch.setattr(retention, "sort_out", slow)
    else:
        monkeypatch.setattr(Path, "rename", late)
    assert pruned(store, 4) == ["v0001"]
    assert left(store) == [2, 3, 4, 5, 6]
    assert (version / place).is_file()
    assert (version in renamed) == (when == "at the last moment")
    assert not list((store / PAIR).glob(".tmp-*"))


@pytest.mark.parametrize(("change", "name"), [(lambda p: pin(p, True), "pinned"), (accept, "accepted")])
def test_who_pins_or_accepts_waits_for_prune_and_is_told_if_the_version_went(
    store: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[str], Path], name: str
) -> None:
    told: dict[int, str] = {}

    def later(number: int) -> None:
        try:
            told[number] = str(change(str(store / PAIR / f"v{number:04d}")))
        except BadInput as error:
            told[number] = str(error)

    threads = [threading.Thread(target=later, args=(number,)) for number in (2, 5)]

    def slow(*arguments: Any) -> Sorting:
        for thread in threads:
            thread.start()
            thread.join(0.2)
        return sort_out(*arguments)

    monkeypatch.setattr(retention, "sort_out", slow)
    for number in (2, 5):
        (store / PAIR / f"v{number:04d}" / "rejected.json").write_text('{"reason": "worse"}')
    assert pruned(store, 2) == ["v0001", "v0002", "v0003", "v0004"]
    for thread in threads:
        thread.join(30)
    kept = store / PAIR / "v0005"
    assert "v0002 was removed meanwhile" in told[2]
    assert told[5] == str(kept)
    assert (kept / name).is_file()


def test_a_version_outside_a_store_is_pinned_without_a_lock(store: Path, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere" / "profile"
    shutil.copytree(store / PAIR / "v0001", alone)
    pin(str(alone), True)
    assert (alone / "pinned").is_file()
    assert [path.name for path in alone.parent.iterdir()] == ["profile"]


def test_it_tells_why_a_version_stays(tmp_path: Path) -> None:
    changes: dict[int, dict[str, object]] = {2: {"recipe_sha256": "a" * 64}, 7: {"previous": "profile-5"}}
    folders = [made(tmp_path, number, **changes.get(number, {})) for number in range(1, 8)]
    pin(str(folders[0]), True)
    (folders[0] / "validations" / ".run-1").mkdir(parents=True)
    (folders[2] / "validations").mkdir()
    (folders[2] / "validations" / "musique-0001.parquet").touch()
    (folders[3] / "profile.parquet").write_bytes(b"PAR1")
    expected = {
        1: "pinned, being measured or cut off",
        2: "the newest of its recipe that serves",
        3: "validated",
        4: "cannot be read",
        5: "replaced by v0007",
    }
    for really in (False, True):
        told = prune(tmp_path, 1, really=really, now=NOW)
        assert told.kept == [(str(folders[number - 1]), why) for number, why in expected.items()]
        assert [one.path for one in told.removals] == [str(folders[5])]
    assert left(tmp_path) == [1, 2, 3, 4, 5, 7]


def test_what_a_version_being_measured_replaced_stays(tmp_path: Path) -> None:
    for number in range(1, 5):
        folder = made(tmp_path, number, **({"previous": "profile-1"} if number == 2 else {}))
        if number == 2:
            (folder / "validations" / ".run-1").mkdir(parents=True)
    assert pruned(tmp_path, 1) == ["v0003"]
    assert left(tmp_path) == [1, 2, 4]
