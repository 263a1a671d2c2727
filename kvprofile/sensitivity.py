"""Measures how sensitive each layer is, on a profile's own samples, and whether scattered layers do better than one group.

First every layer alone is taken from the sender in the receiver's own prefill. Then, at the recompute of every group on the
frontier, the layers that were most sensitive are recomputed as a set, to be compared with that group sample by sample.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from kvprofile import __version__
from kvprofile.analysis.scores import all_scores
from kvprofile.analysis.sensitivity import most_sensitive
from kvprofile.data.prompts import Sample
from kvprofile.engine.budget import MemoryBudget
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.executor import answer_plans
from kvprofile.errors import BadInput
from kvprofile.identity import json_sha256
from kvprofile.layers import Plan
from kvprofile.measurement import Scoring, measured_samples, measurement_table
from kvprofile.profiled_pair import ProfiledPair, profile_metrics, profile_recipe
from kvprofile.run import Progress, question_of
from kvprofile.store.reader import SENSITIVITY_FOLDER, Profile
from kvprofile.store.writer import alone, write_table
from kvprofile.strategies import load_all
from kvprofile.strategies.layer_set import plan_of as set_of
from kvprofile.strategies.single_layer_reuse import plan_of as reuse_of


def measure_sensitivity(
    profile: Profile, pair: ProfiledPair, progress: Progress, *, reverse: bool = False, memory_limit: int | None = None
) -> None:
    """Measures the map and keeps it beside the profile; a run that was cut off goes on.

    Args:
        profile: The profile, with its samples.
        pair: Its models.
        progress: Who is told.
        reverse: Exchange the roles: how sensitive the sender is to the receiver's layers. No sets are measured then.
        memory_limit: As for a sweep.

    Raises:
        BadInput: If the profile keeps no token ids.
    """
    samples = profile_samples(profile)
    direction = "reverse" if reverse else "forward"
    pair = pair.reversed() if reverse else pair
    layers = len(pair.readers.receiver.layers)
    metrics = profile_metrics(pair.recipe)
    budget = MemoryBudget(pair.readers.receiver.devices, memory_limit)
    work = profile.folder / SENSITIVITY_FOLDER / f".run-{direction}"

    def measured(plans: Sequence[Plan]) -> pa.Table:
        every = [Plan("full_prefill"), *plans]
        place = (
            work
            / json_sha256([profile.header["profile_id"], __version__, torch.__version__, [p.key for p in every]])[:16]
        )
        place.mkdir(exist_ok=True)

        def on_sample(sample: Sample) -> pa.Table:
            caches = ContextCaches(*pair.readers, sample.context_token_ids, sample.head_tokens)
            question = question_of(sample, pair.receiver)
            answers = answer_plans(
                pair.readers,
                caches,
                question,
                every,
                load_all(),
                progress.plans_done,
                progress.say,
                budget,
            )
            by_agreement = pair.recipe.references == "none"
            own_metrics = metrics[sample.task, sample.dataset]
            scoring = Scoring(sample, own_metrics, question.ending.text, by_agreement, None, {}, keep_text=True)
            return measurement_table(answers, scoring)

        return measured_samples(samples, place, len(every), progress, on_sample)

    with alone(work):
        progress.say(f"one of {layers} layers from the sender at a time")
        table = measured([reuse_of(layer) for layer in range(layers)])
        sets = [] if reverse else _sets(profile, table)
        if sets:
            progress.say(f"{len(sets)} sets of the most sensitive layers, at the recompute of the frontier's groups")
            rest = measured(sets)
            table = pa.concat_tables([table, rest.filter(pc.field("strategy") == "layer_set")])
        write_table(table, work.parent / f"{direction}.parquet", dict(profile.header))
    shutil.rmtree(work, ignore_errors=True)


def profile_samples(profile: Profile) -> list[Sample]:
    """Returns the samples of a profile, in its own token ids; which texts end an answer, its recipe tells.

    Raises:
        BadInput: If they were not kept.
    """
    rows: list[dict[str, Any]] = profile.samples().to_pylist()
    if any(row["context_token_ids"] is None or row["suffix_token_ids"] is None for row in rows):
        raise BadInput(f"{profile.folder} keeps no token ids (--no-text), so its samples cannot be measured again")
    stop = {(one.task, one.name): one.stop for one in profile_recipe(profile).data}
    return [
        Sample(
            sample_id=row["sample_id"],
            task=row["task"],
            dataset=row["dataset"],
            context_token_ids=tuple(row["context_token_ids"]),
            suffix_token_ids=tuple(row["suffix_token_ids"]),
            references=tuple(row["references"] or ()),
            head_tokens=row["head_tokens"],
            truncated_tokens=row["truncated_tokens"],
            boundary_moved=False,
            max_new_tokens=row["max_new_tokens"],
            stop=stop.get((row["task"], row["dataset"]), ()),
            context_sha256=row["context_sha256"],
        )
        for row in rows
    ]


def _sets(profile: Profile, table: pa.Table) -> list[Plan]:
    """Returns the most sensitive layers of every count that a group on the frontier recomputes, per task."""
    sets: dict[Plan, None] = {}
    for scores in all_scores(table):
        block = (scores.task, scores.dataset, scores.metric)
        on_frontier = [
            row
            for row in profile.rows.to_pylist()
            if (row["task"], row["dataset"], row["metric"]) == block
            and row["on_frontier"]
            and row["start_layer"] is not None
        ]
        order = most_sensitive(scores)
        for row in on_frontier:
            if row["recomputed_layers"] < row["total_layers"]:
                sets[set_of(order[: row["recomputed_layers"]])] = None
    return list(sets)
