"""Links between a tiny sender and a receiver, whole and damaged, for tests."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache

import torch

from kvprofile.cost.timeline import Mode
from kvprofile.engine.consumer import Served, request_identity, ship
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question
from kvprofile.engine.frames import pack, parts
from kvprofile.engine.reference import Capture, capture, greedy, partial_prefill
from kvprofile.engine.transport import SocketSink, SocketSource, Throttle
from kvprofile.layers import LayerRange
from tests.engine.architectures import VOCABULARY, tiny_decoder

CONTEXT = tuple(torch.randint(3, VOCABULARY, (23,), generator=torch.Generator().manual_seed(2)).tolist())
QUESTION = Question((5, 9, 30, 41, 7), 6, Ending(frozenset({2})))
SENDER = "5e" * 32
GROUP = LayerRange(1, 3)
PREAMBLE = 24


class Sending:
    """A sender on a thread of its own, at the other end of `source`."""

    def __init__(self, send: Callable[[socket.socket], None]) -> None:
        theirs, self.ours = socket.socketpair()
        self.source = SocketSource(self.ours)
        self._thread = threading.Thread(target=self._run, args=(send, theirs))
        self._thread.start()

    def _run(self, send: Callable[[socket.socket], None], connection: socket.socket) -> None:
        with connection, suppress(OSError):  # a receiver that falls back hangs up
            send(connection)

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert self.ours.fileno() == -1, "the receiver left its socket open"


def shipping(theirs: Capture, group: LayerRange, mode: Mode, throttle: Throttle | None = None) -> Sending:
    return Sending(lambda connection: ship(theirs, group, SENDER, SocketSink(connection, throttle), mode))


def sending(data: Iterable[bytes], then: Callable[[], object] = lambda: None) -> Sending:
    """Sends bytes, does something else, and hangs up."""

    def send(connection: socket.socket) -> None:
        for piece in data:
            connection.sendall(piece)
        then()

    return Sending(send)


def frames(theirs: Capture, group: LayerRange, mode: Mode = "overlapped", sender: str = SENDER) -> list[bytes]:
    identity = request_identity(sender, theirs.token_ids, group)
    shipped = parts(identity.group, mode, theirs.kv, lambda layer: theirs.entering[layer])
    return [b"".join(pack(part, identity)) for part in shipped]


def changed_header(frame: bytes, **changes: object) -> bytes:
    """Returns a frame whose JSON header says something else."""
    length = int.from_bytes(frame[12:16], "little")
    header = json.loads(frame[PREAMBLE : PREAMBLE + length])
    text = json.dumps({**header, **changes}).encode()
    return frame[:12] + len(text).to_bytes(4, "little") + frame[16:PREAMBLE] + text + frame[PREAMBLE + length :]


def body_of(frame: bytes) -> bytes:
    return frame[PREAMBLE + int.from_bytes(frame[12:16], "little") :]


def flipped(frame: bytes, place: int) -> bytes:
    return frame[:place] + bytes([frame[place] ^ 1]) + frame[place:][1:]


def with_version(frame: bytes, version: int) -> bytes:
    return frame[:8] + version.to_bytes(4, "little") + frame[12:]


def with_lengths(frame: bytes, header: int | None, body: int | None) -> bytes:
    header_bytes = frame[12:16] if header is None else header.to_bytes(4, "little")
    body_bytes = frame[16:24] if body is None else body.to_bytes(8, "little")
    return frame[:12] + header_bytes + body_bytes + frame[24:]


def with_body(frame: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Changes the body and lets the header say its hash, as a sender that lies would."""
    body = change(body_of(frame))
    head = changed_header(frame, sha256=hashlib.sha256(body).hexdigest())
    head = head[: len(head) - len(body_of(head))]
    return with_lengths(head, None, len(body)) + body


def with_header_text(frame: bytes, text: bytes) -> bytes:
    return with_lengths(frame[:PREAMBLE], len(text), None) + text + body_of(frame)


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
