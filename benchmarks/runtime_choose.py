"""Times what a server does per request: `choose`, `decide`, `cache_key` and `Watch.refresh` on a profile of 500 plans.

    python benchmarks/runtime_choose.py

The profile is made up: 31 layers, every group, losses and bounds that fall with recompute but for noise; so are the times of
layers, as only the arithmetic is timed. Each call is timed by itself, after a warm-up, with other limits, tokens and links each
time. `choose_text` parses the limit, too; `decide` is of a policy made ready with `on`, `policy_decide` makes it ready each time;
`refresh` looks at a store of one pair with 20 versions. The clock's own cost is not taken off. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvprofile.cost.layer_times import LayerMs
from kvprofile.layers import groups
from kvprofile.limits import BOUND_METHOD, LossLimit
from kvprofile.runtime import Fingerprint, Link, Policy, ProfileStore, RuntimeProfile, cache_key

LAYERS = 31
CALLS = {
    "choose": 200_000,
    "choose_text": 200_000,
    "decide": 3_000,
    "decide_waiting": 20_000,
    "policy_decide": 1000,
    "cache_key": 500,
    "refresh": 2_000,
}
CONTEXT = 32_768


class MadeUpTimes:
    """Layer times that grow linearly with the context."""

    def at(self, tokens: int) -> LayerMs:
        return LayerMs((tokens / 1000,) * LAYERS, (0.3,) * LAYERS, 2.0)


def main() -> None:
    draw = random.Random(0)
    profile = RuntimeProfile(Path("made up"), _header(), _rows(draw), times=MadeUpTimes())
    limits = [LossLimit(draw.uniform(0, 30), "%") for _ in range(1000)]
    texts = [f"{limit.value:.2f}%" for limit in limits]
    policy = Policy("10%", latency_target_ms=200)
    decider = policy.on(profile)
    loads = [(draw.randrange(1000, 16_000), Link(draw.uniform(1e5, 1e7), 0.5)) for _ in range(1000)]
    plan = profile.choose("10%")
    assert plan is not None
    context = [draw.randrange(128_000) for _ in range(CONTEXT)]
    with tempfile.TemporaryDirectory() as empty:
        for number in range(20):
            (Path(empty) / "pair" / f"v{number + 1:04d}").mkdir(parents=True)
        watch = ProfileStore(empty).watch(sender=None, receiver=None)
        calls: dict[str, Callable[[int], Any]] = {
            "choose": lambda i: profile.choose(limits[i % 1000], "qa", "f1", "made up"),
            "choose_text": lambda i: profile.choose(texts[i % 1000]),
            "decide": lambda i: decider.decide(loads[i % 1000][0], 0, loads[i % 1000][1]),
            "decide_waiting": lambda i: decider.decide(loads[i % 1000][0], 3, loads[i % 1000][1]),
            "policy_decide": lambda i: policy.decide(profile, loads[i % 1000][0], 0, loads[i % 1000][1]),
            "cache_key": lambda i: cache_key(plan, context, f"tenant {i}"),
            "refresh": lambda i: watch.refresh(),
        }
        found = {name: _percentiles(call, CALLS[name]) for name, call in calls.items()}
    for name, held in found.items():
        print(f"{name:15} {'  '.join(f'{key} {value:.2f}' for key, value in held.items())} microseconds")
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    machine = {"python": platform.python_version(), "machine": platform.machine(), "load_average": load}
    print(
        json.dumps(
            {"plans": len(profile.rows), "candidates": len(decider.allowed), "context": CONTEXT, **machine, "us": found}
        )
    )


def _percentiles(call: Callable[[int], Any], times: int) -> dict[str, float]:
    clock = time.perf_counter_ns
    for i in range(min(times, 1000)):
        call(i)
    taken = []
    for i in range(times):
        begun = clock()
        call(i)
        taken.append(clock() - begun)
    taken.sort()
    at = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    return {name: taken[int(share * times)] / 1000 for name, share in at.items()} | {"max": taken[-1] / 1000}


def _header() -> dict[str, Any]:
    model = dict.fromkeys(Fingerprint._fields, "a" * 64) | {"dtype": "bfloat16"}
    return {"sender": model, "receiver": model, "bounds": BOUND_METHOD, "created_at": "2026-01-01T00:00:00Z"}


def _rows(draw: random.Random) -> list[dict[str, Any]]:
    """Returns 496 groups and four more plans."""
    plans: list[tuple[str, int | None, int | None]] = [("layer_group", *group) for group in groups(LAYERS)]
    plans += [
        ("full_reuse", None, None),
        ("full_prefill", None, None),
        ("sender_alone", None, None),
        ("no_context", None, None),
    ]
    rows = []
    for strategy, start, stop in plans:
        count = stop - start if start is not None and stop is not None else LAYERS * (strategy == "full_prefill")
        loss = max(-0.02, 0.35 * (1 - count / LAYERS) ** 2 + draw.gauss(0, 0.02)) if count < LAYERS else 0.0
        rows.append(
            {
                **{"strategy": strategy, "start_layer": start, "stop_layer": stop, "params": None},
                **{"recomputed_layers": count, "total_layers": LAYERS, "recompute_fraction": count / LAYERS},
                **{"kv_bytes_per_token": (LAYERS - count) * 4096, "e_bytes_per_token": 8192 if start else 0},
                **{"task": "qa", "dataset": "made up", "metric": "f1", "n_planned": 50, "n_scored": 50},
                **{"quality": 0.8 * (1 - loss), "baseline_quality": 0.8, "loss_rel": loss, "loss_points": 80 * loss},
                **{"loss_rel_upper": loss + 0.05, "loss_points_upper": 80 * loss + 4},
            }
        )
    return rows


if __name__ == "__main__":
    main()
