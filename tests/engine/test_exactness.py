"""Equalities that must hold before any number means anything, on every supported architecture."""

from __future__ import annotations

import pytest
import torch

from kvprofile.engine.cache import empty_cache, prefilled_cache
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question, Readers, answer_plans
from kvprofile.engine.gates import check_gates
from kvprofile.engine.reference import capture, greedy, partial_prefill
from kvprofile.layers import LayerRange, Plan, groups
from kvprofile.strategies import load_all
from tests.engine.architectures import CONFIGS, CONTEXT, LAYERS, SUFFIX, tiny_decoder

WITH_EXPERTS = {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"}
NO_END = Ending()


@pytest.mark.parametrize("architecture", CONFIGS)
class TestArchitecture:
    def test_own_cache_gives_what_transformers_generates(self, architecture: str) -> None:
        decoder = tiny_decoder(architecture)
        plain = decoder.model.generate(
            torch.tensor([[*CONTEXT, *SUFFIX]]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, -8:].tolist()
        assert list(greedy(decoder, capture(decoder, CONTEXT).kv, SUFFIX, 8, NO_END)) == plain

    def test_sender_equal_to_receiver_changes_nothing(self, architecture: str) -> None:
        decoder = tiny_decoder(architecture)
        own = capture(decoder, CONTEXT)
        for group in groups(LAYERS):
            for mixed, whole in zip(partial_prefill(decoder, own, group), own.kv, strict=True):
                torch.testing.assert_close(mixed.keys, whole.keys, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(mixed.values, whole.values, rtol=1e-4, atol=1e-5)

    def test_all_layers_are_full_prefill(self, architecture: str) -> None:
        sender, receiver = tiny_decoder(architecture, 1), tiny_decoder(architecture, 2)
        mixed = partial_prefill(receiver, capture(sender, CONTEXT), receiver.all_layers)
        for one, other in zip(mixed, capture(receiver, CONTEXT).kv, strict=True):
            torch.testing.assert_close(one.keys, other.keys, rtol=0, atol=0)
            torch.testing.assert_close(one.values, other.values, rtol=0, atol=0)

    def test_sweep_gives_the_reference_executors_tokens(self, architecture: str) -> None:
        sender, receiver = tiny_decoder(architecture, 1), tiny_decoder(architecture, 2)
        readers, question = Readers(sender, receiver), Question(SUFFIX, 8, Ending(frozenset({2})))
        strategies = load_all()
        plans = [plan for s in strategies.values() for plan in s.plans(LAYERS, (1,))]
        caches = ContextCaches(sender, receiver, CONTEXT, 3)
        answers = {a.plan: a.token_ids for a in answer_plans(readers, caches, question, plans, strategies)}
        alone = capture(sender, CONTEXT)
        for group in groups(LAYERS):
            expected = greedy(receiver, partial_prefill(receiver, alone, group), *question)
            assert answers[Plan("layer_group", group)] == expected, group
        assert answers[Plan("sender_alone")] == greedy(sender, alone.kv, *question)
        assert answers[Plan("full_reuse")] == greedy(receiver, alone.kv, *question)
        assert answers[Plan("no_context")] == greedy(receiver, capture(receiver, CONTEXT[:3]).kv, *question)
        assert answers[Plan("full_reuse")] != answers[Plan("full_prefill")], "the sender's cache was not read"
        assert len({answers[Plan("layer_group", group)] for group in groups(LAYERS)}) >= 2, "nothing was spliced"

    def test_gates_pass_and_no_hook_is_left(self, architecture: str) -> None:
        sender, receiver = tiny_decoder(architecture, 1), tiny_decoder(architecture, 2)
        before = _hooks(sender) + _hooks(receiver)
        check_gates(
            Readers(sender, receiver),
            ContextCaches(sender, receiver, CONTEXT, 3),
            CONTEXT,
            Question(SUFFIX, 4, NO_END),
        )
        assert _hooks(sender) + _hooks(receiver) == before
        assert not any("forward" in layer.__dict__ for layer in receiver.layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_half_precision_parts_at_near_ties_only(architecture: str, dtype: torch.dtype) -> None:
    """The gate compares full reuse and groups, and raises where a difference is no near tie."""
    readers = Readers(*(Decoder(tiny_decoder(architecture, seed).model.to(dtype)) for seed in (1, 2)))
    caches = ContextCaches(*readers, CONTEXT, 3)
    numerics = check_gates(readers, caches, CONTEXT, Question(SUFFIX, 8, NO_END))
    assert numerics.compared > LAYERS
    assert numerics.noise > 0
    assert (numerics.largest_margin is None) == (numerics.parted == 0)
    if numerics.parted and architecture not in WITH_EXPERTS:
        assert numerics.largest_margin <= 2 * numerics.noise


class TestSplice:
    """Each test fails if one line of the splice is wrong."""

    def test_each_layer_comes_from_where_the_group_says(self) -> None:
        sender, receiver = tiny_decoder(seed=1), tiny_decoder(seed=2)
        theirs = capture(sender, CONTEXT)
        group = LayerRange(1, 3)
        mixed = partial_prefill(receiver, theirs, group)
        for layer in (0, 3):
            assert torch.equal(mixed[layer].keys, theirs.kv[layer].keys)
            assert torch.equal(mixed[layer].values, theirs.kv[layer].values)
        for layer in (1, 2):
            assert not torch.allclose(mixed[layer].keys, theirs.kv[layer].keys, atol=1e-2)

    def test_recomputation_starts_from_the_senders_hidden_states(self) -> None:
        """An independent splice: the receiver's layers called by hand on the sender's hidden states."""
        sender, receiver = tiny_decoder(seed=1), tiny_decoder(seed=2)
        theirs = capture(sender, CONTEXT)
        hidden = sender.model(torch.tensor([CONTEXT]), output_hidden_states=True).hidden_states[1]
        model = receiver.model.model
        rotary = model.rotary_emb(hidden, position_ids=torch.arange(len(CONTEXT))[None])
        cache = empty_cache()
        for layer in model.layers[1:3]:
            hidden = layer(hidden, position_embeddings=rotary, **{receiver._cache_name: cache, "use_cache": True})
        mixed = partial_prefill(receiver, theirs, LayerRange(1, 3))
        for layer in (1, 2):
            torch.testing.assert_close(mixed[layer].keys, cache.layers[layer].keys, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mixed[layer].values, cache.layers[layer].values, rtol=1e-4, atol=1e-5)

    def test_group_from_layer_0_embeds_with_the_receiver(self) -> None:
        sender, receiver = tiny_decoder(seed=1), tiny_decoder(seed=2)
        first = partial_prefill(receiver, capture(sender, CONTEXT), LayerRange(0, 1))[0]
        assert torch.equal(first.keys, capture(receiver, CONTEXT).kv[0].keys)

    def test_question_stands_behind_the_context(self) -> None:
        decoder = tiny_decoder()
        context = capture(decoder, CONTEXT).kv
        whole = decoder.logits(torch.tensor([[*CONTEXT, *SUFFIX]]), empty_cache(), keep=len(SUFFIX))
        behind = decoder.logits(torch.tensor([SUFFIX]), prefilled_cache(context), keep=len(SUFFIX))
        torch.testing.assert_close(behind, whole, rtol=1e-4, atol=1e-4)

    def test_two_models_disagree(self) -> None:
        """The negative control: if reuse gave the receiver's own answer on strangers' caches, nothing was spliced."""
        sender, receiver = tiny_decoder(seed=1), tiny_decoder(seed=2)
        reused = greedy(receiver, capture(sender, CONTEXT).kv, SUFFIX, 8, NO_END)
        assert reused != greedy(receiver, capture(receiver, CONTEXT).kv, SUFFIX, 8, NO_END)


def _hooks(decoder: object) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in decoder.model.modules())  # type: ignore[attr-defined]


def test_a_group_that_was_not_expected_is_there_nevertheless() -> None:
    sender, receiver = tiny_decoder("llama", 1), tiny_decoder("llama", 2)
    caches = ContextCaches(sender, receiver, CONTEXT, 3)
    caches.expect([LayerRange(1, 2)])
    for mixed, alone in zip(
        caches.mixed(LayerRange(1, 3)),
        partial_prefill(receiver, capture(sender, CONTEXT), LayerRange(1, 3)),
        strict=True,
    ):
        torch.testing.assert_close(mixed.keys, alone.keys)


def test_passes_go_no_further_than_the_plans_and_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = tiny_decoder("llama", 1), tiny_decoder("llama", 2)
    question, caches = Question(SUFFIX, 8, NO_END), ContextCaches(sender, receiver, CONTEXT, 3)
    passes: list[LayerRange] = []
    recompute = Decoder.recompute

    def noting(reader: Decoder, ids: object, group: LayerRange, *others: object, **options: object) -> object:
        passes.append(group)
        return recompute(reader, ids, group, *others, **options)  # type: ignore[arg-type]

    def answered(*edges: tuple[int, int]) -> dict[Plan, tuple[int, ...] | None]:
        plans = [Plan("layer_group", LayerRange(*each)) for each in edges]
        return {
            a.plan: a.token_ids for a in answer_plans(Readers(sender, receiver), caches, question, plans, load_all())
        }

    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "recompute", noting)
        answers = answered((1, 2), (1, 3), (2, 3))
        answers |= answered((2, 3), (2, 4))  # the pass from layer 2 that is held ends too early
    assert passes == [receiver.all_layers, LayerRange(1, 3), LayerRange(2, 3), LayerRange(2, 4)]
    for plan, ids in answers.items():
        assert plan.range
        assert ids == greedy(receiver, partial_prefill(receiver, capture(sender, CONTEXT), plan.range), *question)
