"""Finds the profile of the very models that a server runs, and keeps it current. Parquet takes pyarrow, a URL fsspec."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvprofile.errors import BadInput
from kvprofile.resources import expanded
from kvprofile.runtime.differences import Difference, differences
from kvprofile.runtime.export import SUFFIX, read_export
from kvprofile.runtime.fingerprint import UNKNOWN, Fingerprint, Pair
from kvprofile.runtime.profile import RuntimeProfile

if TYPE_CHECKING:
    from kvprofile.store.reader import Profile

_NEAREST = 3
_LONGEST = 200


class Question(NamedTuple):
    """What a server asks a store for; None where anything will do.

    Attributes:
        sender: Who writes the cache.
        receiver: Who reads it.
        task: That the profile must have.
        dataset: Likewise, of the task.
        metric: Likewise, of the dataset.
        dtype: That both models computed in.
    """

    sender: Fingerprint
    receiver: Fingerprint
    task: str | None
    dataset: str | None
    metric: str | None
    dtype: str | None


class Near(NamedTuple):
    """A profile that does not answer, and why.

    Attributes:
        place: Where it lies: its folder or URL.
        differences: What keeps it from answering; never empty.
    """

    place: str
    differences: tuple[Difference, ...]


class Found(NamedTuple):
    """A store's answer.

    Attributes:
        profile: The newest profile of exactly these models that may be used; None means: do a full prefill.
        nearest: Where there is none, the profiles that come closest, at most one of a pair folder, closest first.
    """

    profile: RuntimeProfile | None
    nearest: tuple[Near, ...]

    @property
    def why(self) -> str:
        """Why there is none, in words; empty where there is one."""
        if self.profile is not None:
            return ""
        reasons = [f"{near.place}: {'; '.join(one.words for one in near.differences)}" for near in self.nearest]
        return "\n".join(reasons) or "the store has no profile"


class Version(NamedTuple):
    """A version in a store.

    Attributes:
        place: Its folder or URL.
        name: Such as `v0003`.
        rejected: Whether it must not be used.
        fetch: Returns a folder of this machine that holds it: all of it, or at least its `profile.parquet`.
    """

    place: str
    name: str
    rejected: bool
    fetch: Callable[[bool], Path]


class ProfileStore:
    """A folder of profiles, such as `outputs`, or the URL of a remote store, such as `s3://bucket/profiles`."""

    def __init__(self, path: str | Path) -> None:
        self.path = path if isinstance(path, str) and "://" in path else expanded(path)

    def find(
        self,
        *,
        sender: Fingerprint | None,
        receiver: Fingerprint | None,
        task: str | None = None,
        dataset: str | None = None,
        metric: str | None = None,
        dtype: str | None = None,
    ) -> Found:
        """Returns the newest usable profile of exactly these models, read whole; or none, and what differs in the nearest.

        Weights, tokenizer, chat template and config of both models must be known and equal. Names count for nothing.

        Args:
            sender: Who writes the cache; None if that is not known.
            receiver: Who reads it, likewise.
            task: That the profile must have.
            dataset: That it must have for the task.
            metric: That it must have for the dataset.
            dtype: That both models must have computed in.
        """
        question = Question(sender or UNKNOWN, receiver or UNKNOWN, task, dataset, metric, dtype)
        answers: list[RuntimeProfile] = []
        near: list[Near] = []
        for versions in self._pairs():
            found = _newest(versions, question)
            if isinstance(found, RuntimeProfile):
                answers.append(found)
            else:
                near.append(found)
        newest = max(answers, key=lambda one: str(one.header["created_at"]), default=None)
        return Found(newest, () if newest else tuple(sorted(near, key=_distance)[:_NEAREST]))

    def watch(self, **question: Any) -> Watch:
        """Returns the answer to `find` with the same arguments, which `refresh` brings up to date."""
        return Watch(self, question)

    def state(self) -> frozenset[tuple[str, bool]]:
        """Returns which versions there are and whether they are rejected: what an answer depends on. Opens no file."""
        return frozenset((one.place, one.rejected) for pair in self._pairs() for one in pair)

    def _pairs(self) -> Iterator[list[Version]]:
        """Yields the versions of each pair, newest first."""
        from kvprofile.store.reader import is_url, pairs, versions

        if is_url(self.path):
            yield from _remote_pairs(str(self.path))
            return
        for pair in pairs(Path(self.path)):
            if found := versions(pair):  # none where they were all removed a moment ago
                yield [_local(folder) for _, folder in reversed(found)]


class Watch:
    """A store's answer, kept current: `found` costs nothing and may be read by any thread, `refresh` looks at the store.

    Attributes:
        question: The arguments of `ProfileStore.find`.
    """

    def __init__(self, store: ProfileStore, question: Mapping[str, Any]) -> None:
        self.question: Mapping[str, Any] = MappingProxyType(dict(question))
        self._store = store
        self._lock = threading.Lock()
        # Looked at before the search: what is published meanwhile is then found by the next refresh.
        self._state = store.state()
        self._found = store.find(**self.question)

    @property
    def found(self) -> Found:
        """The last answer. A profile that was taken from it goes on to work when a newer one is there."""
        return self._found

    def refresh(self) -> bool:
        """Looks whether versions came, went or were rejected, and only then reads; returns whether the answer changed.

        Raises:
            OSError: If the store cannot be listed; the last answer stays.
        """
        with self._lock:
            state = self._store.state()
            if state == self._state:
                return False
            found = self._store.find(**self.question)
            before = self._found
            same = (found.profile and found.profile.folder) == (before.profile and before.profile.folder)
            if not same or found.profile is None:
                self._found = found
            self._state = state
            return self._found != before


def load_profile(path: str | Path) -> RuntimeProfile:
    """Returns the profile that a path means: a profile folder, its `profile.parquet`, a pair, a store of one pair, an export.

    Of a pair, the newest version that is not rejected. NOTE: Whether it is about your models is not asked; see `is_for` and
    `ProfileStore.find`.

    Raises:
        BadInput: If there is none, it is rejected, or its file is truncated, foreign, changed, or made by a newer kvprofile.
    """
    file = expanded(path)
    if file.suffix == SUFFIX and file.is_file():
        return read_export(file)
    from kvprofile.store.reader import resolve

    folder = resolve(path)
    if is_rejected(folder):
        raise BadInput(f"{folder} was rejected and must not be used; sweep again or give another version")
    return _load(folder)


def from_reader(profile: Profile) -> RuntimeProfile:
    """Returns what a runtime takes of a profile that was read as a whole."""
    table = profile.timings()
    timings = [] if table is None else table.to_pylist()
    return RuntimeProfile(profile.folder, profile.header, profile.rows.to_pylist(), profile.validations(), timings)


def is_rejected(folder: Path) -> bool:
    """Returns whether somebody said that a version must not be used."""
    from kvprofile.store.reader import rejection

    return rejection(folder) is not None


def _load(folder: Path) -> RuntimeProfile:
    from kvprofile.store.reader import MEASUREMENTS_FILE, load, read_header

    profile = load(folder)
    measurements = folder / MEASUREMENTS_FILE
    if measurements.is_file() and read_header(measurements) != profile.header:
        raise BadInput(f"{folder} has two headers that differ, so one was changed; copy it again or sweep again")
    return from_reader(profile)


def _local(folder: Path) -> Version:
    return Version(str(folder), folder.name, is_rejected(folder), lambda whole: folder)


def _remote_pairs(url: str) -> Iterator[list[Version]]:
    from kvprofile.store.reader import PROFILE_FILE, REJECTED_FILE
    from kvprofile.store.remote import Listing, RemoteVersion, fetch
    from kvprofile.store.remote_files import Remote

    def made(version: RemoteVersion) -> Version:
        name = version.name.rpartition("/")[2]
        rejected = REJECTED_FILE in version.files
        return Version(version.url, name, rejected, lambda whole: fetch(version, None if whole else (PROFILE_FILE,)))

    listing = Listing(Remote(url))
    for pair in listing.pairs:
        yield [made(version) for version in reversed(listing.published(pair))]


def _newest(versions: list[Version], question: Question) -> RuntimeProfile | Near:
    """Returns the first of a pair's versions, newest first, that answers; else the one that comes closest."""
    near: list[Near] = []
    for version in versions:
        found = _compare(version, question)
        if isinstance(found, RuntimeProfile):
            return found
        near.append(Near(version.place, tuple(found)))
    return min(near, key=_distance)


def _compare(version: Version, question: Question) -> RuntimeProfile | list[Difference]:
    from kvprofile.store.reader import PROFILE_FILE, format_version, read_header

    try:
        folder = version.fetch(False)
        pair = Pair.of(read_header(folder / PROFILE_FILE))
        found = differences(pair, question.sender, question.receiver, version.name, lambda: format_version(folder))
        if question.dtype is not None and {question.dtype} != {pair.sender_dtype, pair.receiver_dtype}:
            computed = f"{pair.sender_dtype} and {pair.receiver_dtype}"
            found.append(Difference("dtype", f"{version.name} was measured in {computed}, not in {question.dtype}"))
        if version.rejected:
            found.append(Difference("rejected", f"{version.name} was rejected"))
        if found:
            return found
        profile = _load(version.fetch(True))
        return _lacking(profile, question) or profile
    except (BadInput, OSError) as error:
        return [Difference("file", str(error))]


def _lacking(profile: RuntimeProfile, question: Question) -> list[Difference]:
    rows = profile.rows
    for name in ("task", "dataset", "metric"):
        wanted = getattr(question, name)
        known = list(dict.fromkeys(str(row[name]) for row in rows))
        if wanted is not None and wanted not in known:
            return [Difference(name, f"no such {name}: it has {', '.join(known)[:_LONGEST]}")]
        rows = tuple(row for row in rows if wanted in (None, row[name]))
    return []


def _distance(near: Near) -> tuple[bool, int]:
    return any(one.what == "file" for one in near.differences), len(near.differences)
