"""Losses of a chain from scores given by hand."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from kvprofile.analysis.chain import (
    FULL,
    FULL_REUSE,
    MIDDLE_FULL,
    NO_CONTEXT,
    Arm,
    arms,
    chain,
    direct,
    first_hop,
    last_hop,
)
from kvprofile.errors import BadInput
from kvprofile.layers import PLAN_COLUMNS, LayerRange
from kvprofile.report.chain import chain_document, print_chain
from kvprofile.store.schema import MEASUREMENTS

FIRST, SECOND, THIRD = LayerRange(0, 2), LayerRange(1, 3), LayerRange(2, 3)
SCORES: dict[Arm, list[float | None]] = {
    FULL: [1.0, 0.8, 0.6, 0.8],
    NO_CONTEXT: [0.0, 0.0, 0.0, 0.0],
    FULL_REUSE: [0.1, 0.1, 0.1, 0.1],
    direct(SECOND): [0.9, 0.7, 0.5, 0.7],
    last_hop(SECOND): [1.0, 0.6, 0.6, 0.6],
    MIDDLE_FULL: [0.5, 0.5, 0.5, 0.7],
    first_hop(FIRST): [0.5, 0.4, 0.2, 0.7],
    chain(FIRST, SECOND): [0.6, 0.4, 0.4, 0.2],
}
HEADER: dict[str, Any] = {
    "sender": {"name": "a"},
    "chain": {"middle": {"name": "b"}},
    "receiver": {"name": "c", "layers": 3},
    "references": "data",
    "confidence": 0.9,
    "resamples": 500,
    "seed": 0,
}


def table(scores: dict[Arm, list[float | None]]) -> pa.Table:
    rows = [
        {
            **dict.fromkeys(MEASUREMENTS.names),
            **{"sample_id": str(i), "task": "qa", "dataset": "d", "metric": "f1"},
            **dict(zip(PLAN_COLUMNS, arm.plan.key, strict=True)),
            **{"value": value, "status": "error" if value is None else "ok"},
        }
        for arm, values in scores.items()
        for i, value in enumerate(values)
    ]
    return pa.Table.from_pylist(rows, schema=MEASUREMENTS)


def block(scores: dict[Arm, list[float | None]]) -> dict[str, Any]:
    (found,) = chain_document(HEADER, table(scores), [FIRST], [SECOND])["blocks"]
    return dict(found)


def test_losses_are_against_the_full_prefill_of_the_model_that_answers() -> None:
    shown = {(one["path"], one["strategy"]): one for one in block(SCORES)["arms"]}
    baselines = {path: one["baseline_quality"] for path, one in shown.items()}
    assert baselines == {key: pytest.approx(0.55 if key[0].endswith("B") else 0.8) for key in shown}
    assert shown["A→B", "layer_group"]["loss_points"] == pytest.approx(10)
    assert shown["A→C", "layer_group"]["loss_points"] == pytest.approx(10)
    assert shown["B→C", "layer_group"]["loss_points"] == pytest.approx(10)
    assert shown["A→B→C", "chain"]["loss_points"] == pytest.approx(40)
    assert shown["A→B→C", "chain"]["loss_rel"] == pytest.approx(0.5)
    for own in (shown["B", "full_prefill"], shown["C", "full_prefill"]):
        assert (own["loss_points"], own["loss_points_lower"], own["loss_points_upper"]) == (0, 0, 0)


def test_a_chain_beside_its_hops() -> None:
    (one,) = block(SCORES)["chains"]
    assert one["added_points"] == pytest.approx(20)
    for name, points in {"more_than_direct": 30, "more_than_last_hop": 30, "more_than_added": 20}.items():
        found = one[name]
        assert found["points"] == pytest.approx(points), name
        assert found["lower"] < points < found["upper"], name
        assert found["upper"] <= (300 if name == "more_than_added" else 100)


def test_bounds_of_what_is_alike_reckon_with_the_unseen() -> None:
    alike = {arm: [0.5, 0.5] for arm in SCORES}
    (one,) = block(alike)["chains"]
    direct_, added = one["more_than_direct"], one["more_than_added"]
    assert direct_["points"] == added["points"] == one["added_points"] == 0
    assert direct_["lower"] == pytest.approx(-direct_["upper"])
    assert direct_["upper"] > 20, "two samples cannot exclude that a third loses all"
    assert added["upper"] == pytest.approx(3 * direct_["upper"])


def test_samples_that_failed_are_left_out_of_what_they_are_part_of() -> None:
    scores = {**SCORES, first_hop(FIRST): [None, 0.4, 0.2, 0.7], direct(SECOND): [None] * 4}
    scores[chain(FIRST, SECOND)] = [0.6, 0.4, 0.4, None]
    found = block(scores)
    (one,) = found["chains"]
    assert one["more_than_direct"] == {"points": None, "lower": None, "upper": None}
    assert one["more_than_last_hop"]["points"] == pytest.approx(80 / 3)
    assert one["added_points"] == pytest.approx(30)
    assert one["more_than_added"]["points"] == pytest.approx(0)
    console = Console(file=io.StringIO(), width=200)
    print_chain(console, chain_document(HEADER, table(scores), [FIRST], [SECOND]))
    assert isinstance(console.file, io.StringIO)
    assert "Beyond chance, 0 of 1 chain lost" in console.file.getvalue()


@pytest.mark.parametrize("held", [0.0, 1.0])
def test_a_difference_beyond_chance_is_counted(held: float) -> None:
    many: dict[Arm, list[float | None]] = {arm: [0.5] * 60 for arm in SCORES}
    many[chain(FIRST, SECOND)] = [held] * 60
    console = Console(file=io.StringIO(), width=200)
    print_chain(console, chain_document(HEADER, table(many), [FIRST], [SECOND]))
    assert isinstance(console.file, io.StringIO)
    assert "Beyond chance, 1 of 1 chain lost" in console.file.getvalue()


def test_of_several_chains_it_says_that_each_is_judged_by_itself() -> None:
    many: dict[Arm, list[float | None]] = {arm: [0.5] * 60 for arm in arms([FIRST], [SECOND, THIRD])}
    many[chain(FIRST, SECOND)] = [0.0] * 60
    console = Console(file=io.StringIO(), width=200)
    print_chain(console, chain_document(HEADER, table(many), [FIRST], [SECOND, THIRD]))
    assert isinstance(console.file, io.StringIO)
    assert "each judged by itself with no allowance for their number, 1 of 2 chains lost" in console.file.getvalue()


def test_without_a_baseline_there_is_nothing_to_tell() -> None:
    with pytest.raises(BadInput, match="no answer on d could be scored"):
        block({**SCORES, FULL: [None] * 4})
