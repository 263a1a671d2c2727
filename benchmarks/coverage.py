"""Simulates how often the bounds of a loss hold, on differences that look like those of F1 and on treacherous ones.

    python benchmarks/coverage.py

Every repetition draws samples, bounds the loss at 95 %, and asks whether the true loss lies below; bounds of both rules, in
points and relative. Samples are ordered by full prefill's score, as ids may be. Then how often each way of deciding selects a
plan whose true loss is above the limit, from 30 plans that all lose a little too much. Then the time of bounding 465 plans
on 50 samples with 10 000 resamples. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvprofile.analysis.decision import Resampling, decide
from kvprofile.analysis.loss import Floats, loss_bounds
from kvprofile.analysis.profile_table import rescore, set_certified
from kvprofile.analysis.scores import FULL_PREFILL, Scores
from kvprofile.layers import PLAN_COLUMNS, LayerRange, Plan, PlanKey
from kvprofile.limits import LossLimit, Rule

CONFIDENCE = 0.95

Draw = Callable[[np.random.Generator, int], tuple[Floats, Floats]]
"""Draws full prefill's scores and a plan's."""


def _f1(rng: np.random.Generator, n: int) -> Floats:
    """Draws scores such as F1 has: many zeros, some ones, some between."""
    kind = rng.random(n)
    return np.where(kind < 0.5, 0.0, np.where(kind < 0.65, 1.0, rng.beta(2, 2, n)))


def _mostly_equal(changed: float, kept: float) -> Draw:
    def draw(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
        full = _f1(rng, n)
        other = np.where(rng.random(n) < kept, full * rng.random(n), _f1(rng, n))
        return full, np.where(rng.random(n) < changed, other, full)

    return draw


def _rare(share: float, noise: float = 0.0) -> Draw:
    """Rarely all is lost; else nothing, up to noise."""

    def draw(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
        full = np.full(n, 1.0 - noise)
        plan = full + noise * rng.choice([-1.0, 0.0, 1.0], n)
        return full, np.where(rng.random(n) < share, 0.0, plan)

    return draw


def _binary(full: float, plan: float) -> Draw:
    return lambda rng, n: ((rng.random(n) < full) * 1.0, (rng.random(n) < plan) * 1.0)


CASES: dict[str, Draw] = {
    "F1, a third of the answers change": _mostly_equal(0.33, 0.7),
    "F1, most answers change": _mostly_equal(0.9, 0.5),
    "F1, few answers change, all lose": _mostly_equal(0.1, 1.0),
    "exact match, independent": _binary(0.4, 0.35),
    "equal": lambda rng, n: (full := _f1(rng, n), full.copy()),
    "1 % lose all": _rare(0.01),
    "2 % lose all": _rare(0.02),
    "5 % lose all": _rare(0.05),
    "2 % lose all, the others a little either way": _rare(0.02, noise=0.1),
}


def coverage(draw: Draw, samples: int, repetitions: int, seed: int) -> dict[str, float]:
    """Returns the share of repetitions in which each bound lies at or above the true loss."""
    full, plan = draw(np.random.default_rng(seed + 1), 2_000_000)
    true = {"points": 100 * float((full - plan).mean()), "rel": 1 - float(plan.mean() / full.mean())}
    rng = np.random.default_rng(seed)
    held = dict.fromkeys(("bound_points", "bound_rel", "certified_points", "certified_rel"), 0)
    for _ in range(repetitions):
        full, plan = draw(rng, samples)
        (row,), scores = _rows(full, plan[None])
        once = Resampling(CONFIDENCE, 1000, int(rng.integers(2**31)))
        rescore([row], scores, **once._asdict())
        set_certified([row], scores, CONFIDENCE, once.seed)
        for rule, end in (("bound", "_upper"), ("certified", "_certified")):
            rel, points = row[f"loss_rel{end}"], row[f"loss_points{end}"]
            held[f"{rule}_points"] += points >= true["points"] - 1e-3
            held[f"{rule}_rel"] += rel is None or rel >= true["rel"] - 1e-5
    return {name: count / repetitions for name, count in held.items()}


def selections(samples: int, repetitions: int, seed: int) -> dict[str, float]:
    """Returns how often each way of deciding selects one of 30 plans that all lose 6 points where 5 are the limit."""
    rng = np.random.default_rng(seed)
    ways: dict[str, tuple[Rule, float | None]] = {
        "point": ("point", None),
        "bound": ("bound", None),
        "bound, split": ("bound", 0.5),
        "certified": ("certified", None),
        "certified, split": ("certified", 0.5),
    }
    wrong = dict.fromkeys(ways, 0)
    for _ in range(repetitions):
        full = rng.beta(4, 2, samples)
        plans = np.clip(full - 0.06 + rng.normal(0, 0.1, (30, samples)), 0, 1)
        for name, (rule, split) in ways.items():
            rows, scores = _rows(full, plans)
            once = Resampling(CONFIDENCE, 500, int(rng.integers(2**31)))
            rescore(rows, scores, **once._asdict())
            wrong[name] += (
                decide(rows, LossLimit(5, "pt"), rule, scores, once, split, reckon=False).selected is not None
            )
    return {name: count / repetitions for name, count in wrong.items()}


def _rows(full: Floats, plans: Floats) -> tuple[list[dict[str, Any]], Scores]:
    """Returns rows and scores of plans as a profile has them, samples in the order of full prefill's score."""
    order = np.argsort(full)
    keys: list[PlanKey] = [Plan("layer_group", LayerRange(i, i + 1)).key for i in range(len(plans))]
    values = np.vstack([full, plans])[:, order]
    nothing = np.full(values.shape, np.nan)
    places = {key: i for i, key in enumerate([FULL_PREFILL, *keys])}
    samples = tuple(f"{i:04d}" for i in range(len(full)))
    scores = Scores("task", "data", "f1", samples, places, values, nothing, nothing, nothing)
    rows = [
        {**dict(zip(PLAN_COLUMNS, key, strict=True)), "recompute_fraction": (i + 1) / 100, "on_frontier": True}
        for i, key in enumerate(keys)
    ]
    return rows, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    results: list[dict[str, Any]] = []
    for samples in (50, 200):
        for name, draw in CASES.items():
            held = coverage(draw, samples, options.repetitions, options.seed)
            results.append({"case": name, "samples": samples, **held})
            print(json.dumps(results[-1]), flush=True)
    wrong = {str(samples): selections(samples, options.repetitions // 4, options.seed) for samples in (50, 200)}
    print(json.dumps(wrong), flush=True)
    rng = np.random.default_rng(options.seed)
    values, baseline = rng.random((465, 50)), rng.random(50)
    begun = time.perf_counter()
    loss_bounds(values, baseline, confidence=CONFIDENCE, resamples=10_000, seed=0)
    seconds = time.perf_counter() - begun
    print(
        json.dumps(
            {
                "repetitions": options.repetitions,
                "bounding_465_plans_seconds": seconds,
                "cases": results,
                "selected_though_above_the_limit": wrong,
            }
        )
    )


if __name__ == "__main__":
    main()
