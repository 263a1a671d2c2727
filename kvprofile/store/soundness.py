"""Whether one version of a profile is what its manifest, its schemas and its own measurements say. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from kvprofile.analysis.profile_table import PlanCost, build_profile_rows
from kvprofile.errors import BadInput
from kvprofile.layers import LayerRange, Plan, plan_key
from kvprofile.limits import BOUND_METHOD
from kvprofile.store import reader
from kvprofile.store.manifest import ADDED_LATER, MANIFEST_FILE, file_record, read_manifest
from kvprofile.store.reader import Profile

ROUNDING = 1e-12
"""Of the largest number that goes into a mean. Another machine may add in another order, which moves the last of the 16 digits
of a double by a little for every sample; whatever a person or a disk changes moves more."""

_OPTIONAL_FILES = frozenset(
    {
        reader.RECIPE_FILE,
        "environment.json",
        reader.SEARCH_FILE,
        reader.TIMINGS_FILE,
        reader.REJECTED_FILE,
        MANIFEST_FILE,
    }
)
_TABLES = (reader.PROFILE_FILE, reader.MEASUREMENTS_FILE, reader.SAMPLES_FILE)
_REBUILT = (
    *("n_scored", "quality", "baseline_quality", "floor_quality", "sender_quality", "loss_rel", "loss_points"),
    *("gap_recovered", "mean_kl", "top1_agreement", "exact_match_rate", "on_frontier"),
)
_BOUNDS = ("loss_rel_upper", "loss_points_upper")

_COPY = "copy it again or sweep again"


class Finding(NamedTuple):
    """Something about a store that its owner should know.

    Attributes:
        severity: `fault` if something is broken, `remark` if it only takes place.
        path: Where.
        what: What was found.
        mend: What to do about it.
    """

    severity: Literal["fault", "remark"]
    path: str
    what: str
    mend: str


def check_version(folder: Path) -> Iterator[Finding]:
    """Yields what is wrong with one version, wherever its folder lies."""
    yield from hash_findings(folder)
    if not (folder / reader.PROFILE_FILE).is_file():
        yield Finding("fault", str(folder), f"it has no {reader.PROFILE_FILE}", f"{_COPY}, or remove the folder")
        return
    try:
        profile = reader.load(folder)
    except (BadInput, OSError) as error:
        yield _told(folder, error)
        return
    yield from _tables(profile)
    yield from faults_beside(profile)
    yield from _unfinished(profile)
    yield from _strangers(folder)


def hash_findings(folder: Path) -> Iterator[Finding]:
    """Yields where a version's files are not those of its manifest."""
    try:
        manifest = read_manifest(folder)
    except BadInput as error:
        yield _told(folder / MANIFEST_FILE, error)
        return
    if manifest is None:
        yield Finding("remark", str(folder), "it has no manifest, so hashes are not checked", "none needed")
        return
    for name, record in manifest.items():
        path = folder / name
        if not path.is_file():
            yield Finding("fault", str(path), "the manifest names it, and it is missing", _COPY)
        elif file_record(path) != record:
            yield Finding("fault", str(path), "its content is not the one that was published", _COPY)
    if absent := [name for name in _TABLES if name not in manifest]:
        yield Finding("fault", str(folder / MANIFEST_FILE), f"it does not name {', '.join(absent)}", _COPY)


def _tables(profile: Profile) -> Iterator[Finding]:
    folder = profile.folder
    try:
        measurements, header = reader.read_measurements(folder / reader.MEASUREMENTS_FILE, with_header=True)
        samples = profile.samples()
        searched = profile.search() is not None
        profile.timings()
    except (BadInput, OSError) as error:
        yield _told(folder, error)
        return
    if header != profile.header:
        keys = sorted(key for key in {*header, *profile.header} if header.get(key) != profile.header.get(key))
        what = f"its header differs from that of {reader.PROFILE_FILE} ({', '.join(keys)})"
        yield Finding("fault", str(folder / reader.MEASUREMENTS_FILE), what, _COPY)
    if searched != (profile.header["search"] == "adaptive"):
        there = "there" if searched else "missing"
        what = f"the search was {profile.header['search']}, and {reader.SEARCH_FILE} is {there}"
        yield Finding("fault", str(folder), what, _COPY)
    yield from _samples(profile, measurements, samples)
    try:
        yield from _aggregates(profile, measurements)
    except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, pa.ArrowException) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        what = f"its numbers cannot be made from the measurements ({reason})"
        yield Finding("fault", str(folder / reader.PROFILE_FILE), what, _COPY)


def _samples(profile: Profile, measurements: pa.Table, samples: pa.Table) -> Iterator[Finding]:
    path = str(profile.folder / reader.SAMPLES_FILE)
    planned = {(row["task"], row["dataset"]): row["n_planned"] for row in profile.rows.to_pylist()}
    columns = ("task", "dataset", "sample_id")
    held = set(zip(*(samples[name].to_pylist() for name in columns), strict=True))
    for (task, dataset), count in planned.items():
        found = sum((task, dataset) == one[:2] for one in held)
        if found != count:
            what = f"{found} samples of {task}/{dataset}, and {count} were planned"
            yield Finding("fault", path, what, _COPY)
    if strangers := set(zip(*(measurements[name].to_pylist() for name in columns), strict=True)) - held:
        task, dataset, name = min(strangers, key=str)
        what = f"{len(strangers)} measured samples are not in it, such as {name} of {task}/{dataset}"
        yield Finding("fault", path, what, _COPY)


def _aggregates(profile: Profile, measurements: pa.Table) -> Iterator[Finding]:
    """Compares the published numbers with those that the measurements give; costs are taken as published."""
    path, header = str(profile.folder / reader.PROFILE_FILE), profile.header
    published = {_row_key(row): row for row in profile.rows.to_pylist()}
    if len(published) != profile.rows.num_rows:
        yield Finding("fault", path, "a plan stands in it twice", _COPY)
        return
    rebuilt = build_profile_rows(
        measurements,
        _costs(published.values()),
        n_planned={(row["task"], row["dataset"]): row["n_planned"] for row in published.values()},
        confidence=header["confidence"],
        resamples=header["resamples"],
        seed=header["seed"],
    )
    made = {_row_key(row): row for row in rebuilt.to_pylist()}
    if made.keys() != published.keys():
        what = f"{len(made.keys() ^ published.keys())} rows of plans, tasks or metrics have no counterpart in the measurements"
        yield Finding("fault", path, what, _COPY)
        return
    columns = _REBUILT if header["bounds"] != BOUND_METHOD else (*_REBUILT, *_BOUNDS)
    for name in columns:
        differing = [key for key, row in published.items() if not _equal(row, made[key], name)]
        if differing:
            row, other = published[differing[0]], made[differing[0]]
            what = f"{name} of {len(differing)} rows is not what the measurements give, such as {row[name]} for {other[name]}"
            yield Finding("fault", path, what, _COPY)
    if header["bounds"] != BOUND_METHOD:
        what = f"its upper bounds were made by {header['bounds'] or 'an older method'} and are not checked"
        yield Finding("remark", path, what, "none needed; every reader makes them anew")


def _row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["dataset"], row["metric"], *plan_key(row)


def _costs(rows: Any) -> list[PlanCost]:
    """Returns the plans in the order of the rows, which decides between equal ones, with what the rows say of costs."""
    plans: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        plans.setdefault(plan_key(row), []).append(row)
    by_source = (
        *("prefill_flops", "full_prefill_flops", "measured_prefill_ms", "measured_full_prefill_ms"),
        "context_tokens_median",
    )
    alike = ("granularity", "recomputed_layers", "total_layers", "kv_bytes_per_token", "e_bytes_per_token")
    costs = []
    for (strategy, start, stop, params), held in plans.items():
        plan = Plan(strategy, None if start is None else LayerRange(start, stop), params)
        of_sources: dict[str, Any] = {
            name: {(row["task"], row["dataset"]): row[name] for row in held} for name in by_source
        }
        costs.append(PlanCost(plan=plan, **(of_sources | {name: held[0][name] for name in alike})))
    return costs


def _equal(row: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    a, b = row[name], other[name]
    if a is None or b is None or not isinstance(a, float):
        return bool(a == b)
    into = [1.0, *(abs(held) for held in (a, b, row["quality"], row["baseline_quality"]) if held is not None)]
    return bool(abs(a - b) <= ROUNDING * max(into))


def faults_beside(profile: Profile) -> Iterator[Finding]:
    """Checks validations and sensitivity maps, each by itself, so that one bad file hides no other."""
    validations = profile.folder / reader.VALIDATIONS_FOLDER
    checks = [(path, profile.validation) for path in sorted(validations.glob("[!.]*.parquet"))]
    sensitivity = profile.folder / reader.SENSITIVITY_FOLDER
    for path, read in [*checks, *((path, profile.map_in) for path in sorted(sensitivity.glob("[!.]*.parquet")))]:
        try:
            read(path)
        except (BadInput, OSError) as error:
            yield _told(path, error)


def _unfinished(profile: Profile) -> Iterator[Finding]:
    for place, kind in ((reader.VALIDATIONS_FOLDER, "validation"), (reader.SENSITIVITY_FOLDER, "sensitivity map")):
        for run in sorted((profile.folder / place).glob(".run-*")):
            if parts := list(run.rglob("[!.]*.parquet")):
                what = f"unfinished {kind}, {len(parts)} parts measured"
                yield Finding("remark", str(run), what, f"run the same {kind} again to go on, or remove it")


def _strangers(folder: Path) -> Iterator[Finding]:
    try:
        known = {*_TABLES, *_OPTIONAL_FILES, *ADDED_LATER, *(read_manifest(folder) or ())}
    except BadInput:
        return
    known |= {reader.VALIDATIONS_FOLDER, reader.SENSITIVITY_FOLDER}
    for path in sorted(folder.iterdir()):
        if path.name not in known:
            yield Finding("remark", str(path), "it belongs to nothing", "remove it if it is not yours")


def _told(path: Path, error: Exception) -> Finding:
    """Returns a fault that a reader told in one sentence: a place, what it found, and after `;` what to do."""
    sentence = str(error)
    places = [path, *path.iterdir()] if path.is_dir() else [path]
    place = next((one for one in places if sentence.startswith(f"{one} ")), path)
    sentence = sentence.removeprefix(f"{place} ")
    newer = sentence.endswith(": pip install -U kvprofile")
    what, _, mend = sentence.rpartition(": " if newer else "; ")
    return Finding("fault", str(place), what or sentence, mend if what else _COPY)
