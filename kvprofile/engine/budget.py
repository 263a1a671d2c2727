"""How much memory of its devices the engine may take."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch

from kvprofile.errors import BadInput

_SHARE = 0.8
"""Of what is there: the closed formulas of `cost.memory` are within a fifth of measured peaks, and other processes live too."""


class MemoryBudget:
    """What may be taken on each of some devices.

    Args:
        devices: Where the receiver's layers run.
        limit: Bytes of tensors on each GPU, of the whole process on a CPU; None for what is free.

    Raises:
        BadInput: If more is held already.
    """

    def __init__(self, devices: Iterable[torch.device], limit: int | None = None) -> None:
        self._devices, self._limit = sorted(set(devices), key=str), limit
        held = max(map(_held, self._devices))
        if limit is not None and held >= limit:
            raise BadInput(
                f"the models and libraries take {held / 1e9:.1f} GB, more than --memory-limit; give more or a smaller dtype"
            )

    def room(self) -> int:
        """Returns the bytes that may be taken now on the fullest device, as if all that is measured lay there."""
        return min(map(self._room, self._devices))

    def _room(self, device: torch.device) -> int:
        held = _held(device)
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
        else:
            free = psutil.virtual_memory().available
        return int(_SHARE * (free if self._limit is None else min(free, max(0, self._limit - held))))


def _held(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
