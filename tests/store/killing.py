"""A small process that forks publishers and pruners, kills them half-way, and looks at what a reader sees. No torch.

Run as `python -m tests.store.killing FOLDER SEED KILLS`; FOLDER holds the version `sound`, which is published again and again.
A child counts its own calls of functions written in C, as system calls are, and kills itself at a random one; some are killed
from outside at a random moment. The parent itself reads no table: Arrow's threads would not survive a fork.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvprofile.store.manifest import file_record, read_manifest
from kvprofile.store.reader import load, resolve, versions
from kvprofile.store.retention import prune
from kvprofile.store.writer import publish

KEEP = 3


def publish_copy(pair: Path, sound: Path) -> None:
    def build(folder: Path, number: int) -> None:
        for path in sound.iterdir():
            shutil.copyfile(path, folder / path.name)
        (folder / "number.json").write_text(str(number))

    publish(pair, build)


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(child: int) -> int:
    """Returns 0, or what ended a child: its exit code, or less the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def counted(work: Callable[[], None], limit: int | None, told: Path) -> Callable[[], None]:
    """Returns work that kills its process at a call, or without a limit tells how many calls it takes."""

    def run() -> None:
        calls = 0

        def on_event(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            if event in ("c_call", "c_return"):
                calls += 1
                if calls == limit:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(on_event)
        work()
        sys.setprofile(None)
        if limit is None:
            told.write_text(str(calls))

    return run


def whole(folder: Path, number: int) -> bool:
    """Returns whether a version holds all that its manifest names, and is the one of its number."""
    manifest = read_manifest(folder)
    same = manifest is not None and all(file_record(folder / name) == record for name, record in manifest.items())
    return same and json.loads((folder / "number.json").read_text()) == number


def read_until(stop: Path, pair: Path, pruned: bool) -> None:
    """Reads as servers do: whatever is seen must be whole, and numbers only grow."""
    seen: set[int] = set()
    reads, parent = 0, os.getppid()
    while not stop.exists() and os.getppid() == parent:
        found = dict(versions(pair))
        assert max(found) >= max(seen, default=0)
        assert pruned or seen <= set(found), f"{seen - set(found)} were lost"
        seen |= set(found)
        newest = resolve(pair)
        assert load(newest).header["profile_id"]
        for number, folder in found.items():
            try:
                sound = whole(folder, number)
            except FileNotFoundError:
                sound = False
            # Removed meanwhile, it is gone as a whole; what is still there is whole.
            assert sound or (pruned and not folder.exists()), f"{folder} is not whole"
        reads += 1
    assert reads > 5


def kill_many(
    work: Callable[[], None], kills: int, chance: random.Random, told: Path, check: Callable[[bool], None]
) -> int:
    """Kills the work so many times, half-way in all but name; returns how many were met by the signal."""
    child = forked(counted(work, None, told))
    assert ended(child) == 0
    check(True)
    calls = int(told.read_text())
    met = 0
    for number in range(kills):
        began = time.monotonic()
        inside = number % 5 != 0
        child = forked(counted(work, chance.randint(1, calls) if inside else None, told))
        if not inside:
            time.sleep(chance.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
        how = ended(child)
        assert how in (0, -signal.SIGKILL), f"it ended with {how} after {time.monotonic() - began:.2f} s"
        met += how != 0
        check(False)
        if number % 10 == 9:
            assert ended(forked(work)) == 0
            check(True)
    return met


def publishers(store: Path, sound: Path, chance: random.Random, kills: int) -> int:
    pair, stop = store / "pair", store / "stop"
    publish_copy(pair, sound)
    before = [1]
    reader = forked(lambda: read_until(stop, pair, pruned=False))

    def check(finished: bool) -> None:
        nonlocal before
        now = [number for number, _ in versions(pair)]
        assert now in (before, [*before, before[-1] + 1]), f"{now} after {before}"
        assert not finished or len(now) > len(before)
        assert all(whole(folder, number) for number, folder in versions(pair)[-3:])
        assert not finished or not list(pair.glob(".tmp-*")), "the next publisher left what a killed one had"
        before = now

    try:
        return kill_many(lambda: publish_copy(pair, sound), kills, chance, store / "told", check)
    finally:
        stop.touch()
        assert ended(reader) == 0


def pruners(store: Path, sound: Path, chance: random.Random, kills: int) -> int:
    pair, stop = store / "pair", store / "stop"

    def refill() -> None:
        for _ in range(3):
            publish_copy(pair, sound)

    for _ in range(2):
        refill()
    reader = forked(lambda: read_until(stop, pair, pruned=True))

    def check(finished: bool) -> None:
        now = versions(pair)
        assert len(now) >= KEEP
        assert all(whole(folder, number) for number, folder in now)
        assert not finished or len(now) == KEEP
        assert not finished or not list(pair.glob(".tmp-*"))
        newest = now[-1][0]
        refill()
        assert [number for number, _ in versions(pair)[-3:]] == [newest + 1, newest + 2, newest + 3]

    try:
        return kill_many(lambda: _prune(store), kills, chance, store / "told", check)
    finally:
        stop.touch()
        assert ended(reader) == 0


def _prune(store: Path) -> None:
    prune(store, KEEP, really=True)


def main() -> None:
    folder, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    met = 0
    for name, kill, share in (("publish", publishers, 0.7), ("prune", pruners, 0.3)):
        (folder / name).mkdir()
        met += kill(folder / name, folder / "sound", chance, round(kills * share))
    print(json.dumps({"kills": kills, "met": met}))


if __name__ == "__main__":
    main()
