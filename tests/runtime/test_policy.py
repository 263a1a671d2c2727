"""What a server does with a request, by quality, load and time to the first token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvprofile.analysis.choice import cheapest
from kvprofile.cost.layer_times import LayerMs, not_timed
from kvprofile.cost.timeline import LayerCost, Link, Request, first_tokens_ms
from kvprofile.errors import BadInput
from kvprofile.layers import LayerRange
from kvprofile.limits import BOUND_METHOD, LossLimit, parse_loss
from kvprofile.runtime import Decision, Policy, RuntimeProfile, load_profile
from kvprofile.runtime.export import export_text
from tests.profile_factory import add_timings, header, publish_profile
from tests.runtime.test_staircase import random_rows

LAYERS = 10
FAST = Link(1e6)


class FixedTimes:
    """Each layer recomputes a token in a hundredth of a millisecond and reads in one; from 100 to 1000 tokens."""

    def at(self, tokens: int) -> LayerMs:
        if not 100 <= tokens <= 1000:
            raise BadInput(f"layers were timed at contexts of 100 to 1000 tokens, not at {tokens}")
        return LayerMs((tokens / 100,) * LAYERS, (1.0,) * LAYERS, 2.0)


def row(start: int | None, stop: int | None, loss: float, **changes: Any) -> dict[str, Any]:
    count = 0 if start is None or stop is None else stop - start
    return {
        **{"strategy": "full_reuse" if start is None else "layer_group", "start_layer": start, "stop_layer": stop},
        **{"params": None, "recomputed_layers": count, "total_layers": LAYERS, "recompute_fraction": count / LAYERS},
        **{"kv_bytes_per_token": (LAYERS - count) * 100, "e_bytes_per_token": 200 if start else 0},
        **{"task": "qa", "dataset": "data", "metric": "f1", "n_planned": 4, "n_scored": 4},
        **{"quality": 0.8 * (1 - loss), "baseline_quality": 0.8, "loss_rel": loss, "loss_points": 80 * loss},
        **{"loss_rel_upper": loss + 0.02, "loss_points_upper": 80 * (loss + 0.02), **changes},
    }


ROWS = [
    row(None, None, 0.31),
    row(0, 2, 0.08),
    row(0, 3, 0.09),  # no better than the one before, so never looked at
    row(2, 6, 0.04),
    row(1, 9, 0.01),
    {**row(None, None, 0.0), "strategy": "full_prefill", "recompute_fraction": 1.0},
]


def profile(rows: Sequence[dict[str, Any]] = ROWS, timed: bool = True, validations: Any = ()) -> RuntimeProfile:
    held = header(bounds=BOUND_METHOD)
    return RuntimeProfile(Path("x"), held, rows, validations, times=FixedTimes() if timed else None)


def group(decision: Decision) -> tuple[int | None, int | None] | None:
    return None if decision.plan is None else (decision.plan.start_layer, decision.plan.stop_layer)


def said(decision: Decision) -> dict[str, str | None]:
    return {one.name: one.why_not for one in decision.considered}


def first_token(plan: LayerRange, tokens: int, link: Link) -> float:
    """Time to the first token, written down by hand."""
    layers = [LayerCost(tokens * 100, tokens / 100, 1.0)] * LAYERS
    request = Request(plan, layers, tokens * 200, 2.0)
    return first_tokens_ms([request], link, "overlapped")[0]


@pytest.mark.parametrize(
    ("value", "unit"),
    [(float("nan"), "%"), (float("inf"), "pt"), (-1, "%"), (101, "pt"), ("5", "%"), (5, "pct"), (5, None)],
)
def test_a_limit_that_is_none_is_refused(value: Any, unit: Any) -> None:
    limit = LossLimit(value, unit)
    for ask in (lambda: profile().choose(limit), lambda: Policy(limit).on(profile())):
        with pytest.raises(BadInput, match="cannot be; give a number from 0 to 100 and the unit"):
            ask()


@pytest.mark.parametrize(("value", "unit"), [(0, "%"), (100, "%"), (100.0, "pt")])
def test_a_limit_at_either_end_is_one(value: float, unit: Any) -> None:
    limit = LossLimit(value, unit)
    assert profile().choose(limit) == Policy(limit).decide(profile(), 500).plan


def test_while_requests_wait_the_fewest_recomputed_layers() -> None:
    decision = Policy("10%", latency_target_ms=10_000).decide(profile(), 500, waiting=3, link=FAST)
    assert group(decision) == (0, 2)
    assert decision.why == "fewest recomputed layers: 3 waiting"
    assert said(decision) == {
        "full_reuse": "loss 31% above 10%",
        "layers 0–1 (2 of 10)": None,
        "layers 2–5 (4 of 10)": "recomputes more layers",
        "layers 1–8 (8 of 10)": "recomputes more layers",
    }


def test_without_load_the_best_quality_in_time() -> None:
    tokens = 500
    times = {g: first_token(LayerRange(*g), tokens, FAST) for g in ((0, 2), (2, 6), (1, 9))}
    assert times[0, 2] < times[2, 6] < times[1, 9] < 62, "full prefill takes 62 ms"
    found = [
        Policy("10%", latency_target_ms=target) for target in (62, 61, times[1, 9] - 0.1, times[2, 6], times[0, 2])
    ]
    decisions = [policy.decide(profile(), tokens, link=FAST) for policy in found]
    assert [group(one) for one in decisions] == [None, (1, 9), (2, 6), (2, 6), (0, 2)]
    assert [one.first_token_ms for one in decisions] == [62, times[1, 9], times[2, 6], times[2, 6], times[0, 2]]
    assert "nothing waits" in decisions[0].why
    assert said(decisions[4]) == {
        "full_reuse": "loss 31% above 10%",
        "full_prefill": f"slower than {times[0, 2]:g} ms: 62 ms",
        "layers 1–8 (8 of 10)": f"slower than {times[0, 2]:g} ms: {times[1, 9]:.0f} ms",
        "layers 2–5 (4 of 10)": f"slower than {times[0, 2]:g} ms: {times[2, 6]:.0f} ms",
        "layers 0–1 (2 of 10)": None,
    }
    assert said(decisions[1])["layers 0–1 (2 of 10)"] == "less quality"


def test_nothing_in_time_takes_what_is_fastest() -> None:
    fast = Policy("10%", latency_target_ms=5).decide(profile(), 500, link=FAST)
    assert group(fast) == (0, 2)
    assert fast.why == f"nothing is within 5 ms; fastest within 10%: {fast.first_token_ms:.0f} ms, full prefill 62 ms"
    assert [one.name for one in fast.considered if one.why_not is None] == ["layers 0–1 (2 of 10)"]
    slow = Policy("10%", latency_target_ms=5).decide(profile(), 500, link=Link(1.0))
    assert group(slow) is None
    assert slow.first_token_ms == 62
    assert "no plan is faster than its 62 ms" in slow.why
    assert [one.name for one in slow.considered if one.why_not is None] == ["full_prefill"]


class LastLayersAreDear:
    """Times under which the first four layers are recomputed for nothing."""

    def at(self, tokens: int) -> LayerMs:
        return LayerMs((0.0,) * 4 + (100.0,) * 6, (1.0,) * LAYERS, 2.0)


def test_of_equally_fast_plans_the_one_with_less_recompute() -> None:
    plans = [row(None, None, 0.31), row(0, 2, 0.08), row(0, 4, 0.02)]
    rows = [{**one, "kv_bytes_per_token": 24} for one in plans]  # the first four layers hold nothing
    made = profile(rows).with_times(LastLayersAreDear())
    decision = Policy("10%", latency_target_ms=1, loading="load_reused").decide(made, 100, link=Link(100.0))
    times = {one.name: one.first_token_ms for one in decision.considered if one.plan}
    assert times == {"full_reuse": None, "layers 0–1 (2 of 10)": 24 + 12, "layers 0–3 (4 of 10)": 24 + 12}
    assert group(decision) == (0, 2)


@pytest.mark.parametrize(
    ("policy", "link", "timed", "words"),
    [
        (Policy("10%"), FAST, True, "no latency target"),
        (Policy("10%", latency_target_ms=50), None, True, "the link is not known"),
        (Policy("10%", latency_target_ms=50), FAST, False, "no times of layers"),
    ],
)
def test_without_times_the_fewest_recomputed_layers(policy: Policy, link: Link | None, timed: bool, words: str) -> None:
    decision = policy.decide(profile(timed=timed), 500, link=link)
    assert group(decision) == (0, 2)
    assert words in decision.why


@pytest.mark.parametrize("tokens", [99, 1001])
def test_a_length_that_was_not_timed_is_prefilled(tokens: int) -> None:
    decision = Policy("10%", latency_target_ms=50).decide(profile(), tokens, link=FAST)
    assert group(decision) is None
    assert f"not at {tokens}" in decision.why
    assert f"not at {tokens}" in str(said(decision)["layers 0–1 (2 of 10)"])


def test_times_of_another_model_are_not_believed() -> None:
    shorter = [{**one, "total_layers": 12} for one in ROWS]
    decision = Policy("10%", latency_target_ms=50).decide(profile(shorter), 500, link=FAST)
    assert group(decision) is None
    assert decision.why == "full prefill: the times are of 10 layers, the profile of 12"


def test_no_plan_within_the_loss_is_full_prefill() -> None:
    decision = Policy("0.5%").decide(profile(), 500, waiting=1)
    assert group(decision) is None
    assert decision.why == "full prefill: no plan is within 0.5% by rule point"
    assert said(decision)["layers 1–8 (8 of 10)"] == "loss 1% above 0.5%"
    assert decision.considered[-1].name == "full_prefill"


def test_rules_say_what_they_refuse() -> None:
    rows = [*ROWS, row(0, 1, 0.05, loss_rel_upper=None)]
    decision = Policy("6%", rule="bound").decide(profile(rows), 500)
    assert group(decision) == (2, 6)
    assert said(decision)["layer 0 (1 of 10)"] == "upper bound of the loss not known"
    points = Policy("4pt", rule="bound").decide(profile(rows), 500)
    assert group(points) == (1, 9)
    assert said(points)["full_reuse"] == "upper bound of the loss 26.4 points above 4 points"


def validation(dataset: str = "fresh", **changes: Any) -> dict[str, Any]:
    plan = {
        **{"strategy": "layer_group", "start_layer": 2, "stop_layer": 6, "params": None, "unit": "%"},
        **{"quality": 0.6, "baseline_quality": 0.63, "held": True, **changes},
    }
    return {"task": "qa", "dataset": dataset, "metric": "f1", "plans": [plan]}


@pytest.mark.parametrize(
    ("validations", "why"),
    [
        ([], "not validated"),
        ([validation()], None),
        ([validation(), validation("other")], None),
        ([validation(held=None)], "not validated"),
        ([validation(held=None), validation("other")], None),
        ([validation(held=False)], "broke its promise in the validation on fresh"),
        ([validation(), validation("other", held=False)], "broke its promise in the validation on other"),
        ([validation(held=False), validation()], None),
        ([validation(), validation(held=False)], "broke its promise in the validation on fresh"),
        ([validation(quality=0.5)], "lost more than 10% in the validation on fresh"),
        ([validation(quality=None)], "lost more than 10% in the validation on fresh"),
        ([validation(baseline_quality=0.0, quality=0.0)], "lost more than 10% in the validation on fresh"),
        ([validation(quality=10**400)], "lost more than 10% in the validation on fresh"),
        ([validation(baseline_quality=10**400)], "lost more than 10% in the validation on fresh"),
        ([validation(start_layer=1)], "not validated"),
        ([validation(params="{}")], "not validated"),
        ([{**validation(), "task": "code"}], "not validated"),
        ([{**validation(), "metric": "exact_match"}], "not validated"),
    ],
)
def test_a_validated_plan_held_on_all_fresh_data(validations: list[dict[str, Any]], why: str | None) -> None:
    decision = Policy("10%", rule="validated").decide(profile(validations=validations), 500)
    assert group(decision) == ((2, 6) if why is None else None)
    assert said(decision)["layers 0–1 (2 of 10)"] == "not validated"
    if why is not None:
        assert said(decision)["layers 2–5 (4 of 10)"] == why


def test_validated_counts_points_where_points_are_asked_for() -> None:
    held = profile(validations=[validation(quality=0.5, baseline_quality=0.53)])
    assert group(Policy("4pt", rule="validated").decide(held, 500)) == (2, 6)
    assert group(Policy("5%", rule="validated").decide(held, 500)) is None


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("rule", ["point", "bound"])
def test_the_first_candidate_is_the_cheapest_plan(seed: int, rule: Any) -> None:
    draw = random.Random(seed)
    rows = [{**one, "baseline_quality": 0.8, "kv_bytes_per_token": None} for one in random_rows(draw, 50)]
    made = profile(rows)
    source = made.source("qa", "data", "f1")
    own = [one for one in rows if (one["task"], one["metric"]) == ("qa", "f1")]
    for limit in [LossLimit(100 * draw.random(), draw.choice(["%", "pt"])) for _ in range(20)]:  # type: ignore[arg-type]
        policy = Policy(limit, rule, task=source[0], metric=source[2])
        decision = policy.decide(made, 500, waiting=draw.randrange(3))
        expected = cheapest(own, limit, rule)
        assert decision.plan == made.choose(limit, "qa", "f1", rule=rule)
        assert (decision.plan is None) == (expected is None)
        taken = [one for one in decision.considered if one.why_not is None]
        assert [one.plan for one in taken] == [decision.plan]
        qualities = [one.plan.quality for one in policy.on(made).allowed]
        assert qualities == sorted(set(qualities))


@pytest.mark.parametrize(
    ("policy", "request_", "words"),
    [
        (Policy("10%", rule="certified"), (500, 0, FAST), "no policy rule"),  # type: ignore[arg-type]
        (Policy("10%", rule="bounds"), (500, 0, FAST), 'did you mean "bound"'),  # type: ignore[arg-type]
        (Policy("10%", loading="overlaped"), (500, 0, FAST), 'did you mean "overlapped"'),  # type: ignore[arg-type]
        (Policy("10"), (500, 0, FAST), "no unit"),
        (Policy("10%", latency_target_ms=0), (500, 0, FAST), "latency target"),
        (Policy("10%", latency_target_ms=float("nan")), (500, 0, FAST), "latency target"),
        (Policy("10%", task="code"), (500, 0, FAST), "no task 'code'"),
        (Policy("10%"), (0, 0, FAST), "cannot be"),
        (Policy("10%"), (5, -1, FAST), "cannot be"),
        (Policy("10%", latency_target_ms=5), (500, 0, Link(0.0)), "a link of"),
        (Policy("10%", latency_target_ms=5), (500, 0, Link(float("nan"))), "a link of"),
        (Policy("10%", latency_target_ms=5), (500, 0, Link(5.0, -1.0)), "a link of"),
    ],
)
def test_bad_input(policy: Policy, request_: tuple[int, int, Link], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        policy.decide(profile(), *request_)


def test_plans_whose_time_is_not_modelled_are_not_timed() -> None:
    odd = {**row(None, None, 0.02), "strategy": "layer_set", "params": '{"ranges":[[1,9]]}', "recompute_fraction": 0.8}
    decision = Policy("10%", latency_target_ms=50).decide(profile([*ROWS[:4], odd]), 500, link=FAST)
    assert group(decision) == (2, 6)
    assert said(decision)["layer_set"] == not_timed(odd)
    assert parse_loss("10%").allows(odd)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_bytes_per_token": 201}, "the bytes of a layer_group are not those of its layers"),
        ({"kv_bytes_per_token": None}, "does not say how many bytes it ships"),
        ({"e_bytes_per_token": None}, "does not say how many bytes it ships"),
    ],
)
def test_a_plan_whose_bytes_cannot_be_is_passed_over(change: dict[str, Any], words: str) -> None:
    rows = [{**one, **change} if one["start_layer"] == 1 else one for one in ROWS]
    decision = Policy("10%", latency_target_ms=61).decide(profile(rows), 500, link=FAST)
    assert group(decision) == (2, 6)
    assert words in str(said(decision)["layers 1–8 (8 of 10)"])


def test_times_of_a_profile_decide(tmp_path: Path) -> None:
    """From the published timings to the decision, and the same from its export."""
    folder = publish_profile(tmp_path)
    add_timings(folder)
    made = load_profile(folder)
    (tmp_path / "profile.json").write_text(export_text(made))
    for one in (made, load_profile(tmp_path / "profile.json")):
        assert one.times is not None
        tokens = one.timings[0]["context_tokens"]
        full = sum(map(sum, one.times.at(tokens)[:2])) + one.times.at(tokens)[2]
        in_time = Policy("45%", latency_target_ms=full + 1, metric="f1").decide(one, tokens, link=FAST)
        late = Policy("45%", latency_target_ms=full / 1e6, metric="f1").decide(one, tokens, link=FAST)
        assert (in_time.plan, in_time.first_token_ms) == (None, pytest.approx(full))
        assert "nothing is within" in late.why
