"""`kvprofile select` as a runtime decides, and `--max-starts` of select and pareto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvprofile.cost.layer_times import LayerMs
from kvprofile.errors import BadInput
from kvprofile.report import serving
from kvprofile.runtime import RuntimeProfile, load_profile
from kvprofile.store import reader
from kvprofile.store.reader import Profile
from tests.command import document, run
from tests.profile_factory import add_validation, publish_profile


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_profile(tmp_path_factory.mktemp("store"), samples=300)


class Timed:
    """A layer takes 10 ms to recompute and 1 ms to read, at any length."""

    def at(self, tokens: int) -> LayerMs:
        return LayerMs((10.0,) * 6, (1.0,) * 6, 0.0)


@pytest.fixture(name="timed")
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = serving.from_reader

    def with_times(profile: Profile) -> RuntimeProfile:
        return made(profile).with_times(Timed())

    monkeypatch.setattr(serving, "from_reader", with_times)


REQUEST = ("--tokens", "1000", "--bandwidth", "100Gbps", "--latency", "1ms")


@pytest.mark.parametrize("loss", ["0%", "1%", "5%", "21%", "45%", "1pt", "30pt"])
@pytest.mark.parametrize("rule", ["point", "bound"])
def test_it_selects_what_the_runtime_chooses(loss: str, rule: Any, folder: Path) -> None:
    plan = load_profile(folder).choose(loss, rule=rule)
    result = run("select", folder, "--max-loss", loss, "--rule", rule)
    found = json.loads(result.stdout)
    assert result.exit_code == (1 if plan is None else 0)
    keys = ("strategy", "start_layer", "stop_layer", "params", "recompute_fraction")
    assert found["selected"] == (None if plan is None else {name: getattr(plan, name) for name in keys})
    taken = [one for one in found["decision"]["considered"] if one["why_not"] is None]
    assert [one["plan"] for one in taken] == [found["plan"]] == [found["decision"]["plan"]]


@pytest.mark.usefixtures("timed")
def test_a_latency_target_leaves_time_for_quality(folder: Path) -> None:
    found = {
        slo: document("select", folder, "--max-loss", "45%", *REQUEST, "--slo", f"{slo}ms") for slo in (500, 40, 20, 1)
    }
    assert [one["plan"] for one in found.values()] == [
        "full_prefill",
        "layers 2–3 (2 of 6)",
        "layer 2 (1 of 6)",
        "full_reuse",
    ]
    assert run("select", folder, "--max-loss", "45%", *REQUEST, "--slo", "0.5s").exit_code == 1
    assert found[500]["decision"]["modelled_first_token_ms"] == 66
    why = {one["plan"]: one["why_not"] for one in found[20]["decision"]["considered"]}
    assert why["full_prefill"] == "slower than 20 ms: 66 ms"
    assert why["layers 2–3 (2 of 6)"].startswith("slower than 20 ms: 2")
    assert why["layer 2 (1 of 6)"] is None
    assert why["full_reuse"] == "less quality"
    assert "nothing is within 1 ms" in found[1]["decision"]["why"]
    waiting = document("select", folder, "--max-loss", "45%", *REQUEST, "--slo", "500ms", "--waiting", "2")
    assert (waiting["plan"], waiting["decision"]["why"]) == ("full_reuse", "fewest recomputed layers: 2 waiting")


def test_a_plan_within_the_limit_that_is_not_taken_is_not_denied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(times: Any, slo: str) -> tuple[Any, Any, str]:
        made = serving.from_reader
        with monkeypatch.context() as patched:
            patched.setattr(serving, "from_reader", lambda profile: made(profile).with_times(times))
            found = document("select", folder, "--max-loss", "0.5%", *REQUEST, "--slo", slo)
        return found["plan"], found["tasks"][0]["samples_needed"], found["sureness"]

    class Untimed(Timed):
        def at(self, tokens: int) -> LayerMs:
            raise BadInput("layers were timed at contexts of 10 to 20 tokens")

    for times, slo, why in ((Untimed(), "1ms", "the time is not known"), (Timed(), "1s", "full prefill is taken")):
        plan, needed, sureness = asked(times, slo)
        assert (plan, needed) == ("full_prefill", [])
        assert sureness.startswith(f"a plan is within the limit, but {why}")
    denied = document("select", folder, "--max-loss", "0%", "--rule", "bound", *REQUEST, "--slo", "1s")
    assert denied["sureness"] == "no plan is shown to be within the limit"
    assert denied["tasks"][0]["samples_needed"]


def test_a_profile_without_times_says_so(folder: Path) -> None:
    found = document("select", folder, "--max-loss", "45%", *REQUEST, "--slo", "500ms")
    assert found["plan"] == "full_reuse"
    assert found["decision"]["why"].endswith("the profile has no times of layers")


def test_validated_needs_a_validation_that_held(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    result = run("select", folder, "--max-loss", "5%", "--rule", "validated")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["rule"] == found["tasks"][0]["rule"] == "validated"
    assert found["decision"]["why"].endswith("by rule validated; check one on fresh data with `kvprofile validate`")
    assert found["sureness"].endswith("on fresh data; check one with `kvprofile validate`")
    assert found["tasks"][0]["samples_needed"] == []
    assert {"plan": "layers 2–3 (2 of 6)", "why_not": "not validated"}.items() <= found["decision"]["considered"][
        2
    ].items()
    add_validation(folder)
    found = document("select", folder, "--max-loss", "5%", "--rule", "validated")
    assert found["plan"] == "layers 2–3 (2 of 6)"
    assert found["validated_on_fresh_data"] == ["musique (8 samples): loss 0.0%"]
    assert found["rule"] == found["tasks"][0]["rule"] == "validated"
    assert found["sureness"] == "held on fresh data: on 8 samples of musique, it loses at most 10.0% at 95%"


def test_it_reads_the_profile_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    load, make = reader.load, RuntimeProfile.__init__

    def counted_load(path: Any) -> Profile:
        calls.append("load")
        return load(path)

    def counted_make(*words: Any, **named: Any) -> None:
        calls.append("make")
        make(*words, **named)

    monkeypatch.setattr(reader, "load", counted_load)
    monkeypatch.setattr(RuntimeProfile, "__init__", counted_make)
    assert run("select", folder, "--max-loss", "5%").exit_code == 0
    assert calls == ["load", "make"]


def test_a_rejected_version_is_not_selected_from(tmp_path: Path) -> None:
    older, newer = publish_profile(tmp_path), publish_profile(tmp_path)
    (newer / "rejected.json").write_text("{}")
    result = run("select", tmp_path, "--max-loss", "5%")
    assert json.loads(result.stdout)["profile"] == str(older)
    sentence = "v0002 was rejected; this profile (v0001) is of other weights if they changed since"
    assert " ".join(result.stderr.split()) == sentence
    assert run("select", older, "--max-loss", "5%").stderr == "", "it was asked for"
    assert run("select", older / "profile.parquet", "--max-loss", "5%").stderr == ""
    (older / "rejected.json").write_text("{}")
    third = publish_profile(tmp_path)
    result = run("select", older.parent, "--max-loss", "5%")
    assert (json.loads(result.stdout)["profile"], result.stderr) == (str(third), ""), "those before do not matter"
    assert "was rejected" in str(run("select", newer, "--max-loss", "5%").exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slo", "500ms"], "give --tokens and --bandwidth"),
        (["--slo", "500ms", "--tokens", "100"], "give --tokens and --bandwidth"),
        (["--latency", "1ms"], "give --bandwidth, too"),
        ([*REQUEST, "--slo", "500"], "write 500ms"),
        ([*REQUEST, "--slo", "0ms"], "latency target of 0.0 ms cannot be met"),
        (["--bandwidth", "100"], "write 100Gbps"),
        ([*REQUEST, "--waiting", "-1"], "cannot be"),
        (["--tokens", "0"], "cannot be"),
        ([*REQUEST, "--rule", "certified"], "are about one request"),
        (["--rule", "validated", "--split", "0.5"], "are about one request"),
        (["--waiting", "1", "--all-tasks"], "are about one request"),
        (["--rule", "foo"], "rules are point, bound, certified, validated"),
        (["--rule", "validatd"], 'did you mean "validated"'),
        (["--max-starts", "-1"], "give 0 or more"),
        (["--max-starts", "1", "--rule", "certified"], "--max-starts chooses by all samples"),
        (["--max-starts", "1", "--split", "0.5"], "--max-starts chooses by all samples"),
        (["--max-starts", "1", "--all-tasks"], "--max-starts chooses by all samples"),
    ],
)
def test_bad_input(words: list[str], message: str, folder: Path) -> None:
    result = run("select", folder, "--max-loss", "5%", *words)
    assert message in str(result.exception)
    assert result.stdout == ""


def test_few_starts_cost_quality_and_save_bytes(folder: Path) -> None:
    whole = document("select", folder, "--max-loss", "5%")
    none = document("select", folder, "--max-loss", "5%", "--max-starts", "0")
    one = document("select", folder, "--max-loss", "5%", "--max-starts", "1")
    assert [found["plan"] for found in (whole, none, one)] == [
        *("layers 2–3 (2 of 6)", "layers 0–3 (4 of 6)", "layers 2–3 (2 of 6)")
    ]
    assert "e_storage" not in whole
    assert (none["e_storage"]["starts"], none["e_storage"]["e_bytes_saved_per_token"]) == ([], 256)
    assert none["e_storage"]["lost_points_worst"] > 10
    assert none["e_storage"]["worst_at"] in (1, 2, 3)
    assert one["e_storage"]["starts"] == [2]
    assert one["e_storage"]["lost_points_worst"] == pytest.approx(0)


def test_pareto_draws_the_frontier_of_what_is_kept(folder: Path) -> None:
    (block,) = document("pareto", folder, "--max-starts", "0")["blocks"]
    assert block["e_storage"]["starts"] == []
    assert {one["start_layer"] for one in block["frontier"]} <= {0, None}
    (both,) = document("pareto", folder, "--max-starts", "6", "--metric", "exact_match", "--max-loss", "5%")["blocks"]
    assert both["metric"] == "exact_match"
    grids = [
        document("pareto", folder, "--max-loss", "5%", *words)["blocks"][0]["selected_by_granularity"]
        for words in ((), ("--max-starts", "6"))
    ]
    assert (set(grids[0]), grids[1]) == ({"2", "3"}, {})
    output = run("pareto", folder, "--max-starts", "1", "--max-loss", "5%").output
    assert "qa / hotpotqa: E kept of layers 2; the best quality at any recompute loses 0.00 points on average" in output
    assert "E kept" not in run("pareto", folder).output
    for words in (["--granularity", "1"], ["--all-tasks", "--max-loss", "5%"], ["--split", "0.5", "--max-loss", "5%"]):
        assert "--max-starts chooses" in str(run("pareto", folder, "--max-starts", "1", *words).exception)
