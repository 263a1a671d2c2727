"""Writes tables and publishes profile versions so that a reader never meets a half-written one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from kvprofile.errors import Interrupted
from kvprofile.store.manifest import write_manifest
from kvprofile.store.migrations import migrate
from kvprofile.store.reader import versions
from kvprofile.store.schema import FOOTER_KEY, missing_header_keys
from kvprofile.store.temporary import TEMPORARY, removed, temporary_beside

LOCK = "lock"
"""Of a folder of work in progress."""
PAIR_LOCK = ".lock"
_LONGEST_NAME = 96


def pair_folder(out: Path, sender_name: str, receiver_name: str) -> Path:
    """Returns the folder of a pair in the store `out`: `<receiver>__from__<sender>`, safe on any file system."""
    return out / f"{safe_name(receiver_name)}__from__{safe_name(sender_name)}"


def safe_name(name: str) -> str:
    """Returns the name as a file may be called on any file system; two names never become one."""
    safe = re.sub(r"[^A-Za-z0-9._+@-]", "_", name.replace("/", "--")).strip(".")
    if safe == name.replace("/", "--") and 0 < len(safe) <= _LONGEST_NAME:
        return safe
    # Two names that differ only in what was replaced or cut must not share a folder.
    return f"{safe[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".lstrip("-")


@contextmanager
def alone(work: Path) -> Iterator[None]:
    """Makes a folder and keeps other processes from the same work while the block runs.

    Raises:
        Interrupted: If another process is at it.
    """
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(work / LOCK, timeout=0):
            yield
    except Timeout:
        raise Interrupted(
            f"another process does this very work in {work}; wait for it, or give another place"
        ) from None


def write_table(table: pa.Table, path: Path, footer: dict[str, Any] | None = None) -> None:
    """Writes a table as Parquet under a temporary name and renames it; `footer` goes to the key `kvprofile`.

    Raises:
        ValueError: If the footer lacks a key that its format requires; nothing is written then.
    """
    if footer is not None:
        if missing := missing_header_keys(migrate(footer) if "format_version" in footer else footer):
            raise ValueError(f"the profile's footer lacks {', '.join(missing)}")
        encoded = json.dumps(footer, ensure_ascii=False, sort_keys=True, allow_nan=False)
        table = table.replace_schema_metadata({FOOTER_KEY: encoded})
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def publish(pair: Path, build: Callable[[Path, int], None]) -> Path:
    """Returns the folder of a new version of the pair, complete or not there at all.

    `build` gets an empty temporary folder and the version's number and writes all files; their hashes are written last, as
    `manifest.json`. Publishers of one pair take turns, so two sweeps at once get two numbers; what a killed one left behind
    is removed by the next.
    """
    pair.mkdir(parents=True, exist_ok=True)
    with FileLock(pair / PAIR_LOCK):
        for leftover in pair.glob(f"{TEMPORARY}*"):
            removed(leftover)
        number = max((n for n, _ in versions(pair)), default=0) + 1
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=pair))
        try:
            build(temporary, number)
            write_manifest(temporary)
            sync_folder(temporary)
            temporary.chmod(0o777 & ~_umask())  # mkdtemp's 0700 would keep the user's group from the profile
            target = pair / f"v{number:04d}"
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(pair)
    return target


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder have reached the disk."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
