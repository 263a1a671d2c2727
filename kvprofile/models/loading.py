"""Loads models and pairs through Transformers, with every failure a user can cause as one sentence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvprofile.errors import BadInput
from kvprofile.models import adapters, demo, failures, hub
from kvprofile.models.architecture import refuse_unsupported
from kvprofile.models.fingerprint import (
    ModelFingerprint,
    config_sha256,
    fingerprint,
    hub_weights_sha256,
    template_sha256,
    tokenizer_sha256,
    weights_sha256,
)
from kvprofile.models.reference import DEMO_BASE, ModelReference, parse

if TYPE_CHECKING:
    from kvprofile.recipe import ModelOptions


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


class _Source(NamedTuple):
    """Where Transformers reads a base from: a folder or hub id, with the name of a GGUF file in the folder."""

    place: str
    revision: str | None
    gguf: str | None

    @property
    def keywords(self) -> dict[str, str]:
        given = {"revision": self.revision, "gguf_file": self.gguf}
        return {key: value for key, value in given.items() if value}


class _Base(NamedTuple):
    source: _Source
    model: PreTrainedModel
    commit: str | None


def load_model(text: str, options: ModelOptions, folders: Sequence[Path] = ()) -> LoadedModel:
    """Returns the model that `text` names; see `reference.parse`.

    Raises:
        BadInput: If it is not there, not a decoder, not whole, or the options do not fit it.
        OutOfMemory: If the device is too small.
    """
    reference = parse(text, folders)
    source = _source(reference)
    _check_config(source, reference, options)
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
    sources = [_source(reference) for reference in references]
    for source, reference in zip(sources, references, strict=True):
        _check_config(source, reference, options)
    bases: dict[_Source, _Base] = {}
    loaded = []
    for source, reference in zip(sources, references, strict=True):
        if source in bases:  # copied before any adapter is merged into it
            loaded.append(bases[source]._replace(model=_twin(bases[source].model)))
        else:
            bases[source] = _load_base(source, reference, options)
            loaded.append(bases[source])
    return tuple(_finish(base, reference, options) for base, reference in zip(loaded, references, strict=True))


def fingerprint_of(text: str, options: ModelOptions, folders: Sequence[Path] = ()) -> ModelFingerprint:
    """Returns the fingerprints of the model that `text` names as it is now; its weights are not loaded.

    Those of local files come from the cache or from reading them once; those of a hub id from the hub's own hashes of its
    files, or from the hub's cache where the hub cannot be asked.

    Raises:
        BadInput: As in `load_model`.
    """
    reference = parse(text, folders)
    source = _source(reference)
    config = _check_config(source, reference, options)
    if options.quantization:
        config.quantization_config = _quantization(options.quantization)
    elif source.gguf and hasattr(config, "quantization_config"):
        del config.quantization_config
    adapter = adapters.folder(reference.adapter, reference.adapter_revision) if reference.adapter else None
    tokenizer = _tokenizer(source, adapter, reference, options)
    hashes = None if Path(source.place).is_absolute() else hub.weight_hashes(source.place, source.revision)
    if hashes is not None:
        weights = hub_weights_sha256(hashes, adapter)
    else:
        weights = weights_sha256(_folder(source, source.revision), source.gguf, adapter)
    return ModelFingerprint(weights, tokenizer_sha256(tokenizer), template_sha256(tokenizer), config_sha256(config))


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
    source = _source(reference)
    config = _check_config(source, reference, options)
    device = _device(options)
    with failures.explained(reference.name), quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=_dtype(options, device), trust_remote_code=options.trust_remote_code
        )
    adapter = adapters.folder(reference.adapter, reference.adapter_revision) if reference.adapter else None
    return Outline(model, _tokenizer(source, adapter, reference, options), device)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the progress bars and remarks of Transformers and PEFT off the terminal, and restores the settings."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def plain_weights(model: PreTrainedModel) -> None:
    """Drops what a GGUF file leaves in the config: once loaded, its weights are no longer quantised."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _source(reference: ModelReference) -> _Source:
    if reference.base == DEMO_BASE:
        return _Source(str(demo.base_folder()), None, None)
    path = Path(reference.base)
    if not path.is_absolute():
        return _Source(reference.base, reference.revision, None)
    if path.is_file():
        return _Source(str(path.parent.resolve()), None, path.name)
    if not (path / "config.json").is_file():
        if (path / adapters.CONFIG_FILE).is_file():
            raise BadInput(f'"{path}" is an adapter without its base; write BASE+{path.name}')
        ggufs = sorted(path.glob("*.gguf"))
        hint = f'name a file in it, such as "{ggufs[0].name}"' if ggufs else "name a folder that save_pretrained wrote"
        raise BadInput(f'model folder "{path}" has no config.json; {hint}')
    return _Source(str(path.resolve()), None, None)


def _check_config(source: _Source, reference: ModelReference, options: ModelOptions) -> PretrainedConfig:
    if not Path(source.place).is_absolute():
        failures.require_on_hub(source.place, source.revision)
    with failures.explained(reference.name), quiet():
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source.place, trust_remote_code=options.trust_remote_code, **source.keywords
        )
    refuse_unsupported(config, reference.name)
    return config


def _load_base(source: _Source, reference: ModelReference, options: ModelOptions) -> _Base:
    device = _device(options)
    keywords: dict[str, Any] = {**source.keywords, "dtype": _dtype(options, device)}
    if options.device_map or options.quantization:
        keywords["device_map"] = options.device_map or {"": device}
    with failures.explained(reference.name), quiet():
        if options.quantization:
            keywords["quantization_config"] = _quantization(options.quantization)
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
        if source.gguf:
            plain_weights(model)
        if "device_map" not in keywords and not hasattr(model, "hf_device_map"):
            model.to(device)
    return _Base(source, model, getattr(model.config, "_commit_hash", None))


def _finish(base: _Base, reference: ModelReference, options: ModelOptions) -> LoadedModel:
    """Merges the adapter, loads the tokenizer, takes the fingerprints."""
    model, adapter = base.model, None
    if reference.adapter:
        adapter = adapters.folder(reference.adapter, reference.adapter_revision)
        with failures.explained(reference.name), quiet():
            model = adapters.merge(model, adapter, reference.name)
    model.eval().requires_grad_(False)
    tokenizer = _tokenizer(base.source, adapter, reference, options)
    weights = model.get_input_embeddings().weight
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        reference=reference,
        fingerprint=fingerprint(
            _folder(base.source, base.commit or base.source.revision),
            base.source.gguf,
            adapter,
            model.config,
            tokenizer,
        ),
        dtype=str(model.dtype).removeprefix("torch."),
        device=weights.device if weights.device.type != "meta" else _device(options),
        commit=base.commit,
    )


def _tokenizer(source: _Source, adapter: Path | None, reference: ModelReference, options: ModelOptions) -> Any:
    """Returns the adapter's own tokenizer where it brings one, since it may have tokens or a template of its own."""
    own = adapter and (adapter / "tokenizer_config.json").is_file()
    place, keywords = (str(adapter), {}) if own else (source.place, source.keywords)
    with failures.explained(reference.name), quiet():
        return AutoTokenizer.from_pretrained(place, trust_remote_code=options.trust_remote_code, **keywords)


def _folder(source: _Source, revision: str | None) -> Path:
    """Returns the folder that weights are read from: for a hub id its snapshot in the hub's cache."""
    if Path(source.place).is_absolute():
        return Path(source.place)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source.place, "config.json", revision=revision)
    if not isinstance(config, str):
        raise BadInput(f'"{source.place}" is not in the hub\'s cache after loading; check HF_HOME')
    return Path(config).parent


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
        raise BadInput("a base that both models share cannot be offloaded to disk; use more memory or a smaller dtype")
    remove_hook_from_module(model, recurse=True)
    twin = copy.deepcopy(model)
    dispatch_model(model, device_map=device_map)
    dispatch_model(twin, device_map=device_map)
    return twin


def _device(options: ModelOptions) -> torch.device:
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(options.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(
            f'device "{options.device}" is not there; `kvprofile doctor` lists this machine\'s devices'
        ) from error
    return device


def _dtype(options: ModelOptions, device: torch.device) -> torch.dtype:
    if options.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f'unknown dtype "{options.dtype}"; use auto, float32, bfloat16 or float16')
    return dtype


def _quantization(options: dict[str, Any]) -> Any:
    from transformers.quantizers.auto import AutoQuantizationConfig

    if not options.keys() & {"quant_method", "load_in_4bit", "load_in_8bit"}:
        raise BadInput(
            'quantization needs "quant_method", or "load_in_4bit: true" or "load_in_8bit: true" for bitsandbytes'
        )
    return AutoQuantizationConfig.from_dict(dict(options))
