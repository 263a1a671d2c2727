"""Names of files that are being written. Needs the standard library only."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".tmp-"
"""How the names of files and folders begin that no reader looks at."""


def temporary_beside(path: Path) -> Path:
    """Returns a name in the folder of `path` that no other thread, process or machine takes; it is renamed to `path` when whole.

    It tells the process, so that `store prune` knows what nobody goes on to write.
    """
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:16]}-{path.name}")


def removed(path: Path) -> bool:
    """Removes a file or a folder with all that is in it; returns whether it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
    return not (path.exists() or path.is_symlink())


def writer_of(path: Path) -> int | None:
    """Returns the id of the process that gave a temporary file its name, None if the name does not tell."""
    match = re.match(rf"{re.escape(TEMPORARY)}(\d+)-", path.name)
    return int(match[1]) if match else None
