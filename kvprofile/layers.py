"""Layer ranges and plans: the half-open groups of layers a receiver recomputes, and their grids. No torch."""

from __future__ import annotations

import json
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


def set_params(layers: Iterable[int]) -> str:
    """Returns the parameters of a `layer_set`: its layers, neighbours as one range."""
    ranges: list[LayerRange] = []
    for layer in sorted(set(layers)):
        if ranges and ranges[-1].stop == layer:
            ranges[-1] = LayerRange(ranges[-1].start, layer + 1)
        else:
            ranges.append(LayerRange(layer, layer + 1))
    return json.dumps({"ranges": ranges}, separators=(",", ":"))


def ranges_in(params: str | None) -> list[LayerRange]:
    """Returns the ranges that `set_params` wrote.

    Raises:
        BadInput: If it did not: the text may come from a file that anybody wrote.
    """
    held = _held(params, "ranges", list)
    ok = held and all(isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in held)
    if not ok or not all(0 <= start < stop for start, stop in held):
        raise BadInput(f"{str(params)[:60]!r} are no parameters of a layer_set; measure again")
    return [LayerRange(start, stop) for start, stop in held]


def layer_params(layer: int) -> str:
    """Returns the parameters of a `single_layer_reuse`."""
    return json.dumps({"layer": layer}, separators=(",", ":"))


def layer_in(params: str | None) -> int:
    """Returns the layer that `layer_params` wrote.

    Raises:
        BadInput: As `ranges_in`.
    """
    held: int = _held(params, "layer", int)
    return held


def _held(params: str | None, name: str, kind: type) -> Any:
    try:
        value = json.loads(params or "")[name]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        value = None
    if type(value) is not kind:
        raise BadInput(f"{str(params)[:60]!r} are no parameters with {name}; measure again")
    return value


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


def furthest_stops(groups: Iterable[LayerRange]) -> dict[int, int]:
    """Returns the latest stop of all groups with a start, by start."""
    stops: dict[int, int] = {}
    for start, stop in groups:
        stops[start] = max(stop, stops.get(start, 0))
    return stops


def grid_union(layers: int, units: Sequence[int]) -> list[LayerRange]:
    """Returns the distinct groups on any of the grids, by start then stop."""
    return sorted({group for unit in units for group in groups(layers, unit)})


def largest_unit(group: LayerRange, layers: int, units: Iterable[int]) -> int | None:
    """Returns the largest of `units` whose grid contains the group, None if none does."""
    return max((unit for unit in units if on_grid(group, layers, unit)), default=None)


def on_grid(group: LayerRange, layers: int, unit: int) -> bool:
    """Whether a group begins and ends on edges of the grid of `unit`-layer units."""
    return group.start % unit == 0 and (group.stop % unit == 0 or group.stop == layers)


def describe_set(params: str) -> str:
    """Returns a `layer_set` as people read it, such as `1–2, 5, 9–12`: both ends inclusive."""
    ranges = ranges_in(params)
    return ", ".join(str(group.start) if group.length == 1 else f"{group.start}–{group.stop - 1}" for group in ranges)


def describe(group: LayerRange | None, layers: int) -> str:
    """Returns the group as people read it, such as `layers 8–18 (11 of 30)`: both ends inclusive."""
    if group is None:
        return "–"
    if group.length == 1:
        return f"layer {group.start} (1 of {layers})"
    return f"layers {group.start}–{group.stop - 1} ({group.length} of {layers})"
