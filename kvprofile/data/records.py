"""Records from files and hub data sets: the same few columns for everything. Reads no model."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprofile.errors import BadInput, did_you_mean
from kvprofile.recipe import DataSource, FieldMapping
from kvprofile.resources import find, resource

_OR = ("", ", or references: none if the data have no answers")

SUFFIXES = (".jsonl", ".parquet", ".csv")


@dataclass(frozen=True)
class Record:
    """One context with a question about it and its references."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """All records of a data source.

    Attributes:
        name: Value of the `dataset` column.
        sha256: Hash of the mapped records in order of their ids, so that neither file format nor order changes it.
    """

    name: str
    sha256: str
    records: tuple[Record, ...]


def load_dataset(source: DataSource, folder: Path, with_answers: bool = True) -> Dataset:
    """Reads and maps all records; relative paths are looked up from `folder`, then here, then among what is bundled.

    Without answers, none are read, and the data need not have any.

    Raises:
        BadInput: If the data is missing, empty, not what its suffix says, or a record lacks a field or repeats an id.
    """
    if source.dataset.startswith("hub:"):
        origin, unit, rows = f"{source.dataset}", "row", _hub_rows(source)
    else:
        path = dataset_path(source.dataset, folder)
        origin, unit = str(path), "line" if path.suffix == ".jsonl" else "row"
        rows = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows, ".csv": _csv_rows}[path.suffix](path)
    records: dict[str, Record] = {}
    for number, row in rows:
        record = _record(row, source.fields, f"{origin} {unit} {number}", with_answers)
        if record.id in records:
            raise BadInput(
                f'{origin} {unit} {number} repeats the id "{record.id}"; every record needs an id of its own'
            )
        records[record.id] = record
    if not records:
        raise BadInput(f"{origin} holds no records; give one with at least one")
    return Dataset(source.name, _sha256(records.values()), tuple(records.values()))


def choose(dataset: Dataset, contexts: int, seed: int) -> tuple[Record, ...]:
    """Returns the first records of a shuffle that depends on seed and ids only, not on the order in the file.

    Raises:
        BadInput: If there are fewer records than contexts.
    """
    if contexts > len(dataset.records):
        held = len(dataset.records)
        raise BadInput(
            f"{dataset.name} has {held} records, fewer than the {contexts} contexts asked for; use at most {held}"
        )
    shuffled = sorted(dataset.records, key=lambda r: (hashlib.sha256(f"{seed}:{r.id}".encode()).digest(), r.id))
    return tuple(shuffled[:contexts])


def dataset_path(dataset: str, folder: Path) -> Path:
    """Returns the file of a bundled name or a path.

    Raises:
        BadInput: If there is none, or it is of no kind that can be read.
    """
    bundled = {path.stem: path for path in resource("datasets").glob("*.jsonl")}
    if dataset in bundled:
        return bundled[dataset]
    path = find(dataset, (folder, Path.cwd(), resource("datasets"), resource("recipes")))
    if path is None:
        known = ", ".join(sorted(bundled))
        raise BadInput(
            f"{dataset} is neither a file nor a bundled set{did_you_mean(dataset, bundled)}; "
            f"bundled are {known}, and hub sets are written hub:NAME"
        )
    if path.suffix not in SUFFIXES or not path.is_file():
        raise BadInput(f"{path} cannot be read as data; give a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    return path


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise BadInput(
                        f"{path} line {number} is not JSON ({error}); each line must be one object"
                    ) from None
                if not isinstance(row, dict):
                    raise BadInput(f"{path} line {number} is not a JSON object; each line must be one object")
                yield number, row
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text; convert it to UTF-8") from error


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    # The default limit of 128 KiB a cell is shorter than long contexts; this is the most a C long holds everywhere.
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), 1):
                if None in row:
                    raise BadInput(f"{path} row {number} has more cells than the header; quote cells that hold commas")
                yield number, row
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text; convert it to UTF-8") from error
    except csv.Error as error:
        raise BadInput(f"{path} is not a readable CSV file ({error}); check its quotes") from error
    finally:
        csv.field_size_limit(limit)


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path} is not a whole Parquet file; copy or download it again") from error


def _hub_rows(source: DataSource) -> Iterator[tuple[int, dict[str, Any]]]:
    import datasets

    name = source.dataset.removeprefix("hub:")
    try:
        table = datasets.load_dataset(name, source.subset, split=source.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadInput(
            f"hub:{name} cannot be loaded ({reason}); check the name, subset, split and the network"
        ) from error
    if isinstance(table, Mapping):
        raise BadInput(f'hub:{name} has the splits {", ".join(table)}; name one with "split:" in the recipe')
    return enumerate(table, 1)


def _record(row: Mapping[str, Any], fields: FieldMapping, place: str, with_answers: bool) -> Record:
    def cell(field: str, column: str) -> Any:
        if column not in row:
            present = ", ".join(map(str, row)) or "none"
            named = f'"{column}"' if column == field else f'"{column}" (mapped to {field})'
            raise BadInput(
                f"{place} has no field {named}{did_you_mean(column, map(str, row))}; present are {present}; "
                f"set fields.{field} in the recipe{_OR[field == 'answers']}"
            )
        return row[column]

    context = _text(cell("context", fields.context), fields.context, place)
    if not context.strip():
        raise BadInput(f'{place} has an empty "{fields.context}"; drop the record or give it its context')
    question = "" if fields.question is None else cell("question", fields.question)
    question = "" if question is None else _text(question, fields.question or "", place)
    if fields.id is None:
        name: Any = hashlib.sha256(json.dumps([context, question]).encode()).hexdigest()[:16]
    else:
        name = cell("id", fields.id)
        name = str(name) if isinstance(name, int) else _text(name, fields.id, place)
        if not name:
            raise BadInput(f'{place} has an empty "{fields.id}"; every record needs an id of its own')
    answers = _answers(cell("answers", fields.answers), fields.answers, place) if with_answers else ()
    return Record(name, context, question, answers)


def _text(value: Any, column: str, place: str) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise BadInput(f'{place} has {kind} in "{column}" where text belongs; convert the column to text')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f'{place} has half a character (a lone surrogate) in "{column}"; write the file again'
        ) from error
    return value


def _answers(value: Any, column: str, place: str) -> tuple[str, ...]:
    if isinstance(value, Mapping) and "text" in value:
        value = value["text"]  # SQuAD's layout, which many hub data sets share
    if isinstance(value, str):
        value = _json_list(value) if value.lstrip().startswith("[") else [value]
    if not isinstance(value, list):
        value = [value]
    answers = tuple(_text(answer, column, place) for answer in value if answer is not None)
    if not any(answer.strip() for answer in answers):
        raise BadInput(f'{place} has no reference in "{column}"; drop the record or add its answer')
    return answers


def _json_list(text: str) -> list[Any]:
    """Returns the list a CSV cell holds; a plain answer that merely starts with a bracket stays one answer."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else [text]


def _sha256(records: Iterable[Record]) -> str:
    digest = hashlib.sha256()
    for record in sorted(records, key=lambda r: r.id):
        row = {"id": record.id, "context": record.context, "question": record.question, "answers": record.answers}
        text = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()
