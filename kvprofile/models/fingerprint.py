"""Fingerprints of weights, tokenizer, chat template and config: what a model is, whatever its files are called.

The weight fingerprint is taken from the checkpoint as it lies on disk, tensor by tensor:

    tensor      = SHA-256(name, dtype, shape, bytes)
    checkpoint  = SHA-256(the tensors' digests, sorted by name)
    + adapter   = SHA-256(checkpoint, the adapter's tensors likewise, its settings that scale or place the change)

So sharding, file names, the order of tensors, the device and the dtype loaded into do not change it, and any changed
weight does.
NOTE: Files that hold the same numbers under other names or in another dtype (GGUF and its conversion, a tied output
matrix written out) are other checkpoints here.

Reading a checkpoint takes seconds per gigabyte, so the result is kept in the cache folder under the files' paths, sizes,
inodes and times of change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from kvprofile.errors import BadInput
from kvprofile.models import adapters
from kvprofile.models.cache_dir import cache_dir

_FORMULA = 1
_SHA256 = re.compile("[0-9a-f]{64}")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_CONFIG_VOLATILE = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)
_ADAPTER_VOLATILE = frozenset({
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_dropout", "peft_version",
    "revision", "task_type",
})  # fmt: skip


class ModelFingerprint(NamedTuple):
    """SHA-256 digests in hexadecimal.

    Attributes:
        weights_sha256: See the module's docstring; empty for files on the hub that were never read here.
        tokenizer_sha256: Over the tokenizer's whole definition, wherever it lies.
        template_sha256: Over the chat template; of the empty text if there is none.
        config_sha256: Over the settings that change what the weights compute (rotary base, windows, quantisation).
    """

    weights_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    config_sha256: str


def fingerprint(
    folder: Path, gguf: str | None, adapter: Path | None, config: PretrainedConfig, tokenizer: Any
) -> ModelFingerprint:
    """Returns the fingerprints of a loaded model.

    Args:
        folder: Where the base's checkpoint lies.
        gguf: The GGUF file in it that was loaded, if any.
        adapter: Folder of the adapter that was merged, if any.
        config: The loaded model's.
        tokenizer: The loaded model's.
    """
    return ModelFingerprint(
        weights_sha256(folder, gguf, adapter),
        tokenizer_sha256(tokenizer),
        template_sha256(tokenizer),
        config_sha256(config, folder),
    )


def weights_sha256(folder: Path, gguf: str | None = None, adapter: Path | None = None) -> str:
    """Returns the fingerprint of a checkpoint, with an adapter on it if given; see the module's docstring.

    Raises:
        BadInput: If the folder holds no weights.
    """
    base = _cached([folder / gguf] if gguf else checkpoint_files(folder))
    return base if adapter is None else _with_adapter(base, adapter)


def _with_adapter(base: str, adapter: Path) -> str:
    file = adapters.weight_file(adapter)
    if file is None:
        raise BadInput(f'adapter "{adapter}" has no {adapters.WEIGHT_FILES[0]}')
    return _json_sha256(["adapter", base, _cached([file]), _adapter_settings(adapter)])


def hub_weights_sha256(files: Mapping[str, str], adapter: Path | None = None) -> str:
    """Returns the fingerprint of a checkpoint on the hub by its files' hashes, if such files were read here before.

    Args:
        files: SHA-256 of the weight files, by name, as the hub's own metadata tells them.
        adapter: Folder of an adapter on it.

    Returns:
        The fingerprint; empty if only reading the files could tell.
    """
    base = _known(_hub_key(files))
    return (base if adapter is None else _with_adapter(base, adapter)) if base else ""


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the files that Transformers reads weights from, of whatever else lies in the folder."""
    names = checkpoint_names(lambda name: (folder / name).is_file(), lambda name: (folder / name).read_text("utf-8"))
    if not names:
        raise BadInput(
            f'model folder "{folder}" holds no weights; it needs model.safetensors or its shards with their index'
        )
    return [folder / name for name in names]


def checkpoint_names(is_there: Callable[[str], bool], read: Callable[[str], str]) -> list[str]:
    """Returns the names of the files that Transformers reads weights from; none if there are none.

    Args:
        is_there: Whether a file of that name is there.
        read: Returns the text of an index of shards.
    """
    for index, single in zip(_INDEXES, _SINGLE, strict=True):
        if is_there(single):
            return [single]
        if is_there(index):
            return sorted(set(json.loads(read(index))["weight_map"].values()))
    return []


def tokenizer_sha256(tokenizer: Any) -> str:
    """Returns the fingerprint of what turns text into ids; independent of where the tokenizer was loaded from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        definition = json.loads(backend.to_str())
        # State of the last call, not part of the definition.
        definition.pop("truncation", None)
        definition.pop("padding", None)
        if getattr(tokenizer, "split_special_tokens", False):
            definition["split_special_tokens"] = True
    else:
        added = {str(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        definition = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab(), "added": added}
    return _json_sha256(definition)


def template_sha256(tokenizer: Any) -> str:
    """Returns the fingerprint of the chat template, with the special tokens that it fills in."""
    template = getattr(tokenizer, "chat_template", None) or ""
    text = template if isinstance(template, str) else _canonical(template).decode()
    named = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if role in text}
    return hashlib.sha256((text + _canonical(named).decode() if named else text).encode()).hexdigest()


def config_sha256(config: PretrainedConfig, folder: Path | None = None) -> str:
    """Returns the fingerprint of the config's settings that differ from their defaults, names and versions aside.

    Where a checkpoint brings code of its own, the Python files of its folder take part.
    """
    settings = config.to_diff_dict()
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        settings["quantization_config"] = _quantization(quantization)
    if getattr(config, "auto_map", None) and folder is not None:
        code = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.py"))}
        return _json_sha256([_without(settings, _CONFIG_VOLATILE), code])
    return _json_sha256(_without(settings, _CONFIG_VOLATILE))


def _quantization(held: Any) -> dict[str, Any]:
    """Returns settings with every default, whether they are a config.json's or those of a loaded model."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    plain: dict[str, Any] = held if isinstance(held, dict) else held.to_dict()
    try:
        filled: dict[str, Any] = AutoQuantizationConfig.from_dict(dict(plain)).to_dict()
    except (ValueError, KeyError, TypeError, ImportError):  # a method that is not known or not installed here
        return plain
    return filled


def _without(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {str(k): _without(v, names) for k, v in value.items() if k not in names}
    return [_without(v, names) for v in value] if isinstance(value, (list, tuple)) else value


def _adapter_settings(adapter: Path) -> dict[str, Any]:
    """Returns the adapter's settings without those that are off, so that a newer PEFT's new ones change nothing."""
    settings = json.loads((adapter / adapters.CONFIG_FILE).read_text("utf-8"))
    kept = {k: v for k, v in settings.items() if (v or type(v) is int) and k not in _ADAPTER_VOLATILE}
    if isinstance(start := settings.get("init_lora_weights"), str):  # such as pissa, which changes the base on loading
        kept["init_lora_weights"] = start
    return {k: _ordered(k, v) for k, v in kept.items()}


def _ordered(name: str, value: Any) -> Any:
    """Returns a setting so that its order counts where it does: the first pattern that fits a layer wins, lists are sets."""
    if name.endswith("_pattern") and isinstance(value, dict) and len(value) > 1:
        return list(value.items())
    return sorted(value, key=str) if isinstance(value, list) else value


def _cached(files: list[Path]) -> str:
    """Returns the digest over the files' tensors, from the cache if no file has changed since."""
    states = [_state(file) for file in files]
    key = _json_sha256([_FORMULA, states])
    digest = _known(key) or _tensors_sha256(files)
    places = [str(path) for path, *_ in states]
    _keep(key, digest, places)
    blobs = {file.name: file.resolve().name for file in files}
    if all(map(_SHA256.fullmatch, blobs.values())):  # the hub's cache names large files by their hashes
        _keep(_hub_key(blobs), digest, places)
    return digest


def _state(file: Path) -> tuple[str | int, ...]:
    """Returns what tells a file from another at its place; a time of modification alone can be set by anybody."""
    stat = file.stat()
    return str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _hub_key(files: Mapping[str, str]) -> str:
    return _json_sha256([_FORMULA, "hub", sorted(files.items())])


def _entry(key: str) -> Path:
    return cache_dir() / "fingerprints" / f"{key}.json"


def _known(key: str) -> str | None:
    """Returns the digest that the cache holds for a key, None if it holds none."""
    try:
        known = json.loads(_entry(key).read_text("utf-8"))
        if known["key"] == key and len(bytes.fromhex(known["sha256"])) == 32:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _keep(key: str, digest: str, files: list[str]) -> None:
    """Writes a cache entry by one rename, unless it is there; without a writable cache the next run computes again."""
    entry = _entry(key)
    document = {"key": key, "sha256": digest, "files": files}
    try:
        if _known(key) == digest:
            return
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=entry.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file)
        Path(temporary).replace(entry)
    except OSError:
        return


def _tensors_sha256(files: list[Path]) -> str:
    tensors = {name: digest for file in files for name, digest in _digests(file)}
    return _json_sha256(sorted(tensors.items()))


def _digests(file: Path) -> Iterator[tuple[str, str]]:
    if file.suffix == ".gguf":
        from gguf import GGUFReader

        for entry in GGUFReader(file).tensors:
            yield (
                entry.name,
                _digest(entry.name, entry.tensor_type.name, entry.shape.tolist(), memoryview(entry.data).cast("B")),
            )
    elif file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, _tensor_digest(name, opened.get_tensor(name))
    else:
        for name, tensor in torch.load(file, map_location="cpu", weights_only=True, mmap=True).items():
            yield name, _tensor_digest(name, tensor)


def _tensor_digest(name: str, tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _digest(name, str(tensor.dtype), list(tensor.shape), raw.data)


def _digest(name: str, dtype: str, shape: list[int], raw: memoryview) -> str:
    digest = hashlib.sha256(_canonical([name, dtype, shape]))
    digest.update(raw)
    return digest.hexdigest()


def _json_sha256(value: Any) -> str:
    return hashlib.sha256(_canonical(value)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str).encode()
