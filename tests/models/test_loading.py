from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PromptTuningConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvprofile.errors import BadInput, OutOfMemory
from kvprofile.models.failures import explained
from kvprofile.models.loading import LoadedModel, load_model, load_models, load_pair
from kvprofile.recipe import ModelOptions
from tests.tiny import tiny_tokenizer
from tests.tiny_models import CPU, peft_model, save_adapter, save_model, tiny_config, tiny_model

IDS = torch.tensor([[5, 9, 200, 31]])


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(IDS).logits  # type: ignore[no-any-return]


def test_folder(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path / "m")), CPU)
    torch.testing.assert_close(logits(loaded), tiny_model()(IDS).logits)
    assert (loaded.dtype, loaded.device, loaded.reference.name) == ("float32", torch.device("cpu"), "m")
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_dtype_and_attention_are_passed_on(tmp_path: Path) -> None:
    options = ModelOptions(dtype="bfloat16", device="cpu", attention="eager")
    loaded = load_model(str(save_model(tmp_path / "m")), options)
    assert loaded.dtype == "bfloat16"
    assert loaded.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
def test_a_soft_capped_model_is_loaded_with_a_kernel_that_honours_it(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.Gemma2Config(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    loaded = load_model(str(tmp_path / "m"), ModelOptions(device="cpu", attention=kernel))
    assert loaded.model.config._attn_implementation == "eager"


def test_auto_is_float32_on_the_cpu(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    assert load_model(str(tmp_path / "m"), ModelOptions(device="cpu")).dtype == "float32"


def test_adapter_is_merged(tmp_path: Path) -> None:
    base, adapter = save_model(tmp_path / "m"), save_adapter(tmp_path / "lora")
    loaded = load_model(f"{base}+{adapter}", CPU)
    tensors = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.k_proj.lora_"
    change = tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"] * 8 / 4
    plain = tiny_model().model.layers[1].self_attn.k_proj.weight
    torch.testing.assert_close(loaded.model.model.layers[1].self_attn.k_proj.weight, plain + change)
    assert not any("lora" in name for name, _ in loaded.model.named_modules())


def test_two_adapters_read_their_base_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_model(tmp_path / "m")
    adapters = [save_adapter(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    read = []
    original = AutoModelForCausalLM.from_pretrained

    def counted(*arguments: Any, **keywords: Any) -> Any:
        read.append(arguments)
        return original(*arguments, **keywords)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    sender, receiver = load_pair(*(f"{base}+{adapter}" for adapter in adapters), CPU)
    assert len(read) == 1
    for loaded, adapter in zip((sender, receiver), adapters, strict=True):
        torch.testing.assert_close(logits(loaded), logits(load_model(f"{base}+{adapter}", CPU)))
    assert not torch.equal(logits(sender), logits(receiver))
    ours = {p.data_ptr() for p in sender.model.parameters()}
    assert not ours & {p.data_ptr() for p in receiver.model.parameters()}


def test_three_models_share_what_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = save_model(tmp_path / "m"), save_model(tmp_path / "n", seed=3)
    adapters = [save_adapter(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    texts = [f"{base}+{adapters[0]}", str(other), f"{base}+{adapters[1]}", str(base)]
    read = []
    original = AutoModelForCausalLM.from_pretrained

    def counted(*arguments: Any, **keywords: Any) -> Any:
        read.append(arguments[0])
        return original(*arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(AutoModelForCausalLM, "from_pretrained", counted)
        loaded = load_models(texts, CPU)
    assert read == [str(base), str(other)]
    for one, text in zip(loaded, texts, strict=True):
        torch.testing.assert_close(logits(one), logits(load_model(text, CPU)))
    places = [p.data_ptr() for one in loaded for p in one.model.parameters()]
    assert len(set(places)) == len(places)


def test_two_bases_are_both_read(tmp_path: Path) -> None:
    pair = load_pair(str(save_model(tmp_path / "a", 0)), str(save_model(tmp_path / "b", 1)), CPU)
    assert not torch.equal(*map(logits, pair))


def test_adapter_brings_its_tokenizer(tmp_path: Path) -> None:
    base, adapter = save_model(tmp_path / "m"), save_adapter(tmp_path / "lora")
    tiny_tokenizer("its own").save_pretrained(adapter)
    assert load_model(f"{base}+{adapter}", CPU).tokenizer.chat_template == "its own"


def test_device_map_of_accelerate(tmp_path: Path) -> None:
    base, adapter = save_model(tmp_path / "m"), save_adapter(tmp_path / "lora")
    sender, receiver = load_pair(str(base), f"{base}+{adapter}", ModelOptions(dtype="float32", device_map="cpu"))
    torch.testing.assert_close(logits(sender), tiny_model()(IDS).logits)
    assert not torch.equal(logits(sender), logits(receiver))


@pytest.mark.parametrize("name", ["nonsense", "disk", "0", "AUTO", "cuda:99", "meta"])
def test_a_device_map_that_cannot_be_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f'device_map "{name}" is neither auto, .* nor a device of this machine'):
        load_model(str(save_model(tmp_path / "m")), ModelOptions(device="cpu", device_map=name))


def test_a_device_without_data_is_no_device(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='device "meta" is not there'):
        load_model(str(save_model(tmp_path / "m")), ModelOptions(device="meta"))


class TestAdapterOfAnotherBase:
    @pytest.mark.parametrize(
        ("made_for", "message"),
        [
            ({"hidden_size": 64}, r"k_proj\.lora_\S+ is .* in the adapter and .* in the base"),
            ({"num_hidden_layers": 5}, "have no place there"),
            ({"num_hidden_layers": 2}, "are missing"),
        ],
    )
    def test_same_names_other_sizes(self, tmp_path: Path, made_for: dict[str, int], message: str) -> None:
        base, adapter = save_model(tmp_path / "m"), save_adapter(tmp_path / "lora", **made_for)
        with pytest.raises(BadInput, match=f"another base .*{message}"):
            load_model(f"{base}+{adapter}", CPU)

    def test_other_names(self, tmp_path: Path) -> None:
        config = transformers.GPT2Config(vocab_size=384, n_embd=32, n_layer=3, n_head=4)
        tiny_model(config).save_pretrained(tmp_path / "m")
        tiny_tokenizer().save_pretrained(tmp_path / "m")
        with pytest.raises(BadInput, match="another base"):
            load_model(f"{tmp_path / 'm'}+{save_adapter(tmp_path / 'lora')}", CPU)

    def test_another_base_name_is_no_obstacle(self, tmp_path: Path) -> None:
        base, adapter = save_model(tmp_path / "m"), save_adapter(tmp_path / "lora")
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "moved/away"}))
        load_model(f"{base}+{adapter}", CPU)


def test_prompt_adapters_cannot_be_merged(tmp_path: Path) -> None:
    base = save_model(tmp_path / "m")
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft_model(tiny_model(), config).save_pretrained(tmp_path / "soft")
    with pytest.raises(BadInput, match="cannot be merged"):
        load_model(f"{base}+{tmp_path / 'soft'}", CPU)


def test_incomplete_folders(tmp_path: Path) -> None:
    base, adapter = save_model(tmp_path / "m"), save_adapter(tmp_path / "lora")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"has no config\.json"):
        load_model(str(tmp_path / "empty"), CPU)
    with pytest.raises(BadInput, match=r"BASE\+lora"):
        load_model(str(adapter), CPU)
    with pytest.raises(BadInput, match=r"has no adapter_config\.json"):
        load_model(f"{base}+{tmp_path / 'empty'}", CPU)
    (tmp_path / "empty" / "some.gguf").touch()
    with pytest.raises(BadInput, match=r"some\.gguf"):
        load_model(str(tmp_path / "empty"), CPU)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"has no adapter_model\.safetensors"):
        load_model(f"{base}+{adapter}", CPU)
    (base / "model.safetensors").unlink()
    with pytest.raises(BadInput, match='cannot load model "m"'):
        load_model(str(base), CPU)


def test_damaged_and_incomplete_weights(tmp_path: Path) -> None:
    base = save_model(tmp_path / "m")
    tensors = load_file(base / "model.safetensors")
    tensors.pop("model.layers.2.self_attn.k_proj.weight")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"lacks 1 .*layers\.2\.self_attn\.k_proj"):
        load_model(str(base), CPU)
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(BadInput, match="damaged"):
        load_model(str(base), CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ModelOptions(device="cuda:99"), "device"),
        (ModelOptions(device="warp"), "device"),
        (ModelOptions(device="cpu", attention="telepathy"), "attention kernel"),
        (ModelOptions(device="cpu", quantization={"bits": 4}), "quant_method"),
        (ModelOptions(device="cpu", quantization={"quant_method": "alchemy"}), "alchemy"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: ModelOptions, message: str) -> None:
    base = save_model(tmp_path / "m")
    with pytest.raises(BadInput, match=message):
        load_model(str(base), options)


def test_checkpoint_code_is_not_run_unasked(tmp_path: Path) -> None:
    base = save_model(tmp_path / "m")
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (base / "config.json").write_text(json.dumps(config))
    (base / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(BadInput, match="--trust-remote-code"):
        load_model(str(base), CPU)


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(BadInput, match='"org/absent@v1" is neither a folder here nor reachable'):
        load_model("org/absent@v1", CPU)


def test_hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE"):
        load_model("org/absent", CPU)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_says_what_helps(error: Exception) -> None:
    with pytest.raises(OutOfMemory, match="smaller dtype"), explained("m"):
        raise error


def test_architecture_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    transformers.MambaConfig(num_hidden_layers=2).save_pretrained(tmp_path / "m")
    with pytest.raises(BadInput, match="recurrent"):
        load_model(str(tmp_path / "m"), CPU)


def test_config_of_other_sizes_than_the_weights(tmp_path: Path) -> None:
    base = save_model(tmp_path / "m")
    tiny_config(hidden_size=64).save_pretrained(base)
    with pytest.raises(BadInput, match='"m"'):
        load_model(str(base), CPU)
