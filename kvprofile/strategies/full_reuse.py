"""The receiver reads the sender's cache as it is and recomputes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprofile.layers import Plan
from kvprofile.strategies import Reading

if TYPE_CHECKING:
    from kvprofile.engine.contexts import ContextCaches

version = 1


def plans(layers: int, granularity: Sequence[int]) -> list[Plan]:
    return [Plan("full_reuse")]


def read(caches: ContextCaches, plan: Plan) -> Reading:
    return Reading(caches.sender_kv)


def recomputed_layers(plan: Plan, layers: int) -> int:
    return 0
