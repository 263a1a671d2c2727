"""`kvprofile cost`: what it says of a synthetic profile, whose layers take 10 µs a token to recompute and 0.5 ms to read."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from kvprofile.errors import BadInput
from kvprofile.layers import layer_params, set_params
from kvprofile.report.cost import Wire, cost_blocks, print_costs
from kvprofile.store.reader import load
from tests.command import run
from tests.profile_factory import add_timings, change_rows, layer_timings, publish_profile

HOSTILE = "[red]x[/red]\x1b[2J"
READ = 6 * 0.5 + 0.25
GBPS = 125_000


def document(*words: object) -> Any:
    result = run("cost", *words, "--json")
    assert result.exit_code == 0, repr(result.exception)
    return json.loads(result.stdout)


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    folder = publish_profile(tmp_path / "outputs")
    add_timings(folder)
    return folder


def test_bytes_and_times_of_every_plan(folder: Path) -> None:
    found = document(folder, "--tokens", "100,200", "--bandwidth", "0.5,1Gbps", "--latency", "1ms")
    assert (found["bandwidths_gbps"], found["latency_ms"], found["mode"]) == ([0.5, 1], 1, "overlapped")
    assert (found["timed_context_tokens"], found["suffix_tokens"]) == ([50, 100, 200], 10)
    (block,) = found["blocks"]
    assert [one["context_tokens"] for one in block["contexts"]] == [100, 200]
    plans = {plan["plan"]: plan for plan in block["contexts"][1]["plans"]}
    assert list(plans) == ["full_reuse", "layer 2 (1 of 6)", "layers 2–3 (2 of 6)", "full_prefill"]
    group, reuse, full = plans["layers 2–3 (2 of 6)"], plans["full_reuse"], plans["full_prefill"]
    assert (group["kv_bytes"], group["e_bytes"]) == (4 * 256 * 200, 256 * 200)
    assert (reuse["kv_bytes"], reuse["e_bytes"]) == (6 * 256 * 200, 0)
    assert (full["kv_bytes"], full["e_bytes"], full["break_even_gbps"]) == (0, 0, None)
    for times in full["modelled_first_token_ms"].values():
        assert times == pytest.approx([6 * 2 + READ] * 2)
    layer = 256 * 200 / GBPS
    all_at_once = group["modelled_first_token_ms"]
    assert all_at_once["load_reused"] == pytest.approx([1 + 5 * layer / gbps + 4 + READ for gbps in (0.5, 1)])
    assert all_at_once["load_all"] == pytest.approx([1 + 7 * layer / gbps + 4 + READ for gbps in (0.5, 1)])
    assert all_at_once["overlapped"] == pytest.approx([1 + layer / gbps + 4 + READ for gbps in (0.5, 1)])
    left = 6 * 2 + READ - 1 - 4 - READ
    assert group["break_even_gbps"]["load_reused"] == pytest.approx(5 * layer / left)
    assert group["break_even_gbps"]["load_all"] == pytest.approx(7 * layer / left)


def test_median_context_if_no_length_is_given(folder: Path) -> None:
    (block,) = document(folder)["blocks"]
    assert [one["context_tokens"] for one in block["contexts"]] == [100]


def test_a_length_that_was_not_timed_does_not_hide_the_others(folder: Path) -> None:
    timed, not_timed = document(folder, "--tokens", "100,2000")["blocks"][0]["contexts"]
    assert timed == document(folder, "--tokens", "100")["blocks"][0]["contexts"][0]
    assert not_timed["context_tokens"] == 2000
    for plan in not_timed["plans"]:
        assert (plan["modelled_first_token_ms"], plan["break_even_gbps"]) == (None, None)
        assert plan["not_known"].startswith("layers were timed at contexts of 50 to 200 tokens, not at 2000")
    assert not_timed["plans"][0]["kv_bytes"] == 6 * 256 * 2000
    shown = run("cost", folder, "--tokens", "100,2000", "--bandwidth", "1Gbps").output
    assert shown.count("timed at contexts of 50 to 200 tokens, not at 2000") == 1
    lines = [line.split() for line in shown.splitlines() if line.startswith("full_reuse")]
    assert lines[0][-1] != lines[1][-1] == lines[1][-2] == "–"


def test_the_table_shows_the_chosen_mode(folder: Path) -> None:
    output = run("cost", folder, "--bandwidth", "0.1Gbps", "--latency", "2ms").output
    assert "qa / hotpotqa, f1; contexts of 100 tokens" in output
    plans = document(folder, "--bandwidth", "0.1Gbps", "--latency", "2ms")["blocks"][0]["contexts"][0]["plans"]
    for mode in ("load_all", "load_reused", "overlapped"):
        shown = run("cost", folder, "--bandwidth", "100Mbps", "--latency", "2ms", "--mode", mode).output
        assert (
            f"Time to first token of a lone request, {mode}, latency 2 ms: modelled from layer times measured on cpu"
            in shown
        )
        for plan in plans:
            (line,) = [line for line in shown.splitlines() if line.startswith(plan["plan"])]
            assert f" {plan['modelled_first_token_ms'][mode][0]:.3g} ms" in line
    assert re.search(r"^full_reuse .* 153.6 kB +0 B .* \d+ Mbps$", output, re.MULTILINE)
    assert re.search(r"^full_prefill .* 0 B +0 B +9.25 ms +–$", output, re.MULTILINE)
    assert f"profile: {folder}" in output


def test_a_narrow_terminal_leaves_out_the_bytes(folder: Path) -> None:
    profile, wire = load(folder), Wire((1.0,), 0.0)
    shown = {}
    for width in (80, 120):
        console = Console(file=io.StringIO(), force_terminal=True, width=width)
        print_costs(console, profile, cost_blocks(profile, wire, None, ("overlapped",)), wire, "overlapped")
        shown[width] = console.file.getvalue()  # type: ignore[attr-defined]
    assert ["153.6 kB" in shown[width] for width in (80, 120)] == [False, True]
    assert ["in a wider terminal" in shown[width] for width in (80, 120)] == [True, False]


def test_latency_beyond_full_prefill_breaks_even_nowhere(folder: Path) -> None:
    found = document(folder, "--latency", "1s")
    reuse, *_ = found["blocks"][0]["contexts"][0]["plans"]
    assert reuse["break_even_gbps"] == {"load_all": None, "load_reused": None, "overlapped": None}
    assert re.search(r"^full_reuse .* none$", run("cost", folder, "--latency", "1s").output, re.MULTILINE)


def test_a_model_of_one_layer(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, layers=1, granularity=(1,))
    add_timings(folder, layer_timings(layers=1))
    assert [plan["plan"] for plan in document(folder)["blocks"][0]["contexts"][0]["plans"]] == [
        "full_reuse",
        "full_prefill",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", 4096), "timed at contexts of 50 to 200 tokens, not at 4096; give a length between"),
        (("--tokens", "4096,8192"), "timed at contexts of 50 to 200 tokens, not at 4096; give a length between"),
        (("--tokens", "many"), "'many' is not a number of tokens"),
        (("--bandwidth", "10"), "'10' has no unit"),
        (("--latency", "1"), "'1' has no unit"),
        (("--mode", "overlap"), 'did you mean "overlapped"'),
        (("--task", "code"), 'no task "code"'),
        (("--metric", "f2"), 'no metric "f2"'),
    ],
)
def test_what_cannot_be_answered_is_told(folder: Path, words: tuple[object, ...], message: str) -> None:
    error = run("cost", folder, *words).exception
    assert isinstance(error, BadInput)
    assert message in str(error)


def test_a_profile_of_before_is_told_to_be_swept_again(tmp_path: Path) -> None:
    error = run("cost", publish_profile(tmp_path)).exception
    assert isinstance(error, BadInput)
    assert re.fullmatch(r".*v0001 has no layer times; sweep again [^.]*", str(error))


def test_one_block_per_task_and_only_what_is_asked(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, sources=[("qa", "a"), ("code", "b")])
    add_timings(folder)
    assert [block["task"] for block in document(folder)["blocks"]] == ["code", "qa"]
    assert [block["dataset"] for block in document(folder, "--task", "qa")["blocks"]] == ["a"]
    assert document(folder, "--metric", "exact_match", "--dataset", "b")["blocks"][0]["metric"] == "exact_match"


@pytest.mark.parametrize(
    ("strategy", "params", "reason"),
    [
        ("layer_set", set_params([1, 3]), "hidden states of its own"),
        ("single_layer_reuse", layer_params(2), "diagnostic"),
    ],
)
def test_plans_that_cannot_be_timed_say_why(folder: Path, strategy: str, params: str, reason: str) -> None:
    path = folder / "profile.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    for one in rows:
        if (one["start_layer"], one["stop_layer"]) == (2, 4):
            one.update(strategy=strategy, start_layer=None, stop_layer=None, params=params)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    (plan,) = [p for p in document(folder)["blocks"][0]["contexts"][0]["plans"] if p["strategy"] == strategy]
    assert (plan["modelled_first_token_ms"], plan["break_even_gbps"]) == (None, None)
    assert reason in plan["not_known"]
    assert plan["kv_bytes"] == 4 * 256 * 100
    assert reason in run("cost", folder).output


@pytest.mark.parametrize("name", ["kv_bytes_per_token", "e_bytes_per_token"])
def test_bytes_that_are_not_known_are_not_zero(folder: Path, name: str) -> None:
    change_rows(folder, lambda row: row.update({name: None} if row["start_layer"] == 2 else {}))
    plans = document(folder)["blocks"][0]["contexts"][0]["plans"]
    unknown = [plan for plan in plans if plan["start_layer"] == 2]
    assert len(unknown) == 2
    for plan in unknown:
        assert plan[name.removesuffix("_per_token")] is None
        assert plan["modelled_first_token_ms"] is None
        assert plan["not_known"] == "the profile does not say how many bytes it ships"
    output = run("cost", folder).output
    assert re.search(r"^layers 2–3 \(2 of 6\) .* – ", output, re.MULTILINE)


def test_hostile_names_are_printed_as_text(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, sources=[(HOSTILE, HOSTILE)], device=HOSTILE)
    add_timings(folder)
    output = run("cost", folder).output
    assert "\x1b" not in output
    assert output.count("[red]") == 3


def test_times_that_are_not_the_profiles_are_refused(folder: Path) -> None:
    add_timings(folder, profile_id="another")
    assert "measured for another profile" in str(run("cost", folder).exception)
    add_timings(folder, layer_timings()[1:])
    assert re.search(r"timings.parquet: the layer times lack a layer", str(run("cost", folder).exception))
    add_timings(folder, layer_timings(layers=5))
    assert "layer times are of 5 layers, the plan of 6" in str(run("cost", folder).exception)
    (folder / "timings.parquet").write_bytes(b"PAR1")
    assert "truncated or not Parquet" in str(run("cost", folder).exception)


def test_help_shows_an_example() -> None:
    assert "Example: kvprofile cost" in run("cost", "--help").output
