"""Measures a chain of readers: B reads A's cache, C reads what B then holds. One plan at a time, with every hop by itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
import transformers

from kvprofile import __version__
from kvprofile.analysis.chain import (
    FULL,
    FULL_REUSE,
    MIDDLE_FULL,
    NO_CONTEXT,
    Arm,
    arms,
    chain,
    direct,
    first_hop,
    last_hop,
)
from kvprofile.data.prompts import Sample
from kvprofile.engine.cache import ContextKV
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.executor import Answer, answer_alone, draft_of
from kvprofile.engine.fidelity import Draft
from kvprofile.engine.gates import check_reader
from kvprofile.engine.reference import capture, mixed_capture, partial_prefill
from kvprofile.errors import BadInput
from kvprofile.identity import json_sha256
from kvprofile.json_text import parse_json
from kvprofile.layers import LayerRange
from kvprofile.measurement import Scoring, measured_samples, measurement_table
from kvprofile.models.compatibility import compare
from kvprofile.models.loading import LoadedModel, load_models
from kvprofile.publication import header_of, model_header
from kvprofile.recipe import Recipe
from kvprofile.run import Progress, end_ids_of, is_of, kept_table, question_of, require_writable
from kvprofile.samples import Part, build_samples, load_parts, remark_on, require_same_ids, sample_identity
from kvprofile.store.schema import FOOTER_KEY
from kvprofile.store.writer import alone, pair_folder, safe_name, write_table

VERSION = 1
"""Part of the identity of a chain's measurements; raised when they change."""


class Groups(NamedTuple):
    """What is recomputed: every one of `first` by B with every one of `second` by C."""

    first: tuple[LayerRange, ...]
    second: tuple[LayerRange, ...]


class Models(NamedTuple):
    """The three models of a chain."""

    a: LoadedModel
    b: LoadedModel
    c: LoadedModel


class MeasuredChain(NamedTuple):
    """Measurements of a chain, and where they are kept.

    Attributes:
        header: The file's footer.
        table: Rows of `measurements.parquet`, with the arms of `analysis.chain.arms`.
    """

    header: dict[str, Any]
    table: pa.Table
    file: Path


@dataclass(frozen=True)
class _Run:
    recipe: Recipe
    groups: Groups
    part: Part
    samples: tuple[Sample, ...]
    models: Models
    readers: tuple[Decoder, Decoder, Decoder]


def measure_chain(recipe: Recipe, middle: str, groups: Groups, out: Path, progress: Progress) -> MeasuredChain:
    """Measures a chain and keeps the result; one that is kept is not measured again, one that was cut off goes on.

    Args:
        recipe: With A as sender, C as receiver and one data source.
        middle: B, named as models are in a recipe.
        groups: What is recomputed.
        out: Folder of chains.
        progress: Who is told.

    Raises:
        BadInput: If models, data or `out` cannot be used, or a range ends behind the models' layers.
        GateFailed: If the models read different token ids, or a reader is not exact.
        Interrupted: If another process measures the same.
    """
    require_writable(out)
    run = _prepare(recipe, middle, groups, progress)
    identity = _identity(run)
    a, b, c = (model.reference.name for model in run.models)
    folder = pair_folder(out, f"{b}__from__{a}", c)
    file = folder / f"{safe_name(run.part.source.name)}-{identity[:16]}.parquet"
    work = folder / f".run-{identity[:16]}"
    with alone(work):
        table = _kept(run, file, identity)
        if table is None:
            _check_gates(run, progress)
            plans = len(arms(*groups))
            table = measured_samples(run.samples, work, plans, progress, lambda one: _measured(run, one, progress))
            write_table(table, file, _header(run, identity))
        else:
            progress.say(f"measured before, kept in {file}")
    shutil.rmtree(work, ignore_errors=True)
    return MeasuredChain(_header(run, identity), table, file)


def _prepare(recipe: Recipe, middle: str, groups: Groups, progress: Progress) -> _Run:
    (part,) = load_parts(recipe)
    texts = (recipe.sender, middle, recipe.receiver)
    progress.say(f"loading {', '.join(texts)}")
    models = Models(*load_models(texts, recipe.models, recipe.search_folders))
    for one, other in ((0, 1), (1, 2), (0, 2)):
        pair = compare(models[one], models[other], chat_template=recipe.chat_template, distances=False)
        pair.require(texts[one], texts[other])
    a, b, c = (Decoder(model.model) for model in models)
    for option, ranges in zip(("--first", "--second"), groups, strict=True):
        if beyond := [group for group in ranges if group.stop > len(c.layers)]:
            start, stop = beyond[0]
            raise BadInput(f"{option} {start}:{stop} ends behind the models' {len(c.layers)} layers")
    configs = [model.model.config for model in models]
    samples = build_samples(recipe, [part], models.c.tokenizer, configs)
    for sample in samples:
        for model in (models.a, models.b):
            require_same_ids(sample, model, models.c)
    remark_on(samples, progress)
    return _Run(recipe, groups, part, samples, models, (a, b, c))


def _identity(run: _Run) -> str:
    """Returns what decides whether measurements of an earlier run may be taken."""
    reader = run.models.c
    decides = {
        "version": VERSION,
        "kvprofile": __version__,
        "models": [tuple(model.fingerprint) for model in run.models],
        "groups": run.groups,
        "samples": sample_identity(run.samples),
        "metrics": [metric.identity for metric in run.part.metrics],
        "references": run.recipe.references,
        "end_ids": [sorted(end_ids_of(model)) for model in run.models],
        "dtype": reader.dtype,
        "attention": reader.model.config._attn_implementation,
        "quantization": run.recipe.models.quantization,
        "device_type": reader.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "store_text": run.recipe.store_text,
    }
    return json_sha256(decides)


def _check_gates(run: _Run, progress: Progress) -> None:
    progress.say("checking that B and C are exact")
    sample = sorted(run.samples, key=lambda s: len(s.context_token_ids))[len(run.samples) // 2]
    for reader, groups in zip(run.readers[1:], run.groups, strict=True):
        check_reader(reader, sample.context_token_ids, sample.suffix_token_ids, groups)


def _readings(run: _Run, sample: Sample) -> Iterator[tuple[Arm, ContextKV]]:
    """Yields every arm with the context cache that it reads, a reader's full prefill before its others."""
    a, b, c = run.readers
    firsts, seconds = run.groups
    caches = ContextCaches(a, c, sample.context_token_ids, sample.head_tokens)
    of_a, of_b = caches.sender_capture, capture(b, sample.context_token_ids)
    yield FULL, caches.receiver_kv
    yield NO_CONTEXT, caches.head_kv
    yield FULL_REUSE, caches.sender_kv
    yield MIDDLE_FULL, of_b.kv
    for second in seconds:
        yield direct(second), partial_prefill(c, of_a, second)
        yield last_hop(second), partial_prefill(c, of_b, second)
    for first in firsts:
        passed_on = mixed_capture(b, of_a, first)
        yield first_hop(first), passed_on.kv
        for second in seconds:
            yield chain(first, second), partial_prefill(c, passed_on, second)


def _measured(run: _Run, sample: Sample, progress: Progress) -> pa.Table:
    """Returns the rows of one sample; B's losses are against B's own full prefill, all others against C's."""
    drafts: dict[bool, Draft] = {}
    answers: dict[bool, list[Answer]] = {False: [], True: []}
    questions = {by_middle: question_of(sample, run.models[1 if by_middle else 2]) for by_middle in (False, True)}
    for arm, context in _readings(run, sample):
        reader, question = run.readers[1 if arm.by_middle else 2], questions[arm.by_middle]
        if arm in (FULL, MIDDLE_FULL):
            drafts[arm.by_middle] = draft_of(reader, context, question)
        answers[arm.by_middle].append(answer_alone(arm.plan, reader, context, question, drafts[arm.by_middle]))
        progress.plans_done(1)
    by_agreement = run.recipe.references == "none"
    text_of = questions[False].ending.text
    scoring = Scoring(sample, run.part.metrics, text_of, by_agreement, None, {}, run.recipe.store_text)
    return pa.concat_tables([measurement_table(one, scoring) for one in answers.values()])


def _header(run: _Run, identity: str) -> dict[str, Any]:
    a, b, c = run.models
    header = header_of(run.recipe, [run.part], a, c, identity, version=1)
    return {**header, "chain": {"middle": model_header(b), **run.groups._asdict(), "identity": identity}}


def _kept(run: _Run, file: Path, identity: str) -> pa.Table | None:
    """Returns the measurements in a file, None if it is missing, not whole or another chain's."""
    table = kept_table(file)
    if table is None:
        return None
    try:
        made_by = parse_json(table.schema.metadata[FOOTER_KEY.encode()])["chain"]["identity"]
    except (KeyError, TypeError, ValueError):
        return None
    plans = [arm.plan for arm in arms(*run.groups)]
    return table if made_by == identity and is_of(table, run.samples, run.part.metrics, plans) else None
