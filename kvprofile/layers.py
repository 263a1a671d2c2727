"""Layer ranges and plans: the half-open groups of layers a receiver recomputes, and their grids. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvprofile.errors import BadInput

PLAN_COLUMNS = ("strategy", "start_layer", "stop_layer", "params")
"""The columns that name a plan in every table."""

PlanKey = tuple[str, int | None, int | None, str | None]
"""Values of `PLAN_COLUMNS`."""


def plan_key(row: Mapping[str, Any]) -> PlanKey:
    """Returns the plan that a row of any table is about."""
    return row["strategy"], row["start_layer"], row["stop_layer"], row["params"]


class LayerRange(NamedTuple):
    """Layers `start … stop - 1`, 0-based like Transformers' `layer_idx`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Plan(NamedTuple):
    """What the receiver does with a context: a strategy, with its layer range and parameters where it has them."""

    strategy: str
    range: LayerRange | None = None
    params: str | None = None
    """Canonical JSON, or None."""

    @property
    def key(self) -> PlanKey:
        """The plan's values of `PLAN_COLUMNS`."""
        start, stop = self.range if self.range else (None, None)
        return self.strategy, start, stop, self.params


def groups(layers: int, unit: int = 1) -> list[LayerRange]:
    """Returns all contiguous groups of `unit`-layer units, by start then stop; the last unit may be shorter.

    `n (n + 1) / 2` groups for `n = ceil(layers / unit)` (arXiv 2411.02820, section 4).

    Raises:
        BadInput: If a unit holds no layer or more than all layers.
    """
    if not 1 <= unit <= layers:
        raise BadInput(f"granularity {unit} is not between 1 and the model's {layers} layers; give units such as 1,2,3")
    edges = [*range(0, layers, unit), layers]
    return [LayerRange(start, stop) for i, start in enumerate(edges) for stop in edges[i + 1 :]]


def grid_union(layers: int, units: Sequence[int]) -> list[LayerRange]:
    """Returns the distinct groups on any of the grids, by start then stop."""
    return sorted({group for unit in units for group in groups(layers, unit)})


def largest_unit(group: LayerRange, layers: int, units: Iterable[int]) -> int | None:
    """Returns the largest of `units` whose grid contains the group, None if none does."""
    return max((unit for unit in units if on_grid(group, layers, unit)), default=None)


def on_grid(group: LayerRange, layers: int, unit: int) -> bool:
    """Whether a group begins and ends on edges of the grid of `unit`-layer units."""
    return group.start % unit == 0 and (group.stop % unit == 0 or group.stop == layers)


def describe(group: LayerRange | None, layers: int) -> str:
    """Returns the group as people read it, such as `layers 8–18 (11 of 30)`: both ends inclusive."""
    if group is None:
        return "–"
    if group.length == 1:
        return f"layer {group.start} (1 of {layers})"
    return f"layers {group.start}–{group.stop - 1} ({group.length} of {layers})"
