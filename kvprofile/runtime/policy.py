"""What a server does with one request: which plan, by quality, load and time to the first token. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from kvprofile.analysis.choice import by_cost, can_serve
from kvprofile.cost.layer_times import LayerMs, kv_bytes_per_layer, not_timed, request_at
from kvprofile.cost.timeline import Link, Mode, first_tokens_ms, parse_mode
from kvprofile.errors import BadInput, one_of
from kvprofile.layers import LayerRange, describe
from kvprofile.limits import LossLimit, Rule, loss_limit
from kvprofile.runtime.plan import ChosenPlan
from kvprofile.runtime.profile import Row, RuntimeProfile, Source
from kvprofile.runtime.validated import VALIDATIONS, why_not_validated

PolicyRule = Literal["point", "bound", "validated"]
"""What of a plan must be within the loss: its measured loss, its upper bound, or its measured loss both in the profile and on
data that the profile never saw."""
POLICY_RULES: tuple[PolicyRule, ...] = get_args(PolicyRule)


class Considered(NamedTuple):
    """One plan that was looked at.

    Attributes:
        plan: The plan; None for full prefill.
        name: The plan for people, such as `layers 8–18 (11 of 30)`.
        first_token_ms: Time to its first token as modelled from measured layers, None where nothing asked for it.
        why_not: Why it was not taken, None for the one that was.
    """

    plan: ChosenPlan | None
    name: str
    first_token_ms: float | None
    why_not: str | None


class Decision(NamedTuple):
    """What to do with a request.

    Attributes:
        plan: The plan; None means: do a full prefill.
        why: The reason in words.
        first_token_ms: Time to the first token of what was decided, as modelled; None where nothing asked for it.
        considered: All that was looked at, in that order: first those that the loss rules out, then the others one by one.
    """

    plan: ChosenPlan | None
    why: str
    first_token_ms: float | None
    considered: tuple[Considered, ...]


class Policy(NamedTuple):
    """What a server's owner accepts.

    Attributes:
        max_loss: Such as `1%` or `1pt`.
        rule: What must be within it. By `validated`, a profile one of whose validations cannot be read allows no plan: it may be
            the one that a plan failed.
        latency_target_ms: Time to the first token that is good enough, in milliseconds; None if none is set.
        task: As for `RuntimeProfile.choose`.
        dataset: Likewise.
        metric: Likewise.
        loading: How caches are loaded, see `cost.timeline`.
    """

    max_loss: str | LossLimit
    rule: PolicyRule = "point"
    latency_target_ms: float | None = None
    task: str | None = None
    dataset: str | None = None
    metric: str | None = None
    loading: Mode = "overlapped"

    def on(self, profile: RuntimeProfile) -> Decider:
        """Returns what decides by this policy; it is made once per profile, and threads may share it.

        Raises:
            BadInput: If the profile lacks what the policy names, or the policy is none.
        """
        limit = loss_limit(self.max_loss)
        parse_policy_rule(self.rule)
        parse_mode(self.loading)
        if self.latency_target_ms is not None and not self.latency_target_ms > 0:
            raise BadInput(f"a latency target of {self.latency_target_ms} ms cannot be met; give one above zero")
        source = profile.source(self.task, self.dataset, self.metric)
        return Decider(self, limit, profile, source)

    def decide(self, profile: RuntimeProfile, tokens: int, waiting: int = 0, link: Link | None = None) -> Decision:
        """Returns what to do with one request; `on` is faster for many.

        Raises:
            BadInput: As `on` and `Decider.decide`.
        """
        return self.on(profile).decide(tokens, waiting, link)


class Candidate(NamedTuple):
    """A plan that the loss allows."""

    plan: ChosenPlan
    name: str
    row: Row


class Decider:
    """A policy on one profile. Of equal quality only the plan with least recompute is a candidate, of equal recompute the best.

    Attributes:
        allowed: Plans within the loss, by rising recompute and quality.
        refused: Plans of the profile's frontier that the loss rules out.
    """

    __slots__ = ("_layers", "_limit", "_policy", "_profile", "_sizes", "_unknown", "allowed", "refused")

    def __init__(self, policy: Policy, limit: LossLimit, profile: RuntimeProfile, source: Source) -> None:
        rows = [row for row in profile.rows_of(source) if can_serve(row)]
        reasons = [(row, _why_refused(row, limit, policy.rule, profile)) for row in rows]
        frontier = {id(row) for row in _frontier(rows)}
        self._policy, self._limit, self._profile = policy, limit, profile
        self._layers = int(profile.rows_of(source)[0]["total_layers"])
        self._sizes, self._unknown = _sizes(profile.rows_of(source))
        self.allowed = tuple(
            Candidate(ChosenPlan.of(row, profile.pair), _name(row), row)
            for row in _frontier([row for row, why in reasons if why is None])
        )
        self.refused = tuple(
            Considered(ChosenPlan.of(row, profile.pair), _name(row), None, why)
            for row, why in sorted(reasons, key=lambda one: by_cost(one[0]))
            if why is not None and id(row) in frontier
        )

    def decide(self, tokens: int, waiting: int = 0, link: Link | None = None) -> Decision:
        """Returns what to do with one request.

        While requests wait, or where no time is asked for or known, the plan with the fewest recomputed layers. Otherwise
        what has the best quality among full prefill and the plans that give their first token in time; if none does,
        whatever is fastest of full prefill and the plans.

        Args:
            tokens: Of the request's context.
            waiting: Requests that wait for this one to be done.
            link: What the cache comes through; None if that is not known.

        Raises:
            BadInput: If `tokens` or `waiting` cannot be, or, where time decides, the link.
        """
        if tokens < 1 or waiting < 0:
            raise BadInput(
                f"a request of {tokens} tokens with {waiting} waiting cannot be; give 1 or more, and 0 or more"
            )
        target, times = self._policy.latency_target_ms, self._profile.times
        if not self.allowed:
            mend = "; check one on fresh data with `kvprofile validate`" if self._policy.rule == "validated" else ""
            return self._full(f"no plan is within {self._limit} by rule {self._policy.rule}{mend}")
        if waiting > 0:
            return self._cheapest(f"{waiting} waiting")
        if target is None:
            return self._cheapest("no latency target is set")
        if link is None or times is None:
            return self._cheapest("the link is not known" if link is None else "the profile has no times of layers")
        if not link.bytes_per_ms > 0 or not link.latency_ms >= 0:
            raise BadInput(f"a link of {link.bytes_per_ms} bytes per ms and {link.latency_ms} ms latency cannot be")
        try:
            ms = times.at(tokens)
        except BadInput as error:
            return self._full(f"the time at {tokens} tokens is not known: {error}")
        if self._unknown:
            return self._full(f"the bytes to ship are not known: {self._unknown}")
        if {len(ms.recompute), len(ms.read)} != {self._layers}:
            return self._full(f"the times are of {len(ms.recompute)} layers, the profile of {self._layers}")
        return self._in_time(tokens, ms, target, link)

    def _cheapest(self, why: str) -> Decision:
        first, *others = self.allowed
        taken = Considered(first.plan, first.name, None, None)
        rest = [Considered(one.plan, one.name, None, "recomputes more layers") for one in others]
        return Decision(first.plan, f"fewest recomputed layers: {why}", None, (*self.refused, taken, *rest))

    def _full(self, why: str) -> Decision:
        others = [Considered(one.plan, one.name, None, why) for one in self.allowed]
        return Decision(None, f"full prefill: {why}", None, (*self.refused, *others, _taken_full(None)))

    def _in_time(self, tokens: int, ms_of: LayerMs, target: float, link: Link) -> Decision:
        full_ms = sum(ms_of.recompute) + sum(ms_of.read) + ms_of.outside
        if full_ms <= target:
            rest = [Considered(one.plan, one.name, None, "full prefill is in time") for one in self.allowed]
            why = f"full prefill: it takes {full_ms:.0f} ms of {target:g} ms, and nothing waits"
            return Decision(None, why, full_ms, (*self.refused, _taken_full(full_ms), *rest))
        considered = [*self.refused, Considered(None, "full_prefill", full_ms, _slower(full_ms, target))]
        late: list[tuple[float, Candidate]] = []
        for place in range(len(self.allowed) - 1, -1, -1):
            one = self.allowed[place]
            try:
                request = request_at(one.row, self._sizes, ms_of, tokens)
            except BadInput as error:  # the timeline cannot serve it, or its bytes contradict those of other plans
                considered.append(Considered(one.plan, one.name, None, not_timed(one.row) or str(error)))
                continue
            ms = first_tokens_ms([request], link, self._policy.loading)[0]
            if ms <= target:
                considered.append(Considered(one.plan, one.name, ms, None))
                considered += [Considered(o.plan, o.name, None, "less quality") for o in self.allowed[:place][::-1]]
                return Decision(one.plan, f"best quality within {target:g} ms: {ms:.0f} ms", ms, tuple(considered))
            considered.append(Considered(one.plan, one.name, ms, _slower(ms, target)))
            late.append((ms, one))
        # Of equal times the one with less recompute, which was looked at later.
        fastest = min(reversed(late), key=lambda one: one[0], default=None)
        if fastest is None or full_ms <= fastest[0]:
            why = f"full prefill: nothing is within {target:g} ms, and no plan is faster than its {full_ms:.0f} ms"
            return Decision(None, why, full_ms, _taken(considered, None))
        ms, one = fastest
        why = (
            f"nothing is within {target:g} ms; fastest within {self._limit}: {ms:.0f} ms, full prefill {full_ms:.0f} ms"
        )
        return Decision(one.plan, why, ms, _taken(considered, one.plan))


def parse_policy_rule(text: str) -> PolicyRule:
    """Returns the rule of that name.

    Raises:
        BadInput: If there is none.
    """
    return one_of(text, POLICY_RULES, "policy rule")


def _sizes(rows: Sequence[Row]) -> tuple[tuple[int, ...], str | None]:
    """Returns the bytes of K/V per layer and token, or why they are not known."""
    try:
        return kv_bytes_per_layer(rows), None
    except BadInput as error:
        return (), str(error)


def _frontier(rows: Iterable[Row]) -> list[Row]:
    """Returns rows by rising recompute and quality; the first is the cheapest, as `analysis.choice.cheapest` sees it."""
    found: list[Row] = []
    for row in sorted(rows, key=by_cost):
        if not found or row["quality"] > found[-1]["quality"]:
            found.append(row)
    return found


def _why_refused(row: Row, limit: LossLimit, rule: PolicyRule, profile: RuntimeProfile) -> str | None:
    measured: Rule = "bound" if rule == "bound" else "point"
    if not limit.allows(row, measured):
        loss = row[limit.column(measured)]
        what = "upper bound of the loss" if measured == "bound" else "loss"
        return f"{what} not known" if loss is None else f"{what} {_amount(loss, limit)} above {limit}"
    if rule != "validated":
        return None
    if unread := next((name for name in profile.unread if name.startswith(VALIDATIONS)), None):
        return f"{unread} cannot be read"
    return why_not_validated(row, limit, profile.validations)


def _amount(loss: float, limit: LossLimit) -> str:
    return f"{limit.measure(loss):.3g}{'%' if limit.unit == '%' else ' points'}"


def _slower(ms: float, target: float) -> str:
    return f"slower than {target:g} ms: {ms:.0f} ms"


def _name(row: Row) -> str:
    if row["strategy"] != "layer_group":
        return str(row["strategy"])
    return describe(LayerRange(row["start_layer"], row["stop_layer"]), row["total_layers"])


def _taken_full(ms: float | None) -> Considered:
    return Considered(None, "full_prefill", ms, None)


def _taken(considered: Iterable[Considered], plan: ChosenPlan | None) -> tuple[Considered, ...]:
    """Returns what was looked at with a plan of it taken after all."""
    late = [one for one in considered if one.plan is plan and one.first_token_ms is not None]
    return tuple(one._replace(why_not=None) if one is late[0] else one for one in considered)
