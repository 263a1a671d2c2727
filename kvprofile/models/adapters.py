"""PEFT adapters: where they lie, whether they fit a base, and merging them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import PreTrainedModel

from kvprofile.errors import BadInput
from kvprofile.models import failures

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def folder(adapter: str, revision: str | None) -> Path:
    """Returns the adapter's folder; one on the hub is fetched when it is not cached.

    Raises:
        BadInput: If there is no adapter.
    """
    path = Path(adapter)
    if not path.is_absolute():
        with failures.explained(adapter):
            path = Path(_fetch(adapter, revision))
    if not (path / CONFIG_FILE).is_file():
        raise BadInput(f'adapter "{adapter}" has no {CONFIG_FILE}; name a folder or hub id that PEFT saved')
    if weight_file(path) is None:
        raise BadInput(f'adapter "{adapter}" has no {WEIGHT_FILES[0]}; name a folder or hub id that PEFT saved')
    return path


def weight_file(path: Path) -> Path | None:
    """Returns the file of the adapter's tensors; PEFT prefers safetensors too."""
    return next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)


def merge(model: PreTrainedModel, adapter: Path, name: str) -> PreTrainedModel:
    """Returns the base with the adapter's change added to its weights, in place.

    Raises:
        BadInput: If the adapter was made for another base, or its method cannot be merged.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(adapter))
    if config.is_prompt_learning:
        raise BadInput(
            f'adapter "{adapter.name}" is a {config.peft_type} adapter, which cannot be merged; '
            "use LoRA or a like method"
        )
    try:
        wrapped = PeftModel.from_pretrained(model, str(adapter), config=config, is_trainable=False)
    except (RuntimeError, ValueError, KeyError) as error:
        raise BadInput(
            f'adapter "{adapter.name}" was made for another base than "{name}" names ({_misfit(error)})'
        ) from error
    _refuse_misfits(wrapped, adapter, name)
    try:
        return wrapped.merge_and_unload(safe_merge=True)
    except ValueError as error:  # safe_merge found NaN
        raise BadInput(f'adapter "{adapter.name}" cannot be merged: {error}') from error


def _refuse_misfits(wrapped: object, adapter: Path, name: str) -> None:
    """Raises BadInput if base and adapter do not match tensor for tensor.

    PEFT goes on in silence in both cases: without the adapter's tensors for layers that the base lacks, and without
    any change in the base's layers that the adapter lacks.
    """
    from peft import get_peft_model_state_dict

    given = _names(adapter)
    misfits = {
        "of its tensors have no place there": given
        - set(get_peft_model_state_dict(wrapped, save_embedding_layers=True)),
        "tensors for it are missing": set(get_peft_model_state_dict(wrapped, save_embedding_layers=False)) - given,
    }
    for what, names in misfits.items():
        if names:
            raise BadInput(
                f'adapter "{adapter.name}" was made for another base than "{name}" names: '
                f"{len(names)} {what}, such as {min(names)}"
            )


def _names(adapter: Path) -> set[str]:
    path = weight_file(adapter)
    if path is None:
        return set()
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as tensors:
            return set(tensors.keys())
    return set(torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def _misfit(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error))
    if sizes := re.search(r"size mismatch for (\S+): .*?(torch\.Size\(\S.*?\)).*?(torch\.Size\(.*?\))", text):
        module = sizes[1].removeprefix("base_model.model.")
        return f"{module} is {_shape(sizes[2])} in the adapter and {_shape(sizes[3])} in the base"
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0][:200].rstrip(". ")


def _shape(text: str) -> str:
    return " × ".join(re.findall(r"\d+", text))


def _fetch(adapter: str, revision: str | None) -> str:
    wanted = [
        "adapter_*",
        "tokenizer*",
        "*.jinja",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab*",
        "merges.txt",
    ]
    try:
        return str(snapshot_download(adapter, revision=revision, allow_patterns=wanted, etag_timeout=10))
    except Exception as error:
        raise failures.unreachable(adapter, revision, error) from error
