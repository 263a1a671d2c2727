"""No test leaves a loading thread behind; devices for tests that need two."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.engine import pretend_devices


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name == "kvprofile-loader"]


@pytest.fixture(name="pretended")
def _pretended(monkeypatch: pytest.MonkeyPatch) -> pretend_devices.PretendedDevices:
    """Pretended devices, not entered yet."""
    if not pretend_devices.registered():
        pytest.skip("this version of torch cannot register a device in Python")
    monkeypatch.setattr(torch, "tensor", pretend_devices.tensor)
    return pretend_devices.PretendedDevices()
