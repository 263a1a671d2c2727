"""One sweep of two data sets under two tasks: rows, scores and costs of each are its own."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from typing import Any

import pytest

from kvprofile.recipe import load_recipe
from kvprofile.scoring import metric
from kvprofile.store.reader import Profile, load
from kvprofile.sweep import sweep
from tests.tiny_models import LAYERS
from tests.tiny_sweep import RECORDS, Silent, write_pair

PLANS = LAYERS * (LAYERS + 1) // 2 + 4
BLOCKS = {("qa", "data", "f1"), ("qa", "data", "exact_match"), ("code", "lines", "code_similarity")}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Both data sets use the same sample ids; the contexts of `lines` are the longer ones."""
    folder = tmp_path_factory.mktemp("pair")
    recipe = load_recipe(str(write_pair(folder)))
    with (folder / "lines.jsonl").open("w", encoding="utf-8") as file:
        for number in range(RECORDS):
            record = {"id": f"r{number}", "context": "x = answer(x)\n" * (number + 9), "answers": ["return x"]}
            file.write(json.dumps(record) + "\n")
    code = {"dataset": "lines.jsonl", "task": "code", "max_new_tokens": 5, "fields": {"question": None}}
    both = [source.model_dump() for source in recipe.data] + [code]
    (folder / "two.yaml").write_text(json.dumps({**recipe.model_dump(), "data": both}), "utf-8")
    return load(sweep(load_recipe(str(folder / "two.yaml")), folder / "store", Silent()))


def of(rows: list[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["task"] == task]


def test_every_plan_has_a_row_per_task_and_metric(profile: Profile) -> None:
    rows = profile.rows.to_pylist()
    assert Counter((r["task"], r["dataset"], r["metric"]) for r in rows) == dict.fromkeys(BLOCKS, PLANS)
    assert {(r["n_planned"], r["n_scored"]) for r in rows} == {(RECORDS, RECORDS)}
    assert [entry["name"] for entry in profile.header["datasets"]] == ["data", "lines"]
    assert [name.split("@")[0] for name in profile.header["metrics"]] == ["code_similarity", "exact_match", "f1"]


def test_answers_are_scored_against_their_own_references(profile: Profile) -> None:
    samples = {(s["task"], s["sample_id"]): s for s in profile.samples().to_pylist()}
    measured = profile.measurements().to_pylist()
    assert len(samples) == 2 * RECORDS
    assert len(measured) == PLANS * RECORDS * len(BLOCKS)
    for row in measured:
        sample = samples[row["task"], row["sample_id"]]
        assert row["value"] == metric(row["metric"]).score(row["output_text"], sample["references"])
        assert row["context_tokens"] == len(sample["context_token_ids"])
        assert row["dataset"] == sample["dataset"]
        assert len(row["output_token_ids"]) <= sample["max_new_tokens"] == {"qa": 6, "code": 5}[row["task"]]


def test_quality_is_the_mean_of_the_tasks_own_samples(profile: Profile) -> None:
    measured = profile.measurements().to_pylist()
    key = ("task", "metric", "strategy", "start_layer", "stop_layer")
    for row in profile.rows.to_pylist():
        values = [m["value"] for m in measured if all(m[k] == row[k] for k in key)]
        assert row["quality"] == pytest.approx(statistics.mean(values))


def test_costs_follow_the_tasks_own_contexts(profile: Profile) -> None:
    rows, samples = profile.rows.to_pylist(), profile.samples().to_pylist()
    for task in ("qa", "code"):
        median = int(statistics.median(len(s["context_token_ids"]) for s in of(samples, task)))
        assert {row["context_tokens_median"] for row in of(rows, task)} == {median}
        full = [row for row in of(rows, task) if row["strategy"] == "full_prefill"]
        assert {row["prefill_flops"] for row in full} == {row["full_prefill_flops"] for row in of(rows, task)}
    cheap, dear = (of(rows, task)[0] for task in ("qa", "code"))
    assert dear["context_tokens_median"] > cheap["context_tokens_median"]
    assert dear["full_prefill_flops"] > cheap["full_prefill_flops"]
    assert dear["kv_bytes_per_token"] == cheap["kv_bytes_per_token"]
    assert {row["measured_prefill_ms"] for row in rows} == {None}, "timed at one length only"
