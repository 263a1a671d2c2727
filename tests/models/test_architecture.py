from typing import Any

import pytest
import transformers

from kvprofile.errors import BadInput
from kvprofile.models.architecture import refuse_unsupported
from tests.engine.architectures import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_ordinary_decoders_pass(name: str) -> None:
    refuse_unsupported(CONFIGS[name](), name)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("T5Config", "encoder–decoder"),
        ("BartConfig", "encoder–decoder"),
        ("WhisperConfig", "encoder–decoder"),
        ("BertConfig", "an encoder"),
        ("RobertaConfig", "an encoder"),
        ("DistilBertConfig", "not a causal language model"),
        ("CLIPConfig", "not a causal language model"),
        ("MambaConfig", "recurrent"),
        ("Mamba2Config", "recurrent"),
        ("FalconMambaConfig", "recurrent"),
        ("RwkvConfig", "recurrent"),
        ("JambaConfig", "recurrent"),
        ("BambaConfig", "recurrent"),
        ("ZambaConfig", "recurrent"),
        ("RecurrentGemmaConfig", "recurrent"),
        ("Qwen3NextConfig", "recurrent"),
        ("MiniMaxConfig", "recurrent"),
        ("Lfm2Config", "recurrent"),
        ("GraniteMoeHybridConfig", "recurrent"),
        ("FalconH1Config", "recurrent"),
    ],
)
def test_others_are_refused_with_the_reason(config: str, reason: str) -> None:
    with pytest.raises(BadInput, match=f'model "x" .*{reason}'):
        refuse_unsupported(getattr(transformers, config)(), "x")


def unknown(**values: Any) -> transformers.LlamaConfig:
    config = transformers.LlamaConfig(num_hidden_layers=2, **values)
    config.model_type = "novel"
    config.auto_map = {"AutoModelForCausalLM": "code.M"}
    return config


def test_unknown_types_are_judged_by_their_layers() -> None:
    refuse_unsupported(unknown(), "x")
    with pytest.raises(BadInput, match="linear_attention"):
        refuse_unsupported(unknown(layer_types=["linear_attention", "full_attention"]), "x")
    with pytest.raises(BadInput, match="mamba_d_state"):
        refuse_unsupported(unknown(mamba_d_state=16), "x")


def test_dense_member_of_a_hybrid_family_passes() -> None:
    kinds = ["attention"] * 2
    refuse_unsupported(transformers.GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=kinds), "x")
