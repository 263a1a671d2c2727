"""Keys under which a server keeps K/V: what a plan makes can never be found as what a model makes. Standard library only.

A key is a prefix in clear text and a SHA-256. Hashed are, one after the other: the kind and version of the key, the length and
the text of a JSON list (tenant, digests of the models, dtypes, plan), and the length and the ids of the context's tokens, eight
bytes each. Lengths, in bytes, stand before what they measure and JSON quotes what it holds, so no two contents are one text.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from kvprofile.errors import BadInput
from kvprofile.runtime.fingerprint import Fingerprint
from kvprofile.runtime.plan import ChosenPlan

KEY_VERSION = 1
"""Raised when the same content gets another key."""


def cache_key(plan: ChosenPlan, context: Sequence[int], namespace: str, *, dtype: str | None = None) -> str:
    """Returns the key of the K/V that a plan leaves in the receiver: an approximation of the receiver's own.

    Args:
        plan: What made it.
        context: The context's token ids from the first one on, which stands at position 0.
        namespace: Whose it is, such as a tenant; nobody else finds it.
        dtype: What the server keeps it in, if both its models do not compute in the dtype of the profile.

    Raises:
        BadInput: If the profile does not tell what its models are, or context or namespace are empty or of other kinds, or a
            text is no valid Unicode.
    """
    pair = plan.pair
    _require_known(pair.sender, "sender")
    _require_known(pair.receiver, "receiver")
    dtypes = [pair.sender_dtype, pair.receiver_dtype] if dtype is None else [_text(dtype, "dtype")] * 2
    what = [plan.strategy, plan.start_layer, plan.stop_layer, plan.params]
    return _key("approximate", namespace, [*pair.sender, *pair.receiver, *dtypes, *what], context)


def exact_cache_key(model: Fingerprint, dtype: str, context: Sequence[int], namespace: str) -> str:
    """Returns the key of the K/V of a model's own full prefill.

    Args:
        model: What made it.
        dtype: What it is kept in, such as `bfloat16`.
        context: As for `cache_key`.
        namespace: As for `cache_key`.

    Raises:
        BadInput: If a digest of the model is not known, or context or namespace are empty or of other kinds, or a text is
            no valid Unicode.
    """
    _require_known(model, "model")
    return _key("exact", namespace, [*model, _text(dtype, "dtype")], context)


def _key(kind: str, namespace: str, what: list[Any], context: Sequence[int]) -> str:
    texts = [_text(namespace, "namespace"), *what]
    _require_unicode(texts)
    held = json.dumps(texts, ensure_ascii=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(f"kvprofile {kind} KV, key {KEY_VERSION}\n".encode())
    for part in (held, _tokens(context)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"kvprofile-{kind}-v{KEY_VERSION}-{digest.hexdigest()}"


def _tokens(context: Sequence[int]) -> bytes:
    try:
        ids = array("q", iter(context))  # without iter, bytes would be taken as numbers of eight bytes each
    except (TypeError, OverflowError) as error:
        raise BadInput("the context is no sequence of token ids; give whole numbers from 0 on") from error
    if not ids or min(ids) < 0:
        raise BadInput("the context is empty or has negative token ids; give whole numbers from 0 on")
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _text(value: str, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadInput(f"the {name} of a cache key is empty or no text; give one")
    return value


def _require_unicode(values: Sequence[Any]) -> None:
    """Refuses lone surrogates: in JSON, two of them in a row are the very text of the character that such a pair stands for."""
    for value in values:
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise BadInput(f"{ascii(value)[:40]} in a cache key has a lone surrogate; give valid Unicode")


def _require_known(model: Fingerprint, role: str) -> None:
    if unknown := model.unknown:
        raise BadInput(
            f"the {role}'s {unknown[0]} is not known, so its cache has no key; sweep again or check the model"
        )
