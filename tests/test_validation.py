"""Validation on fresh data: what is left out, what is measured, what the verdict says, and that it can be cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner, Result

from kvprofile import validation as validation_module
from kvprofile.cli import app
from kvprofile.recipe import load_recipe, with_options
from kvprofile.store.reader import load
from kvprofile.sweep import sweep
from tests.tiny_models import save_adapter
from tests.tiny_sweep import Silent, write_pair


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def write_data(path: Path, numbers: range, thing: str = "coins") -> Path:
    with path.open("w", encoding="utf-8") as file:
        for n in numbers:
            context = f"Cup {n} holds {n} blue {thing}. " * (n + 1)
            file.write(
                json.dumps({"id": f"f{n}", "context": context, "question": "How many?", "answers": [str(n)]}) + "\n"
            )
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def profile(pair: Path, tmp_path: Path) -> Path:
    """Agreement with full prefill is the quality: a tiny model's answers match no label."""
    return sweep(with_options(load_recipe(str(pair)), references="none"), tmp_path / "store", Silent())


def document(result: Result) -> Any:
    return json.loads(result.stdout)


def test_fresh_data_are_measured_one_plan_at_a_time_and_kept(profile: Path, tmp_path: Path) -> None:
    fresh = write_data(tmp_path / "fresh.jsonl", range(5))
    result = run(
        "validate",
        profile,
        "--dataset",
        fresh,
        "--plans",
        "full_reuse,0-2",
        "--contexts",
        3,
        "--max-loss",
        "1%",
        "--json",
    )
    (one,) = document(result)["validations"]
    assert (one["samples"], one["overlap_left_out"], one["dataset"]) == (3, 0, "fresh")
    reuse, whole = one["plans"]
    assert (whole["loss"], whole["held"]) == (0.0, True), "all three layers are a full prefill"
    assert reuse["loss"] > 0.01
    assert reuse["held"] is reuse["promised_at_most"] is None, "the profile never said that it loses so little"
    assert result.exit_code == 0
    kept = pq.read_table(one["file"]).to_pylist()
    assert {row["strategy"] for row in kept} == {
        "full_prefill",
        "no_context",
        "sender_alone",
        "full_reuse",
        "layer_group",
    }
    assert len({row["sample_id"] for row in kept}) == 3
    assert load(profile).validations()[0]["plans"] == one["plans"]
    assert not list(profile.glob("validations/.run-*"))


def test_the_reference_executor_gives_the_sweeps_answers(profile: Path, pair: Path, tmp_path: Path) -> None:
    """The same contexts under other ids are no fresh data, so they are put in by hand."""
    held = load(profile)
    from kvprofile.profiled_pair import load_profiled_pair
    from kvprofile.sensitivity import profile_samples

    models = load_profiled_pair(held, Silent())
    asked = {"task": "qa", "dataset": "data"}
    data = validation_module.fresh_data(
        held, models, str(write_data(tmp_path / "x.jsonl", range(1))), asked, 1, 0, Silent()
    )
    data = data._replace(samples=tuple(profile_samples(held)))
    rows = validation_module.chosen_plans(held, "frontier", None)
    found = validation_module.validate(held, models, data, rows, None, Silent())
    for row, one in zip(rows, found["plans"], strict=True):
        assert one["quality"] == pytest.approx(row["quality"])
    swept = {
        (r["sample_id"], r["strategy"], r["start_layer"], r["stop_layer"]): r for r in held.measurements().to_pylist()
    }
    for row in pq.read_table(found["file"]).to_pylist():
        own = swept[row["sample_id"], row["strategy"], row["start_layer"], row["stop_layer"]]
        assert row["output_token_ids"] == own["output_token_ids"]
        assert row["kl"] == pytest.approx(own["kl"], abs=1e-5)


def test_samples_of_the_profile_are_left_out(profile: Path, pair: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    renamed = (pair.parent / "data.jsonl").read_text("utf-8").replace('"r0"', '"other"')
    both.write_text(renamed + write_data(tmp_path / "x.jsonl", range(2)).read_text("utf-8"), "utf-8")
    (one,) = document(run("validate", profile, "--dataset", both, "--json"))["validations"]
    assert (one["samples"], one["overlap_left_out"]) == (2, 4), "three by id, one by its context"
    nothing_new = run("validate", profile, "--dataset", pair.parent / "data.jsonl")
    assert "all 4 samples" in str(nothing_new.exception)


def test_a_promise_without_a_limit_is_the_profiles_own_bound(profile: Path, tmp_path: Path) -> None:
    fresh = write_data(tmp_path / "fresh.jsonl", range(3))
    (one,) = document(run("validate", profile, "--dataset", fresh, "--json"))["validations"]
    frontier = [
        row
        for row in load(profile).rows.to_pylist()
        if row["on_frontier"] and row["metric"] == "f1" and row["strategy"] != "full_prefill"
    ]
    promised = sorted(row["loss_points_upper"] for row in frontier)
    assert sorted(plan["promised_at_most"] for plan in one["plans"]) == pytest.approx(promised)
    for plan in one["plans"]:
        assert plan["unit"] == "pt"
        assert plan["held"] == (plan["loss"] <= plan["promised_at_most"] + 1e-9)
        assert plan["loss_lower"] <= plan["loss"] <= plan["loss_upper"]


def test_cut_off_it_goes_on(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = write_data(tmp_path / "fresh.jsonl", range(3))
    calls: list[str] = []
    measured = validation_module._measured

    def stops(*arguments: Any) -> Any:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(arguments[2].sample_id)
        return measured(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(validation_module, "_measured", stops)
        run("validate", profile, "--dataset", fresh)
    assert len(calls) == 2
    assert not load(profile).validations()
    calls.clear()
    monkeypatch.setattr(validation_module, "_measured", lambda *a: (calls.append(a[2].sample_id), measured(*a))[1])
    assert run("validate", profile, "--dataset", fresh, "--max-loss", "100%").exit_code == 0
    assert len(calls) == 1
    assert load(profile).validations()[0]["samples"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plans", "selected"], "needs --max-loss"),
        (["--plans", "7-9"], 'no plan "7-9"'),
        (["--plans", "selected", "--max-loss", "0%"], "nothing to validate"),
        (["--task", "code"], "no task"),
        (["--contexts", "0"], "at least 1"),
    ],
)
def test_bad_input(profile: Path, tmp_path: Path, options: list[str], message: str) -> None:
    result = run("validate", profile, "--dataset", write_data(tmp_path / "fresh.jsonl", range(2)), *options)
    assert message in str(result.exception)
    assert result.exit_code == 1  # the runner's, for any exception; `main` turns it into 2


def test_other_models_are_refused(profile: Path, pair: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "other", seed=9)
    fresh = write_data(tmp_path / "fresh.jsonl", range(2))
    result = run("validate", profile, "--dataset", fresh, "--sender", f"{pair.parent / 'base'}+{tmp_path / 'other'}")
    assert "is not the sender of this profile: its weights differ" in str(result.exception)


def test_a_profiles_recipe_cannot_ask_for_remote_code(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = yaml.safe_load((profile / "recipe.yaml").read_text("utf-8"))
    recipe["models"]["trust_remote_code"] = True
    (profile / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    from kvprofile import profiled_pair

    asked = []

    def load_pair(sender: str, receiver: str, options: Any, folders: Any) -> Any:
        asked.append(options.trust_remote_code)
        raise RuntimeError

    monkeypatch.setattr(profiled_pair, "load_pair", load_pair)
    run("validate", profile, "--dataset", write_data(tmp_path / "fresh.jsonl", range(2)))
    assert asked == [False]


def test_a_file_that_is_no_validation_is_named(profile: Path, tmp_path: Path) -> None:
    fresh = write_data(tmp_path / "fresh.jsonl", range(2))
    run("validate", profile, "--dataset", fresh)
    (path,) = (profile / "validations").glob("*.parquet")
    table = pq.read_table(path)
    footer = json.loads(table.schema.metadata[b"kvprofile"])
    footer["validation"]["plans"][0]["held"] = "<script>"
    pq.write_table(table.replace_schema_metadata({"kvprofile": json.dumps(footer)}), path)
    assert "holds no validation" in str(run("report", profile).exception)


def test_a_broken_promise_exits_1_and_one_that_chance_explains_says_so(profile: Path, tmp_path: Path) -> None:
    held = load(profile)
    reuse = next(r for r in held.rows.to_pylist() if r["strategy"] == "full_reuse" and r["metric"] == "f1")
    limit = f"{min(100, 100 * reuse['loss_rel'] + 0.01):.4f}%"
    fresh = write_data(tmp_path / "fresh.jsonl", range(3))
    result = run("validate", profile, "--dataset", fresh, "--plans", "full_reuse", "--max-loss", limit)
    plan = load(profile).validations()[0]["plans"][0]
    assert plan["promised_at_most"] == pytest.approx(reuse["loss_rel"], abs=1e-3)
    assert result.exit_code == (0 if plan["held"] else 1)
    assert f"{int(plan['held'])} of 1 promises held" in result.output
    assert "kept in" in result.output
    assert "Validated on fresh data: fresh (3 samples): loss" in run("pareto", profile, "--max-loss", limit).output
    selected = document(run("select", profile, "--max-loss", limit))
    assert selected["validated_on_fresh_data"][0].startswith("fresh (3 samples)")


def test_a_validation_of_another_profile_is_refused(profile: Path, pair: Path, tmp_path: Path) -> None:
    run("validate", profile, "--dataset", write_data(tmp_path / "fresh.jsonl", range(2)))
    other = sweep(with_options(load_recipe(str(pair)), references="none", seed=1), tmp_path / "other", Silent())
    (profile / "validations").rename(other / "validations")
    assert "was measured for another profile" in str(run("report", other).exception)


def test_a_file_under_way_is_not_read(profile: Path, tmp_path: Path) -> None:
    run("validate", profile, "--dataset", write_data(tmp_path / "fresh.jsonl", range(2)))
    (profile / "validations" / ".tmp-1-fresh-0002.parquet").write_bytes(b"half")
    assert len(load(profile).validations()) == 1


def test_a_metric_that_is_foreign_code_is_not_loaded(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = yaml.safe_load((profile / "recipe.yaml").read_text("utf-8"))
    recipe["data"][0]["metrics"] = ["evil/script"]
    (profile / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    for command in (
        ["validate", profile, "--dataset", write_data(tmp_path / "fresh.jsonl", range(2))],
        ["sensitivity", profile],
    ):
        assert "give --trust-remote-code to run it" in str(run(*command).exception)


def test_another_version_of_the_metric_is_refused(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprofile.scoring import f1

    monkeypatch.setattr(f1, "version", lambda: "2")
    result = run("validate", profile, "--dataset", write_data(tmp_path / "fresh.jsonl", range(2)))
    assert "was scored by exact_match@1, f1@1, this is f1@2" in str(result.exception)
