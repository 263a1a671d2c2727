"""A chain of readers from models in folders to losses: equalities, what is kept, what is said, and that it can be cut off."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from kvprofile import chain as chain_module
from kvprofile import cli
from kvprofile.analysis.chain import FULL, Arm, arms, chain, direct, first_hop, last_hop
from kvprofile.errors import BadInput
from kvprofile.layers import LayerRange, PlanKey, plan_key
from kvprofile.run import kept_table
from kvprofile.store.schema import FOOTER_KEY, MEASUREMENTS, missing_header_keys
from kvprofile.store.writer import write_table
from tests.tiny import tiny_tokenizer
from tests.tiny_models import LAYERS, save_adapter, save_model
from tests.tiny_sweep import write_pair

RECORDS = 2
FIRST, SECOND, ALL = LayerRange(1, 2), LayerRange(2, 3), LayerRange(0, LAYERS)
NAMES = ("base+adapter", "base+other", "base")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_pair(folder)
    save_adapter(folder / "other", seed=7)
    return folder


def command(folder: Path, names: tuple[str, str, str] = NAMES, *more: object) -> list[str]:
    """Returns the command for models in `folder`; agreement is the quality, since a tiny model's answers match no label."""
    models = ["+".join(str(folder / part) for part in name.split("+")) for name in names]
    options = ["--dataset", folder / "data.jsonl", "--contexts", RECORDS, "--references", "none", "--device", "cpu"]
    return ["chain", *models, *map(str, options), "--out", str(folder / "chains"), *map(str, more)]


class Measured(NamedTuple):
    document: dict[str, Any]
    rows: dict[PlanKey, list[dict[str, Any]]]

    def of(self, arm: Arm) -> list[dict[str, Any]]:
        return self.rows[arm.plan.key]


def measured(words: list[str]) -> Measured:
    """Returns the document of a chain, and the rows of every arm, in one order of samples."""
    result = CliRunner().invoke(cli.app, [*words, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    document = json.loads(result.stdout)
    rows: dict[PlanKey, list[dict[str, Any]]] = {}
    for row in sorted(pq.read_table(document["file"]).to_pylist(), key=lambda row: str(row["sample_id"])):
        if row["metric"] == "f1":
            rows.setdefault(plan_key(row), []).append(row)
    return Measured(document, rows)


def assert_same_answers(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other) == RECORDS
    for ours, theirs in zip(one, other, strict=True):
        assert ours["output_token_ids"] == theirs["output_token_ids"]
        assert ours["kl"] == pytest.approx(theirs["kl"], abs=1e-6)
        assert ours["value"] == theirs["value"]


def are_apart(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(abs(ours["kl"] - theirs["kl"]) > 1e-5 for ours, theirs in zip(one, other, strict=True))


class TestExactness:
    def test_a_middle_that_is_the_sender_is_no_hop(self, folder: Path) -> None:
        names = ("base+adapter", "base+adapter", "base")
        found = measured(command(folder, names, "--first", "1:2", "--second", "2:3"))
        assert_same_answers(found.of(chain(FIRST, SECOND)), found.of(direct(SECOND)))
        assert_same_answers(found.of(last_hop(SECOND)), found.of(direct(SECOND)))
        assert {row["value"] for row in found.of(first_hop(FIRST))} == {1.0}

    def test_a_middle_that_recomputes_everything_is_a_sender_of_its_own(self, folder: Path) -> None:
        found = measured(command(folder, NAMES, "--first", "0:3,1:2", "--second", "2:3"))
        assert_same_answers(found.of(chain(ALL, SECOND)), found.of(last_hop(SECOND)))
        assert {row["value"] for row in found.of(first_hop(ALL))} == {1.0}, "B against its own full prefill"
        assert are_apart(found.of(chain(FIRST, SECOND)), found.of(last_hop(SECOND)))

    @pytest.mark.parametrize("middle", ["base+other", "base"])
    def test_a_receiver_that_recomputes_everything_prefills(self, folder: Path, middle: str) -> None:
        names = ("base+adapter", middle, "base")
        found = measured(command(folder, names, "--first", "1:2", "--second", "0:3", "--second", "2:3"))
        for arm in (chain(FIRST, ALL), direct(ALL), last_hop(ALL)):
            assert_same_answers(found.of(arm), found.of(FULL))
        assert are_apart(found.of(chain(FIRST, SECOND)), found.of(FULL))

    @pytest.mark.parametrize(("first", "second"), [((1, 2), (1, 3)), ((0, 2), (0, 2)), ((1, 2), (0, 2))])
    def test_what_the_receiver_recomputes_again_is_as_if_it_had_not_been(
        self, folder: Path, first: tuple[int, int], second: tuple[int, int]
    ) -> None:
        options = ("--first", "{}:{}".format(*first), "--second", "{}:{}".format(*second))
        found = measured(command(folder, NAMES, *options))
        second_range = LayerRange(*second)
        assert_same_answers(found.of(chain(LayerRange(*first), second_range)), found.of(direct(second_range)))
        (one,) = found.document["blocks"][0]["chains"]
        assert one["same_as_direct"] is True
        assert one["more_than_direct"] == {"points": 0, "lower": 0, "upper": 0}

    def test_three_models_give_neither_single_hop(self, folder: Path) -> None:
        found = measured(command(folder, NAMES, "--first", "1:2", "--second", "2:3"))
        for hop in (direct(SECOND), last_hop(SECOND)):
            assert are_apart(found.of(chain(FIRST, SECOND)), found.of(hop))
        assert found.document["blocks"][0]["chains"][0]["same_as_direct"] is False

    def test_a_state_that_enters_from_the_middle_tells_it_from_the_sender(self, folder: Path) -> None:
        """C recomputes layer 2 that B did too, but enters it with what B's layer 1 gave."""
        found = measured(command(folder, NAMES, "--first", "1:3", "--second", "2:3"))
        assert are_apart(found.of(chain(LayerRange(1, 3), SECOND)), found.of(direct(SECOND)))
        assert found.document["blocks"][0]["chains"][0]["same_as_direct"] is False


class TestDocument:
    def test_every_arm_of_every_combination(self, folder: Path) -> None:
        words = command(folder, NAMES, "--first", "1:2, 0:2", "--first", "0:2", "--second", "2:3,1:3")
        found = measured(words)
        firsts, seconds = (FIRST, LayerRange(0, 2)), (SECOND, LayerRange(1, 3))
        assert set(found.rows) == {arm.plan.key for arm in arms(firsts, seconds)}
        assert {len(rows) for rows in found.rows.values()} == {RECORDS}
        block = found.document["blocks"][0]
        assert [(one["path"], one["first"], one["second"]) for one in block["arms"][-4:]] == [
            ("A→B→C", list(first), list(second)) for first in firsts for second in seconds
        ]
        assert [(one["first"], one["second"]) for one in block["chains"]] == [
            (list(first), list(second)) for first in firsts for second in seconds
        ]
        assert found.document["models"] == dict(zip("ABC", NAMES, strict=True))

    def test_losses_are_against_the_model_that_answers(self, folder: Path) -> None:
        found = measured(command(folder, NAMES, "--first", "1:2", "--second", "2:3"))
        block = found.document["blocks"][0]
        shown = {(one["path"], one["strategy"]): one for one in block["arms"]}
        for path, hop in {"A→B": first_hop(FIRST), "A→C": direct(SECOND), "A→B→C": chain(FIRST, SECOND)}.items():
            arm = shown[path, hop.plan.strategy]
            quality = sum(row["value"] for row in found.of(hop)) / RECORDS
            assert arm["quality"] == pytest.approx(quality)
            assert arm["baseline_quality"] == 1.0, "full prefill agrees with itself"
            assert arm["loss_points"] == pytest.approx(100 * (1 - quality))
            assert arm["loss_points_lower"] <= arm["loss_points"] <= arm["loss_points_upper"]
        for path in ("B", "C"):
            own = shown[path, "full_prefill"]
            assert (own["loss_points"], own["loss_points_lower"], own["loss_points_upper"]) == (0, 0, 0)
        (against,) = block["chains"]
        losses = {path: shown[path, "layer_group"]["loss_points"] for path in ("A→B", "A→C", "B→C")}
        lost = shown["A→B→C", "chain"]["loss_points"]
        assert against["more_than_direct"]["points"] == pytest.approx(lost - losses["A→C"])
        assert against["more_than_last_hop"]["points"] == pytest.approx(lost - losses["B→C"])
        assert against["added_points"] == pytest.approx(losses["A→B"] + losses["B→C"])
        assert against["more_than_added"]["points"] == pytest.approx(lost - losses["A→B"] - losses["B→C"])

    def test_the_file_says_what_made_it(self, folder: Path) -> None:
        found = measured(command(folder, NAMES, "--first", "1:2", "--second", "2:3"))
        footer = json.loads(pq.read_schema(found.document["file"]).metadata[FOOTER_KEY.encode()])
        assert missing_header_keys(footer) == []
        names = (footer["sender"]["name"], footer["chain"]["middle"]["name"], footer["receiver"]["name"])
        assert names == NAMES
        assert (footer["chain"]["first"], footer["chain"]["second"]) == ([list(FIRST)], [list(SECOND)])

    def test_tables_for_people(self, folder: Path) -> None:
        shutil.copytree(folder / "other", folder / "[red]other", dirs_exist_ok=True)
        names = ("base+adapter", "base+[red]other", "base")
        shown = CliRunner().invoke(cli.app, command(folder, names, "--first", "1:2", "--second", "2:3")).stdout
        assert "A = base+adapter, B = base+[red]other, C = base\n" in shown
        assert "f1 of agreement with the reader's own full prefill, 2 samples" in shown
        lines = [" ".join(line.split()) for line in shown.splitlines()]
        assert any(line.startswith("A→B→C layer 1 (1 of 3) layer 2 (1 of 3) ") for line in lines)
        assert any(line.startswith("A→C, full_reuse – – ") for line in lines)
        assert any(line.startswith("Beyond chance, ") for line in lines)
        assert lines[-1].startswith("kept in ")


class TestGoingOn:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        calls: list[str] = []
        original = chain_module._measured

        def counted(*arguments: Any) -> Any:
            calls.append(arguments[1].sample_id)
            return original(*arguments)

        monkeypatch.setattr(chain_module, "_measured", counted)
        return calls

    def test_cut_off_it_goes_on(
        self, folder: Path, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words = command(folder, NAMES, "--first", "1:2", "--second", "2:3", "--out", tmp_path)
        counted = chain_module._measured

        def stops(*arguments: Any) -> Any:
            if len(calls) == 1:
                raise KeyboardInterrupt
            return counted(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(chain_module, "_measured", stops)
            CliRunner().invoke(cli.app, words)
        assert len(calls) == 1
        assert not list(tmp_path.glob("*/*.parquet"))
        found = measured(words)
        assert len(calls) == len(set(calls)) == RECORDS
        assert found.rows == measured(command(folder, NAMES, "--first", "1:2", "--second", "2:3")).rows
        assert not list(tmp_path.glob("*/.run-*"))

    def test_what_is_kept_is_not_measured_again(self, folder: Path, tmp_path: Path, calls: list[str]) -> None:
        words = command(folder, NAMES, "--first", "1:2", "--second", "2:3", "--out", tmp_path)
        before = measured(words).document
        again = measured([*words, "--confidence", "0.5"]).document
        assert len(calls) == RECORDS
        assert (again["confidence"], again["file"]) == (0.5, before["file"])
        sides = [one["blocks"][0]["chains"][0]["more_than_added"] for one in (before, again)]
        assert sides[0]["points"] == sides[1]["points"]
        assert sides[0]["lower"] < sides[1]["lower"] <= sides[1]["upper"] < sides[0]["upper"]

    @pytest.mark.parametrize(
        "change",
        [["--second", "1:3"], ["--max-context-tokens", "90"], ["--references", "data"], ["--dtype", "bfloat16"]],
    )
    def test_another_question_is_measured(
        self, folder: Path, tmp_path: Path, calls: list[str], change: list[str]
    ) -> None:
        words = command(folder, NAMES, "--first", "1:2", "--second", "2:3", "--out", tmp_path)
        first = measured(words)
        assert measured([*words, *change]).document["file"] != first.document["file"]
        assert len(calls) == 2 * RECORDS

    def test_a_torn_file_is_measured_again(self, folder: Path, tmp_path: Path, calls: list[str]) -> None:
        words = command(folder, NAMES, "--first", "1:2", "--second", "2:3", "--out", tmp_path)
        found = measured(words)
        file = Path(found.document["file"])
        file.write_bytes(file.read_bytes()[:-50])
        assert measured(words).rows == found.rows
        assert len(calls) == 2 * RECORDS

    @pytest.mark.parametrize("rows", [slice(0, None), slice(0, 0), slice(0, 1), slice(1, None)])
    def test_a_file_that_lacks_rows_or_footer_is_measured_again(
        self, folder: Path, tmp_path: Path, calls: list[str], rows: slice
    ) -> None:
        words = command(folder, NAMES, "--first", "1:2", "--second", "2:3", "--out", tmp_path)
        found = measured(words)
        file = Path(found.document["file"])
        table = pq.read_table(file)
        metadata = None if rows == slice(0, None) else table.schema.metadata
        pq.write_table(table[rows].replace_schema_metadata(metadata), file)
        assert measured(words).rows == found.rows
        assert len(calls) == 2 * RECORDS

    def test_a_file_of_another_chain_is_measured_again(self, folder: Path, tmp_path: Path, calls: list[str]) -> None:
        words = command(folder, NAMES, "--first", "1:2", "--second", "2:3", "--out", tmp_path)
        found = measured(words)
        other = measured([*words, "--max-context-tokens", "90"])
        shutil.copyfile(other.document["file"], found.document["file"])
        assert measured(words).rows == found.rows
        assert len(calls) == 3 * RECORDS


def test_a_home_folder_is_expanded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Path] = []

    def stops(*words: Any) -> None:
        places.append(words[3])
        raise BadInput("far enough")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(chain_module, "measure_chain", stops)
    CliRunner().invoke(cli.app, command(folder, NAMES, "--first", "1:2", "--second", "2:3", "--out", "~/chains"))
    assert places == [tmp_path / "chains"]


def _torn_text(file: Path) -> None:
    """Writes text that is no UTF-8 under a right checksum, as a writer with a broken disk cache would."""
    good = pa.Table.from_pylist([{"sample_id": "é", "error": "é"}], schema=MEASUREMENTS)
    torn = pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe"))
    write_table(good.set_column(good.schema.get_field_index("error"), MEASUREMENTS.field("error"), torn), file)


def _torn_name(file: Path) -> None:
    write_table(pa.Table.from_pylist([{"sample_id": "a"}], schema=MEASUREMENTS), file)
    file.write_bytes(file.read_bytes().replace(b"sample_id", b"\xffample_id"))


@pytest.mark.parametrize("tear", [_torn_text, _torn_name])
def test_a_part_whose_texts_are_torn_is_missing(tear: Callable[[Path], None], tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    write_table(pa.Table.from_pylist([{"sample_id": "a"}], schema=MEASUREMENTS), whole)
    assert kept_table(whole) is not None
    tear(tmp_path / "torn.parquet")
    assert kept_table(tmp_path / "torn.parquet") is None


def replaced(position: int, model: str) -> Callable[[Path], list[str]]:
    names = list(NAMES)
    names[position] = model
    return lambda folder: command(folder, (names[0], names[1], names[2]), "--first", "1:2", "--second", "2:3")


def with_options(*options: str) -> Callable[[Path], list[str]]:
    return lambda folder: command(folder, NAMES, "--first", "1:2", "--second", "2:3", *options)


def without_a_dataset(folder: Path) -> list[str]:
    words = with_options()(folder)
    words[words.index("--dataset") + 1] = "nowhere.jsonl"
    return words


BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "first behind the layers": (with_options("--first", "0:4"), "--first 0:4 ends behind the models' 3 layers"),
    "second behind the layers": (with_options("--second", "3:9"), "--second 3:9 ends behind the models' 3 layers"),
    "nothing to recompute": (with_options("--first", "2:2"), '--first "2:2" is no range of layers; write START:STOP'),
    "backwards": (with_options("--second", "1:3,3:1"), '--second "3:1" is no range of layers'),
    "inclusive": (with_options("--second", "1-2"), '--second "1-2" is no range of layers'),
    "nothing": (with_options("--first", ""), '--first "" is no range of layers'),
    "missing sender": (replaced(0, "base+gone"), "gone"),
    "missing middle": (replaced(1, "gone"), "gone"),
    "missing receiver": (replaced(2, "gone"), "gone"),
    "other tokenizer": (replaced(1, "retold"), "token"),
    "deeper middle": (replaced(1, "deeper"), "layers differs"),
    "deeper receiver": (replaced(2, "deeper"), "layers differs"),
    "missing data": (without_a_dataset, "nowhere.jsonl"),
    "unknown task": (with_options("--task", "qaa"), 'did you mean "qa"'),
    "no contexts": (with_options("--contexts", "0"), "contexts should be greater than or equal to 1"),
    "too many contexts": (with_options("--contexts", "99"), "fewer than the 99 contexts"),
    "no confidence": (with_options("--confidence", "1"), "confidence should be less than 1"),
    "seed below 0": (with_options("--seed", "-1"), "seed should be greater than or equal to 0"),
    "out is a URL": (with_options("--out", "s3://bucket/chains"), "chain works in a folder; give one with --out"),
    "out is a file": (lambda f: with_options("--out", str(f / "data.jsonl"))(f), "--out"),
}


@pytest.fixture(scope="module")
def misfits(folder: Path) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["stones"])
    save_model(folder / "retold", tokenizer=tokenizer)
    save_model(folder / "deeper", num_hidden_layers=4)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_bad_input(
    name: str, misfits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, sentence = BAD[name]
    monkeypatch.setattr(sys, "argv", ["kvprofile", *words(misfits)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert sentence in shown.err.splitlines()[-1]
    assert not shown.out
