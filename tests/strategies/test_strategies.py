"""What every strategy must keep, and that a new file is all it takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.ending import Ending
from kvprofile.engine.reference import greedy
from kvprofile.layers import groups
from kvprofile.strategies import load_all
from tests.engine.architectures import LAYERS, tiny_decoder

CONTEXT = list(range(3, 25))
SUFFIX = (5, 9, 30)


@pytest.mark.parametrize("name", load_all())
def test_with_one_model_on_both_sides_every_plan_answers_alike(name: str) -> None:
    decoder = tiny_decoder()
    caches = ContextCaches(decoder, decoder, CONTEXT, len(CONTEXT))  # nothing is left out without context
    own = greedy(decoder, caches.receiver_kv, SUFFIX, 6, Ending())
    strategy = load_all()[name]
    for plan in strategy.plans(LAYERS, (1, 2)):
        assert plan.strategy == name
        assert 0 <= strategy.recomputed_layers(plan, LAYERS) <= LAYERS
        assert greedy(decoder, strategy.read(caches, plan).context, SUFFIX, 6, Ending()) == own


def test_groups_on_the_grids_of_30_layers() -> None:
    assert [len(groups(30, unit)) for unit in (1, 2, 3)] == [465, 120, 55]
    plans = load_all()["layer_group"].plans(30, (1, 2, 3))
    assert len(plans) == len(set(plans)) == 465
    assert len(groups(32, 3)) == 66, "the last unit is shorter"


def test_a_new_file_is_a_new_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "more_strategies"
    package.mkdir()
    (package / "__init__.py").touch()
    source = Path(sys.modules["kvprofile.strategies"].__file__ or "").parent / "full_reuse.py"
    (package / "other_reuse.py").write_text(source.read_text("utf-8").replace('"full_reuse"', '"other_reuse"'), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = load_all("more_strategies")
    assert list(found) == ["other_reuse"]
    sender, receiver = tiny_decoder(seed=1), tiny_decoder(seed=2)
    caches = ContextCaches(sender, receiver, CONTEXT, 3)
    (plan,) = found["other_reuse"].plans(LAYERS, (1,))
    assert torch.equal(found["other_reuse"].read(caches, plan).context[0].keys, caches.sender_capture.kv[0].keys)
