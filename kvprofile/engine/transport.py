"""How frames get from a sender to a receiver: through a socket, or through a folder with one file a frame.

Both honour a deadline and can be stopped from another thread, so that nobody waits for a sender that has gone. A throttle makes
any of them a link of a given bandwidth.
"""

from __future__ import annotations

import io
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvprofile.cost.timeline import Link

CHUNK_BYTES = 64 * 1024
"""What a sink hands over at once."""

CATCH_UP_MS = 20.0
"""How far a throttled sink may be behind its bandwidth and still make up for it: a late wake-up is not the link's."""

SINK_TIMEOUT_S = 60.0
"""How long a socket's sender waits for a receiver to take one chunk."""

_POLL_S = 0.001


class LinkFailed(Exception):
    """What was asked for did not come over the link, or is not what was asked for; the message is the reason."""


class Sink(Protocol):
    """Where a sender puts frames."""

    def send(self, number: int, pieces: Sequence[bytes]) -> None:
        """Sends frame `number`, whose bytes are the pieces one after the other.

        Raises:
            OSError: If the receiver has gone or the folder cannot be written.
        """

    def close(self) -> None: ...


class Source(Protocol):
    """Where a receiver gets frames from. Deadlines are times of `time.monotonic`."""

    def begin(self, number: int, deadline: float) -> None:
        """Waits for frame `number`. Raises LinkFailed if it does not come in time."""

    def receive(self, into: memoryview, deadline: float) -> int:
        """Reads at least one byte of the frame into `into`, more if they are there; returns how many, 0 at the end.

        Raises:
            LinkFailed: If nothing comes in time, or the link breaks.
        """

    def stop(self) -> None:
        """Makes a waiting `begin` or `receive` fail soon; any thread may call it."""

    def close(self) -> None:
        """Gives everything back; no other call may be under way."""


class Throttle:
    """A token bucket: says when bytes have passed a link, by sleeping until then.

    Args:
        link: Bandwidth, and latency before the first byte.
        now: A clock, in seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        link: Link,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._link, self._now, self._sleep = link, now, sleep
        self._passed: float | None = None

    def wait(self, count: int) -> None:
        """Returns once `count` more bytes have passed."""
        now = self._now()
        if self._passed is None:
            self._passed = now + self._link.latency_ms / 1000
        self._passed = max(self._passed, now - CATCH_UP_MS / 1000) + count / self._link.bytes_per_ms / 1000
        if self._passed > now:
            self._sleep(self._passed - now)


class SocketSink:
    """Sends frames one after the other over a connected stream socket, which it owns from now on."""

    def __init__(self, connection: socket.socket, throttle: Throttle | None = None) -> None:
        self._connection, self._throttle = connection, throttle
        connection.settimeout(SINK_TIMEOUT_S)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            # A frame's last bytes would wait for the acknowledgement of those before.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, number: int, pieces: Sequence[bytes]) -> None:
        for chunk in _paced(pieces, self._throttle):
            self._connection.sendall(
                chunk
            )  # the timeout is for the whole of a call, so that one for a frame would cut slow links

    def close(self) -> None:
        self._connection.close()


class SocketSource:
    """Reads frames from a connected stream socket, which it owns from now on."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def begin(self, number: int, deadline: float) -> None:
        """Does nothing: frames follow each other."""

    def receive(self, into: memoryview, deadline: float) -> int:
        left = deadline - time.monotonic()
        if left <= 0:  # bytes that are there already would be read in any time
            raise LinkFailed("the time is up")
        try:
            self._connection.settimeout(left)
            return self._connection.recv_into(into)
        except TimeoutError:
            raise LinkFailed("the time is up") from None
        except OSError as error:
            raise LinkFailed(f"the connection failed ({error.strerror or type(error).__name__})") from None

    def stop(self) -> None:
        with suppress(OSError):  # the other side may have closed it already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


class FolderSink:
    """Writes each frame to a file of its own, first under a temporary name, so that a reader never sees half a frame.

    Args:
        folder: Of one request; made if it is not there.
        throttle: None for as fast as the disk.
    """

    def __init__(self, folder: Path, throttle: Throttle | None = None) -> None:
        self._folder, self._throttle = folder, throttle
        folder.mkdir(parents=True, exist_ok=True)

    def send(self, number: int, pieces: Sequence[bytes]) -> None:
        whole = _frame_file(self._folder, number)
        temporary = whole.with_name(f".tmp-{os.getpid()}-{whole.name}")
        try:
            with temporary.open("wb", buffering=0) as file:
                for chunk in _paced(pieces, self._throttle):
                    _write(file.fileno(), chunk)
            temporary.replace(whole)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Does nothing: files are whole as soon as they have their names."""


class FolderSource:
    """Reads the frames that a `FolderSink` writes, as they appear; the files stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stopped = threading.Event()
        self._file: io.FileIO | None = None

    def begin(self, number: int, deadline: float) -> None:
        self.close()
        path = _frame_file(self._folder, number)
        # Neither a link out of the folder nor a pipe that would block is followed.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        while True:
            try:
                self._file = io.FileIO(os.open(path, flags))
                break
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise LinkFailed("the time is up") from None
                if self._stopped.wait(_POLL_S):
                    raise LinkFailed("stopped") from None
            except OSError as error:
                raise LinkFailed(f"{path.name} cannot be opened ({error.strerror})") from None
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise LinkFailed(f"{path.name} is no regular file")

    def receive(self, into: memoryview, deadline: float) -> int:
        if self._file is None or self._stopped.is_set():
            raise LinkFailed("stopped")
        if time.monotonic() >= deadline:
            raise LinkFailed("the time is up")
        try:
            return self._file.readinto(into) or 0
        except OSError as error:
            raise LinkFailed(f"the file cannot be read ({error.strerror})") from None

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _frame_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.kvframe"


def _paced(pieces: Sequence[bytes], throttle: Throttle | None) -> Iterator[memoryview]:
    """Yields the bytes in order and in chunks, each one when its last byte has passed the link."""
    for piece in pieces:
        view = memoryview(piece)
        for begins in range(0, len(view), CHUNK_BYTES):
            chunk = view[begins : begins + CHUNK_BYTES]
            if throttle:
                throttle.wait(len(chunk))
            yield chunk


def _write(file: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(file, chunk) :]
