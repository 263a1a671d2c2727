"""Several groups of layers are recomputed, each from the sender's hidden states that enter it: what one group is better than.

Every group needs hidden states of its own, and takes the sender's deviation in once more (arXiv 2411.02820, section 4.1).
`kvprofile sensitivity` measures the most sensitive layers this way, at the recompute of the frontier's groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvprofile.layers import Plan, ranges_in, set_params
from kvprofile.strategies import Reading

if TYPE_CHECKING:
    from kvprofile.engine.contexts import ContextCaches

version = 1


def plan_of(layers: Iterable[int]) -> Plan:
    """Returns the plan that recomputes these layers, neighbours as one group."""
    return Plan("layer_set", params=set_params(layers))


def plans(layers: int, granularity: Sequence[int]) -> list[Plan]:
    return []


def read(caches: ContextCaches, plan: Plan) -> Reading:
    mixed = list(caches.sender_kv)
    for group in ranges_in(plan.params):
        mixed[slice(*group)] = caches.recomputed(group)
    return Reading(tuple(mixed))


def recomputed_layers(plan: Plan, layers: int) -> int:
    return sum(group.length for group in ranges_in(plan.params))
