"""Layer times: every layer at every length, the passes that are timed, and no hook left behind. No time is asserted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvprofile.engine.decoder import Decoder
from kvprofile.engine.timing import LAYER_REPEATS, LayerClock, layer_clock, lengths_to_time, time_layers
from tests.engine.architectures import LAYERS, VOCABULARY, tiny_decoder

CONTEXT = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(2)).tolist()
SUFFIX = (5, 9, 30)


def hooks(model: Decoder) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.model.modules())


@pytest.fixture
def receiver() -> Decoder:
    return tiny_decoder(seed=1)


def test_every_layer_is_timed_at_every_length(receiver: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[str, int, int]] = []
    recompute, logits = receiver.recompute, receiver.logits

    def recomputing(token_ids: list[int], *rest: Any) -> Any:
        passes.append(("context", len(token_ids), 0))
        assert token_ids == CONTEXT[: len(token_ids)]
        return recompute(token_ids, *rest)

    def reading(token_ids: torch.Tensor, cache: Any, keep: int) -> Any:
        passes.append(("suffix", token_ids.shape[1], cache.get_seq_length()))
        return logits(token_ids, cache, keep)

    monkeypatch.setattr(receiver, "recompute", recomputing)
    monkeypatch.setattr(receiver, "logits", reading)
    found = time_layers(receiver, CONTEXT, [10, 40], SUFFIX)
    assert [(one.context_tokens, one.layer) for one in found] == [
        (s, i) for s in (10, 40) for i in (*range(LAYERS), None)
    ]
    assert {(one.suffix_tokens, one.repeats) for one in found} == {(3, LAYER_REPEATS)}
    assert all(one.read_ms >= 0 for one in found)
    assert all((one.recompute_ms is None) == (one.layer is None) for one in found)
    a_round = [("context", 10, 0), ("suffix", 3, 10), ("context", 40, 0), ("suffix", 3, 40)]
    assert passes == a_round[:2] + a_round * LAYER_REPEATS
    assert hooks(receiver) == 0


@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, 5), (1.0, 3), (1.5, 2), (2.0, 1), (50.0, 1)])
def test_slow_models_have_fewer_rounds(
    receiver: Decoder, monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    """Every pass takes so many seconds, of two in the warm-up and four in a round, against 15 s in all."""
    now = [0.0]
    monkeypatch.setattr("kvprofile.engine.timing.time.perf_counter", lambda: now[0])
    slow = receiver.layers[0].self_attn.register_forward_hook(  # type: ignore[union-attr, operator]
        lambda *_: now.__setitem__(0, now[0] + seconds)
    )
    found = time_layers(receiver, CONTEXT, [10, 40], SUFFIX)
    slow.remove()
    assert {one.repeats for one in found} == {rounds}
    assert {one.recompute_ms for one in found if one.layer == 0} == {1000 * seconds}


def test_a_layers_time_is_its_own_and_the_rest_is_outside(receiver: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves only while layer 1 runs, by 2 s, and once before the layers, by 1 s."""
    now = [0.0]
    monkeypatch.setattr("kvprofile.engine.timing.time.perf_counter", lambda: now[0])

    def goes_on(seconds: float) -> Any:
        return lambda *_: now.__setitem__(0, now[0] + seconds)

    slow = receiver.layers[1].self_attn.register_forward_hook(goes_on(2.0))  # type: ignore[union-attr, operator]
    embedding = receiver.model.get_input_embeddings().register_forward_hook(goes_on(1.0))
    with layer_clock(receiver) as clock:
        receiver.recompute(CONTEXT, receiver.all_layers, None)
    slow.remove()
    embedding.remove()
    assert clock.milliseconds() == {**dict.fromkeys(range(LAYERS), 0.0), 1: 2000.0, None: 1000.0}


def test_a_gpus_events_are_read_once_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that stand for CUDA's: a layer takes 1 ms from event to event, and none may be read before the device is done."""
    state = {"now": 0.0, "done": False}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:0"
            state.update(now=state["now"] + 1, done=False)
            self.at = state["now"]

        def elapsed_time(self, end: Event) -> float:
            assert state["done"]
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: state.update(done=True))
    clock = LayerClock({torch.device("cuda:0")}, layers=2)
    for layer, ends in ((None, False), (0, False), (0, True), (1, False), (1, True), (None, True)):
        clock.mark(layer, ends)
    assert clock.milliseconds() == {0: 1.0, 1: 1.0, None: 3.0}


def test_hooks_are_gone_after_an_error(receiver: Decoder) -> None:
    with pytest.raises(IndexError), layer_clock(receiver):
        receiver.recompute([VOCABULARY], receiver.all_layers, None)
    assert hooks(receiver) == 0


@pytest.mark.parametrize(
    ("contexts", "expected"),
    [
        ([8192, 5000], [1024, 2048, 4096, 8192]),
        ([8192, 300], [300, 903, 2720, 8192]),
        ([216, 64], [64, 96, 144, 216]),
        ([27, 1], [1, 3, 9, 27]),
        ([50], [50]),
        ([2, 1], [1, 2]),
    ],
)
def test_lengths_reach_from_short_contexts_to_the_longest(contexts: list[int], expected: list[int]) -> None:
    assert lengths_to_time(contexts) == expected
