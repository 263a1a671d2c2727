"""Reads the profiles of a remote store, any that fsspec reaches, through the cache. Imported only where a URL is given.

A version lies under `STORE/PAIR/v0001/`. It is there once its `manifest.json` is, which is written last; its `claim.json`,
written first, keeps the number for one publisher. What was published is never changed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.core import url_to_fs

from kvprofile.errors import BadInput, KvprofileError
from kvprofile.models.cache_dir import cache_dir
from kvprofile.store.index import Entry, described
from kvprofile.store.manifest import (
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
    rejection,
    rejection_reason,
)

CLAIM_FILE = "claim.json"

_PAIR = re.compile(r"[A-Za-z0-9_+@-][A-Za-z0-9._+@-]{0,250}")
_VERSION = re.compile(r"v(\d{4,9})")


class Remote:
    """The root of a remote store.

    Raises:
        BadInput: From every method, if the place cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        if url.split("://")[0] in ("file", "local"):
            raise BadInput(f"{url} is a folder of this machine; give its path instead")
        with self._told():
            self._fs, self._root = url_to_fs(self.url)

    def place(self, name: str) -> str:
        """Returns the URL of something in the store."""
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{name}"

    def files(self) -> dict[str, int]:
        """Returns the size of every file by its name in the store, in bytes; nothing for a store not yet made."""
        with self._told():
            self._fs.invalidate_cache()
            try:
                found: Mapping[str, Any] = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root.rstrip("/")) + 1
        return {path[start:]: int(about.get("size") or 0) for path, about in found.items()}

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file, None if it is not there."""
        with self._told():
            try:
                content: bytes = self._fs.cat_file(self._path(name))
                return content
            except FileNotFoundError:
                return None

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file unless it is there already; returns whether it did.

        NOTE: Only as safe as the service: S3, GCS and those like them decide between two writers, a plain file server may not.
        """
        with self._told():
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except OSError as error:
                # Other services than Amazon's do not say which condition failed, and s3fs then tells EINVAL.
                if not isinstance(error, FileExistsError) and error.errno != errno.EINVAL:
                    raise
            else:
                return True
        held = self.read(name)
        if held is None:
            raise BadInput(f"{self.place(name)} can be neither created nor read; check what the credentials allow")
        return held == content  # ours, if an answer got lost and the client asked again

    def upload(self, local: Path, name: str) -> None:
        """Copies a local file to the store."""
        with self._told():
            self._fs.put_file(str(local), self._path(name))

    def download(self, name: str, local: Path) -> None:
        """Copies a file of the store to a local one."""
        with self._told():
            self._fs.get_file(self._path(name), str(local))

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with self._told():
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns what a client of any service may raise into one sentence."""
        try:
            yield
        except KvprofileError:
            raise
        except ImportError as error:
            raise BadInput(f"{self.url} needs a package ({error}); pip install 'kvprofile[s3]' for s3://") from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise BadInput(
                f"{self.url} cannot be used ({reason}); check address, credentials, rights and network"
            ) from error


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
        raise BadInput(
            f"there is no profile at {url}; `kvprofile store ls --out URL` lists a store, `kvprofile store push` adds to it"
        )
    if scope.number is not None:
        return found[0]
    if pairs := list(dict.fromkeys(version.pair for version in found))[1:]:
        known = ", ".join(scope.listing.remote.place(pair) for pair in [found[0].pair, *pairs])
        raise BadInput(f"{url} holds {len(pairs) + 1} pairs; give one of {known}")
    return _newest(found, scope.listing.remote.place(found[0].pair))


def _newest(found: list[RemoteVersion], place: str) -> RemoteVersion:
    reasons = []
    for version in reversed(found):
        if REJECTED_FILE not in version.files:
            return version
        reasons.append(rejection_reason(version.read(REJECTED_FILE) or b""))
    raise BadInput(all_rejected(place, len(found), found[-1].url, reasons[0]))


def fetch_profile(url: str) -> Path:
    """Returns the folder in the cache with all files of the version that a URL means.

    Raises:
        BadInput: As `locate` and `fetch`.
    """
    return fetch(locate(url))


def fetch(version: RemoteVersion, only: Collection[str] | None = None) -> Path:
    """Returns the folder in the cache that holds a version's files, or some of them; each is checked when it is copied.

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
    if kept is None:
        temporary = folder / f".tmp-{os.getpid()}-{MANIFEST_FILE}"
        temporary.write_bytes(manifest_bytes(manifest))
        temporary.replace(folder / MANIFEST_FILE)
    return folder


def _fetch_file(version: RemoteVersion, name: str, record: FileRecord, target: Path) -> None:
    if target.is_file() and target.stat().st_size == record.bytes:
        return  # it was checked before it got this name
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_name(f".tmp-{os.getpid()}-{target.name}")
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
    """Returns every published version of a remote store; only small files are copied to the cache for it."""
    listing = Listing(Remote(url))
    return [entry_of(version) for version in listing.all() if version.published]


def entry_of(version: RemoteVersion) -> Entry:
    """Returns a published version of a remote store as an entry of its list."""
    validations = sum(name.startswith(f"{VALIDATIONS_FOLDER}/") for name in version.files)
    pinned = PINNED_FILE in version.files
    size = sum(version.files.values())
    entry = Entry(version.url, version.pair, version.number, size, None, None, pinned, validations)
    try:
        folder = fetch(version, only=(PROFILE_FILE, REJECTED_FILE))
        entry = entry._replace(rejected=rejection(folder))
        return described(entry, load(folder))
    except (BadInput, OSError) as error:
        return entry._replace(problem=str(error))
