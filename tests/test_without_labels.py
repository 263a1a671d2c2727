"""Recipes without references: quality is agreement with the receiver's own full prefill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvprofile import search as search_module
from kvprofile.recipe import load_recipe, with_options
from kvprofile.run import prepare
from kvprofile.scoring import agreement, metric
from kvprofile.store.reader import Profile, load
from kvprofile.sweep import sweep
from tests.tiny_sweep import Silent, write_pair


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with data that have no answers at all."""
    path = write_pair(tmp_path_factory.mktemp("pair"))
    data = path.parent / "data.jsonl"
    rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    data.write_text("\n".join(json.dumps({k: v for k, v in row.items() if k != "answers"}) for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def profile(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    asked = with_options(load_recipe(str(recipe)), references="none")
    return load(sweep(asked, tmp_path_factory.mktemp("store"), Silent()))


def test_values_are_agreement_with_full_prefill(profile: Profile) -> None:
    measured = profile.measurements().to_pylist()
    own = {r["sample_id"]: r["output_text"] for r in measured if r["strategy"] == "full_prefill"}
    for row in measured:
        expected = agreement(metric(row["metric"]), row["output_text"], own[row["sample_id"]])
        assert row["value"] == expected
        assert row["baseline_value"] == 1.0
    assert {r["value"] for r in measured if r["strategy"] == "full_prefill"} == {1.0}
    assert any(r["value"] < 1 for r in measured)
    assert profile.header["references"] == "none"


def test_references_are_part_of_the_identity(tmp_path: Path) -> None:
    labelled = load_recipe(str(write_pair(tmp_path)))
    runs = [prepare(with_options(labelled, references=kind), tmp_path, Silent()) for kind in ("data", "none")]
    assert runs[0].identity != runs[1].identity


@pytest.mark.parametrize("text", ["", "the", "# no code"])
def test_the_same_text_is_full_agreement_even_where_it_says_nothing(text: str) -> None:
    for name in ("f1", "exact_match", "rouge_l", "code_similarity"):
        assert agreement(metric(name), text, text) == 1.0


def test_an_adaptive_search_without_texts_scores_alike(
    recipe: Path, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later rounds do not hold full prefill's answer and decode it again."""
    monkeypatch.setattr(search_module, "MOST_STARTS", 0)
    asked = with_options(load_recipe(str(recipe)), references="none", search="adaptive", store_text=False)
    found = load(sweep(asked, tmp_path, Silent())).measurements().to_pylist()
    key = ("sample_id", "metric", "strategy", "start_layer", "stop_layer")
    values = {tuple(r[k] for k in key): r["value"] for r in profile.measurements().to_pylist()}
    assert all(row["value"] == values[tuple(row[k] for k in key)] for row in found)
    assert all(row["baseline_value"] == 1.0 for row in found)
