"""Whether a store is sound: every version by itself, how they lie together, and what belongs to none. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvprofile.errors import BadInput
from kvprofile.resources import expanded
from kvprofile.store.index import (
    Entry,
    belongs_to_pair,
    entry_of,
    is_version,
    pair_entries,
    pair_folders,
    require_no_version,
)
from kvprofile.store.reader import PROFILE_FILE, is_url, resolve, versions
from kvprofile.store.soundness import Finding, check_version
from kvprofile.store.temporary import TEMPORARY
from kvprofile.store.writer import LOCK, pair_folder

_CHAIN = re.compile(r".+-[0-9a-f]{16}\.parquet|\.run-[0-9a-f]{16}|\.tmp-.+")


class Verdict(NamedTuple):
    """What a check found.

    Attributes:
        checked: How many versions were read.
        findings: What their owner should know, faults and remarks.
    """

    checked: int
    findings: list[Finding]

    @property
    def sound(self) -> bool:
        return all(one.severity != "fault" for one in self.findings)


def verify(store: str | Path) -> Verdict:
    """Checks every version of a store or of one pair, and what lies around them; a folder or a URL.

    Raises:
        BadInput: If there is no such store, or it is one version.
    """
    if is_url(store):
        from kvprofile.store.transfer import verify_remote  # here, so that a folder costs no fsspec

        return verify_remote(str(store))
    store = Path(store)
    if not store.is_dir():
        raise BadInput(f"there is no store at {store}; give the folder that --out of a sweep named")
    require_no_version(store)
    if own := versions(store):
        return Verdict(len(own), list(verify_pair(store)))
    checked, findings = 0, list[Finding]()
    found = pair_folders(store)
    for folder in sorted(store.iterdir()):
        if folder in found:
            checked += len(versions(folder))
            findings += verify_pair(folder)
        elif next(folder.glob("*/v*/profile.parquet"), None) is not None:
            mend = f"kvprofile store verify --out {folder}"
            findings.append(Finding("remark", str(folder), "it is a store of its own, and was not checked", mend))
        elif not (folder.name.startswith(".") or _holds_chains(folder)):
            findings.append(Finding("remark", str(folder), "it belongs to nothing", "remove it if it is not yours"))
    return Verdict(checked, findings)


def _holds_chains(folder: Path) -> bool:
    """Returns whether all that lies in a folder is of measured chains, or of chains at work, as `kvprofile chain` keeps them."""
    held = [path for chain in folder.glob("*") for path in (chain.iterdir() if chain.is_dir() else [chain])]
    return bool(held) and all(_CHAIN.fullmatch(path.name) for path in held)


def verify_named(path: str) -> Verdict:
    """Checks a store, a pair with what lies in its folder, or one version, whichever `path` names.

    Raises:
        BadInput: If there is none.
    """
    if is_url(path):
        from kvprofile.store.transfer import verify_remote

        return verify_remote(path)
    place = expanded(path)
    one = is_version(place) or (place / PROFILE_FILE).is_file()
    if place.is_dir() and not one and (versions(place) or pair_folders(place)):
        return verify(place)
    folder = resolve(path)
    entries = [entry_of(number, one) for number, one in versions(folder.parent) if one == folder]
    return Verdict(1, [*check_version(folder), *(found for entry in entries for found in _placed(entry))])


def verify_pair(pair: Path) -> Iterator[Finding]:
    """Yields what is wrong with the versions of a pair folder, and what else lies in it."""
    entries = pair_entries(pair)
    for entry in entries:
        yield from check_version(Path(entry.path))
        yield from _placed(entry)
    yield from _of_one_pair(pair, entries)
    for path in sorted(pair.iterdir()):
        if path.name.startswith(TEMPORARY):
            what = f"a publisher left it, or is at work ({_size(path)} bytes)"
            yield Finding(
                "remark", str(path), what, "kvprofile store prune --yes removes it if no publisher is at work"
            )
        elif re.fullmatch(r"run-[0-9a-f]+", path.name) and path.is_dir():
            yield from _unfinished(path)
        elif not belongs_to_pair(path):
            yield Finding("remark", str(path), "it belongs to nothing", "remove it if it is not yours")


def _placed(entry: Entry) -> Iterator[Finding]:
    """Yields where a version does not lie where its header says."""
    folder = Path(entry.path)
    if entry.sender is None or entry.receiver is None:
        return
    if entry.header_version != entry.version:
        what = f"its folder says version {entry.version}, its header {entry.header_version}"
        yield Finding("fault", str(folder), what, "give the folder back its name, or sweep again")
    if (own := pair_folder(folder.parent.parent, entry.sender, entry.receiver).name) != entry.pair:
        what = f"it is of the pair {own}, and lies in {entry.pair}"
        yield Finding("fault", str(folder), what, f"move it to {folder.parent.parent / own}")


def _of_one_pair(pair: Path, entries: list[Entry]) -> Iterator[Finding]:
    names = {(e.sender, e.receiver) for e in entries if e.sender is not None}
    if len(names) > 1:
        listed = ", ".join(sorted(f"{receiver} from {sender}" for sender, receiver in names))
        what = f"its versions are of {len(names)} pairs ({listed})"
        yield Finding("fault", str(pair), what, "move the versions of each pair to a store of their own")
    held: dict[str, list[str]] = {}
    for entry in entries:
        if entry.profile_id is not None:
            held.setdefault(entry.profile_id, []).append(Path(entry.path).name)
    for same in held.values():
        if len(same) > 1:
            yield Finding("remark", str(pair), f"{', '.join(same)} are copies of one profile", "keep one of them")


def _unfinished(run: Path) -> Iterator[Finding]:
    if temporary := [path for path in run.iterdir() if path.name.startswith(TEMPORARY)]:
        what = f"{len(temporary)} files that a process left, or is writing"
        yield Finding("remark", str(run), what, "kvprofile store prune --yes removes them once they are old")
    parts = [path for path in run.glob("*.parquet") if not path.name.startswith(".")]
    if parts or [path for path in run.iterdir() if path.name not in (LOCK, *(one.name for one in temporary))]:
        what = f"unfinished run: {len(parts)} parts measured, {_size(run)} bytes"
        yield Finding("remark", str(run), what, "run the same sweep again to go on, or remove it")


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
