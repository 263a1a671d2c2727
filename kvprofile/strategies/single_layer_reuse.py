"""The receiver's own prefill with one layer's K/V from the sender: how sensitive the layer is (arXiv 2411.02820, section 3).

A diagnostic that serves no request, since every other layer is computed; `kvprofile sensitivity` measures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprofile.layers import Plan, layer_in, layer_params
from kvprofile.strategies import Reading

if TYPE_CHECKING:
    from kvprofile.engine.contexts import ContextCaches

version = 1


def plan_of(layer: int) -> Plan:
    return Plan("single_layer_reuse", params=layer_params(layer))


def plans(layers: int, granularity: Sequence[int]) -> list[Plan]:
    return []


def read(caches: ContextCaches, plan: Plan) -> Reading:
    layer, own = layer_in(plan.params), caches.receiver_kv
    return Reading((*own[:layer], caches.sender_kv[layer], *own[layer + 1 :]))


def recomputed_layers(plan: Plan, layers: int) -> int:
    return layers
