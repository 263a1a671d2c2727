"""Reads the profiles of a remote store, any that fsspec reaches, through the cache. Imported only where a URL is given.

A version lies under `STORE/PAIR/v0001/`. It is there once its `manifest.json` is, which is written last; its `claim.json`,
written first, keeps the number for one publisher. What was published is never changed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from kvprofile.errors import BadInput
from kvprofile.models.cache_dir import cache_dir
from kvprofile.store.index import Entry, described
from kvprofile.store.manifest import (
    ACCEPTED_FILE,
    MANIFEST_FILE,
    PINNED_FILE,
    FileRecord,
    Manifest,
    file_record,
    manifest_bytes,
    parse_manifest,
    read_manifest,
)
from kvprofile.store.reader import (
    PROFILE_FILE,
    REJECTED_FILE,
    VALIDATIONS_FOLDER,
    all_rejected,
    load,
    rejection_reason,
)
from kvprofile.store.remote_files import Remote
from kvprofile.store.temporary import temporary_beside

CLAIM_FILE = "claim.json"

_PAIR = re.compile(r"[A-Za-z0-9_+@-][A-Za-z0-9._+@-]{0,250}")
_VERSION = re.compile(r"v(\d{4,9})")


class RemoteVersion(NamedTuple):
    """A version of a remote store.

    Attributes:
        remote: The store.
        pair: Name of the pair.
        number: Number of the version.
        files: Size of every file by its name in the version, in bytes.
    """

    remote: Remote
    pair: str
    number: int
    files: Mapping[str, int]

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.pair}/v{self.number:04d}"

    @property
    def url(self) -> str:
        return self.remote.place(self.name)

    @property
    def published(self) -> bool:
        return MANIFEST_FILE in self.files

    @property
    def is_rejected(self) -> bool:
        """Whether it must not serve: it was rejected, before it was published or since, and not accepted."""
        return REJECTED_FILE in self.files and ACCEPTED_FILE not in self.files

    def rejection(self) -> str | None:
        """Returns why it is rejected, None if it is not."""
        return rejection_reason(self.read(REJECTED_FILE) or b"") if self.is_rejected else None

    def acceptance(self) -> str | None:
        """Returns for what it was rejected before it was accepted, None if that did not happen."""
        both = REJECTED_FILE in self.files and ACCEPTED_FILE in self.files
        return rejection_reason(self.read(REJECTED_FILE) or b"") if both else None

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file, None if it is not there."""
        return self.remote.read(f"{self.name}/{name}")

    def manifest(self) -> Manifest:
        """Returns the manifest.

        Raises:
            BadInput: If it is not there or none.
        """
        content = self.read(MANIFEST_FILE)
        if content is None:
            raise BadInput(f"{self.url} has no {MANIFEST_FILE}, so it is not published; take another version")
        return parse_manifest(content, f"{self.url}/{MANIFEST_FILE}")


class Listing:
    """What lies in a remote store at one moment."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.strangers: list[str] = []
        held: dict[tuple[str, int], dict[str, int]] = {}
        for path, size in remote.files().items():
            pair, _, rest = path.partition("/")
            version, _, name = rest.partition("/")
            match = _VERSION.fullmatch(version)
            if match and version == f"v{int(match[1]):04d}" and name and _PAIR.fullmatch(pair):
                held.setdefault((pair, int(match[1])), {})[name] = size
            elif path:
                self.strangers.append(path)
        self._held = {key: RemoteVersion(remote, *key, files) for key, files in sorted(held.items())}

    @cached_property
    def pairs(self) -> list[str]:
        """Names of the pairs that have a published version."""
        return list(dict.fromkeys(version.pair for version in self.all() if version.published))

    def all(self, pair: str | None = None) -> list[RemoteVersion]:
        """Returns versions, oldest first: of a pair or of all, published or only claimed."""
        return [version for version in self._held.values() if pair in (None, version.pair)]

    def published(self, pair: str) -> list[RemoteVersion]:
        """Returns the published versions of a pair, oldest first."""
        return [version for version in self.all(pair) if version.published]


class Scope(NamedTuple):
    """What a URL means.

    Attributes:
        listing: The store it is in.
        pair: Name of the pair, None if the URL is that of the store.
        number: Number of the version, None if the URL is that of a pair or the store.
    """

    listing: Listing
    pair: str | None
    number: int | None

    def versions(self) -> list[RemoteVersion]:
        """Returns the versions that the URL means, oldest first, published or only claimed."""
        return [version for version in self.listing.all(self.pair) if self.number in (None, version.number)]


def scope_of(url: str) -> Scope:
    """Returns what a URL means; one without any versions is that of a store not yet made."""
    url = url.rstrip("/").removesuffix(f"/{PROFILE_FILE}") if not url.endswith("://") else url
    protocol, _, path = url.partition("://")
    *above, last = path.split("/")
    if above and (match := _VERSION.fullmatch(last)):
        return Scope(Listing(Remote(f"{protocol}://{'/'.join(above[:-1])}")), above[-1], int(match[1]))
    listing = Listing(Remote(url))
    if above and not listing.all() and any(_VERSION.match(name) for name in listing.strangers):
        return Scope(Listing(Remote(f"{protocol}://{'/'.join(above)}")), last, None)
    return Scope(listing, None, None)


def locate(url: str) -> RemoteVersion:
    """Returns the version that a URL means: a version, a pair or a store with one pair, the newest that was not rejected.

    Raises:
        BadInput: If there is none, only rejected ones, or the store has several pairs.
    """
    scope = scope_of(url)
    found = [version for version in scope.versions() if version.published]
    if not found:
        raise BadInput(no_profile(url))
    if scope.number is not None:
        return found[0]
    if pairs := list(dict.fromkeys(version.pair for version in found))[1:]:
        known = ", ".join(scope.listing.remote.place(pair) for pair in [found[0].pair, *pairs])
        raise BadInput(f"{url} holds {len(pairs) + 1} pairs; give one of {known}")
    return _newest(found, scope.listing.remote.place(found[0].pair))


def _newest(found: list[RemoteVersion], place: str) -> RemoteVersion:
    reasons = []
    for version in reversed(found):
        if (reason := version.rejection()) is None:
            return version
        reasons.append(reason)
    raise BadInput(all_rejected(place, len(found), found[-1].url, reasons[0]))


def fetch_profile(url: str) -> Path:
    """Returns the folder in the cache with all files of the version that a URL means.

    Raises:
        BadInput: As `locate` and `fetch`.
    """
    return fetch(locate(url))


def fetch(version: RemoteVersion, only: Collection[str] | None = None) -> Path:
    """Returns the folder in the cache that holds a version's files, or some of them; each is checked when it is copied.

    A rejection or its end that was told since the version was published is copied along.

    Raises:
        BadInput: If a file is not the one that the manifest names, or the version changed since it was read before.
    """
    manifest = version.manifest()
    folder = _cached(version)
    kept = read_manifest(folder)
    if kept is not None and kept != manifest:
        name = min(name for name in {*kept, *manifest} if kept.get(name) != manifest.get(name))
        raise BadInput(
            f"{version.url} is not what was read before: {name} has another hash, and published versions never change; "
            f"ask who replaced it, or remove {folder} to take the new one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in manifest.items():
        if only is None or name in only:
            _fetch_file(version, name, record, folder / name)
    for name in {REJECTED_FILE, ACCEPTED_FILE} - manifest.keys():
        if name in version.files:
            _write(folder / name, version.read(name) or b"")
        else:
            (folder / name).unlink(missing_ok=True)
    if kept is None:
        _write(folder / MANIFEST_FILE, manifest_bytes(manifest))
    return folder


def _write(path: Path, content: bytes) -> None:
    temporary = temporary_beside(path)
    temporary.write_bytes(content)
    temporary.replace(path)


def _fetch_file(version: RemoteVersion, name: str, record: FileRecord, target: Path) -> None:
    if target.is_file() and target.stat().st_size == record.bytes:
        return  # it was checked before it got this name
    target.parent.mkdir(exist_ok=True)
    temporary = temporary_beside(target)
    try:
        version.remote.download(f"{version.name}/{name}", temporary)
        if file_record(temporary) != record:
            raise BadInput(
                f"{version.url}/{name} is not the file that its manifest names; read it again, or push the version again"
            )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _cached(version: RemoteVersion) -> Path:
    url = version.remote.url
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", url)[:60].strip(".-")
    return cache_dir() / "profiles" / f"{safe}-{hashlib.sha256(url.encode()).hexdigest()[:8]}" / version.name


def ls(url: str) -> list[Entry]:
    """Returns every published version of a remote store; only small files are copied to the cache for it.

    Raises:
        BadInput: If the URL is that of a pair or a version.
    """
    return [entry_of(version) for version in _whole_store(url).all() if version.published]


def listing_of(url: str) -> Listing:
    """Returns what lies in the remote store at a URL.

    Raises:
        BadInput: If nothing does, or the URL is that of a pair or a version.
    """
    listing = _whole_store(url)
    if not listing.all():
        raise BadInput(no_profile(url))
    return listing


def _whole_store(url: str) -> Listing:
    scope = scope_of(url)
    if scope.pair is not None:
        raise BadInput(f"{url} is not a store but in one; give {scope.listing.remote.url}")
    return scope.listing


def no_profile(url: str) -> str:
    """Returns the sentence that nothing lies at a URL."""
    return (
        f"there is no profile at {url}; `kvprofile store ls --out URL` lists a store, `kvprofile store push` adds to it"
    )


def entry_of(version: RemoteVersion) -> Entry:
    """Returns a published version of a remote store as an entry of its list."""
    validations = sum(name.startswith(f"{VALIDATIONS_FOLDER}/") for name in version.files)
    pinned = PINNED_FILE in version.files
    size = sum(version.files.values())
    entry = Entry(version.url, version.pair, version.number, size, None, None, pinned, validations)
    try:
        entry = entry._replace(rejected=version.rejection(), accepted=version.acceptance())
        return described(entry, load(fetch(version, only=(PROFILE_FILE, REJECTED_FILE))))
    except (BadInput, OSError) as error:
        return entry._replace(problem=str(error))
