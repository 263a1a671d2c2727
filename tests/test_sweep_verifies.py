"""What a sweep publishes, `store verify` finds sound: the numbers are those of the measurements, however it searched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvprofile.recipe import load_recipe, with_options
from kvprofile.store.reader import load
from kvprofile.store.verify import verify
from kvprofile.sweep import sweep
from tests.tiny_sweep import Silent, write_pair


@pytest.mark.parametrize(
    "options",
    [{}, {"search": "adaptive", "granularity": (1,)}, {"references": "none", "store_text": False}],
    ids=["exhaustive", "adaptive", "unlabelled"],
)
def test_a_swept_profile_is_sound(tmp_path: Path, options: dict[str, Any]) -> None:
    recipe = with_options(load_recipe(str(write_pair(tmp_path))), **options)
    sweep(recipe, tmp_path / "store", Silent())
    assert verify(tmp_path / "store") == (1, [])


def test_two_machines_that_sweep_one_recipe_make_two_profiles(tmp_path: Path) -> None:
    recipe = with_options(load_recipe(str(write_pair(tmp_path))), granularity=(2,))
    one, other = (load(sweep(recipe, tmp_path / name, Silent())).header for name in ("one", "other"))
    assert one["version"] == other["version"] == 1
    assert one["profile_id"] != other["profile_id"]
