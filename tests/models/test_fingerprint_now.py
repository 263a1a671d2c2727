"""What a model is now, told without loading its weights: equal to what loading finds, and on the hub from its hashes alone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.quantizers.auto import AutoQuantizationConfig

from kvprofile.errors import BadInput
from kvprofile.models import hub
from kvprofile.models.checkpoint import looked_up
from kvprofile.models.fingerprint import config_sha256, hub_weights_sha256, weights_sha256
from kvprofile.models.loading import load_model
from kvprofile.run import end_ids_of
from tests.models.test_gguf import write_gguf
from tests.tiny import tiny_tokenizer
from tests.tiny_models import CPU, save_adapter, save_model, tiny_config

SHA = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROFILE_CACHE", str(tmp_path / "cache"))


def test_equals_what_loading_finds(tmp_path: Path) -> None:
    base, adapter = save_model(tmp_path / "base"), save_adapter(tmp_path / "adapter")
    own = save_adapter(tmp_path / "own")
    tiny_tokenizer("another template").save_pretrained(own)
    write_gguf(tmp_path / "tiny.gguf")
    found = {}
    for text in (f"{base}", f"{base}+{adapter}", f"{base}+{own}", f"{tmp_path / 'tiny.gguf'}"):
        loaded = load_model(text, CPU)
        found[text], ends = looked_up(text, CPU)
        assert found[text] == loaded.fingerprint
        assert set(ends) == end_ids_of(loaded)
    assert len(set(found.values())) == 4


@pytest.mark.parametrize("eos", [None, 7, [7, 9]])
@pytest.mark.parametrize("own", [True, False])
def test_end_tokens_are_those_of_the_loaded_model(tmp_path: Path, eos: int | list[int] | None, own: bool) -> None:
    folder = save_model(tmp_path / "base")
    path = folder / ("generation_config.json" if own else "config.json")
    held = {key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token_id"}
    path.write_text(json.dumps(held if eos is None else {**held, "eos_token_id": eos}))
    if not own:
        (folder / "generation_config.json").unlink()
    assert set(looked_up(str(folder), CPU).end_ids) == end_ids_of(load_model(str(folder), CPU))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff{"])
def test_damaged_adapters_are_told_in_a_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    base, adapter = save_model(tmp_path / "base"), save_adapter(tmp_path / "adapter")
    (adapter / name).write_bytes(content)
    for read in (looked_up, load_model):
        with pytest.raises(BadInput):
            read(f"{base}+{adapter}", CPU)


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": {"a": 5}}', '{"weight_map": [1]}'])
def test_damaged_index_is_told_in_a_sentence(tmp_path: Path, content: str) -> None:
    base = save_model(tmp_path / "base", shard="10KB")
    (base / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BadInput):
        looked_up(str(base), CPU)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "of tomorrow", "bits": 3},
    ],
    ids=lambda settings: settings["quant_method"],
)
def test_quantised_checkpoints_have_one_config_before_and_after_loading(settings: dict[str, Any]) -> None:
    plain, loaded = tiny_config(), tiny_config()
    plain.quantization_config = settings
    try:
        loaded.quantization_config = AutoQuantizationConfig.from_dict(dict(settings))
    except (ValueError, ImportError):
        loaded.quantization_config = dict(settings)
    assert config_sha256(plain) == config_sha256(loaded) != config_sha256(tiny_config())


def in_the_hubs_cache(folder: Path, model: Path) -> None:
    """Lays a saved model into a cache as huggingface_hub does, weights under the hash of their file."""
    repository = folder / "models--org--tiny"
    snapshot = repository / "snapshots" / ("c" * 40)
    for made in (snapshot, repository / "refs", repository / "blobs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c" * 40)
    for file in model.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)


READ_FROM_CACHE = """
import sys
from kvprofile.models import hub
from kvprofile.models.checkpoint import looked_up
from kvprofile.models.loading import load_model
from tests.tiny_models import CPU
loaded = load_model("org/tiny", CPU).fingerprint
assert looked_up("org/tiny", CPU).fingerprint == loaded  # the hub cannot be asked: from its cache
hub.listed = lambda hub_id, revision: hub.Listed("c" * 40, {"model.safetensors": sys.argv[1]})
assert looked_up("org/tiny", CPU).fingerprint == loaded
hub.listed = lambda hub_id, revision: hub.Listed("c" * 40, {"model.safetensors": "0" * 64})
assert looked_up("org/tiny", CPU).fingerprint == loaded._replace(weights_sha256="")
assert looked_up("org/tiny", CPU, fetch=True).fingerprint == loaded  # fetched, or in the cache already, and read
"""


@pytest.mark.slow
def test_hub_id_by_the_hubs_hashes_or_from_its_cache(tmp_path: Path) -> None:
    model = save_model(tmp_path / "base")
    in_the_hubs_cache(tmp_path / "hub", model)
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    subprocess.run([sys.executable, "-c", READ_FROM_CACHE, digest], check=True, env=environment)


def test_hashes_of_files_that_were_read_here_tell_the_fingerprint(tmp_path: Path) -> None:
    in_the_hubs_cache(tmp_path / "hub", save_model(tmp_path / "base"))
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("c" * 40)
    known = {"model.safetensors": (snapshot / "model.safetensors").resolve().name}
    assert hub_weights_sha256(known) == "", "never read here"
    assert hub_weights_sha256(known, save_adapter(tmp_path / "adapter")) == ""
    read = weights_sha256(snapshot)
    assert hub_weights_sha256(known) == read
    assert hub_weights_sha256({"model.safetensors": SHA}) == ""
    assert hub_weights_sha256({"other.safetensors": known["model.safetensors"]}) == ""
    adapter = tmp_path / "adapter"
    assert hub_weights_sha256(known, adapter) == weights_sha256(snapshot, adapter=adapter)


def repository(**files: str | None) -> SimpleNamespace:
    siblings = [SimpleNamespace(rfilename=n, lfs=SimpleNamespace(sha256=h) if h else None) for n, h in files.items()]
    return SimpleNamespace(sha="commit", siblings=siblings)


class TestWeightHashes:
    def ask(self, monkeypatch: pytest.MonkeyPatch, answer: Any) -> dict[str, str] | None:
        def model_info(*_: object, **options: object) -> Any:
            assert options["files_metadata"]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub.HfApi, "model_info", model_info)
        found = hub.listed("org/tiny", "main")
        return None if found is None else found.hashes

    def test_one_file_wins_over_pickles_and_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        files = {"model.safetensors": SHA, "pytorch_model.bin": "1" * 64, "tokenizer.json": "2" * 64, "README.md": None}
        assert self.ask(monkeypatch, repository(**files)) == {"model.safetensors": SHA}

    def test_shards_are_those_of_the_index(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        index = tmp_path / "index.json"
        index.write_text('{"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}')
        monkeypatch.setattr(hub, "hf_hub_download", lambda *_, **__: str(index))
        shards = {f"{number}.safetensors": str(number) * 64 for number in range(4)}
        found = self.ask(monkeypatch, repository(**{"model.safetensors.index.json": None, **shards}))
        assert found == {"1.safetensors": "1" * 64, "2.safetensors": "2" * 64}

    def test_a_hub_that_does_not_answer_is_no_error(self) -> None:
        asked = "from kvprofile.models import hub; assert hub.listed('org/tiny', 'main') is None"
        environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
        subprocess.run([sys.executable, "-c", asked], check=True, cwd=Path(__file__).parents[2], env=environment)

    @pytest.mark.parametrize("answer", [ConnectionError("no route"), repository(**{"model.safetensors": None})])
    def test_what_cannot_be_told_is_none(self, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
        assert self.ask(monkeypatch, answer) is None

    def test_offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
        assert hub.listed("org/tiny", None) is None
