from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kvprofile.analysis.frontier import frontier
from kvprofile.analysis.profile_table import build_profile_rows, set_bounds
from kvprofile.analysis.scores import all_scores
from kvprofile.store.schema import MEASUREMENTS, PROFILE
from tests.profile_factory import cost, fail, group_rows, measurements, plans

QA = ("qa", "hotpotqa")
LAYERS = 6
GRID = (1, 2, 3)


def build(rows: list[dict[str, Any]], confidence: float = 0.95) -> pa.Table:
    return build_profile_rows(
        pa.Table.from_pylist(rows, schema=MEASUREMENTS),
        [cost(plan, LAYERS, GRID, [QA]) for plan in plans(LAYERS, GRID)],
        n_planned={QA: 8},
        confidence=confidence,
        resamples=100,
        seed=0,
    )


@pytest.fixture(name="rows")
def _rows() -> list[dict[str, Any]]:
    return measurements(sources=[QA])


def of(rows: list[dict[str, Any]], strategy: str, metric: str = "f1") -> dict[str, Any]:
    return next(r for r in rows if (r["strategy"], r["metric"]) == (strategy, metric))


def select(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def test_means_and_losses_are_those_of_the_samples(rows: list[dict[str, Any]]) -> None:
    table = build(rows)
    assert table.schema == PROFILE
    base = np.mean([r["value"] for r in select(rows, strategy="full_prefill", metric="f1")])
    half = group_rows(table, 2, 3)[0]
    assert half["metric"] == "f1"
    assert half["quality"] == pytest.approx(0.8 * base)
    assert half["baseline_quality"] == pytest.approx(base)
    assert half["loss_rel"] == pytest.approx(0.2)
    assert half["loss_points"] == pytest.approx(20 * base)
    assert half["loss_rel_upper"] > 0.2, "every sample loses the same share, but so few exclude little"
    assert half["loss_points_upper"] > half["loss_points"]
    assert half["floor_quality"] == pytest.approx(0.1 * base)
    assert half["sender_quality"] == pytest.approx(0.4 * base)
    assert half["gap_recovered"] == pytest.approx(0.7 / 0.9)
    assert half["mean_kl"] == pytest.approx(0.2)
    assert half["top1_agreement"] == pytest.approx(0.8)
    assert half["exact_match_rate"] == 0.0
    assert half["recompute_fraction"] == pytest.approx(1 / 6)
    assert group_rows(table, 2, 4)[0]["exact_match_rate"] == 1.0


def test_an_error_is_not_scored_and_takes_the_plan_off_the_frontier(rows: list[dict[str, Any]]) -> None:
    assert group_rows(build(rows), 2, 4)[0]["on_frontier"]
    for r in select(rows, start_layer=2, stop_layer=4, sample_id="s3"):
        fail(r)
    failed = group_rows(build(rows), 2, 4)[0]
    assert (failed["n_planned"], failed["n_scored"]) == (8, 7)
    assert not failed["on_frontier"]
    others = [r["value"] for r in select(rows, strategy="full_prefill", metric="f1") if r["sample_id"] != "s3"]
    assert failed["baseline_quality"] == pytest.approx(np.mean(others))
    assert failed["loss_rel"] == pytest.approx(0.0)


def test_a_value_beside_an_error_does_not_count(rows: list[dict[str, Any]]) -> None:
    for r in select(rows, strategy="full_reuse", sample_id="s3"):
        r["status"] = "error"
    assert of(build(rows).to_pylist(), "full_reuse")["n_scored"] == 7


def test_a_plan_that_was_never_measured_is_a_row_of_nulls(rows: list[dict[str, Any]]) -> None:
    table = build([r for r in rows if r["start_layer"] != 5])
    for row in group_rows(table, 5, 6):
        assert row["n_scored"] == 0
        for name in ("quality", "loss_rel", "loss_points", "loss_rel_upper", "mean_kl", "exact_match_rate"):
            assert row[name] is None


def test_baseline_zero_has_no_relative_loss_but_points(rows: list[dict[str, Any]]) -> None:
    for r in select(rows, strategy="full_prefill"):
        r["value"] = 0.0
    row = of(build(rows).to_pylist(), "full_reuse")
    assert row["loss_rel"] is None
    assert row["loss_rel_upper"] is None
    assert row["loss_points"] < 0


def test_no_gap_to_recover_is_null(rows: list[dict[str, Any]]) -> None:
    full = {r["sample_id"]: r["value"] for r in select(rows, strategy="full_prefill", metric="f1")}
    for r in select(rows, strategy="no_context", metric="f1"):
        r["value"] = full[r["sample_id"]] - 0.0009
    assert of(build(rows).to_pylist(), "full_reuse")["gap_recovered"] is None


def test_without_token_ids_no_exact_match_rate_and_without_kl_no_mean(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        r["output_token_ids"] = r["kl"] = None
    for row in build(rows).to_pylist():
        assert row["exact_match_rate"] is None
        assert row["mean_kl"] is None


def test_frontier_takes_full_prefill_before_the_equal_group_and_never_the_reference_arms(
    rows: list[dict[str, Any]],
) -> None:
    for r in select(rows, strategy="no_context"):
        r["value"] = 1.0
    table = [r for r in build(rows).to_pylist() if r["metric"] == "f1"]
    assert not of(table, "no_context")["on_frontier"]
    assert not of(table, "sender_alone")["on_frontier"]
    assert of(table, "full_reuse")["on_frontier"]
    candidates = [r for r in table if r["strategy"] not in ("no_context", "sender_alone")]
    expected = frontier(*(np.array([r[n] for r in candidates]) for n in ("recompute_fraction", "quality")))
    assert [r["on_frontier"] for r in candidates] == expected.tolist()
    assert not group_rows(build(rows), 0, LAYERS)[0]["on_frontier"]


def test_order_of_the_measurements_moves_nothing(rows: list[dict[str, Any]]) -> None:
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    shuffled.sort(key=lambda r: r["metric"] != "f1")  # the first metric stays the first
    assert build(shuffled).equals(build(rows))


def test_chunked_measurements_and_sliced_lists_give_the_same(rows: list[dict[str, Any]]) -> None:
    whole = pa.Table.from_pylist(rows, schema=MEASUREMENTS)
    costs = [cost(plan, LAYERS, GRID, [QA]) for plan in plans(LAYERS, GRID)]
    options: dict[str, Any] = {"n_planned": {QA: 8}, "confidence": 0.9, "resamples": 50, "seed": 1}
    pieces = pa.concat_tables([whole.slice(0, 11), whole.slice(11, 200), whole.slice(211)])
    assert build_profile_rows(pieces, costs, **options).equals(build_profile_rows(whole, costs, **options))


def test_same_sample_ids_in_two_datasets_stay_apart() -> None:
    other = ("qa", "other")
    rows = measurements(sources=[QA], seed=0) + measurements(sources=[other], seed=1)
    table = build_profile_rows(
        pa.Table.from_pylist(rows, schema=MEASUREMENTS),
        [cost(plan, LAYERS, GRID, [QA, other]) for plan in plans(LAYERS, GRID)],
        n_planned={QA: 8, other: 8},
        confidence=0.95,
        resamples=50,
        seed=0,
    ).to_pylist()
    qualities = {r["dataset"]: r["quality"] for r in select(table, strategy="full_prefill", metric="f1")}
    for source in (QA, other):
        values = [r["value"] for r in select(rows, dataset=source[1], strategy="full_prefill", metric="f1")]
        assert qualities[source[1]] == pytest.approx(np.mean(values))


def test_bounds_set_anew_equal_bounds_built_so(rows: list[dict[str, Any]]) -> None:
    again = build(rows).to_pylist()
    for scores in all_scores(pa.Table.from_pylist(rows, schema=MEASUREMENTS)):
        own = [row for row in again if row["metric"] == scores.metric]
        set_bounds(own, scores, confidence=0.6, resamples=100, seed=0)
    assert again == build(rows, confidence=0.6).to_pylist()
    assert again != build(rows).to_pylist()


def test_full_prefill_loses_nothing_for_sure(rows: list[dict[str, Any]]) -> None:
    full = of(build(rows).to_pylist(), "full_prefill")
    assert (full["loss_rel_upper"], full["loss_points_upper"]) == (0.0, 0.0)
