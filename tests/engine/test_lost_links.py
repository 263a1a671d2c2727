"""Links that fall silent, folders in which files are missing or strange, receivers that are interrupted: nothing hangs."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvprofile.engine.consumer import consume, ship
from kvprofile.engine.transport import (
    CHUNK_BYTES,
    SINK_TIMEOUT_S,
    FolderSink,
    FolderSource,
    LinkFailed,
    SocketSink,
    SocketSource,
)
from tests.engine.links import (
    CONTEXT,
    GROUP,
    QUESTION,
    SENDER,
    Sending,
    fell_back,
    frames,
    own_answer,
    receiver,
    sending,
    theirs,
)


class TestSlowLinks:
    @pytest.mark.parametrize(("arrive", "missing"), [(0, "E of layer 1"), (1, "layer 0"), (2, "layer 3")])
    def test_a_sender_that_falls_silent(self, arrive: int, missing: str) -> None:
        done = threading.Event()
        link = sending(frames(theirs(), GROUP)[:arrive], lambda: done.wait(10))
        remarks: list[str] = []
        try:
            served = consume(
                receiver(), CONTEXT, QUESTION, GROUP, SENDER, link.source, timeout_ms=300, say=remarks.append
            )
        finally:
            done.set()
        with link:
            assert fell_back(served, remarks) == f"{missing}: the time is up"
        assert served.first_token_ms >= 300

    def test_a_sender_that_drips(self) -> None:
        """Every byte comes in time, all of them do not."""
        hung_up = threading.Event()

        def drip() -> Iterator[bytes]:
            for byte in frames(theirs(), GROUP)[0]:
                if hung_up.wait(0.01):
                    return
                yield bytes([byte])

        link = sending(drip())
        remarks: list[str] = []
        served = consume(receiver(), CONTEXT, QUESTION, GROUP, SENDER, link.source, timeout_ms=300, say=remarks.append)
        hung_up.set()
        with link:
            assert fell_back(served, remarks) == "E of layer 1: the time is up"

    def test_a_folder_in_which_nothing_appears(self, tmp_path: Path) -> None:
        remarks: list[str] = []
        source = FolderSource(tmp_path / "absent")
        served = consume(receiver(), CONTEXT, QUESTION, GROUP, SENDER, source, timeout_ms=100, say=remarks.append)
        assert fell_back(served, remarks) == "E of layer 1: the time is up"

    def test_a_link_that_breaks_ends_the_recompute(self) -> None:
        """The receiver is in layer 1 when the link breaks; layer 2 does not run behind it."""
        in_layer = threading.Event()
        link = sending(frames(theirs(), GROUP)[:1], lambda: in_layer.wait(10))
        before = set(threading.enumerate())

        def wait_for_the_break(layer: int) -> None:
            if layer == 1 and not in_layer.is_set():
                in_layer.set()
                for thread in set(threading.enumerate()) - before:
                    thread.join(10)

        with receiver().before_layers(wait_for_the_break), link:
            served = consume(receiver(), CONTEXT, QUESTION, GROUP, SENDER, link.source)
        assert served.fallback == "layer 0: the link ends 24 bytes early"
        assert [(e.what, e.layer) for e in served.events] == [("e", 1)]


class TestFolders:
    def fallback(self, folder: Path, damage: Callable[[Path], None]) -> str:
        ship(theirs(), GROUP, SENDER, FolderSink(folder))
        damage(folder / "00001.kvframe")
        remarks: list[str] = []
        source = FolderSource(folder)
        served = consume(receiver(), CONTEXT, QUESTION, GROUP, SENDER, source, timeout_ms=300, say=remarks.append)
        return fell_back(served, remarks)

    def test_a_cut_file(self, tmp_path: Path) -> None:
        reason = self.fallback(tmp_path, lambda file: os.truncate(file, file.stat().st_size - 3))
        assert reason == "layer 0: the link ends 3 bytes early"

    def test_a_missing_file(self, tmp_path: Path) -> None:
        assert self.fallback(tmp_path, Path.unlink) == "layer 0: the time is up"

    def test_a_pipe_that_would_block(self, tmp_path: Path) -> None:
        def damage(file: Path) -> None:
            file.unlink()
            os.mkfifo(file)

        assert self.fallback(tmp_path, damage) == "layer 0: 00001.kvframe is no regular file"

    def test_a_link_out_of_the_folder(self, tmp_path: Path) -> None:
        def damage(file: Path) -> None:
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")

        assert self.fallback(tmp_path, damage).startswith("layer 0: 00001.kvframe cannot be opened (")

    def test_a_writer_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError):
            FolderSink(tmp_path).send(0, [b"half a frame", None])  # type: ignore[list-item]
        assert not list(tmp_path.iterdir())


def test_an_interrupted_receiver_hangs_up() -> None:
    def interrupt(layer: int) -> None:
        if layer == 2:
            raise KeyboardInterrupt

    gone = threading.Event()
    link = Sending(lambda connection: [connection.sendall(frames(theirs(), GROUP)[0]), gone.wait(10)])
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), receiver().before_layers(interrupt):
            consume(receiver(), CONTEXT, QUESTION, GROUP, SENDER, link.source)
        assert time.monotonic() - begun < 5, "it waited for the sender"
    finally:
        gone.set()
    with link:
        pass
    assert receiver().recompute(CONTEXT, GROUP, theirs().entering[1]), "the receiver is as it was"


def test_an_error_of_the_loading_thread_is_a_reason() -> None:
    class Broken:
        def begin(self, number: int, deadline: float) -> None:
            raise MemoryError("no room")

        def receive(self, into: memoryview, deadline: float) -> int:
            return 0

        def stop(self) -> None: ...

        def close(self) -> None: ...

    served = consume(receiver(), CONTEXT, QUESTION, GROUP, SENDER, Broken())
    assert (served.fallback, served.token_ids) == ("E of layer 1: MemoryError: no room", own_answer())


def test_a_sender_learns_that_its_receiver_has_gone() -> None:
    raised: list[OSError] = []

    def send(connection: object) -> None:
        try:
            for _ in range(1000):
                ship(theirs(), GROUP, SENDER, SocketSink(connection))  # type: ignore[arg-type]
        except OSError as error:
            raised.append(error)

    with Sending(send) as link:
        consume(receiver(), CONTEXT, QUESTION, GROUP, "00" * 32, link.source)
    assert raised


def test_what_comes_after_the_deadline_is_not_read() -> None:
    theirs_, ours = socket.socketpair()
    with theirs_, closing(SocketSource(ours)) as source:
        theirs_.sendall(b"in time")
        into = memoryview(bytearray(2))
        assert source.receive(into, time.monotonic() + 10) == 2
        with pytest.raises(LinkFailed, match="the time is up"):
            source.receive(into, time.monotonic() - 0.001)


def test_the_timeout_of_a_sender_is_for_a_chunk() -> None:
    """`sendall` counts the time of a whole call: one call for a frame would cut a slow link that works."""

    class Connection:
        family = socket.AF_UNIX

        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def settimeout(self, seconds: float) -> None:
            assert seconds == SINK_TIMEOUT_S

        def sendall(self, chunk: memoryview) -> None:
            self.sent.append(bytes(chunk))

    connection, frame = Connection(), os.urandom(3 * CHUNK_BYTES + 5)
    SocketSink(connection).send(0, [b"head", frame])  # type: ignore[arg-type]
    assert b"".join(connection.sent) == b"head" + frame
    assert max(map(len, connection.sent)) == CHUNK_BYTES
