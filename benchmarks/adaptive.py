"""Replays the adaptive search on the measurements of an exhaustive sweep, and compares work and selected plans.

    python benchmarks/adaptive.py outputs/PAIR/v0001 --sets 3 --records 40
    python benchmarks/adaptive.py outputs/PAIR/v0001 --timed 60

The engine's answers do not depend on the search, so the measurements of one exhaustive sweep tell what any search would have met.
Each set is a seeded draw of records, in a seeded order. Work is counted in layer-tokens, one layer run on one token: prefills of
both models, passes from every start, suffixes and answers; of groups one at a time with the sender's capture shared, and of the
search. For the plans selected within 1 % and 5 %, the interval of their paired difference in quality.
`--timed N` runs the search for real instead, on all records of the profile and its models, and N seeded groups of seeded records
one at a time, in turns; their time is extrapolated to all groups of all records. Captures and the ceiling's answer count on both
sides. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvprofile.analysis.choice import cheapest
from kvprofile.analysis.loss import resampling_weights
from kvprofile.analysis.scores import Scores, all_scores
from kvprofile.cost.sweep import layer_tokens
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.executor import answer_plans, draft_of
from kvprofile.engine.reference import greedy, partial_prefill
from kvprofile.layers import LayerRange, Plan, describe, groups
from kvprofile.limits import parse_loss
from kvprofile.models.machine import cpu_name
from kvprofile.profiled_pair import load_profiled_pair
from kvprofile.run import question_of
from kvprofile.search import REUSE, Request, finish, search
from kvprofile.sensitivity import profile_samples
from kvprofile.store.reader import Profile, load
from kvprofile.strategies import load_all


class Lengths(NamedTuple):
    """Tokens of one record: context, suffix, full prefill's answer, and by plan the answer and where it leaves that one."""

    context: int
    suffix: int
    draft: int
    answers: dict[LayerRange, tuple[int, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--metric", default="f1")
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--records", type=int, default=40)
    parser.add_argument("--timed", type=int, help="groups to run one at a time")
    options = parser.parse_args()

    profile = load(options.profile)
    if options.timed:
        print(json.dumps({"profile_id": profile.header["profile_id"], **_timed(profile, options.timed)}))
        return
    layers = profile.rows["total_layers"][0].as_py()
    scores = next(one for one in all_scores(profile.measurements()) if one.metric == options.metric)
    lengths = _lengths(profile.measurements().to_pylist(), options.metric)
    sets = [_compare(scores, lengths, layers, seed, options.records) for seed in range(options.sets)]
    for one in sets:
        print(json.dumps(one))
    print(json.dumps({"profile_id": profile.header["profile_id"], "sets": sets}))


def _compare(scores: Scores, lengths: Sequence[Lengths], layers: int, seed: int, records: int) -> dict[str, Any]:
    order = np.random.default_rng(seed).permutation(len(lengths))[:records]
    allowed = groups(layers)
    asked: list[Request] = []

    def answer(request: Request) -> dict[LayerRange, float | None]:
        asked.append(request)
        kls = {g: float(scores.of(_key(g), scores.kl)[order[request.sample]]) for g in (*request.groups, REUSE)}
        return {group: None if np.isnan(kl) else kl for group, kl in kls.items()}

    left = {why.group for why in finish(search(allowed, (1,), len(order)), answer)}
    work = sum(2 * layers * lengths[sample].context for sample in order)
    work += sum(_shared_work(request.groups, lengths[order[request.sample]], layers) for request in asked)
    alone = sum(
        2 * layers * own.context
        + sum(g.length * own.context + layers * (own.suffix + own.answers[g][0] - 1) for g in allowed)
        for own in (lengths[sample] for sample in order)
    )
    finalists = [group for group in allowed if group not in left]
    return {
        "seed": seed,
        "records": len(order),
        "layer_tokens_one_at_a_time": alone,
        "layer_tokens_adaptive": work,
        "times_less": alone / work,
        "groups_on_all_records": len(finalists),
        "selected": [_selected(scores, order, finalists, allowed, layers, limit) for limit in ("1%", "5%")],
    }


def _timed(profile: Profile, alone: int) -> dict[str, Any]:
    """Runs the search, and seeded groups one at a time in between; samples that the search comes back to are prefilled again."""
    pair = load_profiled_pair(profile, _Quiet())
    readers, samples, strategies = pair.readers, profile_samples(profile), load_all()
    questions = [question_of(sample, pair.receiver) for sample in samples]
    allowed = groups(len(readers.receiver.layers))
    plans = {REUSE: Plan("full_reuse")} | {group: Plan("layer_group", group) for group in allowed}
    rng = random.Random(0)
    drawn = [(rng.randrange(len(samples)), rng.choice(allowed)) for _ in range(alone)]
    searching = 0.0
    whole, single = [], []

    def caches_of(place: int) -> ContextCaches:
        return ContextCaches(*readers, samples[place].context_token_ids, samples[place].head_tokens)

    def answer(request: Request) -> dict[LayerRange, float | None]:
        nonlocal searching
        asked = [REUSE, *request.groups]
        begun = time.perf_counter()
        caches, question = caches_of(request.sample), questions[request.sample]
        answers = answer_plans(readers, caches, question, [plans[group] for group in asked], strategies)
        kls = {group: one.fidelity.kl if one.fidelity else None for group, one in zip(asked, answers, strict=True)}
        searching += time.perf_counter() - begun
        while drawn and len(single) * len(samples) <= alone * request.sample:
            one_at_a_time(*drawn.pop())
        return kls

    def one_at_a_time(place: int, group: LayerRange) -> None:
        begun = time.perf_counter()
        caches, question = caches_of(place), questions[place]
        sender, _ = caches.sender_capture, draft_of(readers.receiver, caches.receiver_kv, question)
        captured = time.perf_counter()
        greedy(readers.receiver, partial_prefill(readers.receiver, sender, group), *question)
        whole.append(captured - begun)
        single.append(time.perf_counter() - captured)

    finish(search(allowed, (1,), len(samples)), answer)
    for place, group in drawn:
        one_at_a_time(place, group)
    extrapolated = len(samples) * (statistics.mean(whole) + len(allowed) * statistics.mean(single))
    return {
        "machine": cpu_name(),
        "threads": torch.get_num_threads(),
        "records": len(samples),
        "search_seconds": searching,
        "groups_run_one_at_a_time": len(single),
        "one_at_a_time_seconds_extrapolated": extrapolated,
        "times_faster": extrapolated / searching,
    }


class _Quiet:
    """Progress that nobody watches."""

    def say(self, remark: str) -> None: ...
    def begin(self, samples: int, plans: int, done: int) -> None: ...
    def plans_done(self, count: int) -> None: ...
    def sample_done(self) -> None: ...


def _shared_work(asked: Sequence[LayerRange], own: Lengths, layers: int) -> float:
    """Returns the layer-tokens of some groups of one record, as the engine shares them; rows that go on are counted singly."""
    going = sum(max(0, count - agreed - 1) for count, agreed in (own.answers[g] for g in asked))
    return layer_tokens(asked, layers, own.context, own.suffix + own.draft - 1) + layers * going


def _selected(
    scores: Scores, order: Any, finalists: list[LayerRange], allowed: list[LayerRange], layers: int, limit: str
) -> dict[str, Any]:
    adaptive, exhaustive = (
        cheapest([_row(scores, order, g, layers) for g in (REUSE, *some)], parse_loss(limit))
        for some in (finalists, allowed)
    )
    found: dict[str, Any] = {"limit": limit}
    for name, row in (("adaptive", adaptive), ("exhaustive", exhaustive)):
        found[name] = None if row is None else describe(row["group"], layers)
        found[f"{name}_quality"] = None if row is None else row["quality"]
    if adaptive and exhaustive:
        one, other = (scores.of(_key(row["group"]), scores.value)[order] for row in (adaptive, exhaustive))
        weights = resampling_weights(len(order), 10_000, 0)
        means = (one - other) @ weights / weights.sum(axis=0)
        found["difference_95"] = [float(np.quantile(means, share)) for share in (0.025, 0.975)]
        found["more_layers_than_exhaustive"] = adaptive["group"].length - exhaustive["group"].length
    return found


def _row(scores: Scores, order: Any, group: LayerRange, layers: int) -> dict[str, Any]:
    quality = float(scores.of(_key(group), scores.value)[order].mean())
    full = float(scores.baseline[order].mean())
    return {
        "group": group,
        "strategy": "layer_group",
        "start_layer": group.start,
        "recompute_fraction": group.length / layers,
        "quality": quality,
        "loss_rel": 1 - quality / full,
        "n_planned": len(order),
        "n_scored": len(order),
    }


def _key(group: LayerRange) -> Any:
    return (Plan("full_reuse") if group == REUSE else Plan("layer_group", group)).key


def _lengths(rows: Sequence[dict[str, Any]], metric: str) -> list[Lengths]:
    """Returns the lengths of every record, in the order of `Scores`: by record id."""
    mine = [row for row in rows if row["metric"] == metric]
    drafts = {row["sample_id"]: row["output_token_ids"] for row in mine if row["strategy"] == "full_prefill"}
    by_record: dict[str, Lengths] = {}
    for row in mine:
        name, ids = row["sample_id"], row["output_token_ids"]
        own = by_record.setdefault(name, Lengths(row["context_tokens"], row["suffix_tokens"], len(drafts[name]), {}))
        if row["strategy"] == "layer_group":
            same = (a == b for a, b in zip(ids, drafts[name], strict=False))
            agreed = next((i for i, equal in enumerate(same) if not equal), min(len(ids), len(drafts[name])))
            own.answers[LayerRange(row["start_layer"], row["stop_layer"])] = len(ids), agreed
    return [by_record[name] for name in sorted(by_record)]


if __name__ == "__main__":
    main()
