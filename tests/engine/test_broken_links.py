"""Whatever goes wrong with a link ends in the receiver's own full prefill, soon, with the reason and nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from kvprofile.engine.consumer import Served, consume, ship
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.frames import MOST_HEADER_BYTES
from kvprofile.engine.reference import Capture, capture, greedy, partial_prefill
from kvprofile.engine.transport import FolderSink, FolderSource, SocketSink
from kvprofile.layers import LayerRange
from tests.engine.architectures import tiny_decoder
from tests.engine.links import (
    CONTEXT,
    PREAMBLE,
    QUESTION,
    SENDER,
    Sending,
    changed_header,
    flipped,
    frames,
    sending,
    with_body,
    with_header_text,
    with_lengths,
    with_version,
)

GROUP = LayerRange(1, 3)
HASH_OF_NOTHING = "0" * 64


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name == "kvprofile-loader"]


@cache
def receiver() -> Decoder:
    return tiny_decoder(seed=2)


@cache
def theirs() -> Capture:
    return capture(tiny_decoder(seed=1), CONTEXT)


@cache
def own_answer() -> tuple[int, ...]:
    own = greedy(receiver(), capture(receiver(), CONTEXT).kv, *QUESTION)
    assert own != greedy(receiver(), partial_prefill(receiver(), theirs(), GROUP), *QUESTION)
    return own


def fell_back(served: Served, remarks: list[str]) -> str:
    assert served.fallback is not None
    assert served.token_ids == own_answer()
    assert remarks == [f"the sender's cache is not used, the receiver prefills the context itself: {served.fallback}"]
    return served.fallback


def fallback_of(link: Sending, timeout_ms: float = 20_000) -> str:
    remarks: list[str] = []
    begun = time.monotonic()
    with link:
        served = consume(
            receiver(), CONTEXT, QUESTION, GROUP, SENDER, link.source, timeout_ms=timeout_ms, say=remarks.append
        )
    assert time.monotonic() - begun < 10, "it hung"
    return fell_back(served, remarks)


def _other_capture(**changes: object) -> Capture:
    other = tiny_decoder(seed=1)
    if "dtype" in changes:
        other = Decoder(other.model.to(changes["dtype"]))
    return capture(other, changes.get("context", CONTEXT))  # type: ignore[arg-type]


DAMAGED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "nothing": (lambda whole: [], "E of layer 1: the link ends 24 bytes early"),
    "half of the preamble": (lambda whole: [whole[0][:10]], "E of layer 1: the link ends 14 bytes early"),
    "half of the header": (lambda whole: [whole[0][: PREAMBLE + 9]], "E of layer 1: the link ends"),
    "half of E": (lambda whole: [whole[0][:-7]], "E of layer 1: the link ends 7 bytes early"),
    "half of K/V": (lambda whole: [whole[0], whole[1], whole[2][:-1000]], "layer 3: the link ends 1000 bytes early"),
    "no last layer": (lambda whole: whole[:2], "layer 3: the link ends 24 bytes early"),
    "a layer left out": (lambda whole: [whole[0], whole[2]], "layer 0: a frame of another layer came"),
    "no E": (lambda whole: whole[1:], "E of layer 1: a frame of another kind came"),
    "one bit of the first number": (lambda whole: [whole[0], flipped(whole[1], -1), whole[2]], "layer 0: hash differs"),
    "one bit of E": (lambda whole: [flipped(whole[0], -500), *whole[1:]], "E of layer 1: hash differs"),
    "another hash": (
        lambda whole: [*whole[:2], changed_header(whole[2], sha256=HASH_OF_NOTHING)],
        "layer 3: hash differs",
    ),
    "no hash": (lambda whole: [changed_header(whole[0], sha256=None), *whole[1:]], "E of layer 1: hash differs"),
    "garbage": (lambda whole: [bytes(range(256)) * 20], "E of layer 1: no frame begins here"),
    "garbage after E": (lambda whole: [whole[0], bytes(range(256)) * 20], "layer 0: no frame begins here"),
    "a newer wire": (
        lambda whole: [with_version(whole[0], 2), *whole[1:]],
        "E of layer 1: wire version 2 is newer than 1, which this kvprofile reads",
    ),
    "an older wire": (
        lambda whole: [with_version(whole[0], 0)],
        "E of layer 1: wire version 0 is older than 1, which this kvprofile reads",
    ),
    "a huge header": (
        lambda whole: [with_lengths(whole[0], 2**32 - 1, None)],
        f"E of layer 1: a header of 4294967295 bytes; the most is {MOST_HEADER_BYTES}",
    ),
    "a huge body": (
        lambda whole: [with_lengths(whole[0], None, 2**63)],
        f"E of layer 1: a body of {2**63} bytes for tensors of {23 * 32 * 4}",
    ),
    "a small body": (
        lambda whole: [with_lengths(whole[0], None, 100)],
        "E of layer 1: a body of 100 bytes for tensors of",
    ),
    "a header that is a list": (
        lambda whole: [with_header_text(whole[0], b"[]")],
        "E of layer 1: a header that is no JSON object",
    ),
    "a header that is not UTF-8": (
        lambda whole: [with_header_text(whole[0], b"\xff\xfe{}")],
        "E of layer 1: a header that is no JSON object",
    ),
    "a deep header": (
        lambda whole: [with_header_text(whole[0], b"[" * MOST_HEADER_BYTES)],
        "E of layer 1: a header that is no JSON object",
    ),
    "an empty header": (lambda whole: [with_header_text(whole[0], b"{}")], "E of layer 1: a frame of another kind"),
    "a safetensors header without end": (
        lambda whole: [with_body(whole[0], lambda body: b"\xff" * 8 + body[8:])],
        "E of layer 1: a safetensors header that is too long",
    ),
    "no safetensors": (
        lambda whole: [with_body(whole[0], lambda body: body[:8] + b"x" + body[9:])],
        "E of layer 1: a header that is no JSON object",
    ),
    "tensors of other names": (
        lambda whole: [with_body(whole[0], lambda body: body.replace(b'"entering"', b'"centring"'))],
        "E of layer 1: a body that does not hold what its header says",
    ),
    "values where keys are": (
        lambda whole: [whole[0], with_body(whole[1], lambda body: body.replace(b"[1472,2944]", b"[0,1472]   "))],
        "layer 0: a body that does not hold what its header says",
    ),
    "another sender": (
        lambda whole: frames(theirs(), GROUP, sender="00" * 32),
        "E of layer 1: a frame of another sender came",
    ),
    "another context": (
        lambda whole: frames(_other_capture(context=CONTEXT[::-1]), GROUP),
        "E of layer 1: a frame of another context came",
    ),
    "another plan": (
        lambda whole: frames(theirs(), LayerRange(1, 2)),
        "E of layer 1: a frame of another plan came",
    ),
    "a longer context": (
        lambda whole: frames(_other_capture(context=(*CONTEXT, 5)), GROUP),
        "E of layer 1: a frame of another shape or dtype came",
    ),
    "another dtype": (
        lambda whole: frames(_other_capture(dtype=torch.bfloat16), GROUP),
        "E of layer 1: a frame of another shape or dtype came",
    ),
    "other heads": (
        lambda whole: frames(capture(tiny_decoder("gpt_neox"), CONTEXT), GROUP),
        "layer 0: a frame of another shape or dtype came",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_link_ends_in_a_full_prefill(damage: str) -> None:
    change, reason = DAMAGED[damage]
    assert fallback_of(sending(change(frames(theirs(), GROUP)))).startswith(reason)


@pytest.mark.parametrize("mode", ["load_all", "load_reused", "overlapped"])
def test_every_mode_falls_back(mode: str) -> None:
    whole, remarks = frames(theirs(), GROUP, mode), []
    with sending(whole[:-1]) as link:
        served = consume(receiver(), CONTEXT, QUESTION, GROUP, SENDER, link.source, mode, say=remarks.append)
    assert fell_back(served, remarks) == "layer 3: the link ends 24 bytes early"


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
