"""The sensitivity map against the reference executor, sets of layers, the other direction, and that it can be cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvprofile import sensitivity as sensitivity_module
from kvprofile.cli import app
from kvprofile.engine.cache import KV
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.reference import capture, greedy
from kvprofile.layers import LayerRange, describe_set, ranges_in
from kvprofile.profiled_pair import load_profiled_pair
from kvprofile.recipe import load_recipe, with_options
from kvprofile.run import question_of
from kvprofile.store.reader import load
from kvprofile.strategies import layer_set, single_layer_reuse
from kvprofile.sweep import sweep
from tests.tiny_models import LAYERS
from tests.tiny_sweep import RECORDS, Silent, write_pair


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = with_options(load_recipe(str(write_pair(tmp_path_factory.mktemp("pair")))), references="none")
    return sweep(recipe, tmp_path_factory.mktemp("store"), Silent())


@pytest.fixture(scope="module")
def measured(profile: Path) -> list[dict[str, Any]]:
    assert run("sensitivity", profile).exit_code == 0
    table = load(profile).sensitivity()
    assert table is not None
    return [row for row in table.to_pylist() if row["metric"] == "f1"]


def test_every_layer_answers_as_plain_splicing_does(profile: Path, measured: list[dict[str, Any]]) -> None:
    held = load(profile)
    models = load_profiled_pair(held, Silent())
    for sample in sensitivity_module.profile_samples(held):
        ids = sample.context_token_ids
        own, other = (capture(model, ids).kv for model in (models.readers.receiver, models.readers.sender))
        rows = {row["params"]: row for row in measured if row["sample_id"] == sample.sample_id}
        for layer in range(LAYERS):
            spliced = tuple(KV(*(other if index == layer else own)[index]) for index in range(LAYERS))
            answer = greedy(models.readers.receiver, spliced, *question_of(sample, models.receiver))
            assert rows[f'{{"layer":{layer}}}']["output_token_ids"] == list(answer)
    assert len({row["sample_id"] for row in measured}) == RECORDS


def test_the_document_says_what_each_layer_costs(profile: Path, measured: list[dict[str, Any]]) -> None:
    document = json.loads(run("sensitivity", profile, "--json").stdout)
    block = next(b for b in document["blocks"] if b["metric"] == "f1")
    assert [one["layer"] for one in block["layers"]] == list(range(LAYERS))
    for one in block["layers"]:
        own = [r["value"] for r in measured if r["params"] == f'{{"layer":{one["layer"]}}}']
        assert one["loss_rel"] == pytest.approx(1 - sum(own) / RECORDS)
        assert one["critical"] == (one["loss_rel"] > 0.1)
    assert block["critical_layers"] == [one["layer"] for one in block["layers"] if one["critical"]]
    none = json.loads(run("sensitivity", profile, "--critical", "100", "--json").stdout)
    assert none["blocks"][0]["critical_layers"] == []
    for wrong in ("nan", "inf", "-5"):
        assert "no loss between 0 and 100" in str(run("sensitivity", profile, f"--critical={wrong}").exception)


def test_the_other_direction_exchanges_the_models(profile: Path) -> None:
    assert run("sensitivity", profile, "--reverse").exit_code == 0
    table = load(profile).sensitivity("reverse")
    assert table is not None
    rows = table.to_pylist()
    assert {row["strategy"] for row in rows} == {"full_prefill", "single_layer_reuse"}
    models = load_profiled_pair(load(profile), Silent()).reversed()
    sample = sensitivity_module.profile_samples(load(profile))[0]
    own = greedy(
        models.readers.receiver,
        capture(models.readers.receiver, sample.context_token_ids).kv,
        *question_of(sample, models.receiver),
    )
    full = next(r for r in rows if r["strategy"] == "full_prefill" and r["sample_id"] == sample.sample_id)
    assert full["output_token_ids"] == list(own)


def test_a_set_takes_hidden_states_at_every_range(profile: Path) -> None:
    models = load_profiled_pair(load(profile), Silent())
    ids = sensitivity_module.profile_samples(load(profile))[0].context_token_ids
    caches = ContextCaches(*models.readers, ids, 1)
    plan = layer_set.plan_of([2, 0])
    assert ranges_in(plan.params) == [LayerRange(0, 1), LayerRange(2, 3)]
    assert layer_set.recomputed_layers(plan, LAYERS) == 2
    found = layer_set.read(caches, plan).context
    sender = caches.sender_capture
    alone = models.readers.receiver.recompute(ids, LayerRange(2, 3), sender.entering[2])
    assert found[2].keys.equal(alone[0].keys)
    assert found[1].keys.equal(sender.kv[1].keys)
    assert found[0].values.equal(caches.receiver_kv[0].values)
    assert layer_set.plan_of([1, 2, 0]).params == '{"ranges":[[0,3]]}'
    assert describe_set(plan.params or "") == "0, 2"


def test_a_set_of_neighbours_is_the_group(profile: Path) -> None:
    models = load_profiled_pair(load(profile), Silent())
    ids = sensitivity_module.profile_samples(load(profile))[0].context_token_ids
    caches = ContextCaches(*models.readers, ids, 1)
    group = caches.mixed(LayerRange(1, 3))
    for one, other in zip(layer_set.read(caches, layer_set.plan_of([1, 2])).context, group, strict=True):
        assert one.keys.allclose(other.keys, atol=1e-6)


def test_one_layer_of_its_own_model_changes_nothing(profile: Path) -> None:
    models = load_profiled_pair(load(profile), Silent())
    receiver = models.readers.receiver
    caches = ContextCaches(receiver, receiver, (3, 4, 5, 6), 1)
    for layer in range(LAYERS):
        found = single_layer_reuse.read(caches, single_layer_reuse.plan_of(layer)).context
        assert all(one.keys.equal(own.keys) for one, own in zip(found, caches.receiver_kv, strict=True))


def test_cut_off_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = with_options(load_recipe(str(write_pair(tmp_path))), references="none")
    profile = sweep(recipe, tmp_path / "store", Silent())
    calls: list[int] = []
    answer_plans = sensitivity_module.answer_plans

    def stops(*arguments: Any) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        return answer_plans(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(sensitivity_module, "answer_plans", stops)
        run("sensitivity", profile)
    assert load(profile).sensitivity() is None
    calls.clear()
    # A tiny pair's frontier may hold no group, whose layers a set could match.
    monkeypatch.setattr(sensitivity_module, "_sets", lambda *_: [layer_set.plan_of([0, 2])])
    monkeypatch.setattr(sensitivity_module, "answer_plans", lambda *a: (calls.append(1), answer_plans(*a))[1])
    assert run("sensitivity", profile).exit_code == 0
    sets = {row["params"] for row in load(profile).sensitivity().to_pylist() if row["strategy"] == "layer_set"}  # type: ignore[union-attr]
    assert sets == {'{"ranges":[[0,1],[2,3]]}'}
    assert len(calls) == 1 + RECORDS


def test_a_profile_without_texts_is_refused(tmp_path: Path) -> None:
    recipe = with_options(load_recipe(str(write_pair(tmp_path))), store_text=False)
    profile = sweep(recipe, tmp_path / "store", Silent())
    assert "keeps no token ids" in str(run("sensitivity", profile).exception)
