"""Runs all plans of one sample. This is the seam for faster engines: same arguments, same answers, less work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from kvprofile.cost.memory import Lengths, block_bytes, plan_bytes, sample_bytes, verifying_bytes
from kvprofile.cost.prefill import kv_bytes_per_token
from kvprofile.engine.batch import NOT_FINITE, Row, greedy_rows
from kvprofile.engine.budget import MemoryBudget
from kvprofile.engine.cache import ContextKV, prefilled_cache
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.fidelity import Draft, Fidelity, fidelity
from kvprofile.engine.reference import greedy
from kvprofile.engine.shape import shape_of
from kvprofile.errors import OUT_OF_MEMORY, OutOfMemory, is_out_of_memory
from kvprofile.layers import Plan
from kvprofile.strategies import Reading, Strategy

MOST_PLANS = 512
"""Plans answered together at most; memory may allow fewer."""

MOST_VERIFIED = 128
"""Rows of one verifying pass at most: more were no faster (`benchmarks/sweep_speed.py`)."""


class Answer(NamedTuple):
    """What one plan answered on one sample; `error` is set instead of the ids where it could not answer."""

    plan: Plan
    token_ids: tuple[int, ...] | None
    fidelity: Fidelity | None = None
    error: str | None = None


class Question(NamedTuple):
    """What follows a context: T suffix ids, the limit on the answer and what ends it earlier."""

    suffix: tuple[int, ...]
    max_new_tokens: int
    ending: Ending


class Readers(NamedTuple):
    """The two models of a pair."""

    sender: Decoder
    receiver: Decoder


def answer_plans(
    readers: Readers,
    caches: ContextCaches,
    question: Question,
    plans: Sequence[Plan],
    strategies: Mapping[str, Strategy],
    done: Callable[[int], None] = lambda plans: None,
    say: Callable[[str], None] = lambda remark: None,
    budget: MemoryBudget | None = None,
) -> Iterator[Answer]:
    """Yields the greedy answer of every plan, in the order of the plans.

    The reference executor's answer behind the receiver's own full prefill is the draft for all plans.

    Args:
        readers: Sender and receiver.
        caches: The sample's contexts.
        question: The sample's suffix and limits.
        plans: Those with equal starts side by side.
        strategies: By name.
        done: Called with the number of plans just answered.
        say: Called with remarks for the user.
        budget: What memory may be taken; all that is free if None.

    Raises:
        OutOfMemory: If not even one plan at a time fits.
    """
    caches.expect(plan.range for plan in plans if plan.range)
    room = (budget or MemoryBudget(readers.receiver.devices)).room()
    draft = draft_of(readers.receiver, caches.receiver_kv, question)
    shape = shape_of(readers.receiver.model)
    context = caches.receiver_kv[0].keys.shape[-2]
    lengths = Lengths(context, len(question.suffix), question.max_new_tokens, len(draft.token_ids))
    room -= sample_bytes(shape, lengths)
    rows = max(n for n in range(1, MOST_VERIFIED + 1) if n == 1 or verifying_bytes(shape, lengths, n) <= room // 4)
    next_start = context * kv_bytes_per_token(shape, shape.layers)  # is there before the block before it is answered
    joined = 0 if readers.receiver.shares_contexts else 2 * context * kv_bytes_per_token(shape, 1)

    def needed(plans: int) -> int:
        return plans * (plan_bytes(shape, lengths) + joined) + block_bytes(shape, lengths, rows, plans) + next_start

    for block, readings in _blocks(caches, plans, strategies, room, needed):
        for plan, row in zip(block, _answer(readers, readings, question, draft, rows, say), strict=True):
            yield _checked(plan, row)
        done(len(block))


def _blocks(
    caches: ContextCaches,
    plans: Sequence[Plan],
    strategies: Mapping[str, Strategy],
    room: int,
    needed: Callable[[int], int],
) -> Iterator[tuple[list[Plan], list[Reading]]]:
    """Yields plans with their contexts, as many at a time as `room` bytes hold beside what the sample holds anyway.

    `needed` gives the bytes of so many plans beside their contexts.
    """
    whole = {id(kv) for kv in (*caches.sender_capture.kv, *caches.sender_kv, *caches.receiver_kv)}
    block: list[Plan] = []
    readings: list[Reading] = []
    held: dict[int, int] = {}
    for plan in plans:
        reading = strategies[plan.strategy].read(caches, plan)
        added = {id(kv): sum(part.nbytes for part in kv) for kv in reading.context if id(kv) not in whole}
        held |= added
        if block and (len(block) == MOST_PLANS or sum(held.values()) + needed(len(block) + 1) > room):
            yield block, readings
            block, readings, held = [], [], added
        block.append(plan)
        readings.append(reading)
    if block:
        yield block, readings


def _answer(
    readers: Readers,
    readings: Sequence[Reading],
    question: Question,
    draft: Draft,
    together: int,
    say: Callable[[str], None],
) -> list[Row]:
    """Answers a block of plans; out of memory, one half of it after the other."""
    try:
        return _answer_block(readers, readings, question, draft, together)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if len(readings) == 1:
            raise OutOfMemory(OUT_OF_MEMORY) from error
    half = len(readings) // 2
    say(f"out of memory, going on with {len(readings) - half} plans at a time")
    parts = readings[:half], readings[half:]
    return [row for part in parts for row in _answer(readers, part, question, draft, min(together, len(part)), say)]


def draft_of(reader: Decoder, context: ContextKV, question: Question) -> Draft:
    """Returns the reference executor's answer behind the reader's own cache, with the distributions it was chosen from."""
    token_ids = greedy(reader, context, *question)
    given = torch.tensor([[*question.suffix, *token_ids[:-1]]])
    logits = reader.logits(given, prefilled_cache(context), keep=len(token_ids))[0]
    return Draft(token_ids, logits.log_softmax(dim=-1))


def answer_alone(plan: Plan, reader: Decoder, context: ContextKV, question: Question, draft: Draft) -> Answer:
    """Returns the reference executor's answer of one plan behind its context, with its fidelity to the draft."""
    given = torch.tensor([[*question.suffix, *draft.token_ids[:-1]]])
    logits = reader.logits(given, prefilled_cache(context), keep=len(draft.token_ids))[0]
    if not logits.isfinite().all():
        return Answer(plan, None, error="its logits are not finite")
    return Answer(plan, greedy(reader, context, *question), fidelity(draft, logits))


def _answer_block(
    readers: Readers, readings: Sequence[Reading], question: Question, draft: Draft, together: int
) -> list[Row]:
    answers: dict[int, Row] = {}
    alike: dict[tuple[bool, int], list[int]] = {}
    for row, reading in enumerate(readings):
        alike.setdefault((reading.by_sender, reading.context[0].keys.shape[-2]), []).append(row)
    for (by_sender, _), rows in alike.items():
        reader = readers.sender if by_sender else readers.receiver
        contexts = [readings[row].context for row in rows]
        answers |= zip(rows, greedy_rows(reader, contexts, draft, *question, together), strict=True)
    return [answers[row] for row in range(len(readings))]


def _checked(plan: Plan, row: Row) -> Answer:
    if row.token_ids[-1] == NOT_FINITE:
        return Answer(plan, None, error=f"the logits of answer token {len(row.token_ids)} are not finite")
    return Answer(plan, *row)
