"""Which E to keep: against every choice on small cases, and fast enough for large models."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvprofile.analysis.e_storage import allowed, kept_starts
from kvprofile.layers import groups

E_BYTES = 128


def rows(layers: int, quality: Any, plans: Sequence[tuple[int, int]] | None = None) -> list[dict[str, Any]]:
    """Full reuse, full prefill and groups, of which `quality(start, stop)` tells the score."""
    found: list[tuple[str, int | None, int | None]] = [
        ("full_reuse", None, None),
        *(("layer_group", *group) for group in plans or groups(layers)),
        ("full_prefill", None, None),
        ("no_context", None, None),
    ]
    made = []
    for strategy, start, stop in found:
        count = layers * (strategy == "full_prefill") if start is None or stop is None else stop - start
        made.append(
            {
                **{"strategy": strategy, "start_layer": start, "stop_layer": stop, "total_layers": layers},
                **{"recomputed_layers": count, "recompute_fraction": count / layers, "n_planned": 3, "n_scored": 3},
                **{"quality": quality(start or 0, stop or count), "e_bytes_per_token": E_BYTES if start else 0},
            }
        )
    made[-1]["quality"] = 2.0  # an arm to compare with serves nobody
    return made


def objective(held: Sequence[dict[str, Any]], kept: Sequence[int]) -> list[float]:
    """Best quality per number of recomputed layers, by the definition."""
    plans = [row for row in held if row["strategy"] != "no_context" and allowed(row, kept)]
    least = min(row["recomputed_layers"] for row in plans if not row["start_layer"])
    return [
        max(row["quality"] for row in plans if row["recomputed_layers"] <= level)
        for level in range(least, held[0]["total_layers"] + 1)
    ]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 5])
def test_no_other_choice_is_better(seed: int, most: int) -> None:
    draw = random.Random(seed)
    layers = draw.choice([3, 6, 8])
    scores = {group: draw.choice([draw.random(), 0.5, 0.9]) for group in groups(layers)}
    held = rows(layers, lambda start, stop: scores.get((start, stop), 0.3))
    found = kept_starts(held, most)
    assert found is not None
    every = range(1, layers)
    choices = [kept for n in range(most + 1) for kept in itertools.combinations(every, n)]
    reached = {kept: mean(objective(held, kept)) for kept in choices}
    best = max(reached.values())
    assert set(found.starts) <= set(every)
    assert len(found.starts) <= most
    if most <= 4:
        assert found.exact
        assert reached[found.starts] == pytest.approx(best, abs=1e-9)
        fewest = min(len(kept) for kept, value in reached.items() if value >= best - 1e-9)
        assert len(found.starts) == fewest
    else:
        four = max(value for kept, value in reached.items() if len(kept) <= 4)
        assert four - 1e-9 <= reached[found.starts] <= best + 1e-9
        assert found.exact == (len(found.starts) <= 4)
    whole, own = objective(held, tuple(every)), objective(held, found.starts)
    lost = [100 * (a - b) for a, b in zip(whole, own, strict=True)]
    assert found.lost_points_mean == pytest.approx(mean(lost), abs=1e-9)
    assert found.lost_points_worst == pytest.approx(max(lost), abs=1e-9)
    assert lost[found.worst_at] == pytest.approx(max(lost), abs=1e-9)


def test_a_case_that_is_plain() -> None:
    """Quality is the share of three critical layers that are recomputed; groups from 1 and from 5 are worth most."""
    held = rows(8, lambda start, stop: sum(start <= layer < stop for layer in (1, 5, 6)) / 3)
    one, two = kept_starts(held, 1), kept_starts(held, 2)
    assert one is not None
    assert two is not None
    # From 5, two layers reach two of the three; all three then take layers 0 to 6, seven instead of six from 1.
    assert (one.starts, two.starts) == ((5,), (1, 5))
    assert two.frontier_starts == (1, 5)
    assert (two.lost_points_worst, two.e_bytes_per_token, two.e_bytes_saved_per_token) == (0, 2 * E_BYTES, 0)
    assert one.lost_points_worst == pytest.approx(100 / 3)
    assert one.worst_at == 6
    assert one.e_bytes_saved_per_token == E_BYTES


def test_what_does_not_help_is_not_kept() -> None:
    found = kept_starts(rows(6, lambda start, stop: 0.5), 3)
    assert found is not None
    assert (found.starts, found.exact, found.e_bytes_per_token) == ((), True, 0)


def test_plans_that_cannot_serve_do_not_count() -> None:
    held = rows(6, lambda start, stop: 0.9 if start == 3 else 0.5)
    for row in held:
        row["n_scored"] = 2 if row["start_layer"] == 3 else 3
    found = kept_starts(held, 2)
    assert found is not None
    assert found.starts == ()
    assert kept_starts([row for row in held if row["start_layer"]], 2) is None


def test_a_large_model_takes_seconds() -> None:
    draw = random.Random(0)
    scores = {group: draw.random() + group.length / 80 for group in groups(80)}
    held = rows(80, lambda start, stop: scores.get((start, stop), 0.0))
    begun = time.process_time()
    found = kept_starts(held, 4)
    assert time.process_time() - begun < 10
    assert found is not None
    assert len(found.starts) == 4
    assert found.lost_points_worst > 0
