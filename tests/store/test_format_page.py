"""`docs/format.md` names every column and key, with its type, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
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
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text("utf-8")
SCHEMAS = {"profile": PROFILE, "measurements": MEASUREMENTS, "samples": SAMPLES, "search": SEARCH}
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


def test_every_format_is_described() -> None:
    assert [row[0] for row in table(PAGE, "format")] == [str(number) for number in range(1, FORMAT_VERSION + 1)]
    assert f"this page describes {FORMAT_VERSION}" in PAGE


def test_numbers_have_a_unit() -> None:
    for name, schema in SCHEMAS.items():
        for row in table(PAGE.split(f"## `{name}.parquet`\n")[1], "column"):
            kind = schema.field(row[0].strip("`")).type
            number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
            assert bool(row[2]) == number or row[0] == "`round`", row
