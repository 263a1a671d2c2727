"""`docs/format.md` names every column and key, with its type, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvprofile.store.schema import (
    DATASET_KEYS,
    FORMAT_VERSION,
    HEADER_KEYS,
    MEASUREMENTS,
    MODEL_KEYS,
    PROFILE,
    SAMPLES,
    SEARCH,
    TIMINGS,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text("utf-8")
SCHEMAS = {"profile": PROFILE, "measurements": MEASUREMENTS, "samples": SAMPLES, "search": SEARCH, "timings": TIMINGS}
KEYS = {"key": HEADER_KEYS, "key of `sender` and `receiver`": MODEL_KEYS, "key of `datasets`": DATASET_KEYS}


def table(page: str, heading: str) -> list[list[str]]:
    """Returns the cells of the table whose first heading is `heading`, without its two head lines."""
    found = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    assert found, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def words(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list&lt;{kind.value_type}&gt;"
    return str(kind)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_column_is_described(name: str) -> None:
    section = PAGE.split(f"## `{name}.parquet`\n")[1]
    rows = table(section, "column")
    assert [row[0].strip("`") for row in rows] == SCHEMAS[name].names
    assert [row[1] for row in rows] == [words(kind) for kind in SCHEMAS[name].types]
    assert all(len(row) == 4 and row[3] for row in rows)


@pytest.mark.parametrize("heading", KEYS)
def test_every_key_is_described(heading: str) -> None:
    rows = table(PAGE, heading)
    assert [row[0].strip("`") for row in rows] == list(KEYS[heading])
    assert all(len(row) == 2 and row[1] for row in rows)


def test_the_files_whose_footers_have_a_header_are_named() -> None:
    """What the page says of footers, against a version that a sweep wrote."""
    text = PAGE.split("## Header\n")[1].split("```")[0]
    with_key, _, without = text.partition("The first two hold the same one.")
    files = sorted((Path(__file__).parent / "format_1").glob("*.parquet"))
    assert len(files) == 3
    for file in files:
        held = b"kvprofile" in (pq.read_schema(file).metadata or {})
        assert f"`{file.name}`" in (with_key if held else without), file.name


def test_every_format_is_described() -> None:
    assert [row[0] for row in table(PAGE, "format")] == [str(number) for number in range(1, FORMAT_VERSION + 1)]
    assert f"this page describes {FORMAT_VERSION}" in PAGE


def test_numbers_have_a_unit() -> None:
    for name, schema in SCHEMAS.items():
        for row in table(PAGE.split(f"## `{name}.parquet`\n")[1], "column"):
            kind = schema.field(row[0].strip("`")).type
            number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
            assert bool(row[2]) == number or row[0] == "`round`", row
