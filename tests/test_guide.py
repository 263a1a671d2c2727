"""The walk-through of `docs/guide.md`, from the first command to the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvprofile.store.reader import load
from tests.documented import commands, run_in_order


@pytest.mark.slow
def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_order(commands("docs/guide.md"), tmp_path, monkeypatch)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert list((tmp_path / "plots").glob("frontier-*.svg"))
    profile = load(tmp_path / "outputs" / "demo")
    assert {one["dataset"] for one in profile.validations()} == {"hotpotqa_validation", "2wikimqa", "musique"}
    assert profile.sensitivity("forward") is not None
    assert profile.sensitivity("reverse") is not None
    assert load(tmp_path / "outputs" / "unlabelled").header["references"] == "none"
    tasks = load(tmp_path / "outputs" / "tasks").rows["task"].to_pylist()
    assert set(tasks) == {"qa", "summarization", "code"}
