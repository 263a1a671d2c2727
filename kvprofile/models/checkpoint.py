"""Where a model's files lie and what they are, without loading weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvprofile.errors import BadInput
from kvprofile.models import adapters, demo, failures, hub
from kvprofile.models.architecture import refuse_unsupported
from kvprofile.models.fingerprint import (
    ModelFingerprint,
    config_sha256,
    hub_weights_sha256,
    template_sha256,
    tokenizer_sha256,
    weights_sha256,
)
from kvprofile.models.reference import DEMO_BASE, ModelReference, parse

if TYPE_CHECKING:
    from kvprofile.recipe import ModelOptions


class Source(NamedTuple):
    """Where Transformers reads a base from: a folder or hub id, with the name of a GGUF file in the folder."""

    place: str
    revision: str | None
    gguf: str | None

    @property
    def keywords(self) -> dict[str, str]:
        given = {"revision": self.revision, "gguf_file": self.gguf}
        return {key: value for key, value in given.items() if value}


def source_of(reference: ModelReference) -> Source:
    """Returns where the base of a reference lies; the demo's is fetched first.

    Raises:
        BadInput: If the folder holds no model.
    """
    if reference.base == DEMO_BASE:
        return Source(str(demo.base_folder()), None, None)
    path = Path(reference.base)
    if not path.is_absolute():
        return Source(reference.base, reference.revision, None)
    if path.is_file():
        return Source(str(path.parent.resolve()), None, path.name)
    if not (path / "config.json").is_file():
        if (path / adapters.CONFIG_FILE).is_file():
            raise BadInput(f'"{path}" is an adapter without its base; write BASE+{path.name}')
        ggufs = sorted(path.glob("*.gguf"))
        hint = f'name a file in it, such as "{ggufs[0].name}"' if ggufs else "name a folder that save_pretrained wrote"
        raise BadInput(f'model folder "{path}" has no config.json; {hint}')
    return Source(str(path.resolve()), None, None)


def checked_config(source: Source, reference: ModelReference, options: ModelOptions) -> PretrainedConfig:
    """Returns the config of a base.

    Raises:
        BadInput: If it is not there, or not of a decoder that kvprofile can address.
    """
    if not Path(source.place).is_absolute():
        failures.require_on_hub(source.place, source.revision)
    with failures.explained(reference.name), quiet():
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source.place, trust_remote_code=options.trust_remote_code, **source.keywords
        )
    refuse_unsupported(config, reference.name)
    return config


def tokenizer_of(source: Source, adapter: Path | None, reference: ModelReference, options: ModelOptions) -> Any:
    """Returns the adapter's own tokenizer where it brings one, since it may have tokens or a template of its own."""
    own = adapter and (adapter / "tokenizer_config.json").is_file()
    place, keywords = (str(adapter), {}) if own else (source.place, source.keywords)
    with failures.explained(reference.name), quiet():
        return AutoTokenizer.from_pretrained(place, trust_remote_code=options.trust_remote_code, **keywords)


def folder_of(source: Source, revision: str | None) -> Path:
    """Returns the folder that weights are read from: for a hub id its snapshot in the hub's cache."""
    if Path(source.place).is_absolute():
        return Path(source.place)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source.place, "config.json", revision=revision)
    if not isinstance(config, str):
        raise BadInput(f'"{source.place}" is not in the hub\'s cache after loading; check HF_HOME')
    return Path(config).parent


def config_folder(source: Source) -> Path | None:
    """Returns the folder that the config and a checkpoint's own code are read from, None if the hub's cache has none."""
    with suppress(BadInput):
        return folder_of(source, source.revision)
    return None


def quantization_config(options: dict[str, Any]) -> Any:
    """Returns Transformers' config of these options.

    Raises:
        BadInput: If they name no method.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    if not options.keys() & {"quant_method", "load_in_4bit", "load_in_8bit"}:
        raise BadInput(
            'quantization needs "quant_method", or "load_in_4bit: true" or "load_in_8bit: true" for bitsandbytes'
        )
    return AutoQuantizationConfig.from_dict(dict(options))


class LookedUp(NamedTuple):
    """What a model is, told without loading it.

    Attributes:
        end_ids: Token ids that end an answer, sorted.
    """

    fingerprint: ModelFingerprint
    end_ids: tuple[int, ...]


def looked_up(text: str, options: ModelOptions, folders: Sequence[Path] = (), fetch: bool = False) -> LookedUp:
    """Returns what the model that `text` names is now; its weights are not loaded.

    Those of local files come from the cache or from reading them once; those of a hub id from the hub's own hashes of its
    files, or from the hub's cache where the hub cannot be asked. Where neither can tell, `fetch` lets the files be fetched.

    Raises:
        BadInput: As in `load_model`.
    """
    reference = parse(text, folders)
    source = source_of(reference)
    config = checked_config(source, reference, options)
    if options.quantization:
        config.quantization_config = quantization_config(options.quantization)
    elif source.gguf and hasattr(config, "quantization_config"):
        del config.quantization_config
    adapter = adapters.folder(reference.adapter, reference.adapter_revision) if reference.adapter else None
    tokenizer = tokenizer_of(source, adapter, reference, options)
    with failures.explained(reference.name):
        weights = _weights_now(source, adapter, fetch)
        settings = config_sha256(config, None if source.gguf else config_folder(source))
        print_ = ModelFingerprint(weights, tokenizer_sha256(tokenizer), template_sha256(tokenizer), settings)
        return LookedUp(print_, tuple(sorted(end_ids(_generation_config(source, config), tokenizer))))


def end_ids(generation: GenerationConfig | None, tokenizer: Any) -> frozenset[int]:
    """Returns the ids that end an answer."""
    ends = [generation.eos_token_id if generation else None, tokenizer.eos_token_id]
    return frozenset(i for end in ends if end is not None for i in (end if isinstance(end, list) else [end]))


def _weights_now(source: Source, adapter: Path | None, fetch: bool) -> str:
    if Path(source.place).is_absolute():
        return weights_sha256(Path(source.place), source.gguf, adapter)
    listed = hub.listed(source.place, source.revision)
    if listed is None:  # the hub cannot be asked: what is in its cache, if all of it is
        try:
            return weights_sha256(folder_of(source, source.revision), source.gguf, adapter)
        except BadInput:
            return ""
    known = hub_weights_sha256(listed.hashes, adapter)
    return known if known or not fetch else weights_sha256(hub.fetched(source.place, listed), adapter=adapter)


def _generation_config(source: Source, config: PretrainedConfig) -> GenerationConfig:
    """Returns what a loaded model would have: the checkpoint's own, else what its config.json says, else its config."""
    own: list[dict[str, Any]] = [{}, {"config_file_name": "config.json", "_from_model_config": True}]
    for options in own if source.gguf is None else ():
        with suppress(OSError, TypeError), quiet():
            return GenerationConfig.from_pretrained(source.place, revision=source.revision or "main", **options)
    return GenerationConfig.from_model_config(config)


def plain_weights(model: PreTrainedModel) -> None:
    """Drops what a GGUF file leaves in the config: once loaded, its weights are no longer quantised."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


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
