"""What `kvprofile show` says of a profile, as one document; nothing is drawn here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from kvprofile.cost.timing import Timing
from kvprofile.json_text import parse_json
from kvprofile.layers import plan_key
from kvprofile.report.frontier import Row, grids, groups_on
from kvprofile.store.reader import MEASUREMENTS_FILE, SAMPLES_FILE, Profile, acceptance, rejection

ARMS = ("full_prefill", "full_reuse", "sender_alone", "no_context")

_MOST_ERRORS = 5
_OF_PAIR = ("sender", "receiver")
_OF_DATA = ("datasets", "metrics")


def summarize(profile: Profile) -> dict[str, Any]:
    """Returns header, pair, environment, data, baselines, plans, samples, errors and files of a profile.

    `rejected` is why it was rejected and serves nobody, `accepted` why it was before somebody accepted it, None where it was not.
    `samples` and `errors` are None where the profile was copied without the tables that tell.
    """
    rows: list[Row] = profile.rows.to_pylist()
    header = dict(profile.header)
    return {
        "profile": str(profile.folder),
        "rejected": rejection(profile.folder),
        "accepted": acceptance(profile.folder),
        "header": {k: v for k, v in header.items() if k not in (*_OF_PAIR, *_OF_DATA)},
        "pair": {role: header[role] for role in _OF_PAIR},
        "environment": _environment(profile.folder / "environment.json"),
        "data": {name: header[name] for name in _OF_DATA},
        "baselines": _baselines(rows),
        "plans": {
            "total": len({plan_key(r) for r in rows}),
            "groups_by_granularity": {str(unit): len(groups_on(rows, unit)) for unit in grids(rows)},
        },
        "samples": _samples(profile) if (profile.folder / SAMPLES_FILE).is_file() else None,
        "errors": _errors(profile) if (profile.folder / MEASUREMENTS_FILE).is_file() else None,
        "validations": profile.validations(),
        "sensitivity": [name for name in ("forward", "reverse") if profile.sensitivity(name) is not None],
        "left_by_the_search": _left(profile),
        "files": [
            {"name": file.name, "bytes": file.stat().st_size}
            for file in sorted(profile.folder.iterdir())
            if file.is_file()
        ],
    }


def _baselines(rows: list[Row]) -> list[dict[str, Any]]:
    blocks = dict.fromkeys((r["task"], r["dataset"], r["metric"]) for r in rows)
    return [
        {
            "task": task,
            "dataset": dataset,
            "metric": metric,
            "arms": {
                r["strategy"]: {name: r[name] for name in ("quality", "n_scored", "n_planned")}
                for r in rows
                if (r["task"], r["dataset"], r["metric"]) == (task, dataset, metric) and r["strategy"] in ARMS
            },
        }
        for task, dataset, metric in blocks
    ]


def _left(profile: Profile) -> int | None:
    """Returns how many groups an adaptive search did not measure on all samples, None after an exhaustive one."""
    table = profile.search()
    return None if table is None else len(table)


def _samples(profile: Profile) -> dict[str, int]:
    samples = profile.samples()
    truncated = [count for count in samples["truncated_tokens"].to_pylist() if count]
    return {"total": len(samples), "truncated": len(truncated), "most_truncated_tokens": max(truncated, default=0)}


def _errors(profile: Profile) -> dict[str, Any]:
    table = profile.measurements()
    failed = [e for e, s in zip(table["error"].to_pylist(), table["status"].to_pylist(), strict=True) if s == "error"]
    common = Counter(str(error) for error in failed).most_common(_MOST_ERRORS)
    return {"total": len(failed), "most_frequent": [{"error": error, "count": count} for error, count in common]}


def _environment(path: Path) -> dict[str, Any] | None:
    """Returns the file's values by name, None if it is not there or not what a sweep writes."""
    if not path.is_file():
        return None
    try:
        content = parse_json(path.read_bytes())
        timings = [Timing.from_dict(held).as_dict() for held in content["prefill_timings"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    plain: dict[str, Any] = {name: value for name, value in content.items() if isinstance(value, str | int | float)}
    numerics = content.get("numerics")
    if isinstance(numerics, dict) and all(isinstance(value, int | float | None) for value in numerics.values()):
        plain["numerics"] = numerics
    return {**plain, "prefill_timings": timings}
