from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvprofile.cli import pareto, show, store
from kvprofile.errors import BadInput
from tests.profile_factory import fail, header, measurements, publish_profile

QA = [("qa", "hotpotqa")]
HOSTILE = "[red]x[/red]\x1b[2J"


def run(*args: object) -> Result:
    app = typer.Typer()
    for command in (pareto, show, store):
        command.register(app)
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    return publish_profile(tmp_path / "outputs")


def test_pareto_table_and_answer(folder: Path) -> None:
    result = run("pareto", folder, "--max-loss", "1%")
    assert result.exit_code == 0, result.output
    for text in ("qa / hotpotqa, f1, 8 of 8 samples", "full_prefill 0.", "layers 2–3 (2 of 6)", "one-sided at 95%"):
        assert text in result.output
    assert "Cheapest plan measured within 1%: layers 2–3 (2 of 6), f1 0." in result.output
    assert "67% of the prefill FLOPs saved (modelled)" in result.output
    assert "Granularity 2 alone (6 groups) would have selected layers 2–3 (2 of 6)" in result.output
    assert "Granularity 3 alone (3 groups) would have selected no plan." in result.output
    assert f"profile: {folder}" in result.output


def test_pareto_without_max_loss_answers_nothing(folder: Path) -> None:
    result = run("pareto", folder)
    assert result.exit_code == 0
    assert "Cheapest" not in result.output
    assert "would have selected" not in result.output


def test_pareto_says_when_the_bound_is_above_the_limit(folder: Path) -> None:
    assert "upper bound lies above the limit" in run("pareto", folder, "--max-loss", "15pt").output
    assert "upper bound lies above the limit" not in run("pareto", folder, "--max-loss", "100%").output


def test_pareto_exits_1_when_no_plan_is_within(folder: Path) -> None:
    result = run("pareto", folder, "--max-loss", "1pt", "--granularity", 3)
    assert result.exit_code == 1
    assert "No plan of granularity 3 that saves prefill loses at most 1 point: use full_prefill" in result.output
    document = json.loads(run("pareto", folder, "--max-loss", "1pt", "--granularity", 3, "--json").stdout)
    assert document["blocks"][0]["selected"] is None


def test_pareto_json_is_one_document_either_way(folder: Path) -> None:
    result = run("pareto", folder, "--max-loss", "1%", "--json")
    assert result.stdout == run("pareto", folder, "--max-loss", "1%", "--format", "json").stdout
    document = json.loads(result.stdout)
    assert document["profile_id"] == header()["profile_id"]
    (block,) = document["blocks"]
    assert (block["selected"]["start_layer"], block["selected"]["stop_layer"]) == (2, 4)
    assert block["selected_by_granularity"]["3"] is None
    assert block["max_loss"] == "1%"


def test_pareto_csv(folder: Path) -> None:
    result = run("pareto", folder, "--max-loss", "1%", "--format", "csv")
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert [row["selected"] for row in rows] == ["False", "False", "True"]
    assert rows[1]["measured_prefill_saved"] == ""
    assert float(rows[2]["loss_points"]) == pytest.approx(0)


def test_pareto_baseline_zero_points_to_points(tmp_path: Path) -> None:
    rows = measurements(sources=QA)
    for row in rows:
        row["value"] = 0.0
    result = run("pareto", publish_profile(tmp_path, rows), "--max-loss", "1%")
    assert result.exit_code == 1
    assert "full_prefill scores 0, so give points" in result.output


def test_pareto_bad_input_is_raised_as_such(folder: Path) -> None:
    for args in (("--max-loss", "1"), ("--metric", "f2"), ("--granularity", 0), ("--confidence", 2)):
        assert isinstance(run("pareto", folder, *args).exception, BadInput)


def test_show(tmp_path: Path) -> None:
    rows = measurements(sources=QA)
    fail(rows[-1], error="out of\nmemory")
    folder = publish_profile(tmp_path, rows)
    document = json.loads(run("show", folder, "--json").stdout)
    assert document["plans"] == {"total": 25, "groups_by_granularity": {"1": 21, "2": 6, "3": 3}}
    assert document["samples"] == {"total": 8, "truncated": 1, "most_truncated_tokens": 7}
    assert document["errors"] == {"total": 1, "most_frequent": [{"error": "out of\nmemory", "count": 1}]}
    assert document["baselines"][0]["arms"]["full_prefill"]["n_scored"] == 8
    assert {f["name"] for f in document["files"]} >= {"profile.parquet", "samples.parquet", "recipe.yaml"}
    text = run("show", folder).output
    for part in (
        "receiver receiver",
        "weights aaaaaaaaaaaa,",
        "21 groups of granularity 1",
        "1 × out of\\nmemory",
        "1 truncated",
    ):
        assert part in text
    assert "a" * 13 not in text


def test_show_of_the_profile_alone(folder: Path) -> None:
    for name in ("measurements.parquet", "samples.parquet", "environment.json"):
        (folder / name).unlink()
    document = json.loads(run("show", folder, "--json").stdout)
    assert (document["samples"], document["errors"], document["environment"]) == (None, None, None)
    assert run("show", folder).exit_code == 0


def test_hostile_names_are_printed_as_text(tmp_path: Path) -> None:
    sender = {**header()["sender"], "name": HOSTILE, "revision": HOSTILE}
    folder = publish_profile(tmp_path, sources=[(HOSTILE, HOSTILE)], sender=sender, device=HOSTILE)
    for command in (("pareto", folder), ("show", folder), ("store", "ls", "--out", tmp_path)):
        output = run(*command).output
        assert "\x1b" not in output
        assert "[red]" in output
    assert "\x1b" not in run("pareto", folder, "--format", "csv").output


def test_store_ls(folder: Path) -> None:
    assert str(folder) in run("store", "ls", "--out", folder.parent.parent).output.replace("\n", "")
    (entry,) = json.loads(run("store", "ls", "--out", folder.parent.parent, "--json").stdout)
    assert (entry["path"], entry["receiver"], entry["problem"]) == (str(folder), "receiver", None)


def test_store_ls_of_nothing_is_not_an_error(tmp_path: Path) -> None:
    result = run("store", "ls", "--out", tmp_path / "nowhere")
    assert (result.exit_code, "no profiles in" in result.output) == (0, True)
    assert json.loads(run("store", "ls", "--out", tmp_path, "--json").stdout) == []


@pytest.mark.parametrize("command", [("pareto",), ("show",), ("store", "ls")])
def test_help_shows_an_example(command: tuple[str, ...]) -> None:
    assert f"Example: kvprofile {' '.join(command)}" in run(*command, "--help").output
