"""Finds the profile of the very models that a server runs, and keeps it current. Parquet takes pyarrow, a URL fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvprofile.errors import BadInput
from kvprofile.resources import expanded
from kvprofile.runtime.differences import Difference, differences
from kvprofile.runtime.export import SUFFIX, read_export
from kvprofile.runtime.fingerprint import UNKNOWN, Fingerprint, Pair
from kvprofile.runtime.profile import RuntimeProfile
from kvprofile.runtime.reading import from_reader, is_rejected, load_folder, readable, validation_files
from kvprofile.runtime.watch import Watch

if TYPE_CHECKING:
    from kvprofile.store.reader import Profile

_NEAREST = 3
_LONGEST = 200

State = frozenset[tuple[str, bool, frozenset[str]]]
"""Place, rejection and validations of every version."""


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
        unread: Versions that could not be read, whether or not another one answered; a later `find` may read them.
    """

    profile: RuntimeProfile | None
    nearest: tuple[Near, ...]
    unread: tuple[Near, ...] = ()

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
        validations: Names of the files with validations.
        fetch: Returns a folder of this machine that holds it: all of it, or at least its `profile.parquet`.
    """

    place: str
    name: str
    rejected: bool
    validations: frozenset[str]
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

        Weights, tokenizer, chat template and config of both models must be known and equal. Names count for nothing. A version
        that cannot be read does not answer; a validation or layer times that cannot be read are left out, and the profile's
        `unread` says so.

        Args:
            sender: Who writes the cache; None if that is not known.
            receiver: Who reads it, likewise.
            task: That the profile must have.
            dataset: That it must have for the task.
            metric: That it must have for the dataset.
            dtype: That both models must have computed in.

        Raises:
            BadInput: If the store cannot be listed.
        """
        question = Question(sender or UNKNOWN, receiver or UNKNOWN, task, dataset, metric, dtype)
        answers: list[RuntimeProfile] = []
        near: list[Near] = []
        unread: list[Near] = []
        for versions in self._pairs():
            seen = list(_seen(versions, question))
            missed = [one for one in seen if isinstance(one, Near)]
            unread += filter(_is_unread, missed)
            if isinstance(seen[-1], RuntimeProfile):
                answers.append(seen[-1])
            else:
                near.append(min(missed, key=_distance))
        newest = max(answers, key=lambda one: str(one.header["created_at"]), default=None)
        return Found(newest, () if newest else tuple(sorted(near, key=_distance)[:_NEAREST]), tuple(unread))

    def watch(self, **question: Any) -> Watch:
        """Returns the answer to `find` with the same arguments, which `refresh` brings up to date.

        Raises:
            BadInput: If the store cannot be listed.
        """
        return Watch(self, question)

    def state(self) -> State:
        """Returns what an answer depends on: which versions there are, whether they are rejected, what validated them.

        Reads no table: it lists, and opens at most what says that a version is rejected.

        Raises:
            BadInput: If the store cannot be listed.
        """
        return frozenset((one.place, one.rejected, one.validations) for pair in self._pairs() for one in pair)

    def _pairs(self) -> list[list[Version]]:
        """Returns the versions of each pair, newest first.

        Raises:
            BadInput: If the store cannot be listed.
        """
        from kvprofile.store.reader import is_url, pairs, versions

        try:
            if is_url(self.path):
                return list(_remote_pairs(str(self.path)))
            held = [versions(pair) for pair in pairs(Path(self.path))]
            return [[_local(folder) for _, folder in reversed(found)] for found in held if found]
        except OSError as error:  # also where something is pruned at this moment
            raise BadInput(f"{self.path} cannot be listed ({error}); look again, or check its rights") from error


def load_profile(path: str | Path) -> RuntimeProfile:
    """Returns the profile that a path means: a profile folder, its `profile.parquet`, a pair, a store of one pair, an export.

    Of a pair, the newest version that is not rejected. NOTE: Whether it is about your models is not asked; see `is_for` and
    `ProfileStore.find`.

    Raises:
        BadInput: If there is none, it is rejected, or one of its files, validations among them, is truncated, foreign, changed,
            or made by a newer kvprofile.
    """
    file = expanded(path)
    if file.suffix == SUFFIX and file.is_file():
        return read_export(file)
    return from_reader(load_usable(path))


def load_usable(path: str | Path) -> Profile:
    """Returns the whole profile, as `kvprofile.store` reads it, that a path means and a runtime may use.

    Raises:
        BadInput: If there is none, it is rejected, or its file is truncated, foreign, changed, or made by a newer kvprofile.
    """
    from kvprofile.store.reader import is_url, resolve

    folder = resolve(path)
    if is_rejected(folder):
        mend = "sweep again" if is_url(path) else f"`kvprofile store accept {folder}` lets it serve"
        raise BadInput(f"{folder} was rejected and must not be used; {mend}, or give another version")
    return load_folder(folder)


def _local(folder: Path) -> Version:
    validations = frozenset(file.name for file in validation_files(folder))
    return Version(str(folder), folder.name, is_rejected(folder), validations, lambda whole: folder)


def _remote_pairs(url: str) -> Iterator[list[Version]]:
    from kvprofile.store.manifest import ACCEPTED_FILE
    from kvprofile.store.reader import PROFILE_FILE, REJECTED_FILE, VALIDATIONS_FOLDER
    from kvprofile.store.remote import Listing, RemoteVersion, fetch
    from kvprofile.store.remote_files import Remote

    def made(version: RemoteVersion) -> Version:
        name = version.name.rpartition("/")[2]
        rejected = REJECTED_FILE in version.files and ACCEPTED_FILE not in version.files
        validations = frozenset(file for file in version.files if file.startswith(f"{VALIDATIONS_FOLDER}/"))
        only = (PROFILE_FILE,)
        return Version(version.url, name, rejected, validations, lambda whole: fetch(version, None if whole else only))

    listing = Listing(Remote(url))
    for pair in listing.pairs:
        yield [made(version) for version in reversed(listing.published(pair))]


def _seen(versions: list[Version], question: Question) -> Iterator[RuntimeProfile | Near]:
    """Yields what each of a pair's versions, newest first, says, up to the first that answers."""
    for version in versions:
        found = _compare(version, question)
        if isinstance(found, RuntimeProfile):
            yield found
            return
        yield Near(version.place, tuple(found))


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
        profile = readable(load_folder(version.fetch(True)))
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


def _is_unread(near: Near) -> bool:
    return any(one.what == "file" for one in near.differences)


def _distance(near: Near) -> tuple[bool, int]:
    return _is_unread(near), len(near.differences)
