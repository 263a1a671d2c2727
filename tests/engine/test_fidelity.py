"""Closeness to full prefill, against the formulas written out and against plans whose closeness is known."""

from __future__ import annotations

import math

import pytest
import torch

from kvprofile.engine.cache import prefilled_cache
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question, Readers, answer_plans
from kvprofile.engine.fidelity import Draft, fidelity
from kvprofile.engine.reference import capture, partial_prefill
from kvprofile.layers import LayerRange, Plan
from kvprofile.strategies import load_all
from tests.engine.architectures import tiny_decoder

CONTEXT, SUFFIX = tuple(range(3, 40)), (5, 9, 30)


def test_by_hand() -> None:
    full = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]])
    plan = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]])
    found = fidelity(Draft((0, 1), full.log()), plan.log() + 3.0)
    assert found is not None
    assert found.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2, rel=1e-5)
    assert found.nll == pytest.approx(-(math.log(0.25) + math.log(0.7)) / 2, rel=1e-5)
    assert found.top1_agreement == 0.5


@pytest.mark.parametrize("broken", ["plan", "draft", "vocabulary"])
def test_what_cannot_be_compared_is_null(broken: str) -> None:
    log_probs, logits = torch.zeros(2, 4), torch.zeros(2, 5 if broken == "vocabulary" else 4)
    if broken != "vocabulary":
        (logits if broken == "plan" else log_probs)[1, 2] = torch.nan
    assert fidelity(Draft((0, 1), log_probs), logits) is None


def test_of_a_sweep_is_that_of_one_plan_at_a_time() -> None:
    sender, receiver = tiny_decoder(seed=1), tiny_decoder(seed=2)
    readers, question = Readers(sender, receiver), Question(SUFFIX, 6, Ending())
    strategies = load_all()
    plans = [plan for s in strategies.values() for plan in s.plans(len(receiver.layers), (1,))]
    caches = ContextCaches(sender, receiver, CONTEXT, 3)
    answers = {a.plan: a for a in answer_plans(readers, caches, question, plans, strategies)}
    full, own, _ = answers[Plan("full_prefill")][1:]
    assert (own.kl, own.top1_agreement) == (pytest.approx(0, abs=1e-5), 1.0)
    whole = torch.tensor([[*CONTEXT, *SUFFIX, *full[:-1]]])
    draft = Draft(full, receiver.model(whole).logits[0, -len(full) :].log_softmax(dim=-1))
    for group in (LayerRange(0, 2), LayerRange(1, 3), LayerRange(3, 4)):
        kv = partial_prefill(receiver, capture(sender, CONTEXT), group)
        logits = receiver.logits(torch.tensor([[*SUFFIX, *full[:-1]]]), prefilled_cache(kv), keep=len(full))[0]
        assert answers[Plan("layer_group", group)].fidelity == pytest.approx(
            tuple(fidelity(draft, logits)), rel=1e-3, abs=1e-5
        )
