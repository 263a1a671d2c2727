import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvprofile.data.records import Dataset, Record, choose, load_dataset
from kvprofile.errors import BadInput
from kvprofile.recipe import DataSource

ROWS: list[dict[str, Any]] = [
    {"id": "b", "context": "Ada wrote\u2028it.", "question": "Who?", "answers": ["Ada", "Ada, alone"]},
    {"id": "a", "context": 'He said "no", twice.', "question": "", "answers": ["no"]},
]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def csv_file(path: Path, rows: list[dict[str, Any]]) -> None:
    import csv

    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "answers": json.dumps(row["answers"])} for row in rows)


def source(dataset: str, **options: Any) -> DataSource:
    return DataSource(dataset=dataset, task="qa", **options)


def load(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> Dataset:
    jsonl(tmp_path / "d.jsonl", list(rows))
    return load_dataset(source("d.jsonl", **options), tmp_path)


@pytest.mark.parametrize(("suffix", "write"), [("jsonl", jsonl), ("parquet", parquet), ("csv", csv_file)])
def test_all_formats_give_the_same_records(tmp_path: Path, suffix: str, write: Callable[..., None]) -> None:
    write(tmp_path / f"d.{suffix}", ROWS)
    dataset = load_dataset(source(f"d.{suffix}"), tmp_path)
    assert dataset.name == "d"
    assert dataset.records[0] == Record("b", "Ada wrote\u2028it.", "Who?", ("Ada", "Ada, alone"))
    assert dataset.records[1].answers == ("no",)
    jsonl(tmp_path / "d.jsonl", ROWS)
    assert dataset.sha256 == load_dataset(source("d.jsonl"), tmp_path).sha256


def test_the_hash_is_of_the_records(tmp_path: Path) -> None:
    base = load(tmp_path, *ROWS).sha256
    assert load(tmp_path, *reversed(ROWS)).sha256 == base
    assert load(tmp_path, *({**row, "licence": "x"} for row in ROWS)).sha256 == base
    for field, value in {"id": "c", "context": "x", "question": "x", "answers": ["x"]}.items():
        assert load(tmp_path, {**ROWS[0], field: value}, ROWS[1]).sha256 != base


def test_fields_are_mapped(tmp_path: Path) -> None:
    row = {"n": 7, "text": "c", "replies": "r"}
    fields = {"id": "n", "context": "text", "question": None, "answers": "replies"}
    assert load(tmp_path, row, fields=fields).records == (Record("7", "c", "", ("r",)),)


def test_records_without_ids_are_named_by_their_content(tmp_path: Path) -> None:
    rows = [{**row, "id": None} for row in ROWS]
    first, second = load(tmp_path, *rows, fields={"id": None}).records
    assert len(first.id) == 16
    assert first.id != second.id
    assert load(tmp_path, *reversed(rows), fields={"id": None}).records[1].id == first.id


def test_squads_layout_of_answers(tmp_path: Path) -> None:
    row = {**ROWS[0], "answers": {"text": ["x", "y"], "answer_start": [1, 2]}}
    assert load(tmp_path, row).records[0].answers == ("x", "y")


def test_an_answer_in_brackets_stays_one_answer(tmp_path: Path) -> None:
    assert load(tmp_path, {**ROWS[0], "answers": "[1, 2]"}).records[0].answers == ("[1, 2]",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, r'd\.jsonl line 1 has null in "context"'),
        ({"context": " \n"}, r'line 1 has an empty "context"'),
        ({"context": ["a"]}, 'has list in "context" where text belongs'),
        ({"context": "\ud800"}, "half a character"),
        ({"answers": []}, 'line 1 has no reference in "answers"'),
        ({"answers": [""]}, "no reference"),
        ({"answers": None}, "no reference"),
        ({"answers": [4]}, 'has int in "answers"'),
        ({"id": ""}, "empty"),
        ({"id": "a"}, r'line 2 repeats the id "a"'),
    ],
)
def test_bad_records_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = [{**ROWS[0], **change}, ROWS[1]]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(BadInput, match=message):
        load_dataset(source("d.jsonl"), tmp_path)


def test_a_missing_field_names_place_and_columns(tmp_path: Path) -> None:
    row = {**ROWS[0], "contxt": "c"}
    del row["context"]
    with pytest.raises(BadInput) as caught:
        load(tmp_path, ROWS[1], row)
    message = str(caught.value)
    assert 'd.jsonl line 2 has no field "context" (did you mean "contxt"?)' in message
    assert "present are id, question, answers, contxt" in message
    with pytest.raises(BadInput, match=r'"history" \(mapped to context\).*set fields\.context'):
        load(tmp_path, ROWS[0], fields={"context": "history"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b"", "holds no records"),
        ("d.jsonl", b"\n\n", "holds no records"),
        ("d.jsonl", b"{}\n{", r"line 1 has no field"),
        ("d.jsonl", b"{", r"line 1 is not JSON"),
        ("d.jsonl", b"[1]", "line 1 is not a JSON object"),
        ("d.jsonl", b"\xff", "not UTF-8"),
        ("d.csv", b"", "holds no records"),
        ("d.csv", b"id,context,question,answers\n", "holds no records"),
        ("d.csv", b"id,context,question,answers\na,b,c,d,e\n", "row 1 has more cells"),
        ("d.csv", b"id,context,question,answers\na,b,c\n", "no reference"),
        ("d.csv", b'id,context,question,answers\na,"b\n', "not a readable CSV"),
        ("d.csv", b"\xff", "not UTF-8"),
        ("d.parquet", b"", "not a whole Parquet file"),
        ("d.parquet", b"PAR1 and something else", "not a whole Parquet file"),
        ("d.txt", b"x", r"give a \.jsonl, \.parquet or \.csv file"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        load_dataset(source(name), tmp_path)
    assert name in str(caught.value)


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    parquet(tmp_path / "d.parquet", ROWS)
    whole = (tmp_path / "d.parquet").read_bytes()
    for length in (len(whole) // 2, len(whole) - 1):
        (tmp_path / "d.parquet").write_bytes(whole[:length])
        with pytest.raises(BadInput, match="not a whole Parquet file"):
            load_dataset(source("d.parquet"), tmp_path)


def test_damaged_parquet_pages(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "id": str(i), "context": f"context {i} " * 50} for i in range(200)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", compression="zstd")
    content = bytearray((tmp_path / "d.parquet").read_bytes())
    content[4:400] = bytes(396)
    (tmp_path / "d.parquet").write_bytes(content)
    with pytest.raises(BadInput, match="not a whole Parquet file"):
        load_dataset(source("d.parquet"), tmp_path)


def test_missing_data_lists_the_bundled_sets(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r'hotpotqa is neither.*did you mean "hotpotqa_profile".*qmsum'):
        load_dataset(source("hotpotqa"), tmp_path)
    with pytest.raises(BadInput, match=r"none\.jsonl is neither"):
        load_dataset(source("none.jsonl"), tmp_path)


def test_the_recipes_folder_comes_before_the_working_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, rows in ((here, ROWS), (there, ROWS[:1])):
        folder.mkdir()
        jsonl(folder / "d.jsonl", rows)
    monkeypatch.chdir(here)
    assert len(load_dataset(source("d.jsonl"), there).records) == 1
    assert len(load_dataset(source("d.jsonl"), tmp_path).records) == 2


def test_long_csv_cells(tmp_path: Path) -> None:
    csv_file(tmp_path / "d.csv", [{**ROWS[0], "context": "x" * 200_000}])
    assert len(load_dataset(source("d.csv"), tmp_path).records[0].context) == 200_000


def fake_hub(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str | None) -> Any:
        calls.append((name, subset, split))
        if isinstance(result, Exception):
            raise result
        return result

    errors = SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, exceptions=errors))
    return calls


def test_hub_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, ROWS)
    dataset = load_dataset(source("hub:org/set", subset="en", split="test"), tmp_path)
    assert calls == [("org/set", "en", "test")]
    assert (dataset.name, len(dataset.records)) == ("org/set:en:test", 2)


def test_hub_data_without_a_split_or_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, {"train": ROWS, "test": ROWS})
    with pytest.raises(BadInput, match="has the splits train, test"):
        load_dataset(source("hub:org/set"), tmp_path)
    fake_hub(monkeypatch, ConnectionError("no\nroute"))
    with pytest.raises(BadInput, match=r"hub:org/set cannot be loaded \(no route\)"):
        load_dataset(source("hub:org/set"), tmp_path)


def numbered(order: range | list[int]) -> Dataset:
    return Dataset("d", "", tuple(Record(str(i), "c", "", ("a",)) for i in order))


def test_the_choice_depends_on_seed_and_ids_alone() -> None:
    chosen = choose(numbered(range(100)), 50, 0)
    assert chosen == choose(numbered(list(reversed(range(100)))), 50, 0)
    assert chosen[:10] == choose(numbered(range(100)), 10, 0)
    assert chosen != choose(numbered(range(100)), 50, 1)
    assert [r.id for r in chosen[:3]] != ["0", "1", "2"]


def test_more_contexts_than_records() -> None:
    with pytest.raises(BadInput, match="d has 3 records, fewer than the 4 contexts asked for; use at most 3"):
        choose(numbered(range(3)), 4, 0)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("hotpotqa_profile", 60),
        ("hotpotqa_validation", 60),
        ("2wikimqa", 50),
        ("musique", 50),
        ("qmsum", 30),
        ("stdlib_code", 60),
    ],
)
def test_bundled_sets(tmp_path: Path, name: str, count: int) -> None:
    assert len(load_dataset(source(name), tmp_path).records) == count


def test_the_hotpotqa_splits_share_no_question(tmp_path: Path) -> None:
    profile, validation = (load_dataset(source(f"hotpotqa_{s}"), tmp_path).records for s in ("profile", "validation"))
    assert not {r.id for r in profile} & {r.id for r in validation}
    assert not {r.question for r in profile} & {r.question for r in validation}
