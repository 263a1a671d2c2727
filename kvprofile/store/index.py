"""What a store holds, version by version. Needs pyarrow only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from kvprofile.errors import BadInput
from kvprofile.store.manifest import PINNED_FILE
from kvprofile.store.reader import (
    PROFILE_FILE,
    VALIDATIONS_FOLDER,
    Profile,
    acceptance,
    format_version,
    is_url,
    load,
    pairs,
    rejection,
    versions,
)


class Entry(NamedTuple):
    """One version of one pair; what the profile says is None if it cannot be read.

    Attributes:
        path: Its folder, or its URL.
        pair: Name of the pair's folder.
        version: Number of the version.
        bytes: Size of its files, with those that came later, such as validations.
        problem: Why it cannot be read, None if it can.
        rejected: Why it was rejected, None if it was not.
        pinned: Whether `kvprofile store prune` must keep it.
        validations: How many times it was validated.
        sender: Name of the sender.
        receiver: Name of the receiver.
        sender_weights: Hash of the sender's weights.
        receiver_weights: Hash of the receiver's weights.
        created_at: When it was published, in UTC.
        tasks: Its tasks and data, such as `qa/hotpotqa`.
        plans: How many plans it has.
        samples: On how many samples they were to be measured, over all data.
        search: `exhaustive` or `adaptive`.
        format: The format that its file is written in.
        profile_id: Its identity.
        header_version: The number in its header.
        previous: The identity of the profile that it was made to replace, None if of none.
        recipe_sha256: Hash of its recipe, as its header has it.
        accepted: Why it was rejected before somebody accepted it, None if that did not happen.
    """

    path: Path | str
    pair: str
    version: int
    bytes: int
    problem: str | None
    rejected: str | None
    pinned: bool
    validations: int
    sender: str | None = None
    receiver: str | None = None
    sender_weights: str | None = None
    receiver_weights: str | None = None
    created_at: str | None = None
    tasks: tuple[str, ...] = ()
    plans: int | None = None
    samples: int | None = None
    search: str | None = None
    format: int | None = None
    profile_id: str | None = None
    header_version: int | None = None
    previous: str | None = None
    recipe_sha256: str | None = None
    accepted: str | None = None


def ls(out: Path | str) -> list[Entry]:
    """Returns every version in the store, pairs by name and versions oldest first; nothing for a store not yet made.

    The folder of one pair is taken as a store that holds no other.

    Raises:
        BadInput: If `out` is a file or a version.
    """
    if is_url(out):
        from kvprofile.store.remote import ls as remote_ls  # here, so that a folder costs no fsspec

        return remote_ls(str(out))
    out = Path(out)
    if out.is_file():
        raise BadInput(f"{out} is a file, not a store; give the folder that --out of a sweep named")
    require_no_version(out)
    return [entry for pair in ([out] if versions(out) else pairs(out)) for entry in pair_entries(pair)]


def require_no_version(store: Path) -> None:
    """Refuses the folder of one version where a store or a pair is asked for.

    Raises:
        BadInput: If it is one.
    """
    if (store / PROFILE_FILE).is_file():
        raise BadInput(f"{store} is one version; give its pair {store.parent} or the store")


def is_version(path: Path) -> bool:
    """Returns whether a folder is named as a version is."""
    return re.fullmatch(r"v\d{4,}", path.name) is not None


def belongs_to_pair(path: Path) -> bool:
    """Returns whether a file or folder is of those that publishing and measuring leave in the folder of a pair."""
    return is_version(path) or re.fullmatch(r"run-[0-9a-f]+|\.lock|\.tmp-.*", path.name) is not None


def pair_folders(store: Path) -> list[Path]:
    """Returns the folders of a store that hold a version, or work on one; not those of other stores inside it."""
    folders = (path for path in sorted(store.iterdir()) if path.is_dir())
    return [folder for folder in folders if any(belongs_to_pair(path) for path in folder.iterdir())]


def pair_entries(pair: Path) -> list[Entry]:
    """Returns the versions of one pair folder, oldest first."""
    return [entry_of(number, folder) for number, folder in versions(pair)]


def entry_of(number: int, folder: Path) -> Entry:
    """Returns one version."""
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    validations = len(list((folder / VALIDATIONS_FOLDER).glob("[!.]*.parquet")))
    pinned = (folder / PINNED_FILE).is_file()
    entry = Entry(folder, folder.parent.name, number, size, None, rejection(folder), pinned, validations)
    entry = entry._replace(accepted=acceptance(folder))
    try:
        return described(entry, load(folder))
    except (BadInput, OSError) as error:
        return entry._replace(problem=str(error))


def described(entry: Entry, profile: Profile) -> Entry:
    """Returns an entry with what its profile says."""
    header, rows = profile.header, profile.rows
    columns = (rows[name].to_pylist() for name in ("task", "dataset", "n_planned"))
    sources: dict[str, int] = {f"{task}/{dataset}": n for task, dataset, n in zip(*columns, strict=True)}
    names = ("strategy", "start_layer", "stop_layer", "params")
    previous: Any = header.get("previous")
    recipe: Any = header["recipe_sha256"]
    return entry._replace(
        sender=header["sender"]["name"],
        receiver=header["receiver"]["name"],
        sender_weights=header["sender"]["weights_sha256"],
        receiver_weights=header["receiver"]["weights_sha256"],
        created_at=header["created_at"],
        tasks=tuple(sources),
        plans=len(set(zip(*(rows[name].to_pylist() for name in names), strict=True))),
        samples=sum(sources.values()),
        search=header["search"],
        format=format_version(profile.folder),
        profile_id=header["profile_id"],
        header_version=header["version"],
        previous=previous if isinstance(previous, str) else None,
        recipe_sha256=recipe if isinstance(recipe, str) else None,
    )
