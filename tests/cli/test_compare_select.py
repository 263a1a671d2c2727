"""`kvprofile compare` and `kvprofile select`, and the rules of `pareto`, on published made-up profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import document, run
from tests.profile_factory import measurements, publish_profile

QA, CODE = ("qa", "hotpotqa"), ("code", "stdlib")


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_profile(tmp_path_factory.mktemp("store"), samples=300)


@pytest.fixture(name="tasks", scope="module")
def _tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Code loses wherever layer 4 is not recomputed, too."""
    rows = measurements(sources=[QA, CODE])
    for row in rows:
        group = range(row["start_layer"], row["stop_layer"]) if row["start_layer"] is not None else ()
        if row["task"] == "code" and row["strategy"] == "layer_group" and 4 not in group:
            row["value"] *= 0.5
    return publish_profile(tmp_path_factory.mktemp("store"), rows, sources=[QA, CODE])


def test_select_is_one_document_and_says_how_sure(folder: Path) -> None:
    found = document("select", folder, "--max-loss", "5%")
    assert found["selected"] == {
        "strategy": "layer_group",
        "start_layer": 2,
        "stop_layer": 4,
        "params": None,
        "recompute_fraction": pytest.approx(1 / 3),
    }
    assert found["sureness"] == "bounded at 95%, for this plan by itself"
    assert found["tasks"][0]["plan"]["loss_rel_upper"] > found["tasks"][0]["plan"]["loss_rel"]
    assert (
        run("select", folder, "--max-loss", "5%").stdout == run("select", folder, "--max-loss", "5%", "--json").stdout
    )


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (["--rule", "certified"], "certified at 95%, for all 21 plans at once"),
        (["--rule", "certified", "--split", "0.5"], "certified at 95%"),
        (["--rule", "bound", "--split", "0.5"], "bounded at 95%, on samples that did not choose it"),
    ],
)
def test_select_by_every_rule(folder: Path, rule: list[str], words: str) -> None:
    found = document("select", folder, "--max-loss", "6%", *rule)
    assert found["plan"] == "layers 2–3 (2 of 6)"
    assert found["sureness"] == words


def test_select_says_full_prefill_and_exits_1(folder: Path) -> None:
    result = run("select", folder, "--max-loss", "0.5%", "--rule", "bound")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["selected"], found["plan"]) == (None, "full_prefill")
    assert found["tasks"][0]["samples_needed"][0]["samples"] > 300


def test_one_plan_for_all_tasks(tasks: Path) -> None:
    assert document("select", tasks, "--max-loss", "5%", "--task", "qa")["plan"] == "layers 2–3 (2 of 6)"
    assert document("select", tasks, "--max-loss", "5%", "--task", "code")["plan"] == "layers 2–4 (3 of 6)"
    both = document("select", tasks, "--max-loss", "5%", "--all-tasks")
    assert both["plan"] == "layers 2–4 (3 of 6)"
    assert [one["task"] for one in both["tasks"]] == ["code", "qa"]
    result = run("pareto", tasks, "--max-loss", "5%", "--all-tasks")
    assert (
        "Cheapest plan measured within 5% on all tasks: layers 2–4 (3 of 6); loss on code / stdlib 0.0%"
        in result.output
    )
    assert document("pareto", tasks, "--max-loss", "5%", "--all-tasks")["selected_on_all_tasks"][0]["start_layer"] == 2
    none = run("select", tasks, "--max-loss", "5%", "--all-tasks", "--rule", "bound")
    assert none.exit_code == 1
    assert "--all-tasks" in str(run("select", tasks, "--max-loss", "5%").exception)


def test_pareto_tells_the_rules_apart(folder: Path) -> None:
    measured, bounded, certified, split = (
        run("pareto", folder, "--max-loss", "6%", *rule).output
        for rule in ([], ["--rule", "bound"], ["--rule", "certified"], ["--rule", "bound", "--split", "0.5"])
    )
    assert "Cheapest plan measured within 6%: layers 2–3" in measured
    assert "Cheapest plan bounded within 6% at 95%: layers 2–3" in bounded
    assert "--split 0.5 chooses on one half" in bounded
    assert "Cheapest plan certified within 6% at 95% for all 21 plans at once: layers 2–3" in certified
    assert "certified at most" in certified
    assert "chosen on 150 of the samples, all numbers are of the 150 others" in split
    assert "f1, 150 of 150 samples" in split


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rule", "bounds"], 'did you mean "bound"'),
        (["--split", "1"], "--split 1.0 is not between 0 and 1"),
        (["--all-tasks", "--split", "0.5"], "no --split"),
    ],
)
def test_bad_input(folder: Path, words: list[str], message: str) -> None:
    for command in ("select", "pareto"):
        assert message in str(run(command, folder, "--max-loss", "5%", *words).exception)


def test_worthless_plans_are_called_so(tmp_path: Path) -> None:
    rows = measurements(sources=[QA])
    for row in rows:
        if row["strategy"] == "full_reuse":
            row["value"] = 0.0
    output = run("pareto", publish_profile(tmp_path, rows)).output
    assert "full_reuse is worthless: it scores no better than no_context and sender_alone." in output


def test_compare_pairs_samples_and_says_what_moved(tmp_path: Path) -> None:
    before = publish_profile(tmp_path)
    rows = measurements(sources=[QA])
    for row in rows:
        if (row["start_layer"], row["stop_layer"]) == (2, 3) and row["metric"] == "f1":
            row["value"] += 0.1 if row["sample_id"] != "s0" else 0.0
        if (row["start_layer"], row["stop_layer"]) == (2, 4):
            row["value"] = 0.0
    after = publish_profile(tmp_path, rows, kvprofile_version="0.2.0", torch="2.14.0")
    found = document("compare", before, after, "--max-loss", "5%")
    assert found["header"]["torch"] == ["2.13.0", "2.14.0"]
    (block,) = found["blocks"]
    moved = {one["plan"]: one for one in block["moved"]}
    better, lost, same = moved["layer 2 (1 of 6)"], moved["layers 2–3 (2 of 6)"], moved["full_prefill"]
    assert better["difference_points"] == pytest.approx(10 * 7 / 8)
    assert better["lower"] < better["difference_points"] < better["upper"]
    assert same["lower"] < 0 < same["upper"], "eight samples cannot exclude that it moved"
    assert (better["on_frontier"], better["shared_samples"]) == ([True, True], 8)
    assert lost["on_frontier"] == [True, False]
    assert same["difference_points"] == 0
    old, new = block["selected"]
    assert (old["start_layer"], old["stop_layer"]) == (2, 4)
    assert new["recomputed_layers"] == 3
    text = run("compare", before, after, "--max-loss", "5%").output
    assert "leaves" in text
    assert "selected within 5% (rule point): layers 2–3 (2 of 6), loss 0.0% → " in text


def test_samples_of_other_contexts_are_not_paired(tmp_path: Path) -> None:
    before, after = publish_profile(tmp_path / "a"), publish_profile(tmp_path / "b", sources=[("qa", "musique")])
    (block,) = document("compare", before, after)["blocks"]
    assert block["datasets"] == ["hotpotqa", "musique"]
    for one in block["moved"]:
        assert (one["shared_samples"], one["difference_points"], one["lower"]) == (0, None, None)
        assert one["before"] is not None
    other = publish_profile(tmp_path / "c", sources=[CODE])
    assert "no task and metric in common" in str(run("compare", before, other).exception)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"references": "none"}, "compare profiles of one kind"),
        ({"metrics": ["f1@2", "exact_match@1"]}, "other versions of the metric f1"),
    ],
)
def test_scores_of_two_kinds_are_not_compared(tmp_path: Path, header: dict[str, Any], message: str) -> None:
    before, after = publish_profile(tmp_path / "a"), publish_profile(tmp_path / "b", **header)
    assert message in str(run("compare", before, after).exception)


def test_a_split_does_not_select_what_fails_on_the_others(tmp_path: Path) -> None:
    """By the measured loss, too: the plan is good on the samples that choose and loses all on the others."""
    from kvprofile.analysis.decision import chosen_samples

    rows = measurements(sources=[QA], samples=40)
    chooses = dict(zip(sorted({row["sample_id"] for row in rows}), chosen_samples(40, 0.5, 0), strict=True))
    for row in rows:
        if row["strategy"] == "full_reuse":
            row["value"] = row["baseline_value"] if chooses[row["sample_id"]] else 0.0
    result = run("pareto", publish_profile(tmp_path, rows, samples=40), "--max-loss", "5%", "--split", "0.5")
    assert result.exit_code == 1
    assert "No plan: full_reuse is within 5% on the samples that chose it, but measures 100.0%" in result.output
    single = publish_profile(tmp_path / "one", samples=1)
    assert "two samples or more" in str(run("pareto", single, "--max-loss", "5%", "--split", "0.5").exception)


@pytest.mark.parametrize("words", [["--rule", "bound"], ["--split", "0.5"]])
def test_a_rule_without_a_limit_is_refused(folder: Path, words: list[str]) -> None:
    assert "give --max-loss" in str(run("pareto", folder, *words).exception)


def test_a_plan_that_one_profile_has_not_is_no_mover(tmp_path: Path) -> None:
    before, after = publish_profile(tmp_path / "a"), publish_profile(tmp_path / "b", granularity=(3,))
    (block,) = document("compare", before, after)["blocks"]
    moved = {one["plan"]: one["on_frontier"] for one in block["moved"]}
    assert moved["layers 2–3 (2 of 6)"] == [True, None]
    assert "not measured after" in run("compare", before, after).output
