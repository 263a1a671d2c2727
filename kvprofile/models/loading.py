"""Loads models and pairs through Transformers, with every failure a user can cause as one sentence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvprofile.errors import BadInput
from kvprofile.models import adapters, failures
from kvprofile.models.checkpoint import (
    Source,
    checked_config,
    folder_of,
    plain_weights,
    quantization_config,
    quiet,
    source_of,
    tokenizer_of,
)
from kvprofile.models.fingerprint import (
    ModelFingerprint,
    fingerprint,
)
from kvprofile.models.reference import ModelReference, parse

if TYPE_CHECKING:
    from kvprofile.recipe import ModelOptions


_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways of accelerate to spread a model."""


@dataclass
class LoadedModel:
    """A model ready to run: evaluation mode, no gradients, adapters merged.

    Attributes:
        reference: What was asked for.
        dtype: Name of the dtype computed in, such as `bfloat16`.
        device: Where token ids go.
        commit: The base's commit that was read, for a hub id.
    """

    model: PreTrainedModel
    tokenizer: Any
    reference: ModelReference
    fingerprint: ModelFingerprint
    dtype: str
    device: torch.device
    commit: str | None = None


class _Base(NamedTuple):
    source: Source
    model: PreTrainedModel
    commit: str | None


def load_model(text: str, options: ModelOptions, folders: Sequence[Path] = ()) -> LoadedModel:
    """Returns the model that `text` names; see `reference.parse`.

    Raises:
        BadInput: If it is not there, not a decoder, not whole, or the options do not fit it.
        OutOfMemory: If the device is too small.
    """
    reference = parse(text, folders)
    source = source_of(reference)
    checked_config(source, reference, options)
    return _finish(_load_base(source, reference, options), reference, options)


def load_pair(
    sender: str, receiver: str, options: ModelOptions, folders: Sequence[Path] = ()
) -> tuple[LoadedModel, LoadedModel]:
    """Returns sender and receiver, independent of each other; a base they share is read from disk once.

    Raises:
        BadInput: As in `load_model`.
        OutOfMemory: If the device is too small for both.
    """
    first, second = load_models((sender, receiver), options, folders)
    return first, second


def load_models(texts: Sequence[str], options: ModelOptions, folders: Sequence[Path] = ()) -> tuple[LoadedModel, ...]:
    """Returns several models, independent of each other; a base that some share is read from disk once.

    Raises:
        BadInput: As in `load_model`.
        OutOfMemory: If the device is too small for all.
    """
    references = [parse(text, folders) for text in texts]
    sources = [source_of(reference) for reference in references]
    for source, reference in zip(sources, references, strict=True):
        checked_config(source, reference, options)
    bases: dict[Source, _Base] = {}
    loaded = []
    for source, reference in zip(sources, references, strict=True):
        if source in bases:  # copied before any adapter is merged into it
            loaded.append(bases[source]._replace(model=_twin(bases[source].model)))
        else:
            bases[source] = _load_base(source, reference, options)
            loaded.append(bases[source])
    return tuple(_finish(base, reference, options) for base, reference in zip(loaded, references, strict=True))


class Outline(NamedTuple):
    """A model without its weights, for questions about shapes and tokens.

    Attributes:
        model: On the meta device.
        device: Where the model would go.
    """

    model: PreTrainedModel
    tokenizer: Any
    device: torch.device


def load_outline(text: str, options: ModelOptions, folders: Sequence[Path] = ()) -> Outline:
    """Returns the outline of the model that `text` names, by reading its config and tokenizer only.

    Raises:
        BadInput: As in `load_model`.
    """
    reference = parse(text, folders)
    source = source_of(reference)
    config = checked_config(source, reference, options)
    device = _device(options)
    with failures.explained(reference.name), quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=_dtype(options, device), trust_remote_code=options.trust_remote_code
        )
    adapter = adapters.folder(reference.adapter, reference.adapter_revision) if reference.adapter else None
    return Outline(model, tokenizer_of(source, adapter, reference, options), device)


def _load_base(source: Source, reference: ModelReference, options: ModelOptions) -> _Base:
    device = _device(options)
    keywords: dict[str, Any] = {**source.keywords, "dtype": _dtype(options, device)}
    if options.device_map:
        _require_map(options.device_map)
    if options.device_map or options.quantization:
        keywords["device_map"] = options.device_map or {"": device}
    with failures.explained(reference.name), quiet():
        if options.quantization:
            keywords["quantization_config"] = quantization_config(options.quantization)
        model, info = AutoModelForCausalLM.from_pretrained(
            source.place,
            attn_implementation=None if options.attention == "auto" else options.attention,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
            **keywords,
        )
        if missing := sorted(info["missing_keys"]):
            # Transformers would go on with random numbers in their place.
            raise BadInput(
                f'the checkpoint of "{reference.name}" lacks {len(missing)} of the model\'s tensors, '
                f'such as "{missing[0]}"; its config and weights do not belong together'
            )
        _honour_soft_cap(model)
        if source.gguf:
            plain_weights(model)
        if "device_map" not in keywords and not hasattr(model, "hf_device_map"):
            model.to(device)
    return _Base(source, model, getattr(model.config, "_commit_hash", None))


def _honour_soft_cap(model: PreTrainedModel) -> None:
    """Takes the eager kernel where `sdpa` would leave out the soft cap of attention scores; Transformers 5.0 said nothing."""
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    if capped and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def _finish(base: _Base, reference: ModelReference, options: ModelOptions) -> LoadedModel:
    """Merges the adapter, loads the tokenizer, takes the fingerprints."""
    model, adapter = base.model, None
    if reference.adapter:
        adapter = adapters.folder(reference.adapter, reference.adapter_revision)
        with failures.explained(reference.name), quiet():
            model = adapters.merge(model, adapter, reference.name)
    model.eval().requires_grad_(False)
    tokenizer = tokenizer_of(base.source, adapter, reference, options)
    weights = model.get_input_embeddings().weight
    with failures.explained(reference.name):
        prints = fingerprint(
            folder_of(base.source, base.commit or base.source.revision),
            base.source.gguf,
            adapter,
            model.config,
            tokenizer,
        )
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        reference=reference,
        fingerprint=prints,
        dtype=str(model.dtype).removeprefix("torch."),
        device=weights.device if weights.device.type != "meta" else _device(options),
        commit=base.commit,
    )


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """Returns an independent copy in memory.

    Accelerate's hooks close over the module they were put on, so a copied hook would run the original's weights: they
    are taken off before and put back on both.
    """
    device_map = getattr(model, "hf_device_map", {})
    if len(set(device_map.values())) < 2:
        return copy.deepcopy(model)
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_module

    if "disk" in device_map.values():
        raise BadInput(
            "device_map puts part of the base that both models share on disk, where it cannot be shared; use more memory, a "
            "smaller dtype or quantization"
        )
    remove_hook_from_module(model, recurse=True)
    twin = copy.deepcopy(model)
    dispatch_model(model, device_map=device_map)
    dispatch_model(twin, device_map=device_map)
    return twin


def _device(options: ModelOptions) -> torch.device:
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _existing(options.device)


def _existing(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f'device "{name}" is not there; `kvprofile doctor` lists this machine\'s devices') from error
    return device


def _require_map(name: str) -> None:
    if name in _MAPS:
        return
    try:
        _existing(name)
    except BadInput as error:
        raise BadInput(
            f'device_map "{name}" is neither {", ".join(_MAPS)} nor a device of this machine; `kvprofile doctor` lists those'
        ) from error


def _dtype(options: ModelOptions, device: torch.device) -> torch.dtype:
    if options.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f'unknown dtype "{options.dtype}"; use auto, float32, bfloat16 or float16')
    return dtype
