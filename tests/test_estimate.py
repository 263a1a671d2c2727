"""Estimates count what a sweep would run, and load no weights."""

from __future__ import annotations

from pathlib import Path

from kvprofile.estimate import estimate
from kvprofile.recipe import load_recipe
from tests.tiny_models import LAYERS
from tests.tiny_sweep import RECORDS, write_pair


def test_estimate_counts_samples_and_groups_without_weights(tmp_path: Path) -> None:
    recipe = load_recipe(str(write_pair(tmp_path)))
    (tmp_path / "base" / "model.safetensors").unlink()
    result = estimate(recipe)
    assert (result["samples"], result["layers"]) == (RECORDS, LAYERS)
    grids = {tuple(grid["granularity"]): grid for grid in result["grids"]}
    assert {units: grid["groups"] for units, grid in grids.items()} == {(1,): 6, (2,): 3, (1, 2): 6}
    assert grids[(1,)]["seconds"] > grids[(2,)]["seconds"] > 0
