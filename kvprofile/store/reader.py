"""Finds and reads profiles. Needs pyarrow only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvprofile.cost.layer_times import LayerTimes
from kvprofile.errors import BadInput
from kvprofile.json_text import parse_json
from kvprofile.resources import expanded
from kvprofile.store.checks import is_validation, row_problem
from kvprofile.store.header import parse_header
from kvprofile.store.manifest import ACCEPTED_FILE
from kvprofile.store.schema import (
    FOOTER_KEY,
    MEASUREMENTS,
    PROFILE,
    SAMPLES,
    SEARCH,
    TIMINGS,
)

PROFILE_FILE = "profile.parquet"
MEASUREMENTS_FILE = "measurements.parquet"
SAMPLES_FILE = "samples.parquet"
SEARCH_FILE = "search.parquet"
RECIPE_FILE = "recipe.yaml"
REJECTED_FILE = "rejected.json"
VALIDATIONS_FOLDER = "validations"
SENSITIVITY_FOLDER = "sensitivity"
TIMINGS_FILE = "timings.parquet"


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
        return read_measurements(self.folder / MEASUREMENTS_FILE)[0]

    def samples(self) -> pa.Table:
        """Reads and returns the table with one row per sample."""
        return _read(self.folder / SAMPLES_FILE, SAMPLES)[0]

    def search(self) -> pa.Table | None:
        """Reads and returns why an adaptive search left groups, None where none did."""
        path = self.folder / SEARCH_FILE
        return _read(path, SEARCH)[0] if path.is_file() else None

    def timings(self) -> pa.Table | None:
        """Reads and returns the times of single layers, None in profiles made before they were measured."""
        path = self.folder / TIMINGS_FILE
        if not path.is_file():
            return None
        table, header = _read(path, TIMINGS, with_header=True)
        self._require_own(path, header)
        try:
            LayerTimes.from_rows(table.to_pylist())
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from error
        return table

    def validations(self) -> list[dict[str, Any]]:
        """Returns what `kvprofile validate` found, oldest first; the measurements lie in the file each one names."""
        paths = (self.folder / VALIDATIONS_FOLDER).glob("[!.]*.parquet")
        return [self.validation(path) for path in sorted(paths, key=lambda p: p.stem[-4:])]

    def validation(self, path: Path) -> dict[str, Any]:
        """Returns what one of the files in `validations/` found."""
        _, header = read_measurements(path, with_header=True)
        if not is_validation(header.get("validation")):
            raise BadInput(f"{path} holds no validation; remove it or validate again")
        self._require_own(path, header)
        return {**header["validation"], "file": str(path)}

    def sensitivity(self, direction: str = "forward") -> pa.Table | None:
        """Returns the measurements of `kvprofile sensitivity`, None if it has not run; `reverse` exchanges the models' roles."""
        path = self.folder / SENSITIVITY_FOLDER / f"{direction}.parquet"
        return self.map_in(path) if path.is_file() else None

    def map_in(self, path: Path) -> pa.Table:
        """Returns the measurements in one of the files in `sensitivity/`."""
        table, header = read_measurements(path, with_header=True)
        self._require_own(path, header)
        return table

    def _require_own(self, path: Path, header: Mapping[str, Any]) -> None:
        if header["profile_id"] != self.header["profile_id"]:
            raise BadInput(f"{path} was measured for another profile; remove it or measure again")


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

    Rejected versions are passed over unless the path is that of one. What lies at a URL is copied to the cache first.

    Raises:
        BadInput: If there is no profile, only rejected ones, or the store has several pairs.
    """
    if not str(path):
        raise BadInput("the profile's path is empty; give a profile's folder")
    if is_url(path):
        from kvprofile.store.remote import fetch_profile  # here, so that reading a folder costs no fsspec

        return fetch_profile(str(path))
    path = expanded(path)
    if path.is_file():
        if path.name != PROFILE_FILE:
            raise BadInput(f"{path} is not a profile: give a profile's folder or its {PROFILE_FILE}")
        return path.parent
    if not path.exists():
        raise BadInput(f"there is no profile at {path}; `kvprofile store ls` lists what is there")
    if (path / PROFILE_FILE).is_file():
        return path
    if found := versions(path):
        return _newest(found)
    inside = pairs(path)
    if len(inside) == 1:
        return _newest(versions(inside[0]))
    if inside:
        raise BadInput(f"{path} holds {len(inside)} pairs; give one of {', '.join(str(pair) for pair in inside)}")
    if below := sorted({str(found.parent.parent.parent) for found in path.glob(f"*/*/v*/{PROFILE_FILE}")}):
        raise BadInput(f"{path} is no store but holds some; give one of {', '.join(below)}")
    raise BadInput(f"there is no profile in {path}; make one with `kvprofile sweep RECIPE --out {path}`")


def is_url(path: str | Path) -> bool:
    """Returns whether a profile or a store is named by the URL of a remote one, such as `s3://bucket/profiles`."""
    return isinstance(path, str) and "://" in path


def rejection(folder: Path) -> str | None:
    """Returns why a version was rejected when it was published, None if it was not, or was accepted since."""
    return None if (folder / ACCEPTED_FILE).is_file() else _rejected_for(folder)


def acceptance(folder: Path) -> str | None:
    """Returns for what a version was rejected that was accepted since, None if it was never rejected or still is."""
    return _rejected_for(folder) if (folder / ACCEPTED_FILE).is_file() else None


def _rejected_for(folder: Path) -> str | None:
    path = folder / REJECTED_FILE
    return rejection_reason(path.read_bytes()) if path.is_file() else None


def rejection_reason(document: bytes) -> str:
    """Returns the reason in a `rejected.json`; whatever else it holds, the version stays rejected."""
    try:
        return str(parse_json(document)["reason"])
    except (ValueError, KeyError, TypeError):
        return f"{REJECTED_FILE} tells no reason"


def _newest(found: list[tuple[int, Path]]) -> Path:
    """Returns the newest version that holds a profile and was not rejected; where none holds one, its error then tells."""
    whole = [folder for _, folder in found if (folder / PROFILE_FILE).is_file()]
    rejected = {folder: why for folder in whole if (why := rejection(folder)) is not None}
    if whole and len(rejected) == len(whole):
        raise BadInput(all_rejected(str(found[-1][1].parent), len(whole), str(whole[-1]), rejected[whole[-1]]))
    return next((folder for folder in reversed(whole) if folder not in rejected), found[-1][1])


def all_rejected(pair: str, count: int, newest: str, reason: str) -> str:
    """Returns the sentence that a pair has no version to serve with."""
    return f"all {count} versions in {pair} are rejected (the newest: {reason}); name one to see it, such as {newest}"


def load(path: str | Path) -> Profile:
    """Returns the profile that `path` means (see `resolve`).

    Raises:
        BadInput: If there is none, or its file is truncated, foreign, or made by a newer kvprofile.
    """
    folder = resolve(path)
    rows, header = _read(folder / PROFILE_FILE, PROFILE, with_header=True)
    if rows.num_rows == 0:
        raise BadInput(f"{folder / PROFILE_FILE} holds no plans; sweep again")
    if problem := next((why for why in map(row_problem, rows.to_pylist()) if why), None):
        raise BadInput(f"{folder / PROFILE_FILE} has a row with {problem}; copy it again or sweep again")
    return Profile(folder, header, rows)


def format_version(folder: Path) -> int:
    """Returns the format that a profile's file is written in; its header is read as one of this format."""
    made_by: int = parse_json(pq.read_schema(folder / PROFILE_FILE).metadata[FOOTER_KEY.encode()])["format_version"]
    return made_by


def read_measurements(path: Path, with_header: bool = False) -> tuple[pa.Table, dict[str, Any]]:
    """Returns a table of measurements, of a profile or beside it, and its header where it is asked for.

    Raises:
        BadInput: If the file is missing, truncated, foreign, or made by a newer kvprofile.
    """
    table, header = _read(path, MEASUREMENTS, with_header)
    if len(table) == 0:
        raise BadInput(f"{path} holds no measurements; copy it again or sweep again")
    for name in ("sample_id", "task", "dataset", "metric", "strategy", "status"):
        if table[name].null_count:
            raise BadInput(f"{path} has a row without {name}; copy it again or sweep again")
    for name in ("value", "baseline_value", "kl", "nll", "top1_agreement"):
        if not pc.all(pc.is_finite(table[name].drop_null())).as_py() and table[name].null_count < len(table):
            raise BadInput(f"{path} has a {name} that is no number; copy it again or sweep again")
    return table, header


def _read(path: Path, schema: pa.Schema, with_header: bool = False) -> tuple[pa.Table, dict[str, Any]]:
    if not path.is_file():
        raise BadInput(f"{path} is missing; the profile is incomplete, copy it again or sweep again")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            header = parse_header(path, file.schema_arrow.metadata or {}) if with_header else {}
            if absent := [name for name in schema.names if name not in file.schema_arrow.names]:
                raise BadInput(f"{path} is not a {path.name} of a profile: it has no column {', '.join(absent)}")
            table = file.read(columns=schema.names).select(schema.names).cast(schema)
        table.validate(full=True)
        return table, header
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{path} is truncated or not Parquet ({reason}); copy it again or sweep again") from error
    except OSError as error:
        # Arrow reports damaged pages as OSError without a number; real errors of the system keep theirs.
        if error.errno is not None:
            raise
        raise BadInput(f"{path} is truncated or damaged; copy it again or sweep again") from error


def read_header(file: Path) -> dict[str, Any]:
    """Returns the footer of a profile's table, and reads nothing else of it.

    Raises:
        BadInput: As `load`.
    """
    try:
        metadata = pq.read_schema(file).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{file} is missing, truncated or not Parquet; copy it again or sweep again") from error
    return parse_header(file, metadata)
