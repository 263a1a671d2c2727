"""The closed formula of memory against the bytes that tensors really hold."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvprofile.cost.memory import Lengths, block_bytes, plan_bytes, sample_bytes, starts_bytes
from kvprofile.engine import executor
from kvprofile.engine.budget import MemoryBudget
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import MOST_VERIFIED, Question, Readers, answer_plans
from kvprofile.engine.reference import capture, greedy, partial_prefill
from kvprofile.engine.shape import shape_of
from kvprofile.layers import LayerRange, Plan, groups
from kvprofile.strategies import load_all


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of storages made inside it that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and storage.nbytes():
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key, storage.nbytes())

    def _freed(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.now -= count


CASES = {
    "long contexts": (Lengths(10_000, 4, 3, 3), {}),
    "long answers": (Lengths(40, 30, 60, 60), {}),
    "a large vocabulary": (Lengths(40, 8, 6, 6), {"vocab_size": 20_000}),
    "a wide MLP": (Lengths(300, 60, 4, 4), {"intermediate_size": 4096}),
}


@pytest.mark.parametrize("case", CASES)
def test_formula_is_within_a_fifth_of_the_peak(case: str) -> None:
    lengths, options = CASES[case]
    readers = Readers(*(_decoder(seed, options) for seed in (1, 2)))
    ids = torch.randint(3, 90, (lengths.context,), generator=torch.Generator().manual_seed(0)).tolist()
    question = Question(tuple(ids[: lengths.suffix]), lengths.answer_limit, Ending())
    plans = [Plan("layer_group", group) for group in groups(_LAYERS)]
    with HeldBytes() as held:
        caches = ContextCaches(*readers, ids, 3)
        list(answer_plans(readers, caches, question, plans, load_all()))
    shape = shape_of(readers.receiver.model)
    formula = (
        sample_bytes(shape, lengths)
        + starts_bytes(shape, lengths, groups(_LAYERS))
        + block_bytes(shape, lengths, MOST_VERIFIED, len(plans))
        + len(plans) * plan_bytes(shape, lengths)
    )
    assert held.peak == pytest.approx(formula, rel=0.2)


_LAYERS = 12


def _decoder(seed: int, options: dict[str, int]) -> Decoder:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    layers = {"num_hidden_layers": _LAYERS}
    config = transformers.LlamaConfig(
        **{**shape, **layers, **options}, max_position_embeddings=20_000, initializer_range=0.2
    )
    return Decoder(transformers.LlamaForCausalLM(config).eval())


def test_a_long_context_under_a_tight_limit_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = Readers(*(_decoder(seed, {"num_hidden_layers": 4}) for seed in (1, 2)))
    ids = torch.randint(3, 90, (10_000,), generator=torch.Generator().manual_seed(0)).tolist()
    question, plans = Question(tuple(ids[:6]), 8, Ending()), [Plan("layer_group", group) for group in groups(4)]
    real, blocks = executor._answer_block, []

    def counting(readers: object, readings: list[object], *rest: object) -> object:
        blocks.append(len(readings))
        return real(readers, readings, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "_answer_block", counting)

    def answers(room: int) -> list[object]:
        budget = MemoryBudget([torch.device("cpu")])
        monkeypatch.setattr(budget, "room", lambda: room)
        caches = ContextCaches(*readers, ids, 3)
        return [a.token_ids for a in answer_plans(readers, caches, question, plans, load_all(), budget=budget)]

    free = answers(1 << 40)
    assert blocks == [len(plans)]
    shape, lengths = shape_of(readers.receiver.model), Lengths(10_000, 6, 8, 8)
    fixed = sample_bytes(shape, lengths) + block_bytes(shape, lengths, MOST_VERIFIED, len(plans))
    two_starts = 2 * starts_bytes(shape, lengths, [LayerRange(1, 4)])  # the block's and the next one
    assert answers(fixed + two_starts + len(plans) * plan_bytes(shape, lengths)) == free
    assert 1 < max(blocks[1:]) < len(plans)
    sender = capture(readers.sender, ids)
    for plan, ours in zip(plans, free, strict=True):
        assert plan.range
        assert greedy(readers.receiver, partial_prefill(readers.receiver, sender, plan.range), *question) == ours
