"""Every gate, shown to fail: a pair that is sound passes, and the same pair with one line of the splice broken does not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from kvprofile import run
from kvprofile.data.prompts import Sample
from kvprofile.engine import attention, decoder, executor
from kvprofile.engine.cache import KV
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question, Readers
from kvprofile.engine.gates import check_gates
from kvprofile.errors import GateFailed
from kvprofile.layers import LayerRange
from tests.engine.architectures import LAYERS, VOCABULARY, tiny_decoder
from tests.tiny import tiny_tokenizer

CONTEXT = torch.randint(3, VOCABULARY, (23,), generator=torch.Generator().manual_seed(2)).tolist()
OWN_CACHE, OWN_STATES, EXECUTORS = "own cache, injected", "own hidden states does not give", "tokens in the sweep"


@pytest.fixture
def readers() -> Readers:
    return Readers(tiny_decoder(seed=1), tiny_decoder(seed=2))


def check(readers: Readers) -> None:
    question = Question((5, 9, 30, 41, 7), 8, Ending())
    check_gates(readers, ContextCaches(*readers, CONTEXT, 3), CONTEXT, question)


def broken(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Puts `fault`, which gets the original as its first argument, in the place of a function or method."""
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: fault(real, *args, **kwargs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sound_pair_passes(dtype: torch.dtype, readers: Readers) -> None:
    check(Readers(*(Decoder(reader.model.to(dtype)) for reader in readers)))


def test_a_weight_that_is_no_number(readers: Readers) -> None:
    with torch.no_grad():
        readers.receiver.model.get_output_embeddings().weight[0, 0] = torch.nan
    with pytest.raises(GateFailed, match="not finite"):
        check(readers)


def test_a_sender_that_caches_no_numbers(readers: Readers) -> None:
    with torch.no_grad():
        readers.sender.layers[2].self_attn.v_proj.weight[0, 0] = torch.inf
    with pytest.raises(GateFailed, match="sender's keys and values are not finite"):
        check(readers)


OWN_CACHE_FAULTS: dict[str, Callable[[KV], KV]] = {
    "noisy keys": lambda kv: kv._replace(keys=kv.keys + 0.1 * torch.randn_like(kv.keys)),
    "noisy values": lambda kv: kv._replace(values=kv.values + 0.1 * torch.randn_like(kv.values)),
    "keys of the next token": lambda kv: kv._replace(keys=kv.keys.roll(-1, dims=-2)),
}


@pytest.mark.parametrize("fault", OWN_CACHE_FAULTS)
def test_an_own_cache_that_is_not_what_the_model_holds(
    fault: str, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, Decoder, "recompute", lambda real, *args: tuple(map(OWN_CACHE_FAULTS[fault], real(*args))))
    with pytest.raises(GateFailed, match=OWN_CACHE):
        check(readers)


def test_a_group_that_begins_one_layer_late(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(
        monkeypatch,
        ContextCaches,
        "mixed",
        lambda real, self, group: real(self, LayerRange(group.start + 1, group.stop)),
    )
    with pytest.raises(GateFailed, match=EXECUTORS):
        check(readers)


@pytest.mark.parametrize("fault", ["zeros", "left out"])
def test_hidden_states_that_do_not_arrive(fault: str, readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both executors recompute in the same way, so their agreement cannot tell."""

    def enter(real: Any, entering: torch.Tensor, module: Any, args: Any, kwargs: Any) -> Any:
        return None if fault == "left out" else real(torch.zeros_like(entering), module, args, kwargs)

    broken(monkeypatch, decoder, "_enter", enter)
    with pytest.raises(GateFailed, match=f"{OWN_STATES}.* at layer 1"):
        check(readers)


def test_an_answer_that_goes_on_after_its_end(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(real: Any, *args: Any) -> Any:
        return [row._replace(token_ids=(*row.token_ids, 5)) for row in real(*args)]

    broken(monkeypatch, executor, "greedy_rows", longer)
    with pytest.raises(GateFailed, match=EXECUTORS):
        check(readers)


def test_a_group_of_the_wrong_layers(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are right, so only the executors' answers can tell."""

    def wrong(real: Any, self: ContextCaches, group: LayerRange) -> Any:
        whole = group.length == LAYERS
        return real(self, group if whole else LayerRange(0, group.length))

    broken(monkeypatch, ContextCaches, "mixed", wrong)
    with pytest.raises(GateFailed, match=EXECUTORS):
        check(readers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_scales_its_output(
    dtype: torch.dtype, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = Readers(*(Decoder(reader.model.to(dtype)) for reader in readers))
    broken(monkeypatch, attention, "_merge", lambda real, *args: 0.5 * real(*args))
    with pytest.raises(GateFailed, match=EXECUTORS):
        check(readers)


def test_plans_that_get_each_others_answers(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, executor, "greedy_rows", lambda real, *args: (rows := real(*args))[1:] + rows[:1])
    with pytest.raises(GateFailed, match=EXECUTORS):
        check(readers)


def test_rows_that_go_on_from_another_rows_layer(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_row_only(real: Any, parents: list[int], *args: Any) -> Any:
        return real([0] * len(parents), *args)

    broken(monkeypatch, decoder, "_branch", first_row_only)
    with pytest.raises(GateFailed, match=EXECUTORS):
        check(readers)


def test_attention_that_does_not_see_the_context(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(real: Any, *args: Any) -> Any:
        return (part := real(*args))._replace(lse=part.lse - torch.inf, output=0 * part.output)

    broken(monkeypatch, attention, "_attend_together", blind)
    with pytest.raises(GateFailed, match=EXECUTORS):
        check(readers)


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MAMBA_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}
OTHER_STATE: dict[str, Callable[[], Any]] = {
    "recurrent": lambda: transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2
    ),
    "recurrent and attention layers in turn": lambda: transformers.JambaConfig(
        **_SIZES,
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    "both in every layer": lambda: transformers.FalconH1Config(
        **_SIZES, **_MAMBA_HEADS, num_hidden_layers=2, head_dim=8, mamba_d_ssm=32
    ),
    "layers that share keys and values": lambda: transformers.Gemma3nTextConfig(
        **_SIZES,
        num_hidden_layers=4,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["full_attention"] * 4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
}


@pytest.mark.parametrize("state", OTHER_STATE)
def test_a_model_with_other_state_than_keys_and_values_is_refused(state: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(OTHER_STATE[state](), dtype=torch.float32).eval()
    with pytest.raises(GateFailed, match="kvprofile needs a decoder whose layers all"):
        Decoder(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_other_token_ids_on_the_senders_side() -> None:
    tokenizer, other = tiny_tokenizer(), tiny_tokenizer()
    other.add_tokens(["stones"])
    ids = tuple(tokenizer("Box 1 holds red stones.")["input_ids"])
    sample = Sample("r1", "qa", "d", ids, (1,), ("1",), 0, 0, False, 1, (), "")
    same, retold = SimpleNamespace(tokenizer=tokenizer), SimpleNamespace(tokenizer=other)
    run.require_same_ids(sample, same, same)
    with pytest.raises(GateFailed, match='context of "r1" into different token ids from position'):
        run.require_same_ids(sample, retold, same)
