"""How much memory of a device the engine may take."""

from __future__ import annotations

import psutil
import torch

from kvprofile.errors import BadInput

_SHARE = 0.8
"""Of what is there: the closed formulas of `cost.memory` are within a fifth of measured peaks, and other processes live too."""


class MemoryBudget:
    """What may be taken on one device.

    Args:
        device: Where the receiver computes.
        limit: Bytes of tensors on a GPU, of the whole process on a CPU; None for what is free.

    Raises:
        BadInput: If more is held already.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device, self._limit = device, limit
        if limit is not None and self._held() >= limit:
            raise BadInput(
                f"the models and libraries take {self._held() / 1e9:.1f} GB, more than --memory-limit; "
                "give more or a smaller dtype"
            )

    def room(self) -> int:
        """Returns the bytes that may be taken now."""
        if self._device.type == "cuda":
            kept = torch.cuda.memory_reserved(self._device) - self._held()
            free = torch.cuda.mem_get_info(self._device)[0] + kept
        else:
            free = psutil.virtual_memory().available
        return int(_SHARE * (free if self._limit is None else min(free, max(0, self._limit - self._held()))))

    def _held(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return int(psutil.Process().memory_info().rss)
