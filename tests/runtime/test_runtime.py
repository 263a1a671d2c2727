from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvprofile.errors import BadInput
from kvprofile.runtime import ProfileStore, load_profile
from tests.profile_factory import header, publish_profile


def test_heavy_packages_stay_out(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, samples=2)
    program = (
        "import sys\nfrom kvprofile.runtime import load_profile\n"
        f"assert load_profile({str(folder)!r}).choose('1%').start_layer == 2\n"
        "heavy = {'torch', 'transformers', 'pandas', 'datasets', 'pydantic', 'filelock', 'rich', 'typer', 'fsspec'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_remote_store_costs_no_torch() -> None:
    program = (
        "import sys\nfrom kvprofile.runtime import ProfileStore\n"
        "try: ProfileStore('memory://nothing').load(sender='a', receiver='b')\n"
        "except Exception as error: print(error)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pydantic', 'rich', 'scipy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "memory://nothing has no profile of b reading from a; `kvprofile store ls` lists all",
        "[]",
    ]


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


def test_store_finds_the_newest_of_a_pair_by_name_or_weights(tmp_path: Path) -> None:
    publish_profile(tmp_path, samples=2, granularity=(3,), created_at="2026-01-01T00:00:00Z")
    newest = publish_profile(tmp_path, samples=2, granularity=(3,), created_at="2026-02-01T00:00:00Z")
    store = ProfileStore(tmp_path)
    assert store.load(sender="sender", receiver="receiver").folder == newest
    assert store.load(sender="c" * 64, receiver="a" * 64).folder == newest
    with pytest.raises(BadInput, match="no profile of sender reading from receiver"):
        store.load(sender="receiver", receiver="sender")


def test_store_refuses_names_that_fit_two_weights(tmp_path: Path) -> None:
    publish_profile(tmp_path, samples=2, granularity=(3,))
    retrained = {**header()["sender"], "weights_sha256": "9" * 64}
    folder = publish_profile(tmp_path, samples=2, granularity=(3,), sender=retrained)
    with pytest.raises(BadInput, match="weights_sha256"):
        ProfileStore(tmp_path).load(sender="sender", receiver="receiver")
    assert ProfileStore(tmp_path).load(sender="9" * 64, receiver="receiver").folder == folder


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
