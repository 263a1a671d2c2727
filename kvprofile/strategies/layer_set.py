"""Several groups of layers are recomputed, each from the sender's hidden states that enter it: what one group is better than.

Every group needs hidden states of its own, and takes the sender's deviation in once more (arXiv 2411.02820, section 4.1).
`kvprofile sensitivity` measures the most sensitive layers this way, at the recompute of the frontier's groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvprofile.layers import LayerRange, Plan
from kvprofile.strategies import Reading

if TYPE_CHECKING:
    from kvprofile.engine.contexts import ContextCaches

version = 1


def plan_of(layers: Iterable[int]) -> Plan:
    """Returns the plan that recomputes these layers, neighbours as one group."""
    ranges: list[LayerRange] = []
    for layer in sorted(set(layers)):
        if ranges and ranges[-1].stop == layer:
            ranges[-1] = LayerRange(ranges[-1].start, layer + 1)
        else:
            ranges.append(LayerRange(layer, layer + 1))
    return Plan("layer_set", params=json.dumps({"ranges": ranges}, separators=(",", ":")))


def ranges_of(plan: Plan) -> list[LayerRange]:
    return [LayerRange(start, stop) for start, stop in json.loads(plan.params or "{}")["ranges"]]


def ranges_text(params: str) -> str:
    """Returns a set as people read it, such as `1–2, 5, 9–12`: both ends inclusive."""
    ranges = ranges_of(Plan("layer_set", params=params))
    return ", ".join(str(group.start) if group.length == 1 else f"{group.start}–{group.stop - 1}" for group in ranges)


def plans(layers: int, granularity: Sequence[int]) -> list[Plan]:
    return []


def read(caches: ContextCaches, plan: Plan) -> Reading:
    mixed = list(caches.sender_capture.kv)
    for group in ranges_of(plan):
        mixed[slice(*group)] = caches.recomputed(group)
    return Reading(tuple(mixed))


def recomputed_layers(plan: Plan, layers: int) -> int:
    return sum(group.length for group in ranges_of(plan))
