"""Measures the engine against the reference executor and against its floor, on the demo pair, in one run.

    python benchmarks/sweep_speed.py --tokens 256 1024 2048 --answers 12 32

Contexts of `hotpotqa_profile`, joined and cut to so many tokens; answers are forced to a length, since no end token is given. All
one-layer groups by the engine; a seeded sample of plans by the reference executor, one at a time, with the sender's capture
shared as a user's own loop would; its time is extrapolated to all groups. Engine and reference take turns; medians of the
repeats. `starts_seconds` are single passes over the context from each start.
The floor is the FLOPs of starts, suffix tree, further answer tokens (rows with equal contexts and answers so far counted once)
and output matrix over the rate of a matrix product; `parts` sets the engine's seconds in each part, of the repeat in the middle,
against that part's floor. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from kvprofile.cost.prefill import prefill_flops
from kvprofile.cost.sweep import behind_flops, start_flops, suffix_flops
from kvprofile.engine import batch, executor
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question, Readers, answer_plans
from kvprofile.engine.reference import greedy, partial_prefill
from kvprofile.engine.shape import shape_of
from kvprofile.engine.timing import matrix_flops_per_second, wait_for
from kvprofile.layers import LayerRange, Plan, groups
from kvprofile.models.loading import load_pair
from kvprofile.models.machine import cpu_name
from kvprofile.recipe import load_recipe, with_options
from kvprofile.samples import build_samples, load_parts
from kvprofile.strategies import load_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--answers", type=int, nargs="+", default=[12, 32])
    parser.add_argument("--compared", type=int, default=12, help="plans run one at a time in each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    recipe = load_recipe("demo")
    sender, receiver = load_pair(recipe.sender, recipe.receiver, recipe.models, recipe.search_folders)
    readers = Readers(Decoder(sender.model), Decoder(receiver.model))
    cases = []
    few = with_options(recipe, contexts=4)
    samples = build_samples(few, load_parts(few), receiver.tokenizer, [sender.model.config, receiver.model.config])
    sample, ids = samples[0], [token for one in samples for token in one.context_token_ids]
    for tokens in options.tokens:
        for answer in options.answers:
            question = Question(sample.suffix_token_ids, answer, Ending())
            case = measure(readers, ids[:tokens], sample.head_tokens, question, options)
            print(json.dumps(case), flush=True)
            cases.append(case)
    print(
        json.dumps(
            {
                "machine": cpu_name() if receiver.device.type == "cpu" else torch.cuda.get_device_name(receiver.device),
                "threads": torch.get_num_threads(),
                "dtype": receiver.dtype,
                "torch": torch.__version__,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                * (1 if sys.platform == "darwin" else 1024),
                "cases": cases,
            }
        )
    )


def measure(
    readers: Readers, context: Sequence[int], head: int, question: Question, options: argparse.Namespace
) -> dict[str, Any]:
    layers = len(readers.receiver.layers)
    plans = [Plan("layer_group", group) for group in groups(layers)]
    strategies, rng = load_all(), random.Random(options.seed)
    engine, reference, different, compared = [], [], 0, 0
    spent: list[Counter[str]] = []
    answers: dict[Plan, tuple[int, ...]] = {}
    for _ in range(options.repeats):
        caches = ContextCaches(*readers, context, head)
        _ = caches.sender_capture  # made before the clock starts, for both sides
        begun = time.perf_counter()
        with _parts_timed(readers.receiver.devices) as parts:
            answers = {a.plan: a.token_ids or () for a in answer_plans(readers, caches, question, plans, strategies)}
        engine.append(time.perf_counter() - begun)
        spent.append(parts)
        chosen = rng.sample(plans, options.compared)
        begun = time.perf_counter()
        alone = {p: greedy(readers.receiver, _mixed(readers, caches, p), *question) for p in chosen}
        reference.append((time.perf_counter() - begun) / len(chosen) * len(plans))
        different += sum(answers[plan] != ids for plan, ids in alone.items())
        compared += len(chosen)
    rate = matrix_flops_per_second(
        readers.receiver.model.config.hidden_size, readers.receiver.devices[0], readers.receiver.model.dtype
    )
    floors = {part: flops / rate for part, flops in _flops(readers, len(context), question, answers).items()}
    floor = sum(floors.values())
    middle = engine.index(statistics.median_low(engine))
    rest = engine[middle] - spent[middle].total()
    return {
        "context_tokens": len(context),
        "suffix_tokens": len(question.suffix),
        "answer_tokens": question.max_new_tokens,
        "groups": len(plans),
        "engine_seconds": engine,
        "reference_seconds_extrapolated": reference,
        "times_faster": statistics.median(reference) / statistics.median(engine),
        "floor_seconds": floor,
        "times_floor": statistics.median(engine) / floor,
        "parts": {
            part: {"seconds": seconds, "floor_seconds": floors.get(part)}
            for part, seconds in [*spent[middle].items(), ("rest", rest)]
        },
        "starts_seconds": _starts_seconds(readers, context, head),
        "plans_compared": compared,
        "plans_with_other_tokens": different,
    }


def _mixed(readers: Readers, caches: ContextCaches, plan: Plan) -> Any:
    assert plan.range
    return partial_prefill(readers.receiver, caches.sender_capture, plan.range)


def _starts_seconds(readers: Readers, context: Sequence[int], head: int) -> list[float]:
    caches = ContextCaches(*readers, context, head)
    _ = caches.sender_capture
    seconds = []
    for start in range(len(readers.receiver.layers)):
        begun = time.perf_counter()
        caches.mixed(LayerRange(start, start + 1))
        seconds.append(time.perf_counter() - begun)
    return seconds


_PARTS: dict[str, tuple[Any, str]] = {
    "starts": (Decoder, "recompute"),
    "draft": (executor, "draft_of"),
    "suffix and draft": (batch, "_verify"),
    "regrouping": (batch._Batch, "__init__"),
    "tokens after a difference": (batch._Batch, "step"),
}
"""Functions of the engine that do not call one another, by part."""


@contextlib.contextmanager
def _parts_timed(devices: Sequence[torch.device]) -> Iterator[Counter[str]]:
    """Counts the seconds that the engine spends in each part, a GPU's included."""
    seconds: Counter[str] = Counter()

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                wait_for(devices)
                seconds[part] += time.perf_counter() - begun

        return run

    with contextlib.ExitStack() as stack:
        for part, (owner, name) in _PARTS.items():
            stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        yield seconds


def _flops(readers: Readers, tokens: int, question: Question, answers: dict[Plan, tuple[int, ...]]) -> dict[str, float]:
    """Returns the work such an engine cannot avoid, by part: starts with the ceiling's prefill, suffix tree, further tokens."""
    shape = shape_of(readers.receiver.model)
    whole = LayerRange(0, shape.layers)
    ranges = [plan.range for plan in answers if plan.range]
    own = answers[Plan("layer_group", whole)]
    starts = prefill_flops(shape, tokens, whole) + start_flops(
        shape, tokens, [group for group in ranges if group.start]
    )
    head = 2.0 * shape.hidden_size * shape.vocabulary
    suffix = suffix_flops(shape, tokens, len(question.suffix) + len(own) - 1, ranges) + head * len(answers) * len(own)
    further = 0.0
    for length in range(1, len(own)):
        going = [
            (plan.range, ids[:length]) for plan, ids in answers.items() if plan.range and ids[:length] != own[:length]
        ]
        behind = tokens + len(question.suffix) + length - 1
        further += head * len(going)
        for layer in range(shape.layers):
            nodes = {(_read_until(group, layer), answer) for group, answer in going}
            further += len(nodes) * behind_flops(shape, behind, 1, LayerRange(layer, layer + 1))
    return {"starts": starts, "suffix and draft": suffix, "tokens after a difference": further}


def _read_until(group: LayerRange, layer: int) -> tuple[int, int]:
    """Returns what tells the contexts a plan has read up to a layer from another plan's."""
    return (-1, -1) if layer < group.start else (group.start, min(group.stop, layer + 1))


if __name__ == "__main__":
    main()
