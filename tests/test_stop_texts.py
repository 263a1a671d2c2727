"""Stop texts of a recipe, from the sweep over validation, maps and comparisons to the next version."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import yaml

from kvprofile.chain import Groups, measure_chain
from kvprofile.errors import BadInput
from kvprofile.layers import LayerRange
from kvprofile.recipe import load_recipe, with_options
from kvprofile.report.comparison import asked_contexts
from kvprofile.report.text import harmless
from kvprofile.samples import sample_identity
from kvprofile.sensitivity import profile_samples
from kvprofile.store.header import _of_right_kinds
from kvprofile.store.reader import load, read_measurements
from kvprofile.sweep import sweep
from tests.command import document, run
from tests.tiny_sweep import Silent, write_pair


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    return sweep(load_recipe(str(recipe)), recipe.parent / "whole", Silent())


@pytest.fixture(scope="module")
def stop(whole: Path) -> str:
    """The second half of an answer of full prefill, which no plan may write any more."""
    texts = [row["output_text"] for row in measured(whole) if row["strategy"] == "full_prefill"]
    text = max(texts, key=len)
    return str(text[len(text) // 2 :][:2])


@pytest.fixture(scope="module")
def stopped(recipe: Path, stop: str) -> Path:
    values = yaml.safe_load(recipe.read_text("utf-8"))
    values["data"][0]["stop"] = [stop]
    path = recipe.with_name("stopped.yaml")
    path.write_text(yaml.safe_dump(values), "utf-8")
    return sweep(load_recipe(str(path)), recipe.parent / "stopped", Silent())


def measured(profile: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = load(profile).measurements().to_pylist()
    return rows


def test_answers_end_there_and_are_scored_up_to_there(whole: Path, stopped: Path, stop: str) -> None:
    shorter = 0
    for before, after in zip(measured(whole), measured(stopped), strict=True):
        text, ids = before["output_text"].split(stop)[0], after["output_token_ids"]
        assert after["output_text"] == text
        assert ids == before["output_token_ids"][: len(ids)]
        assert (len(ids) < len(before["output_token_ids"])) <= (stop in before["output_text"])
        shorter += len(ids) < len(before["output_token_ids"])
    assert shorter > 10


def test_a_header_names_them_and_only_where_there_are_any(whole: Path, stopped: Path, stop: str) -> None:
    assert [(data["task"], data["stop"]) for data in load(stopped).header["datasets"]] == [("qa", [stop])]
    assert all("stop" not in data for data in load(whole).header["datasets"])
    assert harmless(f"answers of qa end at {stop!r}") in run("show", stopped).stdout
    assert " end at " not in run("show", whole).stdout


def test_the_same_questions_with_other_ends_are_no_shared_samples(whole: Path, stopped: Path) -> None:
    compared = document("compare", whole, stopped)
    assert "until" in compared["header"]["datasets"][1]
    assert {one["shared_samples"] for block in compared["blocks"] for one in block["moved"]} == {0}


def test_only_the_questions_of_the_task_whose_ends_differ_are_others() -> None:
    def asked(**stop: list[str]) -> dict[tuple[str, str], dict[str, str]]:
        """What a profile of one data set under two tasks says it asked."""
        entries = [
            {"name": "d"} | ({"task": task, "stop": stop[task]} if task in stop else {}) for task in ("qa", "code")
        ]
        row = {"context_sha256": "c", "suffix_token_ids": [1], "max_new_tokens": 4, "dataset": "d", "sample_id": "s"}
        table = pa.Table.from_pylist([{**row, "task": "qa"}, {**row, "task": "code"}])
        profile = SimpleNamespace(header={"datasets": entries, "recipe_sha256": "r"}, samples=lambda: table)
        return asked_contexts(profile)  # type: ignore[arg-type]

    plain, changed = asked(), asked(code=["x"])
    assert plain["qa", "d"] == changed["qa", "d"]
    assert plain["code", "d"] != changed["code", "d"]
    assert asked(code=["x"]) != asked(code=["y"])


def test_samples_with_other_ends_are_other_samples(stopped: Path) -> None:
    """So that nothing is resumed, or kept of a validation, that ended elsewhere."""
    samples = profile_samples(load(stopped))
    others = [dataclasses.replace(sample, stop=("?",)) for sample in samples]
    plain = [dataclasses.replace(sample, stop=()) for sample in samples]
    assert len({sample_identity(each) for each in (samples, others, plain)}) == 3


def test_without_labels_a_search_agrees_with_answers_that_end_there(stopped: Path, tmp_path: Path) -> None:
    recipe = with_options(load_recipe(str(stopped.parents[2] / "stopped.yaml")), references="none")
    tables = [
        load(sweep(with_options(recipe, search=how), tmp_path / how, Silent())).measurements().to_pylist()
        for how in ("exhaustive", "adaptive")
    ]
    key = ("sample_id", "metric", "strategy", "start_layer", "stop_layer")
    exhaustive, adaptive = ({tuple(row[name] for name in key): row["value"] for row in table} for table in tables)
    assert adaptive
    assert adaptive == {at: exhaustive[at] for at in adaptive}


def test_answers_of_a_chain_end_there(stopped: Path, stop: str, tmp_path: Path) -> None:
    recipe = load_recipe(str(stopped.parents[2] / "stopped.yaml"))
    groups = Groups((LayerRange(0, 1),), (LayerRange(1, 2),))
    texts = measure_chain(recipe, "base", groups, tmp_path, Silent()).table["output_text"].to_pylist()
    assert texts
    assert not any(stop in text for text in texts)


def test_special_tokens_are_no_stop_texts(stopped: Path) -> None:
    values = yaml.safe_load((stopped.parents[2] / "stopped.yaml").read_text("utf-8"))
    values["data"][0]["stop"] = ["<|im_end|>"]
    changed = stopped.parents[2] / "special.yaml"
    changed.write_text(yaml.safe_dump(values), "utf-8")
    with pytest.raises(BadInput, match=r"special token <\|im_end\|>"):
        sweep(load_recipe(str(changed)), stopped.parents[2] / "special", Silent())


@pytest.mark.parametrize("named", ["x", [], [""], [1], None])
def test_headers_with_other_stop_texts_than_a_recipe_can_have_are_refused(stopped: Path, named: object) -> None:
    header = dict(load(stopped).header)
    header["datasets"] = [{**header["datasets"][0], "stop": named}]
    assert not _of_right_kinds(header)


def test_maps_and_validations_end_answers_there_too(stopped: Path, stop: str, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh.jsonl"
    lines = (stopped.parents[2] / "data.jsonl").read_text("utf-8").replace('"r', '"new').replace("red", "blue")
    fresh.write_text(lines, "utf-8")
    validated = run("validate", stopped, "--dataset", fresh)
    assert validated.exit_code in (0, 1), validated.output
    assert run("sensitivity", stopped).exit_code == 0
    held = load(stopped)
    table = held.sensitivity("forward")
    assert table is not None
    full = {row["sample_id"]: row for row in measured(stopped) if row["strategy"] == "full_prefill"}
    own = [row for row in table.to_pylist() if row["strategy"] == "full_prefill"]
    for name in ("output_token_ids", "output_text", "value"):
        assert [row[name] for row in own] == [full[row["sample_id"]][name] for row in own]
    (validation,) = (stopped / "validations").glob("*.parquet")
    texts = [row["output_text"] for row in read_measurements(validation)[0].to_pylist()]
    assert texts
    assert not any(stop in text for text in texts)


def test_another_end_makes_a_profile_stale(stopped: Path, stop: str, tmp_path: Path) -> None:
    values = yaml.safe_load((stopped.parents[2] / "stopped.yaml").read_text("utf-8"))
    values["data"][0]["stop"] = [stop, "?"]
    changed = stopped.parents[2] / "changed.yaml"
    changed.write_text(yaml.safe_dump(values), "utf-8")
    store = stopped.parents[1]
    assert run("reprofile", stopped.parents[2] / "stopped.yaml", "--out", store, "--check").exit_code == 0
    told = run("reprofile", changed, "--out", store, "--check")
    assert told.exit_code == 1
    assert "the texts that end an answer changed" in told.output


def test_their_order_says_nothing(recipe: Path) -> None:
    base = load_recipe(str(recipe))
    source = base.data[0].model_dump()
    one, other = (with_options(base, data=[{**source, "stop": stop}]) for stop in (["b", "a"], ["a", "b", "a"]))
    assert one == other
    assert one.sha256() == other.sha256()
