"""Plan, run, score, store: the one place that ties the parts of a sweep together."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from kvprofile.cost.layer_times import LayerTiming
from kvprofile.cost.timing import Timing
from kvprofile.data.prompts import Sample
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.executor import answer_plans
from kvprofile.engine.gates import Numerics, check_gates
from kvprofile.engine.reference import greedy
from kvprofile.engine.timing import lengths_to_time, spread_of_groups, time_layers, time_prefills
from kvprofile.layers import LayerRange
from kvprofile.measurement import Scoring, measurement_table
from kvprofile.publication import write_profile
from kvprofile.recipe import Recipe
from kvprofile.run import Frontier, Portion, Progress, Run, prepare, question_of, read_part
from kvprofile.search import REUSE, SEARCHED, Kls, Removed, Request, before_race, finish, search
from kvprofile.store.writer import LOCK, alone, publish, write_table


def sweep(
    recipe: Recipe,
    out: Path,
    progress: Progress,
    memory_limit: int | None = None,
    earlier: Earlier | None = None,
) -> Path:
    """Measures every plan on every sample and returns the folder of the published profile.

    A run of the same identity that was cut off is taken up where it stood; the memory limit is no part of it. With an
    earlier profile the search is adaptive and begins at its frontier.

    Raises:
        BadInput: If the recipe, its data or its models cannot be used.
        GateFailed: If the engine is not exact on this pair.
        Interrupted: If another process runs the same sweep.
    """
    run = prepare(recipe, out, progress, memory_limit, earlier.frontier if earlier else None)
    with alone(run.work):
        checked = _gates_and_timings(run, progress)
        measured = _adaptive(run, progress) if run.search == "adaptive" else _exhaustive(run, progress)

        def build(temporary: Path, version: int) -> None:
            write_profile(run, *checked, *measured, temporary, version, earlier.profile_id if earlier else None)
            if earlier:
                earlier.judge(temporary)

        folder = publish(run.work.parent, build)
        for path in run.work.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    return folder


class Earlier(NamedTuple):
    """The profile that a new one takes the place of.

    Attributes:
        profile_id: Its id.
        frontier: Where the search begins.
        judge: Gets the folder of the new version before it is published.
    """

    profile_id: str
    frontier: Frontier
    judge: Callable[[Path], None]


class _Checked(NamedTuple):
    """What is measured once per run, before the first sample."""

    numerics: Numerics
    timings: list[Timing]
    layer_timings: list[LayerTiming]


def _gates_and_timings(run: Run, progress: Progress) -> _Checked:
    """Checks the gates and times some prefills on the sample of median length, once per run."""
    kept = run.work / "checked.json"
    try:
        held = json.loads(kept.read_text("utf-8"))
        return _Checked(
            Numerics(**held["numerics"]),
            [Timing.from_dict(timing) for timing in held["timings"]],
            [LayerTiming.from_dict(timing) for timing in held["layer_timings"]],
        )
    except (OSError, ValueError, TypeError, KeyError):  # not there, or torn by a crash of the machine: measured again
        pass
    progress.say("checking that the engine is exact on this pair")
    sample = sorted(run.samples, key=lambda s: len(s.context_token_ids))[len(run.samples) // 2]
    caches = run.caches(sample)
    numerics = check_gates(run.readers, caches, sample.context_token_ids, question_of(sample, run.receiver), run.budget)
    if numerics.parted:
        progress.say(
            f"in {run.receiver.dtype}, {numerics.parted} of {numerics.compared} plans part from one plan at a time "
            f"(logits up to {numerics.largest_margin:.3g} apart, equal computations up to {numerics.noise:.3g})"
        )
    progress.say(f"timing prefills of {len(sample.context_token_ids)} tokens")
    groups = [plan.range for plan in run.plans if plan.range]
    spread = spread_of_groups(groups, len(run.readers.receiver.layers))
    timings = time_prefills(run.readers.receiver, caches.sender_capture, spread)
    del caches  # the longest context needs the room
    layer_timings = _layer_timings(run, progress)
    temporary = kept.with_suffix(".tmp")
    document = {
        "numerics": numerics._asdict(),
        "timings": [timing.as_dict() for timing in timings],
        "layer_timings": [timing._asdict() for timing in layer_timings],
    }
    temporary.write_text(json.dumps(document), "utf-8")
    temporary.replace(kept)
    return _Checked(numerics, timings, layer_timings)


def _layer_timings(run: Run, progress: Progress) -> list[LayerTiming]:
    """Times every layer on the longest context, cut to a few lengths, and on the suffix of median length."""
    longest = max(run.samples, key=lambda s: len(s.context_token_ids))
    median = sorted(run.samples, key=lambda s: len(s.suffix_token_ids))[len(run.samples) // 2]
    # The longest context may reach to the models' last position but for its own suffix and answer.
    suffix = median.suffix_token_ids[: len(longest.suffix_token_ids) + longest.max_new_tokens]
    lengths = lengths_to_time([len(s.context_token_ids) for s in run.samples])
    progress.say(f"timing layers at contexts of {', '.join(map(str, lengths))} tokens")
    return time_layers(run.readers.receiver, longest.context_token_ids, lengths, suffix)


class _Measured(NamedTuple):
    """All portions of a run, and why an adaptive search left out the rest."""

    portions: list[Portion]
    removed: list[Removed]


def _exhaustive(run: Run, progress: Progress) -> _Measured:
    portions = [run.portion(sample, run.plans) for sample in run.samples]
    missing = [portion for portion in portions if read_part(run, portion) is None]
    progress.begin(len(portions), len(run.plans), len(portions) - len(missing))
    for portion in missing:
        _measure(run, portion, run.caches(portion.sample), {}, progress, progress.plans_done)
        progress.sample_done()
    return _Measured(portions, [])


def _adaptive(run: Run, progress: Progress) -> _Measured:
    """Measures the groups that the search asks for, and all other plans with a sample's first groups."""
    samples = _in_turn(run.samples)
    searched = min(len(samples), max(SEARCHED, len(run.parts)))
    revisited = min(len(samples), before_race(searched, run.known))
    groups = {plan.range: plan for plan in run.plans if plan.strategy == "layer_group" and plan.range}
    others = [plan for plan in run.plans if plan.strategy != "layer_group"]
    portions: list[Portion] = []
    baselines: dict[int, dict[str, float]] = {}
    held: dict[int, ContextCaches] = {}  # the first samples are come back to

    def answer(request: Request) -> Kls:
        sample = samples[request.sample]
        more = [] if request.sample in baselines else others
        portion = run.portion(sample, [*more, *(groups[group] for group in request.groups)], request.round)
        portions.append(portion)
        table = read_part(run, portion)
        if table is None:
            if request.sample >= revisited:
                held.clear()
            caches = held.get(request.sample) or run.caches(sample)
            if request.sample < searched:
                held[request.sample] = caches
            baseline = baselines.get(request.sample, {})
            table = _measure(run, portion, caches, baseline, progress, lambda plans: None)
        rows = table.to_pylist()
        baselines.setdefault(request.sample, {r["metric"]: r["value"] for r in rows if r["strategy"] == "full_prefill"})
        if request.sample < revisited:
            progress.say(f"round {request.round}: {len(request.groups)} groups on sample {request.sample + 1}")
        else:
            _advance(run, progress, revisited + 1 if request.sample == revisited else 1)
        return {
            REUSE if row["strategy"] == "full_reuse" else LayerRange(row["start_layer"], row["stop_layer"]): row["kl"]
            for row in rows
            if row["strategy"] in ("layer_group", "full_reuse")
        }

    progress.begin(len(samples), len(run.plans), 0)
    removed = finish(search(list(groups), run.recipe.granularity, len(samples), searched, run.known, run.anew), answer)
    if revisited == len(samples):
        _advance(run, progress, revisited)
    return _Measured(portions, removed)


def _advance(run: Run, progress: Progress, samples: int) -> None:
    for _ in range(samples):
        progress.plans_done(len(run.plans))
        progress.sample_done()


def _in_turn(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the samples so that every data set comes early."""
    numbers: Counter[tuple[str, str]] = Counter()
    places = []
    for place, sample in enumerate(samples):
        numbers[sample.task, sample.dataset] += 1
        places.append((numbers[sample.task, sample.dataset], place))
    return [samples[place] for _, place in sorted(places)]


def _measure(
    run: Run,
    portion: Portion,
    caches: ContextCaches,
    baseline: Mapping[str, float],
    progress: Progress,
    done: Callable[[int], None],
) -> pa.Table:
    """Measures a portion, keeps it in its file and returns it; `baseline` is full prefill's scores from an earlier portion."""
    sample = portion.sample
    question = question_of(sample, run.receiver)
    answers = answer_plans(run.readers, caches, question, portion.plans, run.strategies, done, progress.say, run.budget)
    by_agreement = run.recipe.references == "none"
    own = None
    if by_agreement and baseline:  # a later round of a search, whose plans do not include full prefill
        own = question.ending.text(greedy(run.readers.receiver, caches.receiver_kv, *question))
    metrics = next(p.metrics for p in run.parts if p.key == (sample.task, sample.dataset))
    scoring = Scoring(sample, metrics, question.ending.text, by_agreement, own, baseline, run.recipe.store_text)
    table: pa.Table = measurement_table(answers, scoring)
    write_table(table, portion.file)
    if failed := table["status"].to_pylist().count("error"):
        progress.say(f'{failed} of {len(table)} scores of "{sample.sample_id}" failed; kvprofile show tells why')
    return table
