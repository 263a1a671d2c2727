"""A real S3 server process for tests, and the settings that lead fsspec to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@contextmanager
def s3_server(log: Path) -> Iterator[dict[str, str]]:
    """Starts a server and yields the environment in which `s3://` means it."""
    port = free_port()
    with log.open("wb") as told:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=told,
            stderr=told,
            env={**os.environ, "AWS_EC2_METADATA_DISABLED": "true"},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while not _answers(url):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        settings = {"endpoint_url": url, "key": "test", "secret": "test"}
        yield {"FSSPEC_S3": json.dumps(settings)}
    finally:
        server.terminate()
        server.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/moto-api/", timeout=1):
            return True
    except OSError:
        return False
