"""Which versions of a store may go, and how they go: whole, under the pair's lock, never what is still needed."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Self

import psutil
from filelock import FileLock, Timeout

from kvprofile.errors import BadInput
from kvprofile.store.index import Entry, is_version, pair_entries, pair_folders, require_no_version
from kvprofile.store.manifest import ACCEPTED_FILE, PINNED_FILE
from kvprofile.store.reader import (
    SENSITIVITY_FOLDER,
    VALIDATIONS_FOLDER,
    acceptance,
    is_url,
    rejection,
    resolve,
    versions,
)
from kvprofile.store.temporary import TEMPORARY, removed, writer_of
from kvprofile.store.writer import PAIR_LOCK, sync_folder

_STALE = timedelta(hours=1)
"""Age at which a temporary file of a process that is gone is taken for a leftover."""


class Removal(NamedTuple):
    """Something that goes.

    Attributes:
        path: Where it is.
        why: Why it may go.
        bytes: Its size.
    """

    path: str
    why: str
    bytes: int


class Kept(NamedTuple):
    """A version that stays, though it is not among the newest that are to stay.

    Attributes:
        path: Where it is.
        why: Why it stays.
    """

    path: str
    why: str


class Pruned(NamedTuple):
    """What goes of a store, and what stays besides the newest versions."""

    removals: list[Removal]
    kept: list[Kept]

    @classmethod
    def of(cls, told: Iterable[Removal | Kept]) -> Self:
        """Returns both, each in the order in which it is told."""
        held = list(told)
        removals = [one for one in held if isinstance(one, Removal)]
        return cls(removals, [one for one in held if isinstance(one, Kept)])


def prune(
    store: str | Path, keep: int, older_than: timedelta | None = None, *, really: bool, now: datetime | None = None
) -> Pruned:
    """Returns what goes of a store and what stays beyond `keep`, and removes what goes if `really`.

    Args:
        store: A folder, also that of one pair, or the URL of a store.
        keep: How many of the newest versions of each pair stay; of each of its recipes, the newest that serves stays besides.
        older_than: Only versions of at least this age go; None for any.
        really: Whether to remove it.
        now: The time from which ages count; the present if None.

    Raises:
        BadInput: If there is no such store, it is one version, or nothing would be kept.
    """
    if keep < 1:
        raise BadInput(f"--keep {keep} would leave no version to serve with; keep at least 1")
    now = now or datetime.now(UTC)
    if is_url(store):
        from kvprofile.store.transfer import prune_remote  # here, so that a folder costs no fsspec

        return prune_remote(str(store), keep, older_than, really, now)
    store = Path(store)
    if not store.is_dir():
        raise BadInput(f"there is no store at {store}; give the folder that --out of a sweep named")
    require_no_version(store)
    found = [store] if versions(store) else pair_folders(store)
    return Pruned.of(told for pair in found for told in _prune_pair(pair, keep, older_than, really, now))


def _prune_pair(
    pair: Path, keep: int, older_than: timedelta | None, really: bool, now: datetime
) -> Iterator[Removal | Kept]:
    with _locked(pair, wait=really) as alone:
        if alone:
            for leftover in sorted(pair.glob(f"{TEMPORARY}*")):
                removal = Removal(str(leftover), "left by a process that was killed", _size(leftover))
                if not really or removed(leftover):
                    yield removal
        entries = pair_entries(pair)
        sorting = sort_out(entries, keep, older_than, now)
        yield from (Kept(str(entry.path), why) for entry, why in sorting.staying)
        for entry, why in sorting.going:
            folder = Path(entry.path)
            if folder.is_symlink():
                yield Kept(str(folder), "it is a link")
            elif not really or _remove(folder):
                yield Removal(str(folder), why, entry.bytes)
            else:
                yield Kept(str(folder), "pinned, validated or measured since it was looked at")
        places = [pair, *(Path(entry.path) for entry in entries)]
        for file in sorted({file for place in places for file in _stale_files(place, now)}):
            yield Removal(str(file), "left by a process that is gone", file.stat().st_size)
            if really:
                file.unlink(missing_ok=True)


class Sorting(NamedTuple):
    """Which versions of a pair go and which stay though they are not among the newest, oldest first, each with why."""

    going: list[tuple[Entry, str]]
    staying: list[tuple[Entry, str]]


def sort_out(entries: Sequence[Entry], keep: int, older_than: timedelta | None, now: datetime) -> Sorting:
    """Returns which versions of a pair may go, and which must stay.

    The newest `keep` stay, of each recipe the newest that was not rejected, and all that are pinned, validated or being
    measured; so does the version that one of these replaced, to compare with. What cannot be read stays: nobody knows what it
    is. Recipes are told apart by the hash in the header, which a remote store shows, too: where a newer kvprofile hashes the
    same recipe otherwise, one version more stays.
    """
    readable = sorted((entry for entry in entries if entry.problem is None), key=lambda entry: entry.version)
    serving = {entry.recipe_sha256: entry for entry in readable if entry.rejected is None}
    needed = {entry: reasons for entry in readable if (reasons := _needed_for(entry, serving.values()))}
    stays = [entry for entry in readable if entry in needed or entry in readable[-keep:]]
    replaced = {entry.previous: f"replaced by v{entry.version:04d}" for entry in stays}
    which = "" if older_than is None else f" and older than {_days(older_than)}"
    sorting = Sorting([], [(entry, "cannot be read") for entry in entries if entry.problem is not None])
    for entry in readable[:-keep]:
        reasons = [*needed.get(entry, []), *([replaced[entry.profile_id]] if entry.profile_id in replaced else [])]
        if not reasons and older_than is not None and _age(entry, now) < older_than:
            reasons = [f"younger than {_days(older_than)}"]
        if reasons:
            sorting.staying.append((entry, ", ".join(reasons)))
        else:
            sorting.going.append((entry, f"not among the newest {keep}{which}, and nothing refers to it"))
    sorting.staying.sort(key=lambda kept: kept[0].version)
    return sorting


def _needed_for(entry: Entry, serving: Collection[Entry]) -> list[str]:
    """Returns why a version must stay whatever its age, in words; nothing where it need not."""
    known = (
        ("pinned", entry.pinned),
        ("validated", entry.validations > 0),
        ("being measured or cut off", isinstance(entry.path, Path) and busy(entry.path)),
        ("the newest of its recipe that serves", entry in serving),
    )
    return [why for why, holds in known if holds]


def _age(entry: Entry, now: datetime) -> timedelta:
    """Returns how long ago a version was published; none at all where its header does not tell."""
    try:
        made = datetime.fromisoformat(str(entry.created_at))
    except ValueError:
        return timedelta()
    return now - (made if made.tzinfo else made.replace(tzinfo=UTC))


def _days(age: timedelta) -> str:
    hours = age // timedelta(hours=1)
    return f"{hours // 24} days" if hours % 24 == 0 else f"{hours} hours"


def busy(folder: Path) -> bool:
    """Returns whether a validation or a sensitivity map of a version is being measured, or was cut off and can go on."""
    places = (VALIDATIONS_FOLDER, SENSITIVITY_FOLDER)
    return any(True for place in places for _ in (folder / place).glob(".run-*"))


def pin(path: str, pinned: bool) -> Path:
    """Returns the folder of the version that `path` means, after it was pinned against `prune`, or set free.

    Raises:
        BadInput: If there is none, it goes meanwhile, or it lies at a URL.
    """
    folder = _in_a_folder(path, "pinned")
    with _not_pruned(folder):
        if pinned:
            (folder / PINNED_FILE).touch()
        else:
            (folder / PINNED_FILE).unlink(missing_ok=True)
    return folder


def accept(path: str) -> Path:
    """Returns the folder of a rejected version, after it was let serve in spite of its rejection.

    Raises:
        BadInput: If there is none, it was not rejected, it goes meanwhile, or it lies at a URL.
    """
    folder = _in_a_folder(path, "accepted")
    with _not_pruned(folder):
        if rejection(folder) is None:
            raise BadInput(f"{folder} is not rejected; name the rejected version, which `kvprofile store ls` shows")
        (folder / ACCEPTED_FILE).touch()
    return folder


def unaccept(path: str) -> Path:
    """Returns the folder of a version whose rejection holds again.

    Raises:
        BadInput: If there is none, it was not rejected and accepted, it goes meanwhile, or it lies at a URL.
    """
    folder = _in_a_folder(path, "unaccepted")
    with _not_pruned(folder):
        if acceptance(folder) is None:
            raise BadInput(f"{folder} was not accepted after a rejection; `kvprofile store ls` shows which were")
        (folder / ACCEPTED_FILE).unlink()
    return folder


@contextmanager
def _not_pruned(folder: Path) -> Iterator[None]:
    """Keeps `prune` from a version's pair while the block runs; a version outside a pair is not locked.

    Raises:
        BadInput: If the version went before.
    """
    with _locked(folder.parent, wait=True) if is_version(folder) else nullcontext():
        if not folder.is_dir():
            raise BadInput(f"{folder} was removed meanwhile; `kvprofile store ls` lists what is there")
        yield


def _in_a_folder(path: str, done: str) -> Path:
    if is_url(path):
        raise BadInput(f"{path} cannot be {done}, only a folder can; `kvprofile store pull {path}` makes one")
    return resolve(path)


def _remove(folder: Path) -> bool:
    """Removes a version so that it is there whole or not at all, whenever the process stops.

    Returns whether it did: one that was pinned, validated or began to be measured since it was looked at stays.
    """
    if _needed(folder):
        return False
    doomed = folder.with_name(f"{TEMPORARY}removed-{folder.name}-{uuid.uuid4().hex[:16]}")
    folder.rename(doomed)
    if _needed(doomed):  # somebody who had found it under its name was faster
        doomed.rename(folder)
        return False
    sync_folder(doomed.parent)
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def _needed(folder: Path) -> bool:
    validations = (folder / VALIDATIONS_FOLDER).glob("[!.]*.parquet")
    return (folder / PINNED_FILE).is_file() or busy(folder) or any(True for _ in validations)


def _stale_files(place: Path, now: datetime) -> list[Path]:
    """Returns temporary files of single tables, in runs and beside versions, that no living process writes."""
    files = [file for depth in ("*", "*/*") for file in place.glob(f"{depth}/{TEMPORARY}*") if file.is_file()]
    return [file for file in files if now.timestamp() - file.stat().st_mtime > _STALE.total_seconds() and _gone(file)]


def _gone(file: Path) -> bool:
    writer = writer_of(file)
    return writer is not None and not psutil.pid_exists(writer)


@contextmanager
def _locked(pair: Path, wait: bool) -> Iterator[bool]:
    """Keeps publishers from a pair; yields whether none is at work. Without `wait` it changes nothing on the disk."""
    if not wait and not (pair / PAIR_LOCK).exists():
        yield True
        return
    lock = FileLock(pair / PAIR_LOCK, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except (Timeout, OSError):  # held, or a store that may only be read
        if wait:
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
