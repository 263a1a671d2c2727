"""Which layers' E to keep when there is room for few: the hidden states that enter a group's first layer must be stored.

A plan that recomputes layers from `s > 0` needs the sender's hidden states that enter layer `s`; one from layer 0, or without
layers, needs none. The objective is the mean, over every number of recomputed layers that some plan without E does not exceed,
of the best quality reached with at most that many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvprofile.analysis.choice import complete, saves

Floats = NDArray[np.float64]

EXACT = 4
"""Up to so many starts, every choice is looked at."""

_SAME = 1e-12


class KeptStarts(NamedTuple):
    """Starts to keep E of, and what the restriction costs.

    Attributes:
        starts: The layers whose E is kept, none that does not help.
        exact: Whether no other choice of as many is better; else the best four and then one by one, greedily.
        frontier_starts: The layers whose E the unrestricted frontier needs.
        lost_points_mean: Quality lost against all starts, mean over the numbers of recomputed layers, × 100.
        lost_points_worst: The largest loss at any of them, × 100.
        worst_at: The number of recomputed layers of that.
        e_bytes_per_token: Bytes to store per context token for `starts`.
        e_bytes_saved_per_token: What keeping all of `frontier_starts` takes more.
    """

    starts: tuple[int, ...]
    exact: bool
    frontier_starts: tuple[int, ...]
    lost_points_mean: float
    lost_points_worst: float
    worst_at: int
    e_bytes_per_token: int
    e_bytes_saved_per_token: int


def kept_starts(rows: Sequence[dict[str, Any]], most: int) -> KeptStarts | None:
    """Returns which starts to keep, None if no plan without E was scored on every sample.

    Args:
        rows: Rows of one task, dataset and metric.
        most: Starts to keep at most.
    """
    usable = [row for row in rows if complete(row) and (saves(row) or row["strategy"] == "full_prefill")]
    starts = sorted({row["start_layer"] for row in usable if needs_e(row)})
    free = [row for row in usable if not needs_e(row)]
    if not free:
        return None
    levels = range(min(row["recomputed_layers"] for row in free), rows[0]["total_layers"] + 1)
    base = _reached(free, levels)
    own = np.array([_reached([r for r in usable if needs_e(r) and r["start_layer"] == s], levels) for s in starts])
    own = np.maximum(own.reshape(len(starts), len(levels)), base)
    chosen = _best(own, base, min(most, EXACT, len(starts)))
    while len(chosen) < min(most, len(starts)):
        have = _together(own, base, chosen)
        gains = np.maximum(own, have).mean(axis=1) - have.mean()
        if gains.max() <= _SAME:
            break
        chosen = (*chosen, int(gains.argmax()))
    lost = _together(own, base, range(len(starts))) - _together(own, base, chosen)
    size = max((row["e_bytes_per_token"] or 0 for row in usable if needs_e(row)), default=0)
    needed = _frontier_starts(usable)
    return KeptStarts(
        starts=tuple(sorted(starts[place] for place in chosen)),
        exact=len(chosen) <= EXACT,
        frontier_starts=needed,
        lost_points_mean=100 * float(lost.mean()),
        lost_points_worst=100 * float(lost.max()),
        worst_at=levels[int(lost.argmax())],
        e_bytes_per_token=len(chosen) * size,
        e_bytes_saved_per_token=(len(needed) - len(chosen)) * size,
    )


def needs_e(row: dict[str, Any]) -> bool:
    """Returns whether a plan needs hidden states that enter a layer behind the first."""
    return bool(row["start_layer"])


def allowed(row: dict[str, Any], starts: Iterable[int]) -> bool:
    """Returns whether a plan can be served when only the E of these starts is kept."""
    return not needs_e(row) or row["start_layer"] in starts


def _reached(rows: Sequence[dict[str, Any]], levels: range) -> Floats:
    """Returns per level the best quality of the rows that recompute no more layers, -inf where there is none."""
    best = np.full(len(levels), -np.inf)
    for row in rows:
        place = max(0, row["recomputed_layers"] - levels.start)
        best[place] = max(best[place], row["quality"])
    return np.maximum.accumulate(best)


def _together(own: Floats, base: Floats, chosen: Iterable[int]) -> Floats:
    held: Floats = np.maximum(base, own[list(chosen)].max(axis=0, initial=-np.inf))
    return held


def _best(own: Floats, base: Floats, most: int) -> tuple[int, ...]:
    """Returns the fewest rows of `own`, at most `most`, whose maximum has the greatest mean; of equals the first."""
    best: tuple[int, ...] = ()
    mean = float(base.mean())
    for count in range(1, most + 1):
        found, reached = _best_of_size(own, count)
        if reached > mean + _SAME:
            best, mean = found, reached
    return best


def _best_of_size(own: Floats, count: int) -> tuple[tuple[int, ...], float]:
    """Returns the best rows among all choices of `count`, looked at in order; the last two are taken for many at once."""
    if count == 1:
        means = own.mean(axis=1)
        return (int(means.argmax()),), float(means.max())
    pairs = np.array(list(combinations(range(len(own)), 2)))
    joined = np.maximum(own[pairs[:, 0]], own[pairs[:, 1]])
    begins = np.searchsorted(pairs[:, 0], np.arange(len(own) + 1))
    best: tuple[int, ...] = ()
    mean = -np.inf
    for first in combinations(range(len(own)), count - 2):
        begin = begins[first[-1] + 1] if first else 0
        if begin == len(pairs):
            continue
        means = np.maximum(joined[begin:], own[list(first)].max(axis=0, initial=-np.inf)).mean(axis=1)
        place = int(means.argmax())
        if means[place] > mean + _SAME:
            best, mean = (*first, *map(int, pairs[begin + place])), float(means[place])
    return best, mean


def _frontier_starts(rows: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    from kvprofile.analysis.frontier import frontier

    on = frontier(np.array([r["recompute_fraction"] for r in rows]), np.array([r["quality"] for r in rows]))
    return tuple(sorted({row["start_layer"] for row, kept in zip(rows, on, strict=True) if kept and needs_e(row)}))
