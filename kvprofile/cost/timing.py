"""A measured prefill, as it is kept."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvprofile.layers import LayerRange


class Timing(NamedTuple):
    """Times of recomputing one group of layers over one context; all layers are the full prefill.

    Attributes:
        group: The layers.
        context_tokens: S.
        milliseconds: One per repeat, after the warm-up runs, which are not kept.
    """

    group: LayerRange
    context_tokens: int
    milliseconds: tuple[float, ...]

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> Timing:
        """Returns what `as_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError: If it is nothing of that kind.
        """
        group = LayerRange(int(held["start_layer"]), int(held["stop_layer"]))
        if not held["prefill_ms"]:
            raise ValueError("no times")
        return cls(group, int(held["context_tokens"]), tuple(float(ms) for ms in held["prefill_ms"]))

    def as_dict(self) -> dict[str, Any]:
        return {
            "start_layer": self.group.start,
            "stop_layer": self.group.stop,
            "context_tokens": self.context_tokens,
            "prefill_ms": list(self.milliseconds),
        }
