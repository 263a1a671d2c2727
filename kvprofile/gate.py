"""Whether a new version may take the place of an earlier one: no plan of the old frontier loses much more than before."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprofile.analysis.choice import can_serve, complete
from kvprofile.analysis.decision import Resampling
from kvprofile.analysis.loss import Floats, difference_bounds
from kvprofile.analysis.scores import Scores, all_scores
from kvprofile.errors import BadInput
from kvprofile.layers import plan_key
from kvprofile.limits import ROUNDING, LossLimit, Rule
from kvprofile.report.comparison import asked_contexts
from kvprofile.report.frontier import Row, frontier_blocks, plan_text
from kvprofile.store.reader import Profile
from kvprofile.store.schema import ends_of

Block = tuple[str, str, str]


class Worse(NamedTuple):
    """A plan of the old frontier that a new version is worse at.

    Attributes:
        task: The task.
        dataset: Its data.
        metric: Its first metric.
        plan: The plan in words.
        before: Loss in the earlier profile on the samples that both asked alike; None if it cannot be judged.
        after: Loss in the new one.
        grew_by: The difference.
        at_least: Its lower bound, one-sided at the profile's confidence, paired by sample; None for relative losses.
        unit: `pt` or `%`.
        why: Why it cannot be judged, None if it can.
    """

    task: str
    dataset: str
    metric: str
    plan: str
    before: float | None
    after: float | None
    grew_by: float | None
    at_least: float | None
    unit: str
    why: str | None

    def words(self) -> str:
        """Returns it for people."""
        where = f"{self.plan} on {self.task}/{self.dataset}"
        if self.grew_by is None:
            return f"{where} cannot be judged: {self.why}"
        least = "" if self.at_least is None else f" (at least {self.at_least:.1f}pt)"
        return f"{where} loses {self.grew_by:.1f}{self.unit} more{least}"


def require_rule(limit: LossLimit | None, rule: Rule) -> None:
    """Raises BadInput where growth beyond a limit cannot be judged by a rule."""
    if rule not in ("point", "bound") or (rule == "bound" and limit is not None and limit.unit == "%"):
        raise BadInput(
            f"a growth is judged by rule point, or in points by rule bound, not by {rule}; give --fail-if-worse 5pt"
        )


class Gate:
    """Judges new versions of a profile. What it needs of the earlier one is read at once, before hours of measuring.

    Args:
        earlier: The profile that is to be replaced.
        limit: How much more than there a plan may lose.
        serving: Plans that lost more than this before are not looked at, since nobody serves them; None looks at all.
        rule: `point` for the growth as measured, `bound` for its lower bound, so that chance alone does not reject.

    Raises:
        BadInput: If the earlier profile cannot be read as a whole, or the rule does not go with the limit.
    """

    def __init__(
        self, earlier: Profile, limit: LossLimit, rule: Rule = "point", serving: LossLimit | None = None
    ) -> None:
        require_rule(limit, rule)
        self._serving = serving
        self._limit, self._rule, self._header = limit, rule, earlier.header
        self._frontiers = {(b.task, b.dataset, b.metric): b.frontier for b in frontier_blocks(earlier)}
        self._layers = earlier.rows["total_layers"][0].as_py()
        self._scores = _scores(earlier)
        self._contexts = asked_contexts(earlier)

    def not_comparable(self, new: Profile) -> str | None:
        """Returns why the losses of a new version say nothing about the earlier ones, None if they do."""
        if new.rows["total_layers"][0].as_py() != self._layers:
            return "the models have another number of layers"
        if ends_of(new.header["datasets"]) != ends_of(self._header["datasets"]):
            return "answers end at other texts"
        for key in ("datasets", "metrics", "references"):
            if new.header[key] != self._header[key]:
                return f"the {key} changed"
        contexts = asked_contexts(new)
        if not any(self._contexts[source].items() & contexts.get(source, {}).items() for source in self._contexts):
            return "no sample is asked as before"
        return None

    def worse(self, new: Profile) -> list[Worse]:
        """Returns the plans of the old frontier that lose more than the limit allows, or cannot be judged; worst first."""
        rows = {(r["task"], r["dataset"], r["metric"], *plan_key(r)): r for r in new.rows.to_pylist()}
        scores, contexts = _scores(new), asked_contexts(new)
        found = []
        for block, frontier in self._frontiers.items():
            asked = self._contexts.get(block[:2], {}).items() & contexts.get(block[:2], {}).items()
            both = [one.get(block) for one in (self._scores, scores)]
            for row in frontier:
                if can_serve(row) and (self._serving is None or self._serving.allows(row)):
                    judged = self._judge(block, row, rows.get((*block, *plan_key(row))), both, {s for s, _ in asked})
                    found += [judged] if judged else []
        return sorted(found, key=lambda one: -np.inf if one.grew_by is None else -one.grew_by)

    def _judge(
        self, block: Block, row: Row, new: Row | None, both: list[Scores | None], asked: set[str]
    ) -> Worse | None:
        def unjudged(why: str) -> Worse:
            return Worse(*block, plan_text(row), None, None, None, None, self._limit.unit, why)

        if new is None or not complete(new):
            return unjudged("it was not measured" if new is None else f"{new['n_scored']} of {new['n_planned']} scored")
        before, after = both
        if before is None or after is None:
            return unjudged("its measurements are missing")
        values, baselines = zip(*(_of_samples(one, row, asked) for one in (before, after)), strict=True)
        known = ~np.isnan(values[0] + values[1] + baselines[0] + baselines[1])
        old, now = ([baseline[known], value[known]] for baseline, value in zip(baselines, values, strict=True))
        if not known.any() or (self._limit.unit == "%" and not (old[0].mean() and now[0].mean())):
            return unjudged("full prefill scores 0" if known.any() else "no sample was scored in both")
        if self._limit.unit == "%":
            losses = [100 * (1 - float(value.mean() / full.mean())) for full, value in (old, now)]
            least = None
        else:
            losses = [100 * float((full - value).mean()) for full, value in (old, now)]
            least = self._least(old[0] - old[1], now[0] - now[1]) if before.in_unit_range else None
        grew = losses[1] - losses[0]
        judged = grew if self._rule == "point" else least
        if judged is None:
            return unjudged("the metric has no bounds")
        if judged <= self._limit.value + ROUNDING:
            return None
        return Worse(*block, plan_text(row), losses[0], losses[1], grew, least, self._limit.unit, None)

    def _least(self, old: Floats, new: Floats) -> float:
        """Returns the lower bound of how much losses grew, in points; they lie between -1 and 1 and are paired."""
        halves = ((one + 1) / 2 for one in (new, old))
        return 2 * difference_bounds(*halves, **Resampling.of(self._header)._asdict())[0]


def _scores(profile: Profile) -> dict[Block, Scores]:
    return {(one.task, one.dataset, one.metric): one for one in all_scores(profile.measurements())}


def _of_samples(scores: Scores, row: Row, asked: set[str]) -> tuple[Floats, Floats]:
    """Returns a plan's scores and full prefill's, for samples in the order of their ids."""
    place = {sample: i for i, sample in enumerate(scores.samples)}
    chosen = [place[sample] for sample in sorted(asked) if sample in place]
    return scores.of(plan_key(row), scores.value)[chosen], scores.baseline[chosen]
