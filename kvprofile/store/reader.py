"""Finds and reads profiles. Needs pyarrow only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvprofile.errors import BadInput
from kvprofile.store.schema import FOOTER_KEY, FORMAT_VERSION, MEASUREMENTS, PROFILE, SAMPLES, missing_header_keys

PROFILE_FILE = "profile.parquet"
MEASUREMENTS_FILE = "measurements.parquet"
SAMPLES_FILE = "samples.parquet"


@dataclass(frozen=True)
class Profile:
    """One version of one pair's profile.

    Attributes:
        folder: Where its files lie.
        header: The footer `kvprofile` of `profile.parquet`.
        rows: One row per plan × task × metric.
    """

    folder: Path
    header: Mapping[str, Any]
    rows: pa.Table

    def measurements(self) -> pa.Table:
        """Reads and returns the table with one row per plan × sample × metric."""
        return _read(self.folder / MEASUREMENTS_FILE, MEASUREMENTS)[0]

    def samples(self) -> pa.Table:
        """Reads and returns the table with one row per sample."""
        return _read(self.folder / SAMPLES_FILE, SAMPLES)[0]


def versions(pair: Path) -> list[tuple[int, Path]]:
    """Returns the published versions of a pair folder by number, oldest first."""
    if not pair.is_dir():
        return []
    found = [(re.fullmatch(r"v(\d{4,})", path.name), path) for path in pair.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def pairs(store: Path) -> list[Path]:
    """Returns the pair folders of a store by name."""
    if not store.is_dir():
        return []
    return sorted(path for path in store.iterdir() if path.is_dir() and versions(path))


def resolve(path: str | Path) -> Path:
    """Returns the folder of the profile that a path means: a profile, a pair or a store with one pair (newest version).

    Raises:
        BadInput: If there is no profile, or the store has several pairs.
    """
    path = Path(path).expanduser()
    if path.is_file():
        if path.name != PROFILE_FILE:
            raise BadInput(f"{path} is not a profile: give a profile's folder or its {PROFILE_FILE}")
        return path.parent
    if not path.exists():
        raise BadInput(f"there is no profile at {path}; `kvprofile store ls` lists what is there")
    if (path / PROFILE_FILE).is_file():
        return path
    if found := versions(path):
        return found[-1][1]
    inside = pairs(path)
    if len(inside) == 1:
        return versions(inside[0])[-1][1]
    if inside:
        raise BadInput(f"{path} holds {len(inside)} pairs; give one of {', '.join(str(pair) for pair in inside)}")
    raise BadInput(f"there is no profile in {path}; make one with `kvprofile sweep RECIPE --out {path}`")


def load(path: str | Path) -> Profile:
    """Returns the profile that `path` means (see `resolve`).

    Raises:
        BadInput: If there is none, or its file is truncated, foreign, or made by a newer kvprofile.
    """
    folder = resolve(path)
    rows, header = _read(folder / PROFILE_FILE, PROFILE, with_header=True)
    if rows.num_rows == 0:
        raise BadInput(f"{folder / PROFILE_FILE} holds no plans; sweep again")
    return Profile(folder, header, rows)


def _read(path: Path, schema: pa.Schema, with_header: bool = False) -> tuple[pa.Table, dict[str, Any]]:
    if not path.is_file():
        raise BadInput(f"{path} is missing; the profile is incomplete, copy it again or sweep again")
    try:
        with pq.ParquetFile(path) as file:
            header = _header(path, file.schema_arrow.metadata or {}) if with_header else {}
            if absent := [name for name in schema.names if name not in file.schema_arrow.names]:
                raise BadInput(f"{path} is not a {path.name} of a profile: it has no column {', '.join(absent)}")
            table = file.read(columns=schema.names)
        return table.select(schema.names).cast(schema), header
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{path} is truncated or not Parquet ({reason}); copy it again or sweep again") from error
    except OSError as error:
        # Arrow reports damaged pages as OSError without a number; real errors of the system keep theirs.
        if error.errno is not None:
            raise
        raise BadInput(f"{path} is truncated or damaged; copy it again or sweep again") from error


def _header(path: Path, metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    foreign = (
        f"{path} was not written by kvprofile: its footer has no valid key {FOOTER_KEY!r}; give a profile's folder"
    )
    try:
        header = json.loads(metadata[FOOTER_KEY.encode()])
        made_by = header["format_version"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(foreign) from error
    if isinstance(made_by, bool) or not isinstance(made_by, int) or made_by < 1:
        raise BadInput(foreign)
    if made_by > FORMAT_VERSION:
        raise BadInput(
            f"{path} was made by a newer kvprofile (format {made_by}, this reads up to {FORMAT_VERSION}): "
            "pip install -U kvprofile"
        )
    if missing := missing_header_keys(header):
        raise BadInput(f"{path} has an incomplete footer (no {', '.join(missing)}); copy it again or sweep again")
    confidence = header["confidence"]
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise BadInput(f"{path} has a footer whose confidence is no number between 0 and 1; sweep again")
    return dict(header)
