"""What a store holds, version by version. Needs pyarrow only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from kvprofile.errors import BadInput
from kvprofile.store.reader import load, pairs, versions


class Entry(NamedTuple):
    """One version of one pair.

    Attributes:
        path: Its folder.
        pair: Name of the pair's folder.
        version: Number of the version.
        sender: Name of the sender, None if the profile cannot be read.
        receiver: Name of the receiver, None if the profile cannot be read.
        created_at: When it was published, in UTC, None if the profile cannot be read.
        tasks: Its tasks and data, such as `qa/hotpotqa`.
        bytes: Size of its files.
        problem: Why it cannot be read, None if it can.
    """

    path: Path
    pair: str
    version: int
    sender: str | None
    receiver: str | None
    created_at: str | None
    tasks: tuple[str, ...]
    bytes: int
    problem: str | None


def ls(out: Path) -> list[Entry]:
    """Returns every version in the store, pairs by name and versions oldest first; nothing for a store not yet made."""
    if out.is_file():
        raise BadInput(f"{out} is a file, not a store; give the folder that --out of a sweep named")
    return [_entry(pair, number, folder) for pair in pairs(out) for number, folder in versions(pair)]


def _entry(pair: Path, number: int, folder: Path) -> Entry:
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    try:
        profile = load(folder)
    except (BadInput, OSError) as error:
        return Entry(folder, pair.name, number, None, None, None, (), size, str(error))
    header = profile.header
    sources: Any = zip(profile.rows["task"].to_pylist(), profile.rows["dataset"].to_pylist(), strict=True)
    tasks = tuple(dict.fromkeys(f"{task}/{dataset}" for task, dataset in sources))
    names = header["sender"]["name"], header["receiver"]["name"]
    return Entry(folder, pair.name, number, *names, header["created_at"], tasks, size, None)
