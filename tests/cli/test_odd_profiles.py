"""Profiles that hold what no sweep writes, or scores at the edges: one sentence or a null, never a wrong answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvprofile.errors import BadInput
from tests.command import run
from tests.profile_factory import fail, measurements, publish_profile

QA = ("qa", "hotpotqa")


def scored(scale: float, offset: float = 0.0, metric: str = "f1") -> list[dict[str, Any]]:
    rows = [row for row in measurements(sources=[QA]) if row["metric"] == "f1"]
    for row in rows:
        row["metric"] = metric
        row["value"] = scale * row["value"] + offset
        row["baseline_value"] = scale * row["baseline_value"] + offset
    return rows


def test_where_full_prefill_scores_below_zero_only_points_decide(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, scored(1.0, -2.0, "bleurt"))
    for rule in ("point", "bound"):
        result = run("select", folder, "--max-loss", "5%", "--rule", rule)
        assert result.exit_code == 1
    assert "so give points" in run("pareto", folder, "--max-loss", "5%").output
    assert json.loads(run("select", folder, "--max-loss", "5pt").stdout)["selected"]["start_layer"] == 2


def test_scores_too_small_to_divide_by_have_no_relative_loss(tmp_path: Path) -> None:
    result = run("pareto", publish_profile(tmp_path, scored(5e-324)), "--max-loss", "5%", "--json")
    assert result.exit_code == 1
    plan = json.loads(result.stdout)["blocks"][0]["frontier"][0]
    assert plan["loss_rel"] is plan["loss_rel_upper"] is None
    assert "0 or less" in plan["not_known"]["loss_rel"]


def test_when_every_plan_failed_somewhere_there_is_no_frontier(tmp_path: Path) -> None:
    rows = measurements(sources=[QA])
    for row in rows:
        if row["sample_id"] == "s0":
            fail(row)
    folder = publish_profile(tmp_path, rows)
    assert "No plan within 5% among those scored on all samples" in run("pareto", folder, "--max-loss", "5%").output
    assert run("select", folder, "--max-loss", "5%").exit_code == 1
    assert run("report", folder).exit_code == 0


def test_a_built_in_metric_outside_its_range_is_not_certified(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, scored(3.0))
    assert "No plan can be certified" in run("pareto", folder, "--max-loss", "5%", "--rule", "certified").output


@pytest.mark.parametrize("rule", ["bound", "certified"])
def test_confidence_as_near_to_one_as_floats_come(tmp_path: Path, rule: str) -> None:
    folder = publish_profile(tmp_path)
    result = run("select", folder, "--max-loss", "30%", "--rule", rule, "--confidence", "0.9999999999999999")
    assert (result.exit_code, json.loads(result.stdout)["selected"]) == (1, None)


def test_all_tasks_means_all(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, sources=[QA, ("code", "stdlib")])
    for narrower in (["--metric", "f1"], ["--task", "qa"], ["--dataset", "stdlib"]):
        for command in ("pareto", "select"):
            result = run(command, folder, "--max-loss", "5%", "--all-tasks", *narrower)
            assert "every task and dataset" in str(result.exception)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("value", float("inf"), "a value that is no number"),
        ("metric", None, "without metric"),
        ("task", None, "without task"),
    ],
)
def test_measurements_that_cannot_be(tmp_path: Path, column: str, value: object, message: str) -> None:
    folder = publish_profile(tmp_path)
    table = pq.read_table(folder / "measurements.parquet")
    rows = table.to_pylist()
    rows[3][column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), folder / "measurements.parquet")
    for command in (["pareto", folder, "--max-loss", "5%"], ["report", folder], ["compare", folder, folder]):
        assert message in str(run(*command).exception), command


def test_measurements_without_rows(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    table = pq.read_table(folder / "measurements.parquet")
    pq.write_table(table.slice(0, 0), folder / "measurements.parquet")
    result = run("compare", folder, folder)
    assert isinstance(result.exception, BadInput)
    assert "holds no measurements" in str(result.exception)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"total_layers": 32000}, "32000 layers"), ({"quality": None}, "samples that were scored, and no quality")],
)
def test_rows_that_cannot_be(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = publish_profile(tmp_path)
    table = pq.read_table(folder / "profile.parquet")
    rows = [{**row, **change} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), folder / "profile.parquet")
    assert message in str(run("report", folder).exception)


def test_a_metric_whose_name_is_a_control_sequence_is_drawn_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = publish_profile(tmp_path, scored(1.0, metric="\x1b[31m漢"))
    assert run("report", folder, "--plots", tmp_path / "plots").exit_code == 0
    assert capfd.readouterr().err == ""
    assert "\x1b" not in (folder / "report.html").read_text("utf-8")
