"""How much memory of a device the engine may take."""

from __future__ import annotations

import psutil
import torch

from kvprofile.errors import BadInput

_SHARE = 0.8
"""Of what is there: the closed formulas of `cost.memory` are within a fifth of measured peaks, and other processes live too."""


class MemoryBudget:
    """What may be taken on one device, beyond what the process holds when this is made.

    Args:
        device: Where the receiver computes.
        limit: Bytes that the process may hold there in all; None for what is free.

    Raises:
        BadInput: If the process holds more already.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device = device
        self._most: int | None = None
        if limit is not None:
            held = torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
            if held >= limit:
                raise BadInput(
                    f"the models and libraries take {held / 1e9:.1f} GB, more than --memory-limit; give more or a smaller dtype"
                )
            self._most = limit - held

    def room(self) -> int:
        """Returns the bytes that may be taken now."""
        if self._device.type == "cuda":
            kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            free = torch.cuda.mem_get_info(self._device)[0] + kept
        else:
            free = psutil.virtual_memory().available
        return int(_SHARE * (free if self._most is None else min(free, self._most)))
