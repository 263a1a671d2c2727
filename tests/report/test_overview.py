"""How a profile's summary reads on a terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from kvprofile.report.overview import print_summary
from kvprofile.report.summary import summarize
from kvprofile.store.reader import load
from tests.profile_factory import publish_profile


def test_measured_times_are_one_line_each(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    timing = {"start_layer": 2, "stop_layer": 5, "context_tokens": 400, "prefill_ms": [3.0, 1.0, 2.0]}
    (folder / "environment.json").write_text(json.dumps({"device": "cpu", "prefill_timings": [timing]}), "utf-8")
    console = Console(width=200, record=True)
    print_summary(console, summarize(load(folder)))
    shown = console.export_text()
    assert "prefill of 400 tokens, layers 2–4: 2.0 ms (median of 3, 1.0 to 3.0)" in shown
    assert "prefill_timings" not in shown


def test_show_tells_of_validations_and_the_map(tmp_path: Path) -> None:
    """Made as the commands make them: on a tiny pair."""
    from kvprofile.recipe import load_recipe, with_options
    from kvprofile.sweep import sweep
    from tests.test_validation import run, write_data
    from tests.tiny_sweep import Silent, write_pair

    recipe = with_options(load_recipe(str(write_pair(tmp_path))), references="none", search="adaptive")
    profile = sweep(recipe, tmp_path / "store", Silent())
    run("validate", profile, "--dataset", write_data(tmp_path / "fresh.jsonl", range(2)))
    run("sensitivity", profile)
    output = run("show", profile).output
    assert "qa / fresh, f1, 2 samples that the profile never saw" in output
    assert "sensitivity map: forward" in output
    assert "groups that the search left: " in output
