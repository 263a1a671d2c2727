"""Everything that is decided before the first measurement: data, samples, models, plans, identity."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers

from kvprofile.data.prompts import Sample
from kvprofile.engine.budget import MemoryBudget
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question, Readers
from kvprofile.errors import BadInput
from kvprofile.identity import RunIdentity, json_sha256
from kvprofile.layers import PLAN_COLUMNS, LayerRange, Plan
from kvprofile.models.checkpoint import end_ids
from kvprofile.models.compatibility import compare
from kvprofile.models.loading import LoadedModel, load_pair
from kvprofile.recipe import Recipe, SearchMethod
from kvprofile.samples import (
    Part,
    build_samples,
    load_parts,
    remark_on,
    require_same_ids,
    sample_identity,
)
from kvprofile.scoring import Metric
from kvprofile.store.schema import MEASUREMENTS
from kvprofile.store.writer import pair_folder
from kvprofile.strategies import Strategy, load_all


class Progress(Protocol):
    """What a sweep tells while it runs."""

    def say(self, remark: str) -> None: ...
    def begin(self, samples: int, plans: int, done: int) -> None: ...
    def plans_done(self, count: int) -> None: ...
    def sample_done(self) -> None: ...


class Portion(NamedTuple):
    """What is measured and kept at once: some plans on one sample."""

    sample: Sample
    plans: tuple[Plan, ...]
    file: Path


class Frontier(NamedTuple):
    """Where an earlier profile's frontier was.

    Attributes:
        groups: Its groups.
        layers: Of the models then.
        anew: Whether to search as the recipe says, and to measure these groups beside.
    """

    groups: tuple[LayerRange, ...]
    layers: int
    anew: bool


@dataclass(frozen=True)
class Run:
    """Everything decided before the first measurement.

    Attributes:
        search: The recipe's, but adaptive where it begins at a known frontier.
        known: Groups of that frontier.
        anew: Whether the search goes on from the coarse grid in any case.
    """

    recipe: Recipe
    search: SearchMethod
    known: tuple[LayerRange, ...]
    anew: bool
    parts: tuple[Part, ...]
    samples: tuple[Sample, ...]
    sender: LoadedModel
    receiver: LoadedModel
    readers: Readers
    strategies: dict[str, Strategy]
    plans: tuple[Plan, ...]
    identity: str
    work: Path
    budget: MemoryBudget

    def caches(self, sample: Sample) -> ContextCaches:
        return ContextCaches(*self.readers, sample.context_token_ids, sample.head_tokens)

    def portion(self, sample: Sample, plans: Sequence[Plan], round: int = 0) -> Portion:
        """Returns plans on a sample with the file that keeps them; an adaptive search comes back to a sample in later rounds."""
        key = [sample.task, sample.dataset, sample.sample_id, round]
        return Portion(sample, tuple(plans), self.work / f"{json_sha256(key)[:24]}.parquet")


def prepare(
    recipe: Recipe,
    out: Path,
    progress: Progress,
    memory_limit: int | None = None,
    frontier: Frontier | None = None,
) -> Run:
    """Loads data and models, checks that they fit, and names the run.

    Args:
        recipe: What to measure.
        out: The store.
        progress: Who is told.
        memory_limit: Bytes that the process may hold on the receiver's device; None for what is free.
        frontier: That of an earlier profile, where an adaptive search begins; groups that the recipe's grids lack are left out.

    Raises:
        BadInput: If the recipe, its data, its models or the store cannot be used.
        GateFailed: If the models read different token ids.
    """
    parts = load_parts(recipe)
    require_writable(out)
    progress.say(f"loading {recipe.sender} and {recipe.receiver}")
    sender, receiver = load_pair(recipe.sender, recipe.receiver, recipe.models, recipe.search_folders)
    pair = compare(sender, receiver, chat_template=recipe.chat_template, distances=False)
    pair.require(recipe.sender, recipe.receiver)
    readers = Readers(Decoder(sender.model), Decoder(receiver.model))
    if not readers.receiver.shares_contexts:
        name = type(receiver.model).__name__
        progress.say(f"the attention of {name} cannot share contexts between plans: slower, same answers")
    strategies = load_all()
    layers = len(readers.receiver.layers)
    plans = [plan for s in strategies.values() for plan in s.plans(layers, recipe.granularity)]
    plans.sort(key=lambda plan: plan.range is not None)  # among equally good plans the frontier takes the first
    groups = {plan.range for plan in plans if plan.strategy == "layer_group" and plan.range}
    known, anew = _known(frontier, groups, layers, recipe.search)
    method: SearchMethod = "adaptive" if known else recipe.search
    samples = build_samples(recipe, parts, receiver.tokenizer, [sender.model.config, receiver.model.config])
    for sample in samples:
        require_same_ids(sample, sender, receiver)
    remark_on(samples, progress)
    end_ids = end_ids_of(receiver)
    identity = _identity(recipe, method, known, anew, parts, samples, sender, receiver, strategies, end_ids).sha256()
    folder = pair_folder(out, sender.reference.name, receiver.reference.name)
    return Run(
        recipe=recipe,
        search=method,
        known=known,
        anew=anew,
        parts=parts,
        samples=samples,
        sender=sender,
        receiver=receiver,
        readers=readers,
        strategies=strategies,
        plans=tuple(plans),
        identity=identity,
        work=folder / f"run-{identity[:16]}",
        budget=MemoryBudget(readers.receiver.devices, memory_limit),
    )


def _known(
    frontier: Frontier | None, groups: set[LayerRange], layers: int, method: SearchMethod
) -> tuple[tuple[LayerRange, ...], bool]:
    """Returns the groups that an adaptive search begins with, and whether it then searches anew; none for the recipe's own."""
    measures_all = frontier is not None and frontier.anew and method == "exhaustive"
    if frontier is None or frontier.layers != layers or measures_all:
        return (), False
    known = tuple(sorted(groups.intersection(frontier.groups)))
    return known, frontier.anew and bool(known)


def require_writable(out: Path) -> None:
    """Makes a folder; raises BadInput if nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise BadInput(f'cannot write to "{out}" ({error.strerror}); give a writable folder with --out') from error


def end_ids_of(receiver: LoadedModel) -> frozenset[int]:
    """Returns the ids that end an answer."""
    return end_ids(receiver.model.generation_config, receiver.tokenizer)


def question_of(sample: Sample, reader: LoadedModel) -> Question:
    """Returns what a reader is asked behind a sample's context."""
    decode = partial(reader.tokenizer.decode, skip_special_tokens=True)
    return Question(sample.suffix_token_ids, sample.max_new_tokens, Ending(end_ids_of(reader), sample.stop, decode))


def _identity(
    recipe: Recipe,
    method: SearchMethod,
    known: Sequence[LayerRange],
    anew: bool,
    parts: Sequence[Part],
    samples: Sequence[Sample],
    sender: LoadedModel,
    receiver: LoadedModel,
    strategies: dict[str, Strategy],
    end_ids: Iterable[int],
) -> RunIdentity:
    return RunIdentity(
        sender=tuple(sender.fingerprint),
        receiver=tuple(receiver.fingerprint),
        samples=sample_identity(samples),
        metrics=tuple(f"{task}/{dataset}/{m.identity}" for p in parts for task, dataset in [p.key] for m in p.metrics),
        strategies=tuple((name, strategy.version) for name, strategy in strategies.items()),
        granularity=recipe.granularity,
        references=recipe.references,
        search=method,
        known=tuple((group.start, group.stop) for group in known),
        anew=anew,
        end_ids=tuple(sorted(end_ids)),
        dtype=receiver.dtype,
        attention=receiver.model.config._attn_implementation,
        quantization=json.dumps(recipe.models.quantization, sort_keys=True),
        device_type=receiver.device.type,
        torch=torch.__version__,
        transformers=transformers.__version__,
        store_text=recipe.store_text,
        seed=recipe.seed,
        confidence=recipe.confidence,
        resamples=recipe.resamples,
    )


_PART_KEY = ["sample_id", "task", "dataset", "metric", *PLAN_COLUMNS]


def kept_table(path: Path) -> pa.Table | None:
    """Returns the measurements in a file, None if it is missing or not whole."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        table.validate(full=True)  # texts that are not UTF-8 would fail later, wherever they are looked at
    except (OSError, pa.ArrowException, UnicodeDecodeError):
        return None
    return table if table.schema.equals(MEASUREMENTS) else None


def read_part(run: Run, portion: Portion) -> pa.Table | None:
    """Returns what was measured of a portion, None if it is missing or not whole."""
    table = kept_table(portion.file)
    if table is None:
        return None
    sample = portion.sample
    metrics = next(part.metrics for part in run.parts if part.key == (sample.task, sample.dataset))
    return table if is_of(table, [sample], metrics, portion.plans) else None


def is_of(table: pa.Table, samples: Iterable[Sample], metrics: Sequence[Metric], plans: Sequence[Plan]) -> bool:
    """Returns whether measurements are of all these samples by all these metrics and plans, once each, and of nothing else."""
    rows = table.select(_PART_KEY).to_pylist()
    expected = {
        (sample.sample_id, sample.task, sample.dataset, metric.name, *plan.key)
        for sample in samples
        for metric in metrics
        for plan in plans
    }
    return {tuple(row[name] for name in _PART_KEY) for row in rows} == expected and len(rows) == len(expected)
