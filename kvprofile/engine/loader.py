"""Reads a request's frames on a thread of its own and hands them to the thread that computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch

from kvprofile.cost.timeline import Carried
from kvprofile.engine.frames import Part, RequestIdentity, unpack
from kvprofile.engine.transport import LinkFailed, Source


class Event(NamedTuple):
    """Something that happened while a request was served.

    Attributes:
        what: `e`, `kv`: a frame has come whole. `recompute`, `read`: a layer begins to run the context, the suffix (on a GPU:
            its kernels are queued).
        at_ms: Since the request began.
    """

    what: Literal["e", "kv", "recompute", "read"]
    layer: int
    at_ms: float


class Loader:
    """Reads frames on a thread of its own, checks them and moves them to the receiver's device.

    On a GPU, frames are read into pinned memory and copied on a stream of their own, so that copies overlap with kernels.
    """

    def __init__(
        self,
        source: Source,
        expected: Sequence[Part],
        identity: RequestIdentity,
        device: torch.device,
        begun: float,
        timeout_ms: float,
    ) -> None:
        self._source, self._expected, self._identity, self._device = source, expected, identity, device
        self._begun, self._deadline = begun, begun + timeout_ms / 1000
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._arrived: dict[tuple[Carried, int], tuple[dict[str, torch.Tensor], torch.cuda.Event | None]] = {}
        self._left = len(expected)
        self._failure: str | None = None
        self._changed = threading.Condition()
        self.events: list[Event] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets the thread run; at the end it has ended."""
        thread = threading.Thread(target=self._run, name="kvprofile-loader", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._source.stop()
            thread.join()

    def note(self, what: Literal["e", "kv", "recompute", "read"], layer: int) -> None:
        with self._changed:  # so that events lie in the order of their times
            self.events.append(Event(what, layer, 1000 * (time.monotonic() - self._begun)))

    def check(self) -> None:
        """Raises LinkFailed if the link has failed meanwhile."""
        if self._failure is not None:
            raise LinkFailed(self._failure)

    def wait_for_all(self) -> None:
        """Returns once all frames are there. Raises LinkFailed if they do not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._left)
        self.check()

    def take(self, kind: Carried, layer: int) -> dict[str, torch.Tensor]:
        """Returns the tensors of one frame once they are there. Raises LinkFailed if any frame failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or (kind, layer) in self._arrived)
            self.check()
            tensors, copied = self._arrived.pop((kind, layer))
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in tensors.values():
                tensor.record_stream(current)  # its memory is the copying stream's
        return tensors

    def _run(self) -> None:
        part = None
        try:
            for number, part in enumerate(self._expected):
                self._source.begin(number, self._deadline)
                arrived = self._moved(
                    unpack(lambda into: self._source.receive(into, self._deadline), part, self._identity, self._buffer)
                )
                with self._changed:
                    self.note(part.kind, part.layer)
                    self._arrived[part.kind, part.layer] = arrived
                    self._left -= 1
                    self._changed.notify_all()
        except Exception as error:
            # Also what is no LinkFailed: the other thread waits, and a full prefill is right whatever went wrong here.
            what = str(error) if isinstance(error, LinkFailed) else f"{type(error).__name__}: {error}"
            with self._changed:
                self._failure = f"{part}: {what}"
                self._changed.notify_all()

    def _buffer(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _moved(self, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
        if self._stream is None:
            return {name: tensor.to(self._device) for name, tensor in tensors.items()}, None
        with torch.cuda.stream(self._stream):
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return moved, copied
