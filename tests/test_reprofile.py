"""Re-profiling on schedule: what is stale and why, the warm start, the gate, and runs that are cut off."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from kvprofile import measurement
from kvprofile.cli import main
from kvprofile.errors import BadInput, Interrupted
from kvprofile.gate import Gate, Worse
from kvprofile.identity import FINGERPRINTS
from kvprofile.limits import parse_loss
from kvprofile.recipe import load_recipe, with_options
from kvprofile.reprofile import Options, Outcome, known_groups, reprofile
from kvprofile.staleness import Present, why_stale
from kvprofile.store.reader import Profile, load, rejection, versions
from kvprofile.store.retention import accept
from kvprofile.store.schema import FORMAT_VERSION
from kvprofile.store.writer import alone
from tests import profile_factory as factory
from tests.profile_factory import publish_profile
from tests.tiny_models import save_adapter, save_model
from tests.tiny_sweep import Silent, write_pair

LAYERS = 8
KILLS = 40


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return load(publish_profile(tmp_path / "profiles"))


def unchanged(profile: Profile) -> dict[str, Any]:
    header = profile.header
    models = {role: {key: header[role][key] for key in FINGERPRINTS} for role in ("sender", "receiver")}
    kept = {key: header[key] for key in ("datasets", "metrics", "strategies", "end_ids", "recipe_sha256")}
    return {**models, **kept}


class TestWhyStale:
    AT = datetime(2026, 2, 1, tzinfo=UTC)

    def reasons(self, profile: Profile | None, max_age: timedelta | None = None, **now: Any) -> list[str]:
        held = {} if profile is None else unchanged(profile)
        absent = dict.fromkeys(Present._fields)
        found = why_stale(profile, Present(**{**absent, **held, **now}), max_age, self.AT)
        assert all(reason.detail for reason in found)
        return [reason.what for reason in found]

    def test_what_did_not_change_is_current(self, profile: Profile) -> None:
        assert self.reasons(profile) == []
        assert self.reasons(profile, timedelta(days=30)) == []

    def test_no_profile(self) -> None:
        assert self.reasons(None) == ["missing"]

    @pytest.mark.parametrize("role", ["sender", "receiver"])
    @pytest.mark.parametrize("key", FINGERPRINTS)
    def test_every_fingerprint_of_both_models(self, profile: Profile, role: str, key: str) -> None:
        assert self.reasons(profile, **{role: {**unchanged(profile)[role], key: "9" * 64}}) == [FINGERPRINTS[key]]

    def test_weights_that_were_never_read_here_have_changed(self, profile: Profile) -> None:
        unread = {**unchanged(profile)["sender"], "weights_sha256": ""}
        assert self.reasons(profile, sender=unread) == ["weights"]

    def test_data(self, profile: Profile) -> None:
        (one,) = unchanged(profile)["datasets"]
        assert self.reasons(profile, datasets=[{**one, "sha256": "9" * 64}]) == ["data"]
        assert self.reasons(profile, datasets=[{**one, "sample_ids_sha256": "9" * 64}]) == ["data"]
        assert self.reasons(profile, datasets=[one, {**one, "name": "more"}]) == ["data"]
        assert self.reasons(profile, datasets=[]) == ["data"]

    def test_two_data_sources_of_one_name(self, tmp_path: Path) -> None:
        first = {"name": "data", "sha256": "1" * 64, "sample_ids_sha256": "2" * 64}
        second = {**first, "sha256": "3" * 64}
        both = load(publish_profile(tmp_path, datasets=[first, second]))
        assert self.reasons(both) == []
        assert self.reasons(both, datasets=[second, first]) == []
        assert self.reasons(both, datasets=[first, first]) == ["data"]

    def test_end_tokens(self, profile: Profile) -> None:
        assert self.reasons(profile, end_ids=[2, 3]) == ["end tokens"]

    def test_metric_strategy_and_recipe(self, profile: Profile) -> None:
        assert self.reasons(profile, metrics=["f1@2", "exact_match@1"]) == ["metric"]
        held = unchanged(profile)["strategies"]
        assert self.reasons(profile, strategies={**held, "layer_group": 2}) == ["strategy"]
        assert self.reasons(profile, strategies={**held, "of_tomorrow": 1}) == [], "none of its plans was measured"
        assert self.reasons(profile, recipe_sha256="9" * 64) == ["recipe"]

    def test_settings_that_the_recipe_did_not_have_yet_change_nothing(self, profile: Profile) -> None:
        recipe = {"sender": "a", "receiver": "b", "data": [{"dataset": "hotpotqa", "task": "qa"}]}
        (profile.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        now = load_recipe(str(profile.folder / "recipe.yaml"))
        assert now.sha256() != profile.header["recipe_sha256"]
        assert self.reasons(profile, recipe_sha256=now.sha256()) == []
        assert self.reasons(profile, recipe_sha256=with_options(now, seed=1).sha256()) == ["recipe"]

    def test_age(self, profile: Profile) -> None:
        assert self.reasons(profile, timedelta(days=29)) == ["age"]
        assert (
            why_stale(profile, Present(**unchanged(profile)), timedelta(days=29), self.AT)[0].detail
            == "it is 29 days old"
        )

    def test_older_format(self) -> None:
        old = load(Path(__file__).parent / "store" / "format_1")
        assert self.reasons(old) == ["format"]

    def test_date_that_is_none(self, tmp_path: Path) -> None:
        broken = load(publish_profile(tmp_path, created_at="yesterday"))
        assert self.reasons(broken, timedelta(days=1)) == ["age"], "not for ever current"
        assert self.reasons(broken) == []
        ahead = load(publish_profile(tmp_path / "ahead", created_at="2999-01-01T00:00:00Z"))
        assert self.reasons(ahead, timedelta(days=1)) == ["age"]


def test_known_groups_are_those_of_the_frontiers(profile: Profile) -> None:
    known = known_groups(profile)
    on_frontier = {
        (r["start_layer"], r["stop_layer"])
        for r in profile.rows.to_pylist()
        if r["on_frontier"] and r["strategy"] == "layer_group"
    }
    assert on_frontier
    assert on_frontier - {(0, 6)} <= {(g.start, g.stop) for g in known}
    assert (2, 4) in {(g.start, g.stop) for g in known}
    assert len(known) < 6


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair, its recipe and a store with a first profile; scored without labels, so that scores differ."""
    folder = tmp_path_factory.mktemp("profiled")
    recipe = write_pair(folder, num_hidden_layers=LAYERS)
    values = {**yaml.safe_load(recipe.read_text()), "references": "none", "granularity": [1]}
    recipe.write_text(yaml.safe_dump(values))
    assert run(folder).status == "published"
    return folder


@pytest.fixture
def pair(profiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pair"
    shutil.copytree(profiled, folder)
    monkeypatch.chdir(folder)
    return folder


def run(folder: Path, **options: Any) -> Outcome:
    return reprofile(load_recipe(str(folder / "recipe.yaml")), folder / "outputs", Silent(), Options(**options))


def update_weights(folder: Path, **changes: Any) -> None:
    shutil.rmtree(folder / "adapter")
    save_adapter(folder / "adapter", num_hidden_layers=LAYERS, **{"seed": 5, **changes})


def published(folder: Path) -> list[Path]:
    (pair,) = [path for path in (folder / "outputs").iterdir() if "__from__" in path.name]
    return [path for _, path in versions(pair)]


def test_current_is_left_alone_and_no_model_is_loaded(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    outcome = run(pair)
    assert (outcome.status, outcome.reasons, outcome.work_share) == ("current", [], None)
    assert len(published(pair)) == 1


def test_new_weights_are_found_and_measured_from_the_old_frontier(pair: Path) -> None:
    update_weights(pair)
    checked = run(pair, only_check=True)
    assert (checked.status, [r.what for r in checked.reasons]) == ("stale", ["weights"])
    assert len(published(pair)) == 1
    outcome = run(pair)
    assert outcome.status == "published"
    first, second = map(load, published(pair))
    assert (outcome.previous, outcome.profile) == (str(first.folder), str(second.folder))
    assert second.header["previous"] == first.header["profile_id"]
    assert second.header["search"] == "adaptive"
    known = {(g.start, g.stop) for g in known_groups(first)}
    measured = {
        (r["start_layer"], r["stop_layer"])
        for r in second.rows.to_pylist()
        if r["strategy"] == "layer_group" and r["n_scored"] == r["n_planned"]
    }
    assert known <= measured
    assert outcome.work_share is not None
    assert 0 < outcome.work_share < 1
    assert outcome.frontier is not None
    assert sum(outcome.frontier.values()) > 0
    assert run(pair).status == "current"


def test_full_search_where_asked_or_where_the_recipe_changed(pair: Path) -> None:
    update_weights(pair)
    assert run(pair, full=True).work_share == 1
    recipe = pair / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("resamples: 200", "resamples: 300"))
    outcome = run(pair)
    assert ([r.what for r in outcome.reasons], outcome.work_share) == (["recipe"], 1)


def test_changed_records_are_measured_again(pair: Path) -> None:
    data = pair / "data.jsonl"
    data.write_text(data.read_text().replace("red stones", "blue stones"))
    outcome = run(pair)
    assert ([r.what for r in outcome.reasons], outcome.status) == (["data"], "published")


def give_small_loss(folder: Path) -> None:
    """Makes the sender nearly the base, and profiles that."""
    update_weights(folder, alpha=1)
    assert run(folder).status == "published"


def test_worse_version_is_rejected_and_the_old_one_stays(pair: Path) -> None:
    give_small_loss(pair)
    update_weights(pair, alpha=400)
    outcome = run(pair, fail_if_worse=parse_loss("1pt"))
    assert outcome.status == "rejected"
    assert outcome.worse[0]["grew_by"] > 1
    assert outcome.worse[0]["at_least"] < outcome.worse[0]["grew_by"]
    folder = Path(outcome.profile or "")
    assert rejection(folder) == Worse(**outcome.worse[0]).words() + (
        f", and {len(outcome.worse) - 1} more plans" if len(outcome.worse) > 1 else ""
    )
    assert load(pair / "outputs").folder == Path(outcome.previous or "") != folder
    before = len(published(pair))
    again = run(pair, fail_if_worse=parse_loss("1pt"))
    assert (again.status, again.worse, len(published(pair))) == ("rejected", outcome.worse, before), (
        "not measured twice"
    )
    assert run(pair, only_check=True).status == "rejected"
    accept(str(folder))
    assert run(pair).status == "current"
    assert load(pair / "outputs").folder == folder


def test_by_its_lower_bound_what_chance_can_do_passes(pair: Path) -> None:
    give_small_loss(pair)
    update_weights(pair, alpha=400)
    one = parse_loss("1pt")
    outcome = run(pair, fail_if_worse=one, rule="bound")
    assert outcome.status == "published", "four samples bound nothing"
    first, second, third = map(load, published(pair))
    assert Gate(second, one).worse(third), "by rule point it would not have passed"
    for limit, rule in ((parse_loss("1%"), "bound"), (one, "certified")):
        with pytest.raises(BadInput, match="in points by rule bound"):
            Gate(first, limit, rule)  # type: ignore[arg-type]


def scored(out: Path, values: list[float], **changes: Any) -> Profile:
    """A profile of answers that full prefill always gets right and layers 2 and 3 get as `values` say."""
    rows = factory.measurements(samples=len(values), sources=[("qa", "hotpotqa")])
    for row in rows:
        right = row["strategy"] == "full_prefill"
        group = (row["start_layer"], row["stop_layer"]) == (2, 4)
        row["value"] = 1.0 if right else values[int(row["sample_id"][1:])] if group else 0.0
        row["baseline_value"] = 1.0
    return load(publish_profile(out, rows, samples=len(values), **changes))


class TestGate:
    def grown(self, tmp_path: Path, before: int, after: int, limit: str, **options: Any) -> list[float | None]:
        old, new = (scored(tmp_path / str(lost), [0.0] * lost + [1.0] * (50 - lost)) for lost in (before, after))
        assert Gate(old, parse_loss(limit)).not_comparable(new) is None
        found = Gate(old, parse_loss(limit), **options).worse(new)
        return [one.grew_by for one in found if one.plan.startswith("layers 2–3") and one.metric == "f1"]

    def test_growth_of_exactly_the_limit_passes(self, tmp_path: Path) -> None:
        assert self.grown(tmp_path / "a", 6, 7, "2pt") == []
        assert self.grown(tmp_path / "b", 13, 14, "2pt") == []
        assert self.grown(tmp_path / "c", 6, 7, "1.9pt") == [pytest.approx(2)]

    def test_relative_growth(self, tmp_path: Path) -> None:
        assert self.grown(tmp_path / "a", 5, 10, "10%") == []
        assert self.grown(tmp_path / "b", 5, 10, "9%") == [pytest.approx(10)]

    def test_plans_that_nobody_serves_do_not_count(self, tmp_path: Path) -> None:
        assert self.grown(tmp_path / "a", 10, 20, "5pt", serving=parse_loss("20%")) == [pytest.approx(20)]
        assert self.grown(tmp_path / "b", 10, 20, "5pt", serving=parse_loss("19%")) == []

    def test_without_texts_another_recipe_may_ask_otherwise(self, tmp_path: Path) -> None:
        profiles = [scored(tmp_path / name, [1.0] * 4, recipe_sha256=name * 64) for name in ("1", "1", "2")]
        for profile in profiles:
            path = profile.folder / "samples.parquet"
            table = pq.read_table(path)
            none = pa.nulls(len(table), table["suffix_token_ids"].type)
            place = table.schema.get_field_index("suffix_token_ids")
            pq.write_table(table.set_column(place, "suffix_token_ids", none), path)
        gate = Gate(profiles[0], parse_loss("1pt"))
        assert gate.not_comparable(profiles[1]) is None
        assert gate.not_comparable(profiles[2]) == "no sample is asked as before"


def test_rejection_that_somebody_wrote_by_hand(pair: Path) -> None:
    (published(pair)[0] / "rejected.json").write_text('{"reason": "bad in production"}')
    outcome = run(pair)
    assert (outcome.status, outcome.worse) == ("rejected", [])


def test_rejection_of_odd_kinds_is_printed_and_stops_nobody(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {**dict.fromkeys(Worse._fields, "x"), "grew_by": "much", "at_least": [1]}
    (published(pair)[0] / "rejected.json").write_text(json.dumps({"reason": "r", "worse": [odd, 3]}))
    monkeypatch.setattr("sys.argv", ["kvprofile", "reprofile", "recipe.yaml", "recipe.yaml", "--check"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().out.count("recipe.yaml: rejected") == 2


def test_after_a_rejection_better_weights_are_published(pair: Path) -> None:
    give_small_loss(pair)
    update_weights(pair, alpha=400)
    assert run(pair, fail_if_worse=parse_loss("1pt")).status == "rejected"
    update_weights(pair, alpha=1, seed=6)
    assert run(pair, fail_if_worse=parse_loss("100pt")).status == "published"


def test_plans_that_cannot_be_scored_any_more_do_not_pass(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_small_loss(pair)
    update_weights(pair, alpha=2)
    score = measurement.measurement_table

    def failing(*arguments: Any) -> Any:
        table = score(*arguments)
        rows = table.to_pylist()
        for row in rows:
            if row["strategy"] in ("layer_group", "full_reuse") and row["sample_id"] == "r1":
                row.update(value=None, kl=None, nll=None, status="error", error="no answer")
        return type(table).from_pylist(rows, schema=table.schema)

    monkeypatch.setattr("kvprofile.sweep.measurement_table", failing)
    outcome = run(pair, fail_if_worse=parse_loss("100pt"))
    assert outcome.status == "rejected"
    assert {one["why"] for one in outcome.worse} == {"3 of 4 scored"}


@pytest.mark.parametrize(("old", "new"), [("red stones", "blue stones"), ("r0", "first")])
def test_losses_on_other_data_are_not_compared(pair: Path, old: str, new: str) -> None:
    give_small_loss(pair)
    data = pair / "data.jsonl"
    data.write_text(data.read_text().replace(old, new))
    update_weights(pair, alpha=400)
    outcome = run(pair, fail_if_worse=parse_loss("1pt"))
    assert (outcome.status, outcome.not_comparable) == ("published", "the datasets changed")


def test_an_adaptive_recipe_searched_anew_measures_the_old_frontier_everywhere(pair: Path) -> None:
    recipe = pair / "recipe.yaml"
    recipe.write_text(recipe.read_text() + "search: adaptive\n")
    assert run(pair).status == "published"
    old = load(pair / "outputs")
    outcome = run(pair, full=True, fail_if_worse=parse_loss("100pt"))
    assert ([r.what for r in outcome.reasons], outcome.status) == (["asked"], "published")
    rows = load(pair / "outputs").rows.to_pylist()
    whole = {(r["start_layer"], r["stop_layer"]) for r in rows if r["n_scored"] == r["n_planned"]}
    assert {(g.start, g.stop) for g in known_groups(old)} <= whole


def test_frontier_of_a_model_with_other_layers_is_not_begun_with(pair: Path) -> None:
    for place in ("base", "adapter"):
        shutil.rmtree(pair / place)
    save_model(pair / "base", num_hidden_layers=LAYERS - 2)
    save_adapter(pair / "adapter", num_hidden_layers=LAYERS - 2)
    outcome = run(pair, fail_if_worse=parse_loss("1pt"))
    assert outcome.status == "published"
    assert outcome.not_comparable == "the models have another number of layers"
    assert outcome.work_share == 1


def test_two_recipes_of_one_pair_do_not_make_each_other_stale(pair: Path) -> None:
    other = pair / "other.yaml"
    other.write_text((pair / "recipe.yaml").read_text().replace("contexts: 4", "contexts: 3"))
    recipes = [load_recipe(str(pair / name)) for name in ("recipe.yaml", "other.yaml")]
    out = pair / "outputs"
    assert [reprofile(one, out, Silent(), Options()).status for one in recipes] == ["current", "published"]
    assert [reprofile(one, out, Silent(), Options()).status for one in recipes] == ["current", "current"]


def test_unreadable_newest_version_is_measured_again(pair: Path) -> None:
    update_weights(pair)
    assert run(pair).status == "published"
    newest = published(pair)[-1]
    (newest / "profile.parquet").write_bytes(b"damaged")
    outcome = run(pair)
    assert outcome.status == "published"
    assert [r.what for r in outcome.reasons] == ["weights", "unreadable"]


def test_older_version_that_serves_does_not_hide_a_damaged_newer_one(pair: Path) -> None:
    assert run(pair, full=True).status == "published"
    (published(pair)[-1] / "profile.parquet").write_bytes(b"damaged")
    outcome = run(pair)
    assert ([r.what for r in outcome.reasons], outcome.status) == (["unreadable"], "published")


def test_version_of_a_newer_kvprofile_is_left_alone(pair: Path) -> None:
    path = published(pair)[0] / "profile.parquet"
    table = pq.read_table(path)
    future = json.dumps({"format_version": FORMAT_VERSION + 1})
    pq.write_table(table.replace_schema_metadata({"kvprofile": future}), path)
    with pytest.raises(BadInput, match="newer kvprofile"):
        run(pair)


def test_another_device_is_no_other_recipe(pair: Path) -> None:
    recipe = pair / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("device: cpu", "device: auto"))
    assert run(pair, only_check=True).status == "current"


def test_one_run_at_a_time(pair: Path) -> None:
    update_weights(pair)
    with alone(pair / "outputs" / ".reprofile"), pytest.raises(Interrupted, match="another process"):
        run(pair)
    assert run(pair).status == "published"


def test_command_line(pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr("sys.argv", ["kvprofile", "reprofile", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return int(end.value.code or 0), output.out.splitlines(), output.err

    code, lines, _ = command("recipe.yaml", "--json")
    assert (code, [json.loads(line)["status"] for line in lines]) == (0, ["current"])
    code, lines, errors = command("absent.yaml", "recipe.yaml", "--json")
    documents = [json.loads(line) for line in lines]
    assert (code, [one["status"] for one in documents]) == (2, ["failed", "current"])
    assert "absent.yaml" in documents[0]["error"]
    assert "kvprofile: absent.yaml: " in errors
    update_weights(pair)
    code, lines, _ = command("recipe.yaml", "--check")
    assert code == 1
    assert lines[1:] == ["  weights: the sender's weights changed"]
    code, lines, errors = command("recipe.yaml", "--fail-if-worse", "100pt", "--max-age", "30d")
    assert code == 0
    assert "published outputs/" in lines[0]
    assert any("frontier:" in line for line in lines)
    assert "stale: the sender's weights changed" in errors
    for wrong in (
        ["--max-age", "30"],
        ["--fail-if-worse", "1"],
        ["--rule", "certified"],
        ["--rule", "bound", "--fail-if-worse", "5%"],
    ):
        assert command("recipe.yaml", *wrong)[0] == 2


def _reprofile_in_child(folder: str) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not outlive a fork, and waiting for them would never end
    os.chdir(folder)
    run(Path(folder))


@pytest.mark.slow
def test_killed_at_random_points_nothing_is_lost_or_half_there(pair: Path) -> None:
    """Children are forked, so that a kill lands in the work and not in the import of torch."""
    context = multiprocessing.get_context("fork")
    rng = random.Random(0)
    kills = updates = 0
    while kills < KILLS:
        updates += 1
        update_weights(pair, seed=10 + updates)
        before, finished = len(published(pair)), False
        while not finished:
            child = context.Process(target=_reprofile_in_child, args=(str(pair),))
            child.start()
            child.join(rng.uniform(0.0, 2.0) if kills < KILLS else 120)
            assert child.exitcode in (0, None), "it failed by itself"
            assert child.exitcode == 0 or kills < KILLS, "it does not end by itself"
            finished = child.exitcode == 0
            if child.is_alive():
                os.kill(child.pid or 0, signal.SIGKILL)
                child.join()
                kills += 1
            for folder in published(pair):
                profile = load(folder)
                assert len(profile.measurements()) > 0
                assert len(profile.samples()) == 4
        assert run(pair).status == "current"
        assert len(published(pair)) == before + 1
