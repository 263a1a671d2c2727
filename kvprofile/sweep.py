"""Plan, run, score, store: the one place that ties the parts of a sweep together."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from filelock import FileLock, Timeout

from kvprofile import __version__
from kvprofile.analysis.profile_table import PlanCost, Source, build_profile_rows
from kvprofile.cost.prefill import ModelShape, e_bytes_per_token, kv_bytes_per_token, prefill_flops
from kvprofile.data.prompts import Sample, build_sample, task_of
from kvprofile.data.records import Dataset, Record, choose, load_dataset
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.executor import Answer, Question, Readers, answer_plans
from kvprofile.engine.gates import check_gates
from kvprofile.engine.shape import shape_of
from kvprofile.engine.timing import spread_of_groups, time_prefills
from kvprofile.errors import BadInput, GateFailed, Interrupted
from kvprofile.identity import RunIdentity, json_sha256
from kvprofile.layers import LayerRange, Plan, largest_unit
from kvprofile.models.compatibility import compare
from kvprofile.models.loading import LoadedModel, load_pair
from kvprofile.recipe import DataSource, Recipe, to_yaml
from kvprofile.scoring import Metric, metric
from kvprofile.store.schema import FORMAT_VERSION, MEASUREMENTS, SAMPLES
from kvprofile.store.writer import pair_folder, publish, write_table
from kvprofile.strategies import Strategy, load_all


class Progress(Protocol):
    """What a sweep tells while it runs."""

    def say(self, remark: str) -> None: ...
    def begin(self, samples: int, plans: int, done: int) -> None: ...
    def plans_done(self, count: int) -> None: ...
    def sample_done(self) -> None: ...


@dataclass(frozen=True)
class _Part:
    """One data source of a recipe, ready to measure."""

    source: DataSource
    data: Dataset
    records: tuple[Record, ...]
    metrics: tuple[Metric, ...]

    @property
    def key(self) -> Source:
        return self.source.task, self.source.name


@dataclass(frozen=True)
class _Run:
    """Everything decided before the first measurement."""

    recipe: Recipe
    parts: tuple[_Part, ...]
    samples: tuple[Sample, ...]
    sender: LoadedModel
    receiver: LoadedModel
    readers: Readers
    strategies: dict[str, Strategy]
    plans: tuple[Plan, ...]
    end_ids: frozenset[int]
    identity: str
    work: Path

    def question(self, sample: Sample) -> Question:
        return Question(sample.suffix_token_ids, sample.max_new_tokens, self.end_ids)

    def caches(self, sample: Sample) -> ContextCaches:
        return ContextCaches(*self.readers, sample.context_token_ids, sample.head_tokens)

    def part_file(self, sample: Sample) -> Path:
        return self.work / f"{json_sha256([sample.task, sample.dataset, sample.sample_id])[:24]}.parquet"


def sweep(recipe: Recipe, out: Path, progress: Progress) -> Path:
    """Measures every plan on every sample and returns the folder of the published profile.

    A run of the same identity that was cut off is taken up where it stood.

    Raises:
        BadInput: If the recipe, its data or its models cannot be used.
        GateFailed: If the engine is not exact on this pair.
        Interrupted: If another process runs the same sweep.
    """
    run = _prepare(recipe, out, progress)
    with _alone(run.work):
        timings = _gates_and_timings(run, progress)
        open_samples = [sample for sample in run.samples if _read_part(run, sample) is None]
        progress.begin(len(run.samples), len(run.plans), len(run.samples) - len(open_samples))
        for sample in open_samples:
            write_table(_measure(run, sample, progress), run.part_file(sample))
            progress.sample_done()
        folder = publish(run.work.parent, lambda temporary, version: _write(run, timings, temporary, version))
        for file in run.work.iterdir():
            if file.name != _LOCK:
                file.unlink()
    return folder


_LOCK = "lock"


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(work / _LOCK, timeout=0):
            yield
    except Timeout:
        raise Interrupted(
            f"another process runs this very sweep in {work}; wait for it, or give another --out"
        ) from None


def _prepare(recipe: Recipe, out: Path, progress: Progress) -> _Run:
    parts = tuple(_part(recipe, source) for source in recipe.data)
    _require_writable(out)
    progress.say(f"loading {recipe.sender} and {recipe.receiver}")
    sender, receiver = load_pair(recipe.sender, recipe.receiver, recipe.models, recipe.search_folders)
    pair = compare(sender, receiver, chat_template=recipe.chat_template, distances=False)
    pair.require(recipe.sender, recipe.receiver)
    readers = Readers(Decoder(sender.model), Decoder(receiver.model))
    strategies = load_all()
    layers = len(readers.receiver.layers)
    plans = tuple(plan for s in _simplest_first(strategies) for plan in s.plans(layers, recipe.granularity))
    samples = tuple(_sample(recipe, part, record, receiver) for part in parts for record in part.records)
    for sample in samples:
        _require_same_ids(sample, sender, receiver)
    _remark_on(samples, progress)
    end_ids = _end_ids(receiver)
    identity = _identity(recipe, parts, samples, sender, receiver, strategies, end_ids).sha256()
    folder = pair_folder(out, sender.reference.name, receiver.reference.name)
    return _Run(
        recipe,
        parts,
        samples,
        sender,
        receiver,
        readers,
        strategies,
        plans,
        end_ids,
        identity,
        folder / f"run-{identity[:16]}",
    )


def _part(recipe: Recipe, source: DataSource) -> _Part:
    data = load_dataset(source, recipe.folder)
    metrics = tuple(metric(name) for name in task_of(source).metrics)
    return _Part(source, data, choose(data, recipe.contexts, recipe.seed), metrics)


def _require_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".kvprofile-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f'cannot write to "{out}" ({error.strerror}); give a writable folder with --out') from error


def _simplest_first(strategies: dict[str, Strategy]) -> list[Strategy]:
    """Among equally good plans the frontier takes the first: arms without layer ranges come before groups."""
    return sorted(strategies.values(), key=lambda s: any(plan.range for plan in s.plans(1, (1,))))


def _sample(recipe: Recipe, part: _Part, record: Record, receiver: LoadedModel) -> Sample:
    task = task_of(part.source)

    def build(limit: int | None) -> Sample:
        return build_sample(
            receiver.tokenizer,
            record,
            task,
            dataset=part.source.name,
            max_new_tokens=task.max_new_tokens,
            max_context_tokens=limit,
            chat_template=recipe.chat_template,
        )

    sample = build(recipe.max_context_tokens)
    longest = getattr(receiver.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = None if longest is None else longest - len(sample.suffix_token_ids) - sample.max_new_tokens
    if room is not None and len(sample.context_token_ids) > room:
        if room < 1:
            raise BadInput(f'record "{record.id}" leaves no room for its context in the model\'s {longest} positions')
        sample = build(room)
    return sample


def _require_same_ids(sample: Sample, sender: LoadedModel, receiver: LoadedModel) -> None:
    text = receiver.tokenizer.decode(sample.context_token_ids)
    ours, theirs = (m.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for m in (receiver, sender))
    if ours != theirs:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise GateFailed(
            f'sender and receiver turn the context of "{sample.sample_id}" into different token ids from position {at} on '
            f"({theirs[at : at + 3]} and {ours[at : at + 3]}); their tokenizers must be equal"
        )


def _remark_on(samples: Sequence[Sample], progress: Progress) -> None:
    if cut := [s for s in samples if s.truncated_tokens]:
        most = max(s.truncated_tokens for s in cut)
        progress.say(f"{len(cut)} of {len(samples)} contexts are cut in the middle, by up to {most} tokens")
    if moved := sum(s.boundary_moved for s in samples):
        progress.say(
            f"{moved} of {len(samples)} prompts would have other ids if context and suffix were tokenised together"
        )


def _end_ids(receiver: LoadedModel) -> frozenset[int]:
    config = receiver.model.generation_config
    ends = [config.eos_token_id if config else None, receiver.tokenizer.eos_token_id]
    return frozenset(i for end in ends if end is not None for i in (end if isinstance(end, list) else [end]))


def _identity(
    recipe: Recipe,
    parts: Sequence[_Part],
    samples: Sequence[Sample],
    sender: LoadedModel,
    receiver: LoadedModel,
    strategies: dict[str, Strategy],
    end_ids: Iterable[int],
) -> RunIdentity:
    return RunIdentity(
        sender=tuple(sender.fingerprint),
        receiver=tuple(receiver.fingerprint),
        samples=tuple(
            (
                s.sample_id,
                s.task,
                s.dataset,
                s.context_sha256,
                s.suffix_token_ids,
                s.references,
                s.head_tokens,
                s.max_new_tokens,
            )
            for s in samples
        ),
        metrics=tuple(f"{task}/{dataset}/{m.identity}" for p in parts for task, dataset in [p.key] for m in p.metrics),
        strategies=tuple((name, strategy.version) for name, strategy in strategies.items()),
        granularity=recipe.granularity,
        end_ids=tuple(sorted(end_ids)),
        dtype=receiver.dtype,
        attention=recipe.models.attention,
        quantization=json.dumps(recipe.models.quantization, sort_keys=True),
        device_type=receiver.device.type,
        torch=torch.__version__,
        transformers=transformers.__version__,
        store_text=recipe.store_text,
        seed=recipe.seed,
        confidence=recipe.confidence,
        resamples=recipe.resamples,
    )


def _gates_and_timings(run: _Run, progress: Progress) -> list[dict[str, Any]]:
    """Checks the gates and times some prefills on the sample of median length, once per run."""
    kept = run.work / "timings.json"
    if kept.exists():
        timings: list[dict[str, Any]] = json.loads(kept.read_text("utf-8"))
        return timings
    progress.say("checking that the engine is exact on this pair")
    sample = sorted(run.samples, key=lambda s: len(s.context_token_ids))[len(run.samples) // 2]
    caches = run.caches(sample)
    check_gates(run.readers, caches, sample.context_token_ids, run.question(sample))
    progress.say(f"timing prefills of {len(sample.context_token_ids)} tokens")
    groups = [plan.range for plan in run.plans if plan.range]
    spread = spread_of_groups(groups, len(run.readers.receiver.layers))
    timings = [t.as_dict() for t in time_prefills(run.readers.receiver, caches.sender_capture, spread)]
    temporary = kept.with_suffix(".tmp")
    temporary.write_text(json.dumps(timings), "utf-8")
    temporary.replace(kept)
    return timings


def _measure(run: _Run, sample: Sample, progress: Progress) -> pa.Table:
    answers = answer_plans(
        run.readers, run.caches(sample), run.question(sample), run.plans, run.strategies, progress.plans_done
    )
    metrics = next(p.metrics for p in run.parts if p.key == (sample.task, sample.dataset))
    scored = [(answer, *_score(run, sample, answer, metrics)) for answer in answers]
    baseline = next(values for answer, _, values in scored if answer.plan.strategy == "full_prefill")
    rows = [
        {
            "sample_id": sample.sample_id,
            "task": sample.task,
            "dataset": sample.dataset,
            "metric": one.name,
            **dict(zip(("strategy", "start_layer", "stop_layer", "params"), answer.plan.key, strict=True)),
            "value": values.get(one.name),
            "baseline_value": baseline.get(one.name),
            "output_token_ids": answer.token_ids if run.recipe.store_text else None,
            "output_text": text if run.recipe.store_text else None,
            "context_tokens": len(sample.context_token_ids),
            "suffix_tokens": len(sample.suffix_token_ids),
            "status": "ok" if answer.error is None else "error",
            "error": answer.error,
        }
        for answer, text, values in scored
        for one in metrics
    ]
    return pa.Table.from_pylist(rows, schema=MEASUREMENTS)


def _score(run: _Run, sample: Sample, answer: Answer, metrics: Sequence[Metric]) -> tuple[str | None, dict[str, float]]:
    if answer.token_ids is None:
        return None, {}
    text: str = run.receiver.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    return text, {one.name: one.score(text, sample.references) for one in metrics}


def _read_part(run: _Run, sample: Sample) -> pa.Table | None:
    """Returns a sample's finished part, None if it is missing or not whole."""
    try:
        table = pq.read_table(run.part_file(sample))
    except (OSError, pa.ArrowException):
        return None
    return table if table.schema.equals(MEASUREMENTS) else None


def _write(run: _Run, timings: list[dict[str, Any]], folder: Path, version: int) -> None:
    header = _header(run, version)
    measurements = pa.concat_tables([part for s in run.samples if (part := _read_part(run, s)) is not None])
    rows = build_profile_rows(
        measurements,
        _costs(run, timings),
        n_planned={part.key: len(part.records) for part in run.parts},
        confidence=run.recipe.confidence,
        resamples=run.recipe.resamples,
        seed=run.recipe.seed,
    )
    write_table(rows, folder / "profile.parquet", header)
    write_table(measurements, folder / "measurements.parquet", header)
    write_table(_samples_table(run), folder / "samples.parquet")
    (folder / "recipe.yaml").write_text(to_yaml(run.recipe), "utf-8")
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": header["device"],
        "attention": header["attention"],
        "prefill_timings": timings,
        "boundary_moved": sum(s.boundary_moved for s in run.samples),
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=2), "utf-8")


def _costs(run: _Run, timings: Sequence[dict[str, Any]]) -> list[PlanCost]:
    shape = shape_of(run.receiver.model)
    lengths: dict[Source, int] = {}
    for part in run.parts:
        own = [len(s.context_token_ids) for s in run.samples if (s.task, s.dataset) == part.key]
        lengths[part.key] = int(statistics.median(own))
    measured = {LayerRange(t["start_layer"], t["stop_layer"]): statistics.median(t["prefill_ms"]) for t in timings}
    return [_cost(plan, run, shape, lengths, measured) for plan in run.plans]


def _cost(
    plan: Plan, run: _Run, shape: ModelShape, lengths: dict[Source, int], measured: dict[LayerRange, float]
) -> PlanCost:
    whole = LayerRange(0, shape.layers)
    recomputed = run.strategies[plan.strategy].recomputed_layers(plan, shape.layers)
    group = plan.range or LayerRange(0, recomputed)
    ships = run.strategies[plan.strategy].candidate
    timed = lengths if len(lengths) == 1 else {}  # prefills were timed at one length, so for one data set only
    return PlanCost(
        plan=plan,
        granularity=largest_unit(plan.range, shape.layers, run.recipe.granularity) if plan.range else None,
        recomputed_layers=recomputed,
        total_layers=shape.layers,
        prefill_flops={key: prefill_flops(shape, tokens, group) for key, tokens in lengths.items()},
        full_prefill_flops={key: prefill_flops(shape, tokens, whole) for key, tokens in lengths.items()},
        kv_bytes_per_token=kv_bytes_per_token(shape, shape.layers - recomputed) if ships else 0,
        e_bytes_per_token=e_bytes_per_token(shape, group) if ships else 0,
        measured_prefill_ms=dict.fromkeys(timed, measured.get(group)),
        measured_full_prefill_ms=dict.fromkeys(timed, measured.get(whole)),
        context_tokens_median=lengths,
    )


def _samples_table(run: _Run) -> pa.Table:
    text = run.recipe.store_text
    rows = [
        {
            "sample_id": s.sample_id,
            "task": s.task,
            "dataset": s.dataset,
            "context_token_ids": s.context_token_ids if text else None,
            "suffix_token_ids": s.suffix_token_ids if text else None,
            "references": s.references if text else None,
            "head_tokens": s.head_tokens,
            "truncated_tokens": s.truncated_tokens,
            "max_new_tokens": s.max_new_tokens,
            "context_sha256": s.context_sha256,
        }
        for s in run.samples
    ]
    return pa.Table.from_pylist(rows, schema=SAMPLES)


def _header(run: _Run, version: int) -> dict[str, Any]:
    device = run.receiver.device
    return {
        "format_version": FORMAT_VERSION,
        "kvprofile_version": __version__,
        "profile_id": json_sha256([run.identity, version])[:32],
        "version": version,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "sender": _model_header(run.sender, run.recipe),
        "receiver": _model_header(run.receiver, run.recipe),
        "recipe_sha256": run.recipe.sha256(),
        "datasets": [
            {
                "name": part.source.name,
                "sha256": part.data.sha256,
                "sample_ids_sha256": json_sha256([record.id for record in part.records]),
            }
            for part in run.parts
        ],
        "metrics": sorted({one.identity for part in run.parts for one in part.metrics}),
        "attention": run.recipe.models.attention,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": run.recipe.seed,
        "confidence": run.recipe.confidence,
        "resamples": run.recipe.resamples,
    }


def _model_header(loaded: LoadedModel, recipe: Recipe) -> dict[str, Any]:
    config = loaded.model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    return {
        "name": loaded.reference.name,
        "revision": loaded.commit or loaded.reference.revision,
        "weights_sha256": loaded.fingerprint.weights_sha256,
        "tokenizer_sha256": loaded.fingerprint.tokenizer_sha256,
        "template_sha256": loaded.fingerprint.template_sha256,
        "architecture": type(loaded.model).__name__,
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "dtype": loaded.dtype,
        "quantization": recipe.models.quantization,
    }
