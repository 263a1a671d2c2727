"""Publishes in remote stores, copies from them, checks and prunes them. Imported only where a URL is given."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from kvprofile.errors import BadInput, Interrupted
from kvprofile.json_text import parse_json
from kvprofile.store import reader
from kvprofile.store.index import pair_entries
from kvprofile.store.manifest import (
    ACCEPTED_FILE,
    MANIFEST_FILE,
    Manifest,
    file_record,
    is_file_name,
    manifest_bytes,
    read_manifest,
    require_names,
)
from kvprofile.store.reader import Profile, is_url, load
from kvprofile.store.remote import CLAIM_FILE, Listing, RemoteVersion, entry_of, listing_of, no_profile, scope_of
from kvprofile.store.remote_files import Remote
from kvprofile.store.retention import Kept, Pruned, Removal, sort_out
from kvprofile.store.schema import FOOTER_KEY
from kvprofile.store.soundness import Finding, faults_beside, hash_findings
from kvprofile.store.verify import Verdict, verify_pair
from kvprofile.store.writer import pair_folder, publish, write_table

CLAIM_AGE = timedelta(days=1)
"""After which a claim without a manifest is taken for that of a publisher that died."""

_OWN_FILES = (
    *(reader.PROFILE_FILE, reader.MEASUREMENTS_FILE, reader.SAMPLES_FILE, reader.SEARCH_FILE),
    *(reader.TIMINGS_FILE, reader.RECIPE_FILE, "environment.json", reader.REJECTED_FILE),
)


class Copied(NamedTuple):
    """Where a copy of a version lies.

    Attributes:
        place: Its folder or URL.
        already_there: Whether it was there before.
    """

    place: str
    already_there: bool


def push(profile: str, url: str) -> Copied:
    """Publishes a copy of a local version in a remote store, under the next number there, unless it is there as it is here.

    Raises:
        BadInput: If the version is not sound, the store cannot be written, or it holds the version without what came since.
        Interrupted: If the claim on the number was taken away meanwhile.
    """
    if is_url(profile) or not is_url(url):
        raise BadInput("push copies a folder to a URL; give the profile's folder first and the store's URL second")
    loaded = load(profile)
    if broken := next((one for one in hash_findings(loaded.folder) if one.severity == "fault"), None):
        raise BadInput(f"{broken.path}: {broken.what}, so it is not pushed; {broken.mend}")
    if broken := next(faults_beside(loaded), None):
        raise BadInput(f"{broken.path}: {broken.what}, so nothing is pushed; {broken.mend}")
    require_names(_names(loaded))
    scope = scope_of(url)
    if scope.pair is not None:
        raise BadInput(f"{url} is not a store; push to {scope.listing.remote.url}")
    listing, remote = scope.listing, scope.listing.remote
    pair = pair_folder(Path(), loaded.header["sender"]["name"], loaded.header["receiver"]["name"]).name
    for version in listing.published(pair):
        if _claim(version).get("profile_id") == loaded.header["profile_id"]:
            _require_same(loaded, version.manifest(), version.url, version.is_rejected)
            return Copied(version.url, True)
    number = max((version.number for version in listing.all(pair)), default=0) + 1
    claim = _new_claim(loaded)
    # Read again, since not every service decides between two writers of one name.
    while not (_create(remote, pair, number, claim) and _holds(remote, pair, number, claim)):
        number += 1
    version = RemoteVersion(remote, pair, number, {})
    with tempfile.TemporaryDirectory(prefix="kvprofile-push-") as temporary:
        manifest = _stage(loaded, Path(temporary), number)
        for name in manifest:
            remote.upload(Path(temporary) / name, f"{version.name}/{name}")
    if not _holds(remote, pair, number, claim) or not remote.create(
        f"{version.name}/{MANIFEST_FILE}", manifest_bytes(manifest)
    ):
        raise Interrupted(f"the claim on {version.url} was removed while it was pushed; push again")
    return Copied(version.url, False)


def pull(url: str, store: str) -> Copied:
    """Publishes a copy of a remote version in a local store, under the next number there, unless it is there as it is at the URL.

    Raises:
        BadInput: If there is no such version, it is not what its manifest says, or the store holds it without what came since.
    """
    if not is_url(url) or is_url(store):
        raise BadInput("pull copies from a URL to a folder; give the URL first and the store's folder with --out")
    loaded = load(url)
    if broken := next((one for one in hash_findings(loaded.folder) if one.severity == "fault"), None):
        raise BadInput(f"{broken.path}: {broken.what}; remove {loaded.folder}, a copy that was changed, and pull again")
    pair = pair_folder(Path(store), loaded.header["sender"]["name"], loaded.header["receiver"]["name"])
    for entry in pair_entries(pair):
        if entry.profile_id == loaded.header["profile_id"]:
            folder = Path(entry.path)
            there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
            records = {name: file_record(path) for name, path in there.items()}
            _require_same(loaded, records, str(folder), entry.rejected is not None)
            return Copied(str(folder), True)

    def build(folder: Path, number: int) -> None:
        _stage(loaded, folder, number)

    return Copied(str(publish(pair, build)), False)


def _stage(profile: Profile, folder: Path, number: int) -> Manifest:
    """Copies a version with all that lies beside it, gives it its new number, and returns the manifest of all that."""
    held = _names(profile)
    for name in held:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(profile.folder / name, folder / name)
    for name in (reader.PROFILE_FILE, reader.MEASUREMENTS_FILE) if profile.header["version"] != number else ():
        if (folder / name).is_file():
            _renumber(folder / name, number)
    return {name: file_record(folder / name) for name in held}


def _renumber(path: Path, number: int) -> None:
    """Changes the number in a table's header and nothing else, so that one of an older format stays one."""
    reader.read_header(path)
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read()
    header = parse_json(table.schema.metadata[FOOTER_KEY.encode()])
    write_table(table, path, {**header, "version": number})


def _require_same(profile: Profile, there: Manifest, place: str, rejected: bool) -> None:
    """Refuses to take for a copy what lacks files that came since, or has others; `rejected`: it may not serve.

    Raises:
        BadInput: If it is none.
    """
    lacking = [ACCEPTED_FILE] if rejected and (profile.folder / ACCEPTED_FILE).is_file() else []
    for name in _names(profile):
        # Tables of the version itself differ by the number in their headers.
        same = name in there and ("/" not in name or there[name] == file_record(profile.folder / name))
        if not same and not (rejected and name == reader.REJECTED_FILE):
            lacking.append(name)
    if lacking:
        raise BadInput(
            f"{place} is a copy of this profile without {', '.join(lacking)} as it is in {profile.folder}, and what was "
            "published is not changed; give another store, or remove it there and copy again"
        )


def _names(profile: Profile) -> list[str]:
    """Returns the files of a version and of what lies beside it, by their names in its folder."""
    names = [name for name in (*_OWN_FILES, *(read_manifest(profile.folder) or ())) if "/" not in name]
    beside = [
        path.relative_to(profile.folder).as_posix()
        for place in (reader.VALIDATIONS_FOLDER, reader.SENSITIVITY_FOLDER)
        for path in sorted((profile.folder / place).glob("[!.]*.parquet"))
    ]
    accepted = reader.rejection(profile.folder) is None
    held = (name for name in dict.fromkeys([*names, *beside]) if not (accepted and name == reader.REJECTED_FILE))
    return [name for name in held if (profile.folder / name).is_file()]


def _new_claim(profile: Profile) -> bytes:
    claim = {
        "profile_id": profile.header["profile_id"],
        "nonce": uuid.uuid4().hex,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "process": os.getpid(),
    }
    return json.dumps(claim, indent=2).encode()


def _create(remote: Remote, pair: str, number: int, claim: bytes) -> bool:
    return remote.create(f"{pair}/v{number:04d}/{CLAIM_FILE}", claim)


def _holds(remote: Remote, pair: str, number: int, claim: bytes) -> bool:
    return remote.read(f"{pair}/v{number:04d}/{CLAIM_FILE}") == claim


def _claim(version: RemoteVersion) -> dict[str, Any]:
    """Returns a version's claim, empty if it has none that can be read."""
    try:
        held = parse_json(version.read(CLAIM_FILE) or b"")
    except ValueError:
        return {}
    return held if isinstance(held, dict) else {}


def _claimed_for(version: RemoteVersion, now: datetime) -> timedelta:
    """Returns how long ago a version was claimed; for ever, where the claim does not tell."""
    try:
        made = datetime.fromisoformat(_claim(version)["created_at"])
        return now - made
    except (KeyError, TypeError, ValueError):
        return timedelta.max


def prune_remote(url: str, keep: int, older_than: timedelta | None, really: bool, now: datetime) -> Pruned:
    """Returns what goes of a remote store and what stays, and removes what goes if `really`; see `retention.prune`.

    A version's manifest goes first, so that a reader finds all of it or no version; its claim goes last. Of a publisher that
    died the claim goes first, so that if it lives, it finds that it must not publish.

    Raises:
        BadInput: If there is no store at the URL.
    """
    listing = listing_of(url)
    removals: list[tuple[Removal, RemoteVersion]] = []
    kept: list[Kept] = []
    for version in listing.all():
        if not version.published and (age := _claimed_for(version, now)) >= CLAIM_AGE:
            since = "" if age == timedelta.max else f" {age // timedelta(hours=1)} hours ago"
            why = f"claimed{since} and never published"
            removals.append((Removal(version.url, why, sum(version.files.values())), version))
    for pair in listing.pairs:
        by_url = {version.url: version for version in listing.published(pair)}
        sorting = sort_out([entry_of(version) for version in by_url.values()], keep, older_than, now)
        kept += [Kept(str(entry.path), why) for entry, why in sorting.staying]
        for entry, why in sorting.going:
            removals.append((Removal(str(entry.path), why, entry.bytes), by_url[str(entry.path)]))
    return Pruned([removal for removal, version in removals if not really or _removed(version)], kept)


def _removed(version: RemoteVersion) -> bool:
    """Removes a version, or what a publisher that died has left of one; returns False if it lived and published."""
    files = dict(version.files)
    if not version.published:
        claim = version.read(CLAIM_FILE)
        version.remote.remove(f"{version.name}/{CLAIM_FILE}")
        # Looked at again: what was uploaded meanwhile goes, too, and a manifest means that the claim was in force.
        files = version.remote.files(version.name)
        if MANIFEST_FILE in files:
            if claim is not None:
                version.remote.create(f"{version.name}/{CLAIM_FILE}", claim)
            return False
    for name in sorted(files, key=lambda name: (name != MANIFEST_FILE, name == CLAIM_FILE)):
        version.remote.remove(f"{version.name}/{name}")
    return True


def verify_remote(url: str) -> Verdict:
    """Checks a remote store, pair or version as it lies there, not as it lies in the cache; see `verify.verify`.

    Raises:
        BadInput: If there is none.
    """
    scope = scope_of(url)
    listing, versions = scope.listing, scope.versions()
    if not versions:
        raise BadInput(no_profile(url))
    findings = [*_claims(versions), *(_strangers(listing) if scope.pair is None else ())]
    published = [version for version in versions if version.published]
    for name in dict.fromkeys(version.pair for version in published):
        with tempfile.TemporaryDirectory(prefix="kvprofile-verify-") as temporary:
            own = [version for version in published if version.pair == name]
            findings += [finding for version in own for finding in _mirror(version, Path(temporary))]
            for found in verify_pair(Path(temporary) / name):
                texts = (text.replace(temporary, listing.remote.url) for text in found[1:])
                findings.append(Finding(found.severity, *texts))
    return Verdict(len(published), findings)


def _claims(versions: list[RemoteVersion]) -> Iterator[Finding]:
    for version in versions:
        if not version.published:
            who = _claim(version)
            what = f"claimed at {who.get('created_at')} by process {who.get('process')} on {who.get('host')}, and not published"
            mend = f"wait if it is being pushed; after {CLAIM_AGE.days} day `kvprofile store prune` removes it"
            yield Finding("remark", version.url, what, mend)


def _strangers(listing: Listing) -> Iterator[Finding]:
    for path in listing.strangers:
        yield Finding("remark", listing.remote.place(path), "it belongs to nothing", "remove it if it is not yours")


def _mirror(version: RemoteVersion, store: Path) -> Iterator[Finding]:
    """Copies a version as it lies in the remote store, and yields the files that it cannot have."""
    folder = store / version.name
    folder.mkdir(parents=True)
    for name in version.files:
        path = name.rpartition("/")[0]
        if name == CLAIM_FILE:
            continue
        # No manifest can name others, so no reader takes them; some cannot even be copied.
        known = name == MANIFEST_FILE or is_file_name(name)
        if not known or name in (reader.VALIDATIONS_FOLDER, reader.SENSITIVITY_FOLDER):
            yield Finding("remark", f"{version.url}/{name}", "it belongs to nothing", "remove it if it is not yours")
            continue
        (folder / path).mkdir(exist_ok=True)
        version.remote.download(f"{version.name}/{name}", folder / name)
