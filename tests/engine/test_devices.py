"""Models spread over devices, or offloaded, answer as they do in one place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question, Readers, answer_plans
from kvprofile.engine.gates import check_gates
from kvprofile.engine.reference import capture, greedy, mixed_capture, partial_prefill
from kvprofile.layers import LayerRange, Plan
from kvprofile.strategies import layer_set, load_all, single_layer_reuse
from tests.engine.architectures import CONTEXT, LAYERS, SUFFIX, tiny_model
from tests.engine.pretend_devices import PretendedDevices, device, spread

QUESTION = Question(SUFFIX, 8, Ending(frozenset({2})))
GROUP = LayerRange(1, 3)
Answers = dict[Plan, tuple[int, ...] | None]


def eager(architecture: str, seed: int) -> PreTrainedModel:
    """A model whose attention is plain products, which every device has."""
    model = tiny_model(architecture, seed)
    model.config._attn_implementation = "eager"
    return model


def answers(sender: PreTrainedModel, receiver: PreTrainedModel) -> Answers:
    """Returns what all plans answer, once the gates have passed."""
    readers = Readers(Decoder(sender), Decoder(receiver))
    strategies = load_all()
    plans = [plan for strategy in strategies.values() for plan in strategy.plans(LAYERS, (1,))]
    plans += [layer_set.plan_of([0, 2]), single_layer_reuse.plan_of(1)]
    check_gates(readers, ContextCaches(*readers, CONTEXT, 3), CONTEXT, QUESTION)
    caches = ContextCaches(*readers, CONTEXT, 3)
    return {a.plan: a.token_ids for a in answer_plans(readers, caches, QUESTION, plans, strategies)}


# With sharing: plain heads, soft caps and windows; without it: ALiBi.
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize(
    "places", [([0, 0, 1, 1], [0, 0, 1, 1]), ([0, 1, 1, 1], [0, 0, 0, 1]), ([1, 1, 1, 1], [0, 0, 0, 0])]
)
def test_two_devices(architecture: str, places: tuple[list[int], list[int]], pretended: PretendedDevices) -> None:
    plain = answers(eager(architecture, 1), eager(architecture, 2))
    with pretended:
        # The sender's head is on the device of its last layer, the receiver's on the first: their logits may lie apart.
        sender, receiver = (
            spread(eager(architecture, 1), places[0], places[0][-1]),
            spread(eager(architecture, 2), places[1]),
        )
        assert answers(sender, receiver) == plain


def test_the_pretended_devices_refuse_to_mix(pretended: PretendedDevices) -> None:
    with pretended:
        ours, theirs = (torch.ones(2, device=device(index)) for index in (0, 1))
        assert (ours + ours.to(device(0))).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="of tensors on"):
            ours + theirs
        with pytest.raises(RuntimeError, match="of tensors on"):
            ours + torch.ones(2)


def test_a_chain_over_two_devices(pretended: PretendedDevices) -> None:
    def chained(models: list[PreTrainedModel]) -> tuple[int, ...]:
        first, second, third = map(Decoder, models)
        passed_on = mixed_capture(second, capture(first, CONTEXT), GROUP)
        return greedy(third, partial_prefill(third, passed_on, LayerRange(2, 3)), *QUESTION)

    plain = chained([eager("llama", seed) for seed in (1, 2, 3)])
    with pretended:
        places = ([0, 0, 1, 1], [0, 1, 1, 1], [1, 0, 0, 0])
        assert chained([spread(eager("llama", seed), at) for seed, at in zip((1, 2, 3), places, strict=True)]) == plain


@pytest.mark.parametrize("offloaded", [{"model.layers.1", "model.layers.2"}, {"model.layers.0"}, None])
def test_weights_on_disk(offloaded: set[str] | None, tmp_path: Path) -> None:
    def on_disk(seed: int) -> PreTrainedModel:
        model = tiny_model("llama", seed)
        parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
        parts += [f"model.layers.{layer}" for layer in range(LAYERS)]
        places = {part: "disk" if offloaded is None or part in offloaded else "cpu" for part in parts}
        folder = tmp_path / str(seed)
        sent: PreTrainedModel = dispatch_model(model, device_map=places, main_device="cpu", offload_dir=folder)
        assert any(weight.is_meta for weight in sent.parameters()), "nothing was offloaded"
        return sent

    assert answers(on_disk(1), on_disk(2)) == answers(tiny_model("llama", 1), tiny_model("llama", 2))
