from __future__ import annotations

from pathlib import Path

import pytest

from kvprofile.errors import BadInput
from kvprofile.limits import BOUND_METHOD
from kvprofile.runtime import load_profile
from tests.profile_factory import publish_profile


def test_chooses_the_critical_layers(tmp_path: Path) -> None:
    profile = load_profile(publish_profile(tmp_path))
    plan = profile.choose("1%")
    assert plan is not None
    assert (plan.strategy, plan.start_layer, plan.stop_layer, plan.metric) == ("layer_group", 2, 4, "f1")
    loose = profile.choose("45%")
    assert loose is not None
    assert loose.strategy == "full_reuse"


def test_none_means_full_prefill(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, granularity=(6,))
    assert load_profile(folder).choose("1pt") is None


def test_several_tasks_must_be_chosen_from(tmp_path: Path) -> None:
    profile = load_profile(publish_profile(tmp_path, sources=[("qa", "a"), ("qa", "b"), ("code", "c")]))
    with pytest.raises(BadInput, match="several values of task; choose one of code, qa"):
        profile.choose()
    with pytest.raises(BadInput, match="several values of dataset; choose one of a, b"):
        profile.choose(task="qa")
    plan = profile.choose(task="qa", dataset="b", metric="exact_match")
    assert plan is not None
    assert (plan.dataset, plan.metric) == ("b", "exact_match")
    with pytest.raises(BadInput, match="no metric 'bleu'"):
        profile.choose(task="code", metric="bleu")


def test_a_rejected_version_is_not_loaded(tmp_path: Path) -> None:
    older = publish_profile(tmp_path, samples=2, granularity=(3,))
    newer = publish_profile(tmp_path, samples=2, granularity=(3,))
    assert load_profile(tmp_path).folder == newer
    (newer / "rejected.json").write_text("{}")
    assert load_profile(tmp_path).folder == load_profile(newer.parent).folder == older
    for path in (newer, newer / "profile.parquet"):
        with pytest.raises(BadInput, match="v0002 was rejected"):
            load_profile(path)
    (older / "rejected.json").write_text("{}")
    with pytest.raises(BadInput, match="rejected"):
        load_profile(tmp_path)


def test_a_profile_and_all_in_it_does_not_change(tmp_path: Path) -> None:
    profile = load_profile(publish_profile(tmp_path, samples=2))
    with pytest.raises(AttributeError, match="does not change"):
        profile.rows = ()
    with pytest.raises(AttributeError, match="does not change"):
        del profile.pair
    for held in (profile.header, profile.header["sender"], profile.header["datasets"][0], profile.rows[0]):
        with pytest.raises(TypeError):
            held["name"] = "x"  # type: ignore[index]


def test_bounds_of_another_method_bound_nothing(tmp_path: Path) -> None:
    kept, old = (publish_profile(tmp_path / str(n), samples=300, bounds=n) for n in (BOUND_METHOD, "percentile@1"))
    assert load_profile(kept).choose("5%", rule="bound") is not None
    assert load_profile(old).choose("5%", rule="bound") is None
    assert load_profile(old).choose("5%") is not None


def test_the_bound_decides_where_asked_for(tmp_path: Path) -> None:
    few, many = (load_profile(publish_profile(tmp_path / str(n), samples=n)) for n in (8, 300))
    assert few.choose("5%") is not None
    assert few.choose("5%", rule="bound") is None
    plan = many.choose("5%", rule="bound")
    assert plan is not None
    assert (plan.start_layer, plan.stop_layer, plan.n_scored) == (2, 4, 300)
    assert plan.loss_rel is not None
    assert plan.loss_rel < plan.loss_rel_upper <= 0.05  # type: ignore[operator]
    with pytest.raises(BadInput, match="use bound or point"):
        few.choose("5%", rule="certified")
    with pytest.raises(BadInput, match="has no unit"):
        few.choose(0.1)  # type: ignore[arg-type]
