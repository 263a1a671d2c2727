"""Reads profiles inside a serving runtime. Needs the standard library and pyarrow only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvprofile.analysis.choice import cheapest
from kvprofile.errors import BadInput
from kvprofile.limits import LossLimit, Rule, parse_loss
from kvprofile.store.index import Entry, ls
from kvprofile.store.reader import Profile, all_rejected, is_url, load

__all__ = ["ChosenPlan", "LossLimit", "ProfileStore", "RuntimeProfile", "load_profile"]


class ChosenPlan(NamedTuple):
    """A plan to serve with: reuse the sender's K/V except of layers `start_layer … stop_layer - 1`, half-open as in the tables.

    Attributes:
        strategy: Family of the plan.
        start_layer: First layer to recompute, None where the plan has no layer range.
        stop_layer: Layer behind the last one to recompute, None where the plan has no layer range.
        params: Canonical JSON of the strategy's parameters, None where it has none.
        recompute_fraction: Share of the layers to recompute.
        quality: Mean score of the plan.
        loss_rel: Measured relative loss against full prefill, None if full prefill scores 0.
        loss_rel_upper: Its upper bound, by the profile's confidence.
        loss_points: Measured loss against full prefill, in points.
        loss_points_upper: Its upper bound.
        n_scored: Samples behind these numbers.
        task: Task it was measured on.
        dataset: Data it was measured on.
        metric: Metric of `quality`.
    """

    strategy: str
    start_layer: int | None
    stop_layer: int | None
    params: str | None
    recompute_fraction: float
    quality: float
    loss_rel: float | None
    loss_rel_upper: float | None
    loss_points: float | None
    loss_points_upper: float | None
    n_scored: int
    task: str
    dataset: str
    metric: str


class RuntimeProfile:
    """One profile, ready to choose from."""

    def __init__(self, profile: Profile) -> None:
        self.folder = profile.folder
        self.header: Mapping[str, Any] = profile.header
        self._rows: list[dict[str, Any]] = profile.rows.to_pylist()

    def choose(
        self,
        max_loss: str | LossLimit = "1%",
        task: str | None = None,
        metric: str | None = None,
        dataset: str | None = None,
        rule: Rule = "point",
    ) -> ChosenPlan | None:
        """Returns the cheapest plan whose loss is within `max_loss`; None means: do a full prefill.

        Args:
            max_loss: Such as `1%` (relative) or `1pt` (points).
            task: Needed if the profile has several.
            metric: The task's first if not given.
            dataset: Needed if the profile has several for the task.
            rule: `point` for the measured loss, `bound` for its upper bound.

        Raises:
            BadInput: If the profile has no such task, metric or dataset, or several fit, or the rule is another.
        """
        if rule not in ("bound", "point"):
            raise BadInput(f"a profile alone cannot tell by rule {rule!r}; use bound or point, or `kvprofile select`")
        limit = max_loss if isinstance(max_loss, LossLimit) else parse_loss(max_loss)
        rows = self._rows
        for column, wanted in (("task", task), ("dataset", dataset)):
            rows = _one(rows, column, wanted)
        rows = _one(rows, "metric", rows[0]["metric"] if metric is None else metric)
        row = cheapest(rows, limit, rule)
        return None if row is None else ChosenPlan(**{name: row[name] for name in ChosenPlan._fields})


class ProfileStore:
    """A folder of profiles, such as `outputs`, or the URL of a remote store, such as `s3://bucket/profiles`."""

    def __init__(self, path: str | Path) -> None:
        self.path = path if is_url(path) else Path(path)

    def load(self, *, sender: str, receiver: str) -> RuntimeProfile:
        """Returns the newest profile of a pair that was not rejected; each model is named by its `weights_sha256` or its `name`.

        NOTE: Prefer the hash. Two models of one name are two models, and a cache that another one wrote is
        wrong in silence.

        Raises:
            BadInput: If the store has no profile of the pair, or the names fit profiles of different weights.
        """
        held = [
            e for e in ls(self.path) if e.problem is None and _is(e, "sender", sender) and _is(e, "receiver", receiver)
        ]
        newest: dict[tuple[str | None, str | None], Entry] = {}
        for entry in sorted((e for e in held if e.rejected is None), key=lambda e: (str(e.created_at), e.version)):
            newest[entry.sender_weights, entry.receiver_weights] = entry
        if held and not newest:
            raise BadInput(
                all_rejected(f"{self.path} of the pair", len(held), str(held[-1].path), str(held[-1].rejected))
            )
        if not newest:
            raise BadInput(
                f"{self.path} has no profile of {receiver} reading from {sender}; `kvprofile store ls` lists all"
            )
        if len(newest) > 1:
            raise BadInput(
                f"{self.path} has profiles of {len(newest)} pairs of weights for {receiver} reading from {sender}; "
                "give weights_sha256 instead of the names"
            )
        return load_profile(next(iter(newest.values())).path)


def load_profile(path: str | Path) -> RuntimeProfile:
    """Returns the profile that a profile folder, its `profile.parquet`, a pair folder or a store with one pair means.

    All of these may also be named by a URL; versions that were rejected are passed over unless the path is that of one.

    Raises:
        BadInput: If there is none, or its file is truncated, foreign, or made by a newer kvprofile.
    """
    return RuntimeProfile(load(path))


def _one(rows: list[dict[str, Any]], column: str, wanted: str | None) -> list[dict[str, Any]]:
    known = list(dict.fromkeys(row[column] for row in rows))
    if wanted is None and len(known) == 1:
        return rows
    if wanted not in known:
        problem = f"no {column} {wanted!r}" if wanted is not None else f"several values of {column}"
        raise BadInput(f"the profile has {problem}; choose one of {', '.join(map(str, known)) or 'none'}")
    return [row for row in rows if row[column] == wanted]


def _is(entry: Entry, role: str, wanted: str) -> bool:
    return wanted in (getattr(entry, role), getattr(entry, f"{role}_weights"))
