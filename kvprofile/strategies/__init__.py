"""Ways of reusing a context, one file each. File name = value of the `strategy` column.

A strategy module offers what `Strategy` lists; nothing else has to change when a file is added. Only an arm to compare with,
which serves no request, is named in `analysis.choice.REFERENCE_ARMS` too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from kvprofile.layers import Plan

if TYPE_CHECKING:
    from kvprofile.engine.cache import ContextKV
    from kvprofile.engine.contexts import ContextCaches


class Reading(NamedTuple):
    """Which model reads which context cache.

    Attributes:
        context: K/V per layer, held by reference.
        by_sender: True if the sender answers instead of the receiver.
    """

    context: ContextKV
    by_sender: bool = False


class Strategy(Protocol):
    """What a strategy module offers.

    Attributes:
        version: Part of every identity; raised when its answers change.
    """

    version: int

    def plans(self, layers: int, granularity: Sequence[int]) -> list[Plan]:
        """Returns the plans to measure on a model of so many layers, those with equal starts together."""

    def read(self, caches: ContextCaches, plan: Plan) -> Reading:
        """Returns the context cache of one plan, from the few operations that `caches` offers."""

    def recomputed_layers(self, plan: Plan, layers: int) -> int:
        """Returns how many layers the receiver runs over the context."""


def load_all(package: str = __name__) -> dict[str, Strategy]:
    """Returns every strategy of a package by name, in alphabetical order."""
    paths = importlib.import_module(package).__path__
    names = sorted(module.name for module in pkgutil.iter_modules(paths))
    return {name: cast("Strategy", importlib.import_module(f"{package}.{name}")) for name in names}
