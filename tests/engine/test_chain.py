"""What a receiver passes on to a next one: equalities that must hold on every supported architecture."""

from __future__ import annotations

import pytest
import torch

from kvprofile.engine.decoder import Decoder
from kvprofile.engine.gates import check_reader
from kvprofile.engine.reference import Capture, capture, mixed_capture, partial_prefill
from kvprofile.errors import GateFailed
from kvprofile.layers import LayerRange, groups
from tests.engine.architectures import CONFIGS, LAYERS, VOCABULARY, tiny_decoder

CONTEXT = torch.randint(3, VOCABULARY, (19,), generator=torch.Generator().manual_seed(4)).tolist()
SUFFIX = (5, 9, 30)


def parts(held: Capture) -> list[torch.Tensor]:
    return [*(part for kv in held.kv for part in kv), *held.entering]


def assert_same(one: Capture, other: Capture) -> None:
    assert len(parts(one)) == len(parts(other)) == 3 * LAYERS
    for ours, theirs in zip(parts(one), parts(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", CONFIGS)
class TestArchitecture:
    def test_of_ones_own_state_nothing_changes(self, architecture: str) -> None:
        decoder = tiny_decoder(architecture)
        own = capture(decoder, CONTEXT)
        for group in groups(LAYERS):
            assert_same(mixed_capture(decoder, own, group), own)
        check_reader(decoder, CONTEXT, SUFFIX, groups(LAYERS))

    def test_all_layers_pass_on_the_middles_own_prefill(self, architecture: str) -> None:
        of_a, middle = capture(tiny_decoder(architecture, 1), CONTEXT), tiny_decoder(architecture, 2)
        assert_same(mixed_capture(middle, of_a, middle.all_layers), capture(middle, CONTEXT))

    def test_whose_state_enters_which_layer(self, architecture: str) -> None:
        of_a, middle = capture(tiny_decoder(architecture, 1), CONTEXT), tiny_decoder(architecture, 2)
        for group in groups(LAYERS):
            mixed = mixed_capture(middle, of_a, group)
            assert mixed.token_ids == of_a.token_ids
            for ours, as_read in zip(mixed.kv, partial_prefill(middle, of_a, group), strict=True):
                torch.testing.assert_close(ours.keys, as_read.keys)
                torch.testing.assert_close(ours.values, as_read.values)
            own = range(group.start + 1 if group.start else 0, group.stop + 1)
            for layer, (ours, of_sender) in enumerate(zip(mixed.entering, of_a.entering, strict=True)):
                assert differ(ours, of_sender) == (layer in own), (group, layer)

    def test_the_state_that_enters_a_layer_gives_its_keys(self, architecture: str) -> None:
        """Read by the middle itself from anywhere inside its group on, the rest of the group is what it holds already."""
        of_a, middle = capture(tiny_decoder(architecture, 1), CONTEXT), tiny_decoder(architecture, 2)
        mixed = mixed_capture(middle, of_a, LayerRange(1, LAYERS))
        for start in range(2, LAYERS):
            assert_same(mixed_capture(middle, mixed, LayerRange(start, LAYERS)), mixed)


def last_keys(reader: Decoder, held: Capture, group: LayerRange) -> torch.Tensor:
    return partial_prefill(reader, held, group)[group.stop - 1].keys


class TestChain:
    FIRST, SECOND = LayerRange(1, 3), LayerRange(2, 4)

    def test_a_middle_that_is_the_sender_changes_nothing(self) -> None:
        a, c = tiny_decoder(seed=1), tiny_decoder(seed=3)
        of_a = capture(a, CONTEXT)
        for first in groups(LAYERS):
            passed_on = mixed_capture(a, of_a, first)
            for second in groups(LAYERS):
                for one, other in zip(
                    partial_prefill(c, passed_on, second), partial_prefill(c, of_a, second), strict=True
                ):
                    torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)
                    torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-5)

    def test_three_models_give_neither_single_hop(self) -> None:
        a, b, c = (tiny_decoder(seed=seed) for seed in (1, 2, 3))
        of_a, of_b = capture(a, CONTEXT), capture(b, CONTEXT)
        chained = last_keys(c, mixed_capture(b, of_a, self.FIRST), self.SECOND)
        assert differ(chained, last_keys(c, of_a, self.SECOND))
        assert differ(chained, last_keys(c, of_b, self.SECOND))

    def test_the_state_behind_the_middles_last_layer_is_its_own(self) -> None:
        """C begins where B's group stopped: it must enter with the output of B's last layer, not with A's state."""
        a, b, c = (tiny_decoder(seed=seed) for seed in (1, 2, 3))
        of_a = capture(a, CONTEXT)
        passed_on = mixed_capture(b, of_a, LayerRange(0, 2))
        second = LayerRange(2, LAYERS)
        from_b = last_keys(c, capture(b, CONTEXT), second)
        torch.testing.assert_close(last_keys(c, passed_on, second), from_b, rtol=1e-4, atol=1e-5)
        assert differ(from_b, last_keys(c, of_a, second))

    def test_a_reader_that_is_not_exact_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder = tiny_decoder()
        monkeypatch.setattr("kvprofile.engine.gates.mixed_capture", lambda *_: capture(tiny_decoder(seed=5), CONTEXT))
        with pytest.raises(GateFailed, match=r"layers 1–2 \(2 of 4\) of a LlamaForCausalLM .* at layer 0"):
            check_reader(decoder, CONTEXT, SUFFIX, [self.FIRST])
