"""An export answers as its profile does, fits its schema, and is refused when anything about it is not right."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest

from kvprofile.errors import BadInput
from kvprofile.identity import json_sha256
from kvprofile.limits import LossLimit, Rule
from kvprofile.runtime import RuntimeProfile, cache_key, load_profile
from kvprofile.runtime.export import EXPORT_VERSION, export_document, export_text, read_export, schema, write_arrow
from kvprofile.runtime.profile import thawed
from kvprofile.runtime.shape import KEYWORDS, misfit
from kvprofile.store.schema import PROFILE, TIMINGS
from tests.profile_factory import header, publish_profile

TIMING = {"context_tokens": 100, "suffix_tokens": 10, "layer": 0, "recompute_ms": 2.0, "read_ms": 0.5, "repeats": 3}
OUTSIDE = {**TIMING, "layer": None, "recompute_ms": None}
VALIDATION: dict[str, Any] = {
    **{"task": "qa", "dataset": "musique", "metric": "f1", "created_at": "2026-02-01T00:00:00Z", "samples": 20},
    **{"overlap_left_out": 0, "max_loss": "1%", "confidence": 0.95, "full_prefill_quality": 0.5, "file": "/secret/x"},
    "plans": [
        {
            **{
                "plan": "layers 2–3 (2 of 6)",
                "strategy": "layer_group",
                "start_layer": 2,
                "stop_layer": 4,
                "params": None,
            },
            **{"recompute_fraction": 1 / 3, "unit": "%", "promised_at_most": 0.01, "profiled_loss": 0.0, "loss": 0.0},
            **{"loss_lower": 0.0, "loss_upper": None, "quality": 0.5, "baseline_quality": 0.5, "beaten_by": []},
            **{"held": True, "bounded": False, "beyond_chance": None},
        }
    ],
}


@pytest.fixture(name="profile", scope="module")
def _profile(tmp_path_factory: pytest.TempPathFactory) -> RuntimeProfile:
    folder = publish_profile(tmp_path_factory.mktemp("store"), sources=[("qa", "a"), ("qa", "b"), ("code", "c")])
    held = load_profile(folder)
    return RuntimeProfile(held.folder, held.header, held.rows, [VALIDATION], [TIMING, OUTSIDE])


@pytest.fixture(name="document", scope="module")
def _document(profile: RuntimeProfile) -> dict[str, Any]:
    return json.loads(export_text(profile))  # type: ignore[no-any-return]


def test_the_schema_is_one_and_uses_nothing_that_is_passed_over() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())

    def words(held: Any, names: bool = False) -> set[str]:
        if isinstance(held, list):
            return set().union(*(words(one) for one in held))
        if not isinstance(held, dict):
            return set()
        inner = [words(value, key in ("properties", "$defs") and not names) for key, value in held.items()]
        return (set() if names else set(held)).union(*inner)

    assert words(schema()) <= KEYWORDS
    assert {"$ref", "const", "pattern", "minItems", "properties"} <= words(schema())


def test_an_export_fits_the_schema_and_has_every_column(document: dict[str, Any]) -> None:
    jsonschema.validate(document, schema(), jsonschema.Draft202012Validator)
    assert set(document["plans"][0]) == set(PROFILE.names)
    assert document["kvprofile_export"] == EXPORT_VERSION
    assert "file" not in document["validations"][0]
    assert document["layer_times"] == [TIMING, OUTSIDE]


def test_an_export_answers_as_its_profile_does(profile: RuntimeProfile, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(export_text(profile))
    read = load_profile(file)
    assert read.pair == profile.pair
    assert (read.rows, read.header, read.timings) == (profile.rows, profile.header, profile.timings)
    assert [thawed(one) for one in read.validations] == [{k: v for k, v in VALIDATION.items() if k != "file"}]
    losses = {row[name] for row in profile.rows for name in ("loss_rel", "loss_rel_upper") if row[name] is not None}
    answers = set()
    for value in sorted({near for loss in losses for near in (loss, loss + 1e-6, math.nextafter(loss, 0))}):
        for unit in ("%", "pt"):
            for task, dataset in (("qa", "a"), ("qa", "b"), ("code", "c")):
                for metric in ("f1", "exact_match"):
                    rules: tuple[Rule, ...] = ("point", "bound")
                    for rule in rules:
                        asked = LossLimit(100 * min(max(0.0, value), 1.0), unit), task, metric, dataset, rule  # type: ignore[arg-type]
                        answers.add(plan := read.choose(*asked))
                        assert plan == profile.choose(*asked)
    assert len(answers) > 8
    chosen = read.choose("45%", "qa", dataset="a")
    assert chosen is not None
    assert cache_key(chosen, [1], "a").startswith("kvprofile-approximate")
    assert export_text(read) == export_text(profile)


def test_an_older_format_is_exported_with_what_it_lacks(tmp_path: Path) -> None:
    profile = load_profile(Path(__file__).parents[1] / "store" / "format_1")
    file = tmp_path / "old.json"
    file.write_text(export_text(profile))
    read = load_profile(file)
    assert read.header["receiver"]["config_sha256"] is None
    assert read.choose("1%") == profile.choose("1%")
    plan = read.choose("1%")
    assert plan is not None
    with pytest.raises(BadInput, match="is not known"):
        cache_key(plan, [1], "a")


def mended(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], str]:
    """Returns what makes a change and gives the hash that belongs to it, as somebody does who means it."""

    def made(document: dict[str, Any]) -> str:
        change(document)
        document.pop("sha256", None)
        return json.dumps({**document, "sha256": json_sha256(document)})

    return made


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], str]:
    def made(document: dict[str, Any]) -> str:
        change(document)
        return json.dumps(document)

    return made


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


SHAPES = {
    "no plans": at("plans", value=[]),
    "plans of another kind": at("plans", value={}),
    "a plan of another kind": at("plans", 0, value=3),
    "text for a number": at("plans", 0, "quality", value="0.9"),
    "truth for a number": at("plans", 0, "recomputed_layers", value=True),
    "fraction of a layer": at("plans", 0, "total_layers", value=6.5),
    "negative layer": at("plans", 0, "start_layer", value=-1),
    "share above one": at("plans", 0, "recompute_fraction", value=1.5),
    "an unknown column": at("plans", 0, "pickle", value="x"),
    "no column": lambda document: document["plans"][0].pop("loss_rel"),
    "null where none may be": at("plans", 0, "task", value=None),
    "an unknown key": at("path", value="/etc/passwd"),
    "no header": lambda document: document.pop("header"),
    "no receiver": lambda document: document["header"].pop("receiver"),
    "a receiver of another kind": at("header", "receiver", value="x"),
    "a digest of another kind": at("header", "receiver", "weights_sha256", value=1),
    "no dtype": lambda document: document["header"]["sender"].pop("dtype"),
    "a very long text": at("plans", 0, "task", value="x" * 2000),
    "another version": at("kvprofile_export", value=0),
    "a truth for a version": at("kvprofile_export", value=True),
    "a text for a version": at("kvprofile_export", value="1"),
    "a validated plan of another kind": at("validations", 0, "plans", 0, value=[]),
    "held is a text": at("validations", 0, "plans", 0, "held", value="true"),
    "negative time": at("layer_times", 0, "read_ms", value=-1.0),
    "no repeats": lambda document: document["layer_times"][0].pop("repeats"),
    "repeats that never ran": at("layer_times", 0, "repeats", value=0),
    "a granularity beyond its column": at("plans", 0, "granularity", value=500),
    "more samples than its column holds": at("plans", 0, "n_planned", value=10**12),
    "negative FLOPs": at("plans", 0, "prefill_flops", value=-1.0),
    "an integer beyond a double": at("plans", 0, "loss_rel", value=10**400),
    "a time beyond a double": at("layer_times", 0, "read_ms", value=10**400),
    "a validated loss beyond a double": at("validations", 0, "plans", 0, "loss", value=10**400),
    "a time that is a text": at("layer_times", 0, "recompute_ms", value="1"),
    "no sha256": lambda document: document.pop("sha256"),
    "an upper-case sha256": lambda document: document.update(sha256=document["sha256"].upper()),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_reader_agrees_with_the_schema(name: str, document: dict[str, Any], tmp_path: Path) -> None:
    damaged = copy.deepcopy(document)
    SHAPES[name](damaged)
    assert misfit(document, schema()) is None
    assert misfit(damaged, schema()) is not None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(damaged, schema(), jsonschema.Draft202012Validator)
    file = tmp_path / "x.json"
    file.write_text(json.dumps(damaged))
    with pytest.raises(BadInput, match="is no export"):
        load_profile(file)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda document: json.dumps(document)[:-20], "is no JSON document"),
        (lambda document: "[" * 10**5, "is no JSON document"),
        (lambda document: "\xff", "is no JSON document"),
        (lambda document: "[]", "is no export"),
        (lambda document: "null", "is no export"),
        (
            lambda document: re.sub(r'("quality": )[^,]+', r"\1NaN", json.dumps(document), count=1),
            "is no JSON document",
        ),
        (
            lambda document: re.sub(r'("quality": )[^,]+', r"\1 1e999", json.dumps(document), count=1),
            "is no JSON document",
        ),
        (mended(at("plans", 0, "quality", value=None)), "samples that were scored, and no quality"),
        (mended(at("plans", 4, "stop_layer", value=0)), "is no export"),
        (mended(at("plans", 0, "n_scored", value=10**6)), "counts that cannot be"),
        (mended(at("plans", 4, "start_layer", value=None)), "is no export"),
        (mended(at("kvprofile_export", value=2)), "pip install -U"),
        (changed(at("header", "receiver", "weights_sha256", value="9" * 64)), "changed after it was exported"),
        (changed(at("plans", 3, "loss_rel", value=0.0123)), "changed after it was exported"),
        (changed(at("header", "sender", "name", value="\ud800")), "is no JSON document"),
    ],
)
def test_what_is_no_export_is_refused(
    made: Callable[[dict[str, Any]], str], words: str, document: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(made(copy.deepcopy(document)).encode("latin-1"))
    with pytest.raises(BadInput, match=words):
        load_profile(file)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    with file.open("wb") as opened:
        opened.truncate(2**29)
    with pytest.raises(BadInput, match="larger than any profile"):
        read_export(file)


def test_a_rejected_version_is_not_exported(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, samples=2, granularity=(3,))
    (folder / "rejected.json").write_text("{}")
    with pytest.raises(BadInput, match="was rejected"):
        load_profile(folder)


def test_nothing_that_is_no_number_is_exported(profile: RuntimeProfile) -> None:
    odd = RuntimeProfile(Path("x"), header(), [{**profile.rows[0], "mean_kl": math.inf}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        export_document(odd)


def test_arrow_file_holds_rows_and_header(profile: RuntimeProfile, tmp_path: Path) -> None:
    write_arrow(profile, tmp_path / "p.arrow")
    table = pa.ipc.open_file(tmp_path / "p.arrow").read_all()
    assert table.schema.equals(PROFILE)
    assert table.to_pylist() == [dict(row) for row in profile.rows]
    assert json.loads(table.schema.metadata[b"kvprofile"]) == thawed(profile.header)


def test_every_number_has_bounds_that_its_column_holds() -> None:
    for name, kind in schema()["$defs"].items():
        for key, held in kind["properties"].items():
            if {"number", "integer"} & set(
                [held["type"]] if "type" in held and isinstance(held["type"], str) else held.get("type", [])
            ):
                assert held["maximum"] <= 1e300, (name, key)
                assert held["minimum"] >= -1e300, (name, key)
    for name, columns in (("plan", PROFILE), ("layer_time", TIMINGS)):
        for field in columns:
            if pa.types.is_integer(field.type):
                held = schema()["$defs"][name]["properties"][field.name]
                for edge in ("minimum", "maximum"):
                    pa.scalar(held[edge], field.type)
