"""What Transformers, PEFT and the hub raise, as one sentence that names the model and the mend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from kvprofile.errors import BadInput, KvprofileError, OutOfMemory, is_out_of_memory

_HUB_REASONS = {
    "GatedRepoError": 'is gated on the hub; accept its terms there and log in with "hf auth login"',
    "RevisionNotFoundError": "has no such revision on the hub; check what follows the @",
    "EntryNotFoundError": "has no config.json on the hub; name a repository in Transformers' format",
}


def require_on_hub(hub_id: str, revision: str | None) -> None:
    """Raises BadInput within seconds if a hub id is neither cached nor reachable.

    Transformers alone would retry for half a minute.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(hub_id, "config.json", revision=revision), str):
        return
    if constants.HF_HUB_OFFLINE:
        raise BadInput(
            f'"{_shown(hub_id, revision)}" is neither a folder here nor in the hub\'s cache; '
            "name a local folder, or unset HF_HUB_OFFLINE to fetch it"
        )
    try:
        HfApi().model_info(hub_id, revision=revision, timeout=10)
    except Exception as error:
        raise unreachable(hub_id, revision, error) from error


def unreachable(hub_id: str, revision: str | None, error: BaseException) -> BadInput:
    """Returns why a hub id could not be read."""
    shown = _shown(hub_id, revision)
    seen: BaseException | None = error
    while seen is not None:
        if reason := _HUB_REASONS.get(type(seen).__name__):
            return BadInput(f'"{shown}" {reason}')
        seen = seen.__cause__ or seen.__context__
    return BadInput(
        f'"{shown}" is neither a folder here nor reachable on the hub; check the spelling, the network or your login'
    )


def _shown(hub_id: str, revision: str | None) -> str:
    return f"{hub_id}@{revision}" if revision else hub_id


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns what loading the model `name` raises into `BadInput` or `OutOfMemory`.

    Errors of the operating system (permissions, a full disk) pass, since they already name their file.
    """
    try:
        yield
    except KvprofileError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise BadInput(_sentence(name, error)) from error
    except Exception as error:  # Parsers of damaged files raise anything, even a bare Exception.
        if is_out_of_memory(error):
            raise OutOfMemory(
                f'out of memory while loading "{name}"; use a smaller dtype, quantisation, or a device map such as "auto"'
            ) from error
        raise BadInput(_sentence(name, error)) from error


def _sentence(name: str, error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    if "trust_remote_code" in text:
        return (
            f'model "{name}" brings its own code; read it, then allow it with --trust-remote-code '
            "(trust_remote_code: true in a recipe)"
        )
    if isinstance(error, SafetensorError):
        return f'the weights of "{name}" are damaged ({text}); fetch or save them again'
    if re.search(r"attn_implementation|flash.?att", text, re.IGNORECASE):
        return (
            f'model "{name}" cannot use that attention kernel here ({_first(text)}); '
            "kvprofile doctor lists what can be used"
        )
    return f'cannot load model "{name}": {_first(text) or type(error).__name__}'


def _first(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0][:240].rstrip(". ")
