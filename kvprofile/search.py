"""The adaptive search: which groups of layers to measure on which samples, and why the others are left. No torch.

It ranks by KL, whose differences between plans vary far less over samples than those of a task score. A coarse grid on a
few samples comes first; the edges of groups near the frontier are moved, by ever smaller steps, down to the finest unit.
One pass from a start serves all groups that start there, so the few starts that come closest enter the race with all their
groups; there a group leaves once it is far from the frontier by more than chance. The last ones are measured on all samples.

A search that knows an earlier frontier begins there and with its neighbours. Where none of these is far better than the known
groups by more than chance, the frontier has not moved and the coarse grid is left out. Known groups are measured on all samples
in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from kvprofile.layers import LayerRange

COARSE_UNITS = 8
"""Units of the first grid, about."""

SEARCHED = 2
"""Samples of the rounds before the race, or one of each data set if there are more of these."""

WARM = 5
"""Samples that tell whether a known frontier has moved; a paired interval needs a few."""

NEAR = 1.25
"""A group is near the frontier if its mean KL is at most this multiple of the lowest with no more recompute."""

MOST_STARTS = 2
"""Starts that enter the race, beside layer 0, whose pass is the receiver's own prefill and costs nothing."""

CONFIDENCE = 0.95
"""One-sided, of the paired differences that end a group's race."""

_SMALLEST = 1e-9
"""A KL that is rounding."""

REUSE = LayerRange(0, 0)
"""Stands for full reuse, which recomputes nothing."""


class Request(NamedTuple):
    """Groups to measure on one sample; `round` counts from 1."""

    round: int
    sample: int
    groups: tuple[LayerRange, ...]


class Removed(NamedTuple):
    """Why a group was not measured on all samples.

    Attributes:
        group: The group.
        round: The round that removed it; 0 if it was never measured.
        samples: Samples it was measured on.
        mean_kl: Over the samples that it shares with its rival; None if there are none.
        rival: The group with no more recompute that it lost to, `REUSE` for full reuse, None if it was never measured.
        rival_mean_kl: Over the same samples.
        reason: In words.
    """

    group: LayerRange
    round: int
    samples: int
    mean_kl: float | None
    rival: LayerRange | None
    rival_mean_kl: float | None
    reason: str


Kls = Mapping[LayerRange, float | None]
"""KL on one sample of each group that was asked for, and of `REUSE`; None where it could not be measured."""


def finish(asking: Generator[Request, Kls, list[Removed]], answer: Callable[[Request], Kls]) -> list[Removed]:
    """Answers a search to its end and returns what it removed."""
    try:
        request = next(asking)
        while True:
            request = asking.send(answer(request))
    except StopIteration as end:
        removed: list[Removed] = end.value
        return removed


def search(
    allowed: Sequence[LayerRange],
    units: Sequence[int],
    samples: int,
    searched: int = SEARCHED,
    known: Collection[LayerRange] = (),
    anew: bool = False,
) -> Generator[Request, Kls, list[Removed]]:
    """Yields what to measure next, takes its KL, and returns why groups were left; all others are then measured on every sample.

    Args:
        allowed: The groups of the recipe's grids.
        units: Layers in a unit of each grid.
        samples: How many samples there are; they are asked for in their order.
        searched: Samples of the rounds before the race.
        known: Groups of an earlier frontier, of the allowed ones.
        anew: Whether to search from the coarse grid even if the known frontier has not moved.
    """
    state = _State(allowed, known)
    first = range(min(searched, samples))
    layers = max(group.stop for group in allowed)
    grids = [[*range(0, layers, unit), layers] for unit in units if all(unit == u or unit % u for u in units)]
    number = 1
    if known:
        near = {g for edges in grids for g in _moved(known, edges, 1)}
        warm = range(min(before_race(searched, known), samples))
        yield from state.measure(number, warm, near.intersection(allowed).union(known))
        if not anew and not state.broken_into():
            state.leave_far(number)
            state.keep_starts(number, {group.start for group in known})
            yield from _race(state, number, warm, samples)
            return state.left(samples)
        number += 1
    steps = [math.ceil((len(edges) - 1) / COARSE_UNITS) for edges in grids]
    coarse = [{*edges[::step], layers} for edges, step in zip(grids, steps, strict=True)]
    yield from state.measure(number, first, {g for g in allowed if any({*g} <= edges for edges in coarse)})
    state.leave_far(number)
    while max(steps) > 1:
        steps, number = [max(1, step // 2) for step in steps], number + 1
        moved = {g for edges, step in zip(grids, steps, strict=True) for g in _moved(state.racing, edges, step)}
        yield from state.measure(number, first, moved.intersection(allowed))
        state.leave_far(number)
    starts = state.best_starts()
    state.keep_starts(number, starts)
    state.take_rows(starts)
    yield from _race(state, number, first, samples)
    return state.left(samples)


def before_race(searched: int, known: Collection[LayerRange]) -> int:
    """Returns how many samples a search may come back to: from that one on, it asks for each once."""
    return max(searched, WARM) if known else searched


def _race(state: _State, number: int, first: range, samples: int) -> Generator[Request, Kls, None]:
    """Measures what is left of the search sample by sample; rounds count on from `number`."""
    number += 1
    yield from state.measure(number, first, state.racing)
    for sample in range(first.stop, samples):
        number += 1
        yield from state.measure(number, [sample], state.racing, even_if_none=True)
        state.leave_beaten(number)


def _moved(groups: Iterable[LayerRange], edges: Sequence[int], step: int) -> set[LayerRange]:
    """Returns the groups of a grid with one or both edges moved by `step` units."""
    place = {edge: i for i, edge in enumerate(edges)}
    on_grid = [(place[g.start], place[g.stop]) for g in groups if {*g} <= place.keys()]
    moves = product((-step, 0, step), repeat=2)
    found = {(start + a, stop + b) for a, b in moves for start, stop in on_grid}
    return {LayerRange(edges[a], edges[b]) for a, b in found if 0 <= a < b < len(edges)}


class _State:
    """What is known of every group.

    Attributes:
        kls: KL by sample of every group measured so far.
        racing: Groups still in the search.
        removed: Those that left.
    """

    def __init__(self, allowed: Sequence[LayerRange], known: Collection[LayerRange]) -> None:
        self._allowed, self._known = allowed, frozenset(known)
        self._asked: dict[LayerRange, set[int]] = {}
        self.kls: dict[LayerRange, dict[int, float]] = {REUSE: {}}
        self.racing: set[LayerRange] = set()
        self.removed: dict[LayerRange, Removed] = {}

    def measure(
        self, number: int, samples: Iterable[int], groups: Iterable[LayerRange], even_if_none: bool = False
    ) -> Generator[Request, Kls, None]:
        """Asks for groups on samples, once each; they then take part in the search. Without any it asks only `even_if_none`."""
        groups = sorted(groups)
        self.racing.update(groups)
        for sample in samples:
            asked = tuple(g for g in groups if sample not in self._asked.setdefault(g, set()))
            for group in asked:
                self._asked[group].add(sample)
            if asked or even_if_none:
                measured = yield Request(number, sample, asked)
                for group in (*asked, REUSE):
                    value = measured.get(group)
                    known = self.kls.setdefault(group, {})
                    if value is not None:
                        known[sample] = value

    def leave_far(self, number: int) -> None:
        """Removes groups that are not near the frontier."""
        for group, (rival, ratio) in self._rivals().items():
            if ratio > NEAR and group not in self._known:
                self._remove(group, number, rival, f"mean KL more than {NEAR:g} times the rival's")

    def broken_into(self) -> bool:
        """Returns whether a group is far better, by more than chance, than the best known one that recomputes no more."""
        means = {g: self._mean(g, self.kls[g]) for g in (REUSE, *self._known)}
        best = {g: min((k for k in means if k.length <= g.length), key=lambda k: means[k]) for g in self.racing}
        return any(self._lower_bound(best[group], group) > 0 for group in self.racing - self._known)

    def best_starts(self) -> set[int]:
        """Returns a few starts: those that are most often the best for what they recompute."""
        rivals = self._rivals()
        starts = {g.start for g in self.racing} - {0}
        credit = {s: (sum(r <= 1 for g, (_, r) in rivals.items() if g.start == s), -s) for s in starts}
        return {*sorted(starts, key=lambda start: credit[start], reverse=True)[:MOST_STARTS]}

    def keep_starts(self, number: int, starts: Collection[int]) -> None:
        """Removes groups with other starts than these and layer 0."""
        rivals = self._rivals()
        for group in {g for g in self.racing if g.start not in {0, *starts}} - self._known:
            self._remove(group, number, rivals[group][0], "starts that come closer to the frontier were taken")

    def take_rows(self, starts: Collection[int]) -> None:
        """Lets all groups of some starts race, and of layer 0."""
        self.racing |= {g for g in self._allowed if g.start in {0, *starts}}
        self.removed = {g: why for g, why in self.removed.items() if g not in self.racing}

    def leave_beaten(self, number: int) -> None:
        """Removes groups that are far from the frontier by more than chance explains."""
        for group in sorted(self.racing - self._known):
            rivals = [r for r in (REUSE, *self.racing) if r.length <= group.length and r != group]
            bound, rival = max((self._lower_bound(group, r), r) for r in rivals)
            if bound > 0:
                self._remove(group, number, rival, f"KL more than {NEAR:g} times the rival's at {CONFIDENCE:.0%}")

    def left(self, samples: int) -> list[Removed]:
        """Returns why groups were not measured on all of so many samples."""
        removed = [why for why in self.removed.values() if why.samples < samples]
        reason = "no neighbour of a group near the frontier"
        return [*removed, *(Removed(g, 0, 0, None, None, None, reason) for g in self._allowed if g not in self.kls)]

    def _rivals(self) -> dict[LayerRange, tuple[LayerRange, float]]:
        """Returns for each group the best other one with no more recompute, and its own mean KL over that one's."""
        means = {g: self._mean(g, self.kls[g]) for g in (REUSE, *sorted(self.racing))}
        found = {}
        for group in sorted(self.racing):
            rival = min((r for r in means if r.length <= group.length and r != group), key=lambda r: means[r])
            equal = means[group] == means[rival]  # both may be 0
            found[group] = rival, 1.0 if equal else means[group] / max(means[rival], _SMALLEST)
        return found

    def _lower_bound(self, one: LayerRange, other: LayerRange) -> float:
        """Returns the lower bound of the mean of KL less `NEAR` times the other's, by Student's t; 0 from fewer than 3."""
        both = sorted(self.kls[one].keys() & self.kls[other].keys())
        if len(both) < 3:
            return 0.0
        difference = np.array([self.kls[one][s] - NEAR * self.kls[other][s] for s in both])
        error = difference.std(ddof=1) / math.sqrt(len(both))
        return float(difference.mean() - student.ppf(CONFIDENCE, len(both) - 1) * error)

    def _mean(self, group: LayerRange, samples: Iterable[int]) -> float:
        values = [self.kls[group][s] for s in samples]
        return sum(values) / len(values) if values else math.inf

    def _remove(self, group: LayerRange, number: int, rival: LayerRange, reason: str) -> None:
        self.racing.discard(group)
        both = self.kls[group].keys() & self.kls[rival].keys()
        own, other = (self._mean(g, both) if both else None for g in (group, rival))
        reason = reason if self.kls[group] else "it could not be measured"
        self.removed[group] = Removed(group, number, len(self.kls[group]), own, rival, other, reason)
