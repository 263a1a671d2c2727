"""The receiver answers without the context: the floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprofile.layers import Plan
from kvprofile.strategies import Reading

if TYPE_CHECKING:
    from kvprofile.engine.contexts import ContextCaches

version = 1


def plans(layers: int, granularity: Sequence[int]) -> list[Plan]:
    return [Plan("no_context")]


def read(caches: ContextCaches, plan: Plan) -> Reading:
    return Reading(caches.head_kv)


def recomputed_layers(plan: Plan, layers: int) -> int:
    return 0
