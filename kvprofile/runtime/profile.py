"""One profile in memory: what to choose from, and whom it is about. Standard library only; Parquet is read with pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from kvprofile.cost.layer_times import LayerMs, LayerTimes
from kvprofile.errors import BadInput
from kvprofile.limits import BOUND_METHOD, LossLimit, Rule, loss_limit
from kvprofile.runtime.fingerprint import Fingerprint, Pair, same_model
from kvprofile.runtime.plan import ChosenPlan
from kvprofile.runtime.staircase import Staircase, staircase

Row = Mapping[str, Any]
Source = tuple[str, str, str]
"""Task, dataset and metric."""

_UNITS = (LossLimit(0, "%"), LossLimit(0, "pt"))
_RULES: tuple[Rule, ...] = ("point", "bound")


class Times(Protocol):
    """How long layers take, as `kvprofile.cost.layer_times` measures it."""

    def at(self, tokens: int) -> LayerMs:
        """Returns milliseconds at a context of `tokens`.

        Raises:
            BadInput: If contexts of that length were not measured.
        """


class RuntimeProfile:
    """One profile, ready to choose from. Nothing of it changes, and threads may share it.

    Attributes:
        folder: Where it was read from.
        header: The footer of `profile.parquet`; everything in it can be read and nothing changed.
        rows: One row per plan, task and metric; upper bounds of other methods than this version's are None.
        validations: What `kvprofile validate` found, oldest first.
        timings: Measured milliseconds of layers by context length, as rows; empty where none were measured.
        times: The same to be asked by length, None where none were measured.
        pair: The models that it is about.
        unread: By name, why files beside the profile could not be read; they are as if they were not there, but see
            `Policy.rule` `validated`.
    """

    __slots__ = ("_blocks", "_known", "folder", "header", "pair", "rows", "times", "timings", "unread", "validations")

    folder: Path
    header: Row
    rows: tuple[Row, ...]
    validations: tuple[Row, ...]
    timings: tuple[Row, ...]
    times: Times | None
    pair: Pair
    unread: Mapping[str, str]
    _known: dict[Source, tuple[Row, ...]]
    _blocks: dict[Source, dict[tuple[str, str], Staircase]]

    def __init__(
        self,
        folder: Path,
        header: Row,
        rows: Iterable[Row],
        validations: Iterable[Row] = (),
        timings: Iterable[Row] = (),
        times: Times | None = None,
        unread: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        bounded = header["bounds"] == BOUND_METHOD
        known = [row if bounded else {**row, "loss_rel_upper": None, "loss_points_upper": None} for row in rows]
        self._set("folder", folder)
        for name, value in (("header", header), ("rows", known), ("validations", validations), ("timings", timings)):
            self._set(name, frozen(value if isinstance(value, Mapping) else list(value)))
        self._set("times", LayerTimes.from_rows(self.timings) if times is None and self.timings else times)
        self._set("pair", Pair.of(header))
        self._set("unread", frozen(unread))
        self._set("_known", _by_source(self.rows))
        self._set("_blocks", {source: _staircases(own, self.pair) for source, own in self._known.items()})

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
            BadInput: If the profile has no such task, metric or dataset, or several fit, or the limit or the rule is none.
        """
        if rule not in _RULES:
            raise BadInput(f"a profile alone cannot tell by rule {rule!r}; use bound or point, or `kvprofile select`")
        limit = loss_limit(max_loss)
        return self._blocks[self.source(task, dataset, metric)][limit.unit, rule].within(limit)

    def is_for(self, sender: Fingerprint, receiver: Fingerprint) -> bool:
        """Returns whether it is about exactly these two models in these roles."""
        return same_model(sender, self.pair.sender) and same_model(receiver, self.pair.receiver)

    def source(self, task: str | None = None, dataset: str | None = None, metric: str | None = None) -> Source:
        """Returns the task, dataset and metric that are meant, as for `choose`.

        Raises:
            BadInput: As `choose`.
        """
        if task is not None and dataset is not None and metric is not None and (task, dataset, metric) in self._known:
            return task, dataset, metric
        sources: list[Source] = list(self._known)
        for place, (name, wanted) in enumerate((("task", task), ("dataset", dataset))):
            sources = _one(sources, place, name, wanted)
        return _one(sources, 2, "metric", sources[0][2] if metric is None else metric)[0]

    def rows_of(self, source: Source) -> tuple[Row, ...]:
        """Returns the rows of a task, dataset and metric that the profile has."""
        return self._known[source]

    def with_times(self, times: Times) -> RuntimeProfile:
        """Returns the same profile with times of layers that were measured elsewhere."""
        return RuntimeProfile(self.folder, self.header, self.rows, self.validations, self.timings, times, self.unread)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a profile does not change; {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a profile does not change; {name} cannot be removed")

    def __repr__(self) -> str:
        return f"<RuntimeProfile {str(self.folder)!r}, {len(self.rows)} rows>"


def frozen(value: Any) -> Any:
    """Returns a value of JSON whose objects and lists cannot be changed."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: frozen(held) for key, held in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def thawed(value: Any) -> Any:
    """Returns a value as `json.dumps` takes it."""
    if isinstance(value, Mapping):
        return {key: thawed(held) for key, held in value.items()}
    return [thawed(held) for held in value] if isinstance(value, tuple) else value


def _by_source(rows: Iterable[Row]) -> dict[Source, tuple[Row, ...]]:
    found: dict[Source, list[Row]] = {}
    for row in rows:
        found.setdefault((row["task"], row["dataset"], row["metric"]), []).append(row)
    return {source: tuple(own) for source, own in found.items()}


def _staircases(rows: Sequence[Row], pair: Pair) -> dict[tuple[str, str], Staircase]:
    return {(limit.unit, rule): staircase(rows, limit, rule, pair) for limit in _UNITS for rule in _RULES}


def _one(sources: list[Source], place: int, name: str, wanted: str | None) -> list[Source]:
    known = list(dict.fromkeys(source[place] for source in sources))
    if wanted is None and len(known) == 1:
        return sources
    if wanted not in known:
        problem = f"no {name} {wanted!r}" if wanted is not None else f"several values of {name}"
        raise BadInput(f"the profile has {problem}; choose one of {', '.join(map(str, known)) or 'none'}")
    return [source for source in sources if source[place] == wanted]
