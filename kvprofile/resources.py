"""Where the bundled recipes and data sets lie: inside an installed wheel, or beside the package in a checkout."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvprofile.errors import KvprofileError


def resource(name: str) -> Path:
    """Returns the bundled folder `recipes` or `datasets`.

    Raises:
        KvprofileError: If the installation lacks it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "_bundled" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise KvprofileError(f"this installation lacks its bundled {name}: pip install --force-reinstall kvprofile")


def expanded(path: str | Path) -> Path:
    """Returns the path with `~` as the home folder; one of a user that does not exist stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def find(path: str, folders: Iterable[Path]) -> Path | None:
    """Returns the first existing file or folder `path` seen from `folders`, None if there is none."""
    wanted = expanded(path)
    return next((folder / wanted for folder in folders if (folder / wanted).exists()), None)
