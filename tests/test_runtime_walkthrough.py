"""The walk-through of `docs/runtime.md`: profile, server, new weights, new profile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.documented import ROOT, blocks, commands, run_in_order

RECIPE = "# served/recipe.yaml\n"


@pytest.mark.slow
def test_the_walk_through_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served").mkdir()
    (recipe,) = [block for block in blocks("docs/runtime.md", "yaml") if block.startswith(RECIPE)]
    (tmp_path / "served" / "recipe.yaml").write_text(recipe, "utf-8")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    lines = commands("docs/runtime.md", ("kvprofile", "python", "cp"))
    printed = dict(enumerate(run_in_order(lines, tmp_path, monkeypatch)))
    served = [printed[place] for place, line in enumerate(lines) if "server.py" in line]
    checked = next(printed[place] for place, line in enumerate(lines) if "--check" in line)
    before, refused, after = served
    assert "v0001" in before.splitlines()[0]
    assert "weights" in refused.splitlines()[0]
    assert "full prefill: no profile of these models" in refused
    assert "the receiver's weights changed" in checked
    assert "v0002" in after.splitlines()[0]


def test_no_output_was_left_out() -> None:
    lines = (ROOT / "docs" / "runtime.md").read_text("utf-8").splitlines()
    assert [line for line in lines if line.isalpha() and line.isupper()] == []
