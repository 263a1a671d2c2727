"""Sweeps of a tiny pair from end to end: what is published, and that kills, rivals and full disks lose nothing."""

from __future__ import annotations

import errno
import json
import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kvprofile import sweep as sweep_module
from kvprofile.cost.layer_times import LayerTimes
from kvprofile.engine import budget, executor
from kvprofile.engine.batch import Row
from kvprofile.engine.timing import LAYER_REPEATS
from kvprofile.errors import BadInput, Interrupted, OutOfMemory
from kvprofile.recipe import load_recipe, with_options
from kvprofile.store.reader import load
from kvprofile.sweep import sweep
from tests.tiny_models import LAYERS
from tests.tiny_sweep import RECORDS, Silent, sweep_quietly, write_pair

LIMIT = 1_000_000_000
GROUPS = LAYERS * (LAYERS + 1) // 2
ARMS = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def profile(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep(load_recipe(str(pair)), tmp_path_factory.mktemp("store"), Silent())


def tables(folder: Path) -> list[pa.Table]:
    """Returns the three tables without footers and measured times, which no two runs share."""
    names = ("profile", "measurements", "samples")
    held = [pq.read_table(folder / f"{name}.parquet").replace_schema_metadata(None) for name in names]
    return [t.drop_columns([c for c in t.column_names if c.startswith("measured_")]) for t in held]


def test_every_plan_is_measured_on_every_sample(profile: Path) -> None:
    held = load(profile)
    assert profile.name == "v0001"
    assert held.rows.num_rows == (GROUPS + ARMS) * 2  # two metrics
    assert held.measurements().num_rows == (GROUPS + ARMS) * 2 * RECORDS
    rows = held.rows.to_pylist()
    assert all(row["n_scored"] == row["n_planned"] == RECORDS for row in rows)
    whole = next(row for row in rows if row["strategy"] == "layer_group" and row["recomputed_layers"] == LAYERS)
    assert whole["exact_match_rate"] == 1.0
    assert whole["measured_prefill_ms"] > 0
    assert {row["granularity"] for row in rows if row["strategy"] == "layer_group"} == {1, 2}
    reuse = next(row for row in rows if row["strategy"] == "full_reuse")
    assert (reuse["kv_bytes_per_token"], reuse["prefill_flops"]) == (LAYERS * 2 * 2 * 8 * 4, 0)


def test_layers_are_timed_once_up_to_the_longest_context(
    pair: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = load(profile)
    longest = max(held.measurements()["context_tokens"].to_pylist())
    table = held.timings()
    assert table is not None
    times = LayerTimes.from_rows(table.to_pylist())
    assert (times.layers, times.lengths[-1], len(times.lengths)) == (LAYERS, longest, 4)
    assert times.suffix_tokens in held.measurements()["suffix_tokens"].to_pylist()
    assert set(table["repeats"].to_pylist()) == {LAYER_REPEATS}
    with monkeypatch.context() as patched:
        patched.setattr(sweep_module, "publish", lambda *_: (_ for _ in ()).throw(Interrupted("stopped")))
        with pytest.raises(Interrupted):
            sweep(load_recipe(str(pair)), tmp_path, Silent())
    (kept,) = tmp_path.glob("*/run-*/checked.json")
    first = json.loads(kept.read_text("utf-8"))["layer_timings"]
    again = load(sweep(load_recipe(str(pair)), tmp_path, Silent())).timings()
    assert again is not None
    assert again.to_pylist() == first, "a run that goes on keeps what it measured"


def test_samples_let_anybody_repeat_a_measurement(profile: Path, pair: Path) -> None:
    """Plain Transformers calls, nothing of kvprofile: full prefill of the stored ids gives the stored answers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair.parent / "base", dtype=torch.float32)
    answers = {
        row["sample_id"]: row["output_token_ids"]
        for row in load(profile).measurements().to_pylist()
        if row["strategy"] == "full_prefill"
    }
    for sample in pq.read_table(profile / "samples.parquet").to_pylist():
        prompt = sample["context_token_ids"] + sample["suffix_token_ids"]
        out = model.generate(torch.tensor([prompt]), max_new_tokens=sample["max_new_tokens"], do_sample=False)
        assert out[0, len(prompt) :].tolist() == answers[sample["sample_id"]]


def test_without_text_neither_texts_nor_ids_are_stored(pair: Path, tmp_path: Path) -> None:
    folder = sweep(with_options(load_recipe(str(pair)), store_text=False, contexts=2), tmp_path, Silent())
    held = load(folder)
    assert held.measurements()["output_text"].null_count == held.measurements().num_rows
    assert held.measurements()["output_token_ids"].null_count == held.measurements().num_rows
    samples = pq.read_table(folder / "samples.parquet")
    assert samples["context_token_ids"].null_count == samples["references"].null_count == 2


def test_an_interrupted_sweep_goes_on(
    pair: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = sweep_module.write_table, []

    def full_disk(table: pa.Table, path: Path, footer: dict[str, object] | None = None) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)
        real(table, path, footer)

    recipe = load_recipe(str(pair))
    with monkeypatch.context() as patched:
        patched.setattr(sweep_module, "write_table", full_disk)
        with pytest.raises(OSError, match="No space"):
            sweep(recipe, tmp_path, Silent())
    part = written[0]
    part.write_bytes(part.read_bytes()[:100])  # a torn part is measured again
    told = Silent()
    folder = sweep(recipe, tmp_path, told)
    assert (told.resumed, told.measured) == (1, RECORDS - 1)
    assert all(a.equals(b) for a, b in zip(tables(folder), tables(profile), strict=True))


@pytest.mark.parametrize("fault", ["no rows", "some rows", "another sample's"])
def test_a_readable_part_that_is_not_the_samples_is_measured_again(
    fault: str, pair: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(str(pair))
    with monkeypatch.context() as patched:
        patched.setattr(sweep_module, "publish", lambda *_: (_ for _ in ()).throw(Interrupted("stopped")))
        with pytest.raises(Interrupted):
            sweep(recipe, tmp_path, Silent())
    one, other, *_ = sorted(tmp_path.glob("*/run-*/*.parquet"))
    held = {"no rows": (one, 0), "some rows": (one, 3), "another sample's": (other, None)}[fault]
    pq.write_table(pq.read_table(held[0]).slice(0, held[1]), one)
    (one.parent / "checked.json").write_text("[", "utf-8")  # torn as well: measured anew
    told = Silent()
    folder = sweep(recipe, tmp_path, told)
    assert (told.resumed, told.measured) == (RECORDS - 1, 1)
    assert all(a.equals(b) for a, b in zip(tables(folder), tables(profile), strict=True))


def assert_same_scores(one: Path, other: Path) -> None:
    """Everything equal, token ids included; divergences, sums of many floats, to within rounding."""
    for ours, theirs in zip(tables(one), tables(other), strict=True):
        divergences = {"kl", "nll", "mean_kl"} & set(ours.column_names)
        assert ours.drop_columns(divergences).equals(theirs.drop_columns(divergences))
        for name in divergences:
            assert ours[name].to_pylist() == pytest.approx(theirs[name].to_pylist(), rel=1e-4, abs=1e-6)


def test_block_size_does_not_move_the_scores(
    pair: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "MOST_PLANS", 1)
    folder = sweep(load_recipe(str(pair)), tmp_path, Silent())
    assert_same_scores(folder, profile)


def test_a_memory_limit_cuts_blocks_and_moves_no_score(
    pair: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, blocks = executor._answer_block, []

    def counting(readers: object, readings: list[object], *rest: object) -> object:
        blocks.append(len(readings))
        return real(readers, readings, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "_answer_block", counting)
    monkeypatch.setattr(budget, "_held", lambda device: LIMIT - 1 if blocks else 0)
    folder = sweep(load_recipe(str(pair)), tmp_path, Silent(), LIMIT)
    assert set(blocks[1:]) == {1}, "nothing is left after the gates' block"
    assert_same_scores(folder, profile)


def test_a_memory_limit_below_what_the_models_take_is_refused(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--memory-limit"):
        sweep(load_recipe(str(pair)), tmp_path, Silent(), 1000)


def test_out_of_memory_halves_the_block(
    pair: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = executor._answer_block

    def small(readers: object, readings: list[object], *rest: object) -> object:
        if len(readings) > 3:
            raise torch.OutOfMemoryError("too many rows")
        return real(readers, readings, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "_answer_block", small)
    folder = sweep(load_recipe(str(pair)), tmp_path, Silent())
    assert_same_scores(folder, profile)


def test_out_of_memory_with_one_plan_is_said(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> object:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(executor, "_answer_block", none)
    with pytest.raises(OutOfMemory, match="max-context-tokens"):
        sweep(load_recipe(str(pair)), tmp_path, Silent())


def test_what_fails_is_an_error_row(pair: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, told = executor.greedy_rows, Silent()

    def first_row_fails(*arguments: object) -> list[Row]:
        rows = real(*arguments)  # type: ignore[arg-type]
        if not told.begun:  # the gates' own plans
            return rows
        return [Row((*rows[0].token_ids[:-1], executor.NOT_FINITE), None), *rows[1:]]

    monkeypatch.setattr(executor, "greedy_rows", first_row_fails)
    held = load(sweep(load_recipe(str(pair)), tmp_path, told))
    failed = [row for row in held.measurements().to_pylist() if row["status"] == "error"]
    assert failed
    assert all(row["value"] is None and "not finite" in row["error"] for row in failed)
    by_plan = {(r["strategy"], r["start_layer"], r["stop_layer"], r["metric"]): r for r in held.rows.to_pylist()}
    for row in failed:
        plan = by_plan[row["strategy"], row["start_layer"], row["stop_layer"], row["metric"]]
        assert plan["n_scored"] < plan["n_planned"]
        assert not plan["on_frontier"]


def test_a_metric_that_raises_is_an_error_row(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvprofile.scoring import f1

    def raises(text: str, references: object) -> float:
        raise ZeroDivisionError("no words")

    monkeypatch.setattr(f1, "score", raises)
    rows = load(sweep(load_recipe(str(pair)), tmp_path, Silent())).measurements().to_pylist()
    by_metric = {name: {row["status"] for row in rows if row["metric"] == name} for name in ("f1", "exact_match")}
    assert by_metric == {"f1": {"error"}, "exact_match": {"ok"}}
    assert next(row for row in rows if row["metric"] == "f1")["error"] == "metric f1 failed: no words"


def test_the_same_sweep_twice_at_once_is_refused(pair: Path, tmp_path: Path) -> None:
    class Rival(Silent):
        def sample_done(self) -> None:
            with pytest.raises(Interrupted, match="another process"):
                sweep(load_recipe(str(pair)), tmp_path, Silent())
            super().sample_done()

    told = Rival()
    sweep(load_recipe(str(pair)), tmp_path, told)
    assert told.measured == RECORDS


def test_long_contexts_are_cut_and_said(pair: Path, tmp_path: Path) -> None:
    told = Silent()
    folder = sweep(with_options(load_recipe(str(pair)), max_context_tokens=20), tmp_path, told)
    samples = pq.read_table(folder / "samples.parquet").to_pylist()
    assert {len(s["context_token_ids"]) for s in samples} == {20}
    assert any("cut in the middle" in remark for remark in told.remarks)


def test_unwritable_store_is_bad_input(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot write"):
        sweep(load_recipe(str(pair)), tmp_path / "file", Silent())


@pytest.mark.slow
def test_fifty_kills_at_random_end_with_the_same_tables(pair: Path, profile: Path, tmp_path: Path) -> None:
    """`kill -9` at moments drawn over the length of an undisturbed sweep; each store is then finished and compared."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["kvprofile.sweep", "tests.tiny_sweep"])

    def start(out: Path) -> BaseProcess:
        process = processes.Process(target=sweep_quietly, args=(pair, out))
        process.start()
        return process

    def finish(out: Path) -> float:
        begun = time.monotonic()
        process = start(out)
        process.join(timeout=120)
        assert process.exitcode == 0
        return time.monotonic() - begun

    finish(tmp_path / "warm-up")
    length = finish(tmp_path / "undisturbed")
    rng, kills = random.Random(0), 0
    while kills < 50:
        out = tmp_path / f"store{kills}"
        for _ in range(5):
            process = start(out)
            process.join(timeout=rng.uniform(0, length))
            if process.exitcode is None:
                process.kill()
                kills += 1
            process.join()
        finish(out)
        folders = sorted(out.glob("*/v*"))
        assert folders
        for folder in folders:
            assert all(a.equals(b) for a, b in zip(tables(folder), tables(profile), strict=True))
