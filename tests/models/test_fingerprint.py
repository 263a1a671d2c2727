from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvprofile.models import fingerprint as module
from kvprofile.models.cache_dir import cache_dir
from kvprofile.models.fingerprint import config_sha256, template_sha256, tokenizer_sha256, weights_sha256
from kvprofile.models.loading import load_model
from kvprofile.recipe import ModelOptions
from tests.tiny import tiny_tokenizer
from tests.tiny_models import CPU, save_adapter, save_model, tiny_config


def rewrite(folder: Path, change: dict[str, torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_sharding_file_names_and_place_do_not_matter(tmp_path: Path) -> None:
    whole, shards = save_model(tmp_path / "whole"), save_model(tmp_path / "shards", shard="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    renamed = shutil.copytree(shards, tmp_path / "renamed")
    index = json.loads((renamed / "model.safetensors.index.json").read_text())
    first = index["weight_map"]["model.norm.weight"]
    (renamed / first).rename(renamed / "zzz.safetensors")
    index["weight_map"] = {k: "zzz.safetensors" if v == first else v for k, v in index["weight_map"].items()}
    (renamed / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_sha256(whole) == weights_sha256(shards) == weights_sha256(renamed)


def test_torch_checkpoint_has_the_same_fingerprint(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    expected = weights_sha256(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert weights_sha256(folder) == expected


def test_any_changed_weight_name_shape_or_dtype_changes_it(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    seen = {weights_sha256(folder)}
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    nudged = norm.clone()
    nudged[-1] = torch.nextafter(nudged[-1], torch.tensor(9.0))
    for change in (nudged, norm.view(1, -1), norm.view(torch.int32)):
        rewrite(folder, {"model.norm.weight": change})
        seen.add(weights_sha256(folder))
    rewrite(folder, {"model.norm.weight": norm, "new": norm.clone()})
    seen.add(weights_sha256(folder))
    assert len(seen) == 5


def test_stray_files_do_not_matter(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    expected = weights_sha256(folder)
    save_file({"x": torch.ones(2)}, folder / "consolidated.safetensors")
    assert weights_sha256(folder) == expected


def test_dtype_loaded_into_does_not_matter(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "m"))
    half = load_model(folder, ModelOptions(dtype="bfloat16", device="cpu"))
    assert half.fingerprint == load_model(folder, CPU).fingerprint


def test_adapter_counts_with_its_scale_and_its_base(tmp_path: Path) -> None:
    base, other = save_model(tmp_path / "m"), save_model(tmp_path / "n", seed=5)
    one, two = save_adapter(tmp_path / "one", 1), save_adapter(tmp_path / "two", 2)
    stronger = save_adapter(tmp_path / "stronger", 1, alpha=16)
    prints = [weights_sha256(base), *(weights_sha256(base, adapter=a) for a in (one, two, stronger))]
    assert len({*prints, weights_sha256(other, adapter=one)}) == 5
    config = json.loads((one / "adapter_config.json").read_text())
    moved = config | {"base_model_name_or_path": "else/where", "inference_mode": False, "peft_version": "9"}
    moved["target_modules"] = config["target_modules"][::-1]
    (one / "adapter_config.json").write_text(json.dumps(moved))
    assert weights_sha256(base, adapter=one) == prints[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "pissa"},
        {"lora_alpha": 0},
        {"alpha_pattern": {"k_proj": 1, "[kv]_proj": 64}},
        {"alpha_pattern": {"[kv]_proj": 64, "k_proj": 1}},
    ],
    ids=str,
)
def test_adapter_settings_that_merge_to_other_weights(tmp_path: Path, changes: dict[str, object]) -> None:
    base, adapter = save_model(tmp_path / "m"), save_adapter(tmp_path / "one")
    path = adapter / "adapter_config.json"
    plain = json.loads(path.read_text())
    variants = [plain, {**plain, **changes}, {**plain, "alpha_pattern": {"k_proj": 64, "[kv]_proj": 1}}]
    prints = []
    for one in variants:
        path.write_text(json.dumps(one))
        prints.append(weights_sha256(base, adapter=adapter))
    assert len(set(prints)) == len(variants)


class TestCache:
    def test_file_put_in_anothers_place_under_its_time_is_read(self, tmp_path: Path) -> None:
        folder, other = save_model(tmp_path / "m"), save_model(tmp_path / "n", seed=3)
        os.utime(folder / "model.safetensors", (0, 0))
        before = weights_sha256(folder)
        (folder / "model.safetensors").unlink()
        shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
        os.utime(folder / "model.safetensors", (0, 0))
        assert weights_sha256(folder) == weights_sha256(other) != before

    @pytest.fixture
    def reads(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        read: list[Path] = []
        original = module._digests

        def counted(file: Path) -> object:
            read.append(file)
            return original(file)

        monkeypatch.setattr(module, "_digests", counted)
        return read

    def test_files_are_read_once_until_they_change(self, tmp_path: Path, reads: list[Path]) -> None:
        folder = save_model(tmp_path / "m")
        first = weights_sha256(folder)
        assert weights_sha256(folder) == first
        assert len(reads) == 1
        os.utime(folder / "model.safetensors", ns=(1, 1))
        assert weights_sha256(folder) == first
        assert len(reads) == 2

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"sha256": "00"}', "null"])
    def test_damaged_entry_is_rebuilt(
        self, tmp_path: Path, content: str, reads: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVPROFILE_CACHE", str(tmp_path / "cache"))
        folder = save_model(tmp_path / "m")
        first = weights_sha256(folder)
        (entry,) = (cache_dir() / "fingerprints").iterdir()
        entry.write_text(content)
        assert weights_sha256(folder) == first
        assert weights_sha256(folder) == first
        assert len(reads) == 2

    def test_without_a_writable_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = save_model(tmp_path / "m")
        expected = weights_sha256(folder)
        (tmp_path / "file").touch()
        monkeypatch.setenv("KVPROFILE_CACHE", str(tmp_path / "file"))
        assert weights_sha256(folder) == expected


def test_tokenizer_fingerprint_is_of_its_definition(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    first = tokenizer_sha256(tokenizer)
    tokenizer(["a", "a long text"], padding=True, truncation=True, max_length=3)
    assert tokenizer_sha256(tokenizer) == first
    for name in ("one", "two"):
        tokenizer.save_pretrained(tmp_path / name)
        assert tokenizer_sha256(type(tokenizer).from_pretrained(tmp_path / name)) == first
    tokenizer.add_tokens(["brand-new"])
    assert tokenizer_sha256(tokenizer) != first


def test_template_fingerprint() -> None:
    prints = [template_sha256(tiny_tokenizer(template)) for template in (None, "a", "b")]
    assert len(set(prints)) == 3
    assert template_sha256(tiny_tokenizer("a")) == prints[1]


def test_template_fingerprint_counts_the_special_tokens_that_it_fills_in() -> None:
    prints = []
    for template in ("{{ bos_token }}{{ x }}", "{{ x }}"):
        for bos in ("<a>", "<b>"):
            tokenizer = tiny_tokenizer(template)
            tokenizer.bos_token = bos
            prints.append(template_sha256(tokenizer))
    assert prints[0] != prints[1]
    assert prints[2] == prints[3]


def test_tokenizer_fingerprint_sees_how_special_tokens_in_texts_are_read() -> None:
    one, other = tiny_tokenizer(), tiny_tokenizer()
    other.split_special_tokens = True
    assert tokenizer_sha256(one) != tokenizer_sha256(other)


def test_code_that_a_checkpoint_brings_counts(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    config = AutoConfig.from_pretrained(folder)
    code = folder / "modeling_x.py"
    code.write_text("EPSILON = 1e-6")
    assert config_sha256(config, folder) == config_sha256(config), "it is not used"
    config.auto_map = {"AutoModelForCausalLM": "modeling_x.X"}
    before = config_sha256(config, folder)
    code.write_text("EPSILON = 10.0")
    assert config_sha256(config, folder) != before


def test_config_fingerprint_sees_what_weights_do_not() -> None:
    plain = config_sha256(tiny_config())
    assert config_sha256(tiny_config(name_or_path="elsewhere", dtype="bfloat16")) == plain
    assert config_sha256(tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})) != plain
