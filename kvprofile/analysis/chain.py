"""A chain of readers against its single hops: the arms, and how much more the chain loses. No torch.

A wrote the cache, B read it and recomputed the layers `first`, C reads what B then holds and recomputes the layers `second`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvprofile.analysis.decision import Resampling
from kvprofile.analysis.loss import Floats, difference_bounds
from kvprofile.analysis.scores import FULL_PREFILL, Scores
from kvprofile.layers import LayerRange, Plan


class Arm(NamedTuple):
    """One way to an answer.

    Attributes:
        path: Whose cache is read by whom; the last one answers.
        plan: As which it is kept.
        first: What B recomputes of A's cache.
        second: What C recomputes.
    """

    path: str
    plan: Plan
    first: LayerRange | None = None
    second: LayerRange | None = None

    @property
    def by_middle(self) -> bool:
        """Whether B answers; its losses are against its own full prefill."""
        return self.path.endswith("B")


def _params(**values: object) -> str:
    return json.dumps(values, separators=(",", ":"), sort_keys=True)


FULL = Arm("C", Plan("full_prefill"))
NO_CONTEXT = Arm("C", Plan("no_context"))
FULL_REUSE = Arm("A→C", Plan("full_reuse"))
"""C reads A's cache as it is: what a chain comes to in which nobody recomputes anything."""
MIDDLE_FULL = Arm("B", Plan("full_prefill", params=_params(reader="B")))


def first_hop(first: LayerRange) -> Arm:
    """Returns A→B: B answers."""
    return Arm("A→B", Plan("layer_group", first, _params(reader="B", sender="A")), first=first)


def last_hop(second: LayerRange) -> Arm:
    """Returns B→C, over B's own full prefill."""
    return Arm("B→C", Plan("layer_group", second, _params(reader="C", sender="B")), second=second)


def direct(second: LayerRange) -> Arm:
    """Returns A→C, in which B has no part."""
    return Arm("A→C", Plan("layer_group", second, _params(reader="C", sender="A")), second=second)


def chain(first: LayerRange, second: LayerRange) -> Arm:
    """Returns A→B→C; the range of its plan is C's."""
    return Arm("A→B→C", Plan("chain", second, _params(first=first)), first, second)


def arms(firsts: Sequence[LayerRange], seconds: Sequence[LayerRange]) -> list[Arm]:
    """Returns every arm, in the order in which they are shown."""
    return [
        *(FULL, NO_CONTEXT, FULL_REUSE),
        *(direct(second) for second in seconds),
        *(last_hop(second) for second in seconds),
        MIDDLE_FULL,
        *(first_hop(first) for first in firsts),
        *(chain(first, second) for first in firsts for second in seconds),
    ]


def read_by_middle(scores: Scores) -> Scores:
    """Returns the scores with B's full prefill as the baseline."""
    plans = {key: row for key, row in scores.plans.items() if key != FULL_PREFILL}
    if MIDDLE_FULL.plan.key in plans:
        plans[FULL_PREFILL] = plans[MIDDLE_FULL.plan.key]
    # Which outputs are equal was told against C's full prefill.
    return dataclasses.replace(scores, plans=plans, same_output=np.full_like(scores.same_output, np.nan))


class Difference(NamedTuple):
    """How much more a chain loses than something else, in points of the mean score; None where nothing was scored.

    Attributes:
        points: On the samples.
        lower: One-sided bound, reckoning with the unseen as bounds of a loss do.
        upper: Likewise.
    """

    points: float | None
    lower: float | None
    upper: float | None


class ChainAgainstHops(NamedTuple):
    """A chain beside its single hops, on the same samples.

    Attributes:
        first: Start and stop of what B recomputed.
        second: Start and stop of what C recomputes.
        same_as_direct: Whether C recomputes all that B did, before any of it is read: the chain then is A→C.
        more_than_direct: Than A→C.
        more_than_last_hop: Than B→C.
        added_points: Loss of A→B, in B's scores, and of B→C together: what profiles of the two pairs would make one expect.
        more_than_added: Than that.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    same_as_direct: bool
    more_than_direct: Difference
    more_than_last_hop: Difference
    added_points: float | None
    more_than_added: Difference


def chain_against_hops(
    scores: Scores, first: LayerRange, second: LayerRange, resampling: Resampling
) -> ChainAgainstHops:
    """Returns how much more the chain loses than its hops, paired by sample."""

    def value(arm: Arm) -> Floats:
        return scores.of(arm.plan.key, scores.value)

    held, alone = value(chain(first, second)), value(last_hop(second))
    unit = scores.in_unit_range
    # What the chain would score if losses added up. It lies between -1 and 2, and is mapped from there to 0 … 1, where the worst
    # that an unseen sample can be is known.
    expected = alone + value(first_hop(first)) - value(MIDDLE_FULL)
    added = _more((held + 1) / 3, (expected + 1) / 3, resampling, unit)
    known = ~np.isnan(scores.baseline) & ~np.isnan(expected) & ~np.isnan(held)
    same = second.start <= first.start and first.stop <= second.stop
    than_direct = _more(held, value(direct(second)), resampling, unit)
    if same and than_direct.points is not None:  # on every sample that may come
        than_direct = Difference(0.0, 0.0, 0.0)
    return ChainAgainstHops(
        first=(first.start, first.stop),
        second=(second.start, second.stop),
        same_as_direct=same,
        more_than_direct=than_direct,
        more_than_last_hop=_more(held, alone, resampling, unit),
        added_points=100 * float((scores.baseline - expected)[known].mean()) if known.any() else None,
        more_than_added=Difference(*(None if value is None else 3 * value for value in added)),
    )


def _more(held: Floats, other: Floats, resampling: Resampling, in_unit_range: bool) -> Difference:
    known = ~np.isnan(held) & ~np.isnan(other)
    if not known.any():
        return Difference(None, None, None)
    held, other = held[known], other[known]
    lower, upper = difference_bounds(other, held, **resampling._asdict(), in_unit_range=in_unit_range)
    return Difference(100 * float(other.mean() - held.mean()), lower, upper)
