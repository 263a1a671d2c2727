from __future__ import annotations

from pathlib import Path

import pytest

from kvprofile.errors import BadInput
from kvprofile.layers import PLAN_COLUMNS
from kvprofile.limits import parse_loss
from kvprofile.report.documents import plan_document
from kvprofile.report.frontier import _validated, frontier_blocks, plan_text
from kvprofile.store.reader import Profile, load
from tests.profile_factory import fail, measurements, publish_profile

SOURCES = [("qa", "hotpotqa"), ("code", "stdlib")]


@pytest.fixture(name="profile")
def _profile(tmp_path: Path) -> Profile:
    return load(publish_profile(tmp_path))


def test_frontier_and_choice(profile: Profile) -> None:
    (block,) = frontier_blocks(profile, limit=parse_loss("1%"))
    assert [plan_text(row) for row in block.frontier] == ["full_reuse", "layer 2 (1 of 6)", "layers 2–3 (2 of 6)"]
    assert block.selected is block.frontier[2]
    assert block.metric == "f1"


def test_coarser_grids_alone(profile: Profile) -> None:
    (block,) = frontier_blocks(profile, limit=parse_loss("1%"))
    assert {u: plan_text(row) for u, row in block.grids.items() if row} == {2: "layers 2–3 (2 of 6)"}
    assert block.grids[3] is None  # two units are all layers, one holds only one critical layer


def test_one_grid_has_its_own_frontier(profile: Profile) -> None:
    (block,) = frontier_blocks(profile, limit=parse_loss("25%"), granularity=3)
    assert [plan_text(row) for row in block.frontier] == ["full_reuse", "layers 0–2 (3 of 6)", "full_prefill"]
    assert block.selected is not None
    assert plan_text(block.selected) == "layers 0–2 (3 of 6)"
    assert block.grids == {}


def test_last_unit_may_be_shorter(tmp_path: Path) -> None:
    profile = load(publish_profile(tmp_path, layers=7, granularity=(1, 2)))
    (block,) = frontier_blocks(profile, granularity=2, limit=parse_loss("100%"))
    assert block.frontier
    (block,) = frontier_blocks(profile, granularity=3)
    assert plan_text(block.frontier[-1]) == "layers 0–5 (6 of 7)"


def test_a_grid_that_was_not_swept_is_refused(tmp_path: Path) -> None:
    profile = load(publish_profile(tmp_path, granularity=(3,)))
    with pytest.raises(BadInput, match=r"3 of the 6 groups of granularity 2.*--granularity 2|1 of the 6 groups"):
        frontier_blocks(profile, granularity=2)
    with pytest.raises(BadInput, match="granularity 0"):
        frontier_blocks(profile, granularity=0)


def test_other_confidence_makes_bounds_anew(profile: Profile) -> None:
    own = frontier_blocks(profile)[0].frontier[0]
    same = frontier_blocks(profile, confidence=0.95)[0].frontier[0]
    surer = frontier_blocks(profile, confidence=0.99)[0].frontier[0]
    assert own == same
    assert surer["loss_points_upper"] > own["loss_points_upper"]
    with pytest.raises(BadInput, match="between 0 and 1"):
        frontier_blocks(profile, confidence=95)


def test_one_block_per_task_and_dataset(tmp_path: Path) -> None:
    profile = load(publish_profile(tmp_path, sources=SOURCES))
    assert [(b.task, b.dataset) for b in frontier_blocks(profile)] == sorted(SOURCES)
    assert [b.task for b in frontier_blocks(profile, task="qa")] == ["qa"]
    assert [b.dataset for b in frontier_blocks(profile, dataset="stdlib")] == ["stdlib"]
    assert {b.metric for b in frontier_blocks(profile, metric="exact_match")} == {"exact_match"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"task": "qq"}, "no task"),
        ({"dataset": "x"}, "no dataset"),
        ({"metric": "exactmatch"}, r'no metric "exactmatch" \(did you mean "exact_match"'),
    ],
)
def test_what_the_profile_has_not_is_named(profile: Profile, asked: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        frontier_blocks(profile, **asked)  # type: ignore[arg-type]


def test_incomplete_plans_are_neither_on_the_frontier_nor_chosen(tmp_path: Path) -> None:
    rows = measurements(sources=SOURCES[:1])
    for row in rows:
        if (row["sample_id"], row["start_layer"], row["stop_layer"]) == ("s0", 2, 4):
            fail(row)
    (block,) = frontier_blocks(load(publish_profile(tmp_path, rows)), limit=parse_loss("1%"))
    assert block.selected is not None
    assert plan_text(block.selected) == "layers 1–3 (3 of 6)"
    assert block.frontier[-1] is block.selected


def test_measured_and_modelled_savings_stay_apart(profile: Profile) -> None:
    reuse, group, *_ = (plan_document(row) for row in frontier_blocks(profile)[0].frontier)
    assert (reuse["modelled_prefill_saved"], reuse["measured_prefill_saved"]) == (1.0, 1.0)
    assert group["modelled_prefill_saved"] == pytest.approx(5 / 6)
    assert group["measured_prefill_saved"] is None


@pytest.mark.parametrize("unit", ["%", "pt"])
def test_a_validated_loss_that_no_float_holds_is_not_known(tmp_path: Path, unit: str) -> None:
    (block,) = frontier_blocks(load(publish_profile(tmp_path, samples=2)))
    plan = {**dict.fromkeys(PLAN_COLUMNS), "strategy": "full_reuse", "unit": unit, "loss": 10**400}
    said = {"task": "qa", "metric": block.metric, "dataset": "fresh", "samples": 3, "plans": [plan]}
    assert list(_validated([said], block).values()) == [["fresh (3 samples): not known"]]
