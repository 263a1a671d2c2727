"""The manifest of a version: which files it consists of, with their hashes. Needs the standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvprofile.errors import BadInput

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
PINNED_FILE = "pinned"
ACCEPTED_FILE = "accepted"
ADDED_LATER = frozenset({"report.html", PINNED_FILE, ACCEPTED_FILE})
"""Files that come and go beside a published version; so do its folders."""

_NAME = re.compile(r"(?:(?:validations|sensitivity)/)?[A-Za-z0-9_-][A-Za-z0-9._+-]{0,199}")


class FileRecord(NamedTuple):
    """What a manifest says of a file.

    Attributes:
        sha256: Hash of its content, in hexadecimal.
        bytes: Its size.
    """

    sha256: str
    bytes: int


Manifest = Mapping[str, FileRecord]
"""By file name; of a folder beside the version, such as `validations/musique-0001.parquet`."""


def file_record(path: Path) -> FileRecord:
    """Returns hash and size of a file as it is now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(digest.hexdigest(), file.tell())


def write_manifest(folder: Path) -> None:
    """Writes the manifest of a version that is about to be published, after its files have reached the disk."""
    held = {path.name: _settled(path) for path in sorted(folder.iterdir()) if path.is_file() and _belongs(path.name)}
    path = folder / MANIFEST_FILE
    path.write_bytes(manifest_bytes(held))
    _settled(path)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Returns a manifest as the JSON document of its file.

    Raises:
        BadInput: If it names a file as kvprofile does not, so that no reader would take it.
    """
    require_names(manifest)
    files = {name: record._asdict() for name, record in sorted(manifest.items())}
    return json.dumps({"manifest_version": MANIFEST_VERSION, "files": files}, indent=2).encode()


def require_names(names: Iterable[str]) -> None:
    """Refuses files of a version that no manifest can name.

    Raises:
        BadInput: If there is one.
    """
    if strange := [name for name in names if not is_file_name(name)]:
        raise BadInput(
            f"{strange[0]!r} is no name of a file of a version; remove it, or rename it to letters and digits"
        )


def read_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of a version, None where it has none; kvprofile wrote none before format 2 had them.

    Raises:
        BadInput: As `parse_manifest`.
    """
    path = folder / MANIFEST_FILE
    return parse_manifest(path.read_bytes(), str(path)) if path.is_file() else None


def parse_manifest(document: bytes, place: str) -> Manifest:
    """Returns the manifest in a JSON document that anybody may have written; `place` is where it lies.

    Raises:
        BadInput: If it is none, names files outside its version, or was made by a newer kvprofile.
    """
    try:
        held: Any = json.loads(document)
        made_by = held["manifest_version"]
        if type(made_by) is int and made_by > MANIFEST_VERSION:
            raise BadInput(
                f"{place} was made by a newer kvprofile (manifest {made_by}, this reads up to {MANIFEST_VERSION}): "
                "pip install -U kvprofile"
            )
        records = {name: FileRecord(record["sha256"], record["bytes"]) for name, record in held["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{place} is no manifest; copy the version again") from error
    sound = type(made_by) is int and made_by == 1 and all(_sound(name, record) for name, record in records.items())
    if not sound:
        raise BadInput(f"{place} names files or hashes as kvprofile does not; copy the version again")
    return records


def is_file_name(name: str) -> bool:
    """Returns whether a manifest can name a file so."""
    return _NAME.fullmatch(name) is not None and name != MANIFEST_FILE


def _sound(name: str, record: FileRecord) -> bool:
    hashed = isinstance(record.sha256, str) and re.fullmatch(r"[0-9a-f]{64}", record.sha256) is not None
    return is_file_name(name) and hashed and type(record.bytes) is int and record.bytes >= 0


def _belongs(name: str) -> bool:
    return name != MANIFEST_FILE and name not in ADDED_LATER and not name.startswith(".")


def _settled(path: Path) -> FileRecord:
    """Returns the record of a file that has reached the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return file_record(path)
