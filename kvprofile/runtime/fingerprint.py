"""What a model is, as `kvprofile check` measures it: four hashes, equal or not. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvprofile.errors import BadInput
from kvprofile.json_text import parse_json

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Fingerprint(NamedTuple):
    """SHA-256 digests of a model in lower-case hexadecimal; None where one is not known, which equals nothing.

    Two of them compared with `==` may both lack a digest; `same_model` is the question to ask.

    Attributes:
        weights_sha256: Of the checkpoint, with its adapter.
        tokenizer_sha256: Of the tokenizer's definition.
        template_sha256: Of the chat template.
        config_sha256: Of the settings that change what the weights compute.
    """

    weights_sha256: str | None
    tokenizer_sha256: str | None
    template_sha256: str | None
    config_sha256: str | None

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> Fingerprint:
        """Returns the digests among what is said of a model, such as `sender` in a profile's header; None where one lacks."""
        held = (model.get(name) for name in cls._fields)
        return cls(*(value if isinstance(value, str) else None for value in held))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the digests that are none."""
        return tuple(name for name, value in self._asdict().items() if not is_digest(value))


UNKNOWN = Fingerprint(None, None, None, None)
"""The fingerprint of a model that nobody measured; it equals none, itself included."""


def is_digest(value: object) -> bool:
    """Returns whether a value is a SHA-256 as kvprofile writes it: all of it, and in lower case."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def same_model(one: Fingerprint, other: Fingerprint) -> bool:
    """Returns whether all digests are known and equal."""
    return not one.unknown and one == other


class Pair(NamedTuple):
    """The models that a plan was measured on, and what they computed in.

    Attributes:
        sender: Who writes the cache.
        receiver: Who reads it.
        sender_dtype: Such as `bfloat16`.
        receiver_dtype: Likewise.
    """

    sender: Fingerprint
    receiver: Fingerprint
    sender_dtype: str
    receiver_dtype: str

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Pair:
        """Returns what a profile's header says."""
        sender, receiver = header["sender"], header["receiver"]
        return cls(Fingerprint.of(sender), Fingerprint.of(receiver), str(sender["dtype"]), str(receiver["dtype"]))


def fingerprints(check: Mapping[str, Any] | str | bytes) -> tuple[Fingerprint, Fingerprint]:
    """Returns sender's and receiver's fingerprints from what `kvprofile check --json` prints, as text or as its value.

    Raises:
        BadInput: If it is something else.
    """
    try:
        document = check if isinstance(check, Mapping) else parse_json(check)
        models = [document[role] for role in ("sender", "receiver")]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput("this is not what `kvprofile check SENDER RECEIVER --json` prints; run it again") from error
    if not all(isinstance(model, Mapping) for model in models):
        raise BadInput("this is not what `kvprofile check SENDER RECEIVER --json` prints; run it again")
    sender, receiver = map(Fingerprint.of, models)
    return sender, receiver
