"""The sender answers over its own cache: a plan that does not beat it is not worth serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprofile.layers import Plan
from kvprofile.strategies import Reading

if TYPE_CHECKING:
    from kvprofile.engine.contexts import ContextCaches

version = 1


def plans(layers: int, granularity: Sequence[int]) -> list[Plan]:
    return [Plan("sender_alone")]


def read(caches: ContextCaches, plan: Plan) -> Reading:
    return Reading(caches.sender_capture.kv, by_sender=True)


def recomputed_layers(plan: Plan, layers: int) -> int:
    return 0
