"""Measurements of one task, dataset and metric as arrays, plans × samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvprofile.analysis.loss import Floats
from kvprofile.layers import PLAN_COLUMNS, Plan, PlanKey
from kvprofile.scoring import BUILT_IN

FULL_PREFILL: PlanKey = Plan("full_prefill").key


@dataclass(frozen=True)
class Scores:
    """What was measured of every plan on every sample; NaN where nothing was.

    Attributes:
        task: Value of the `task` column.
        dataset: Value of the `dataset` column.
        metric: Value of the `metric` column.
        samples: Id of every column of the arrays, sorted.
        plans: Row of every plan in the arrays.
        value: Scores.
        kl: Divergence of the receiver's next-token distributions from full prefill's, mean over the answer, in nats.
        top1_agreement: Share of the tokens of full prefill's answer that the plan would choose, given those before.
        same_output: 1 where the answer's token ids equal full prefill's, 0 where not, NaN where either was not stored.
    """

    task: str
    dataset: str
    metric: str
    samples: tuple[str, ...]
    plans: dict[PlanKey, int]
    value: Floats
    kl: Floats
    top1_agreement: Floats
    same_output: Floats

    def of(self, plan: PlanKey, array: Floats) -> Floats:
        """Returns the plan's line of one of the arrays, all NaN if the plan was not measured."""
        row = self.plans.get(plan)
        return np.full(array.shape[1], np.nan) if row is None else array[row]

    def among(self, chosen: NDArray[np.bool_]) -> Scores:
        """Returns the scores on some of the samples."""
        arrays = {name: getattr(self, name)[:, chosen] for name in ("value", "kl", "top1_agreement", "same_output")}
        samples = tuple(name for name, there in zip(self.samples, chosen, strict=True) if there)
        return dataclasses.replace(self, samples=samples, **arrays)

    @property
    def in_unit_range(self) -> bool:
        """Whether the metric is known not to leave 0 to 1, and did not."""
        known = self.value[~np.isnan(self.value)]
        return self.metric in BUILT_IN and bool(((known >= 0) & (known <= 1)).all())

    @property
    def baseline(self) -> Floats:
        return self.of(FULL_PREFILL, self.value)


def all_scores(measurements: pa.Table) -> Iterator[Scores]:
    """Yields the scores per task and dataset, metrics in the order in which the measurements first name them."""
    names = ("task", "dataset", "metric")
    blocks = dict.fromkeys(zip(*(measurements[name].to_pylist() for name in names), strict=True))
    for block in sorted(blocks, key=lambda b: b[:2]):
        if None not in block:
            yield _scores(measurements, *block)


def _scores(measurements: pa.Table, task: str, dataset: str, metric: str) -> Scores:
    wanted = (pc.field("task") == task) & (pc.field("dataset") == dataset) & (pc.field("metric") == metric)
    table = measurements.filter(wanted)
    keys = list(zip(*(table[name].to_pylist() for name in PLAN_COLUMNS), strict=True))
    plans = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    sample_ids: list[Any] = table["sample_id"].to_pylist()
    # Sorted, so that the order in which samples were measured moves no bound.
    samples = {sample: i for i, sample in enumerate(sorted(set(sample_ids)))}
    rows = np.array([plans[key] for key in keys], dtype=np.intp)
    columns = np.array([samples[sample] for sample in sample_ids], dtype=np.intp)
    ok = np.array([status == "ok" for status in table["status"].to_pylist()], dtype=bool)

    def array(name: str) -> Floats:
        cells = np.full((len(plans), len(samples)), np.nan)
        found = table[name].cast(pa.float64()).to_numpy(zero_copy_only=False)
        cells[rows[ok], columns[ok]] = found[ok]
        return cells

    same = _same_output(_outputs(table), ok, rows, columns, plans.get(FULL_PREFILL))
    same_output = np.full((len(plans), len(samples)), np.nan)
    same_output[rows, columns] = same
    arrays = array("value"), array("kl"), array("top1_agreement"), same_output
    return Scores(task, dataset, metric, tuple(samples), plans, *arrays)


def _outputs(table: pa.Table) -> list[bytes | None]:
    outputs: list[bytes | None] = []
    chunks: list[Any] = table["output_token_ids"].chunks
    for chunk in chunks:
        ids = chunk.values.to_numpy(zero_copy_only=False)
        edges, stored = chunk.offsets.to_pylist(), chunk.is_valid().to_pylist()
        outputs += [
            ids[a:b].tobytes() if there else None for a, b, there in zip(edges, edges[1:], stored, strict=False)
        ]
    return outputs


def _same_output(
    outputs: list[bytes | None],
    ok: np.ndarray[tuple[int], np.dtype[np.bool_]],
    rows: np.ndarray[tuple[int], np.dtype[np.intp]],
    columns: np.ndarray[tuple[int], np.dtype[np.intp]],
    full_prefill: int | None,
) -> list[float]:
    own = {
        columns[i]: output
        for i, output in enumerate(outputs)
        if output is not None and ok[i] and rows[i] == full_prefill
    }
    return [
        float(output == own[columns[i]]) if output is not None and ok[i] and columns[i] in own else np.nan
        for i, output in enumerate(outputs)
    ]
