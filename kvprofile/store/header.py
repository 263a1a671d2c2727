"""The header of a profile, which lies in the footers of its tables, where anybody may have written it. Needs pyarrow only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvprofile.errors import BadInput, NewerFormat
from kvprofile.json_text import parse_json
from kvprofile.store.migrations import migrate
from kvprofile.store.schema import DATASET_KEYS, FOOTER_KEY, FORMAT_VERSION, missing_header_keys

_TEXTS = ("profile_id", "created_at", "device", "references", "search")
_TEXTS_OF_MODELS = ("name", "weights_sha256", "tokenizer_sha256", "architecture")
_MOST_RESAMPLES = 10**6
_HIGHEST_VERSION = 2**31 - 1


def parse_header(path: Path, metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Returns the header in a footer as one of this format.

    Args:
        path: The file, for people.
        metadata: Of its schema.

    Raises:
        BadInput: If there is none, it is incomplete, holds what kvprofile never writes, or was made by a newer kvprofile.
    """
    header = migrate(_document(path, metadata))
    if missing := missing_header_keys(header):
        raise BadInput(f"{path} has an incomplete footer (no {', '.join(missing)}); copy it again or sweep again")
    confidence, seed, version = header["confidence"], header["seed"], header["version"]
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise BadInput(f"{path} has a footer whose confidence is no number between 0 and 1; sweep again")
    if type(seed) is not int or seed < 0:
        raise BadInput(f"{path} has a footer whose seed is no whole number from 0 on; sweep again")
    if type(version) is not int or not 1 <= version <= _HIGHEST_VERSION:
        raise BadInput(f"{path} has a footer whose version is no whole number from 1 on; copy it again or sweep again")
    if not _of_right_kinds(header):
        raise BadInput(f"{path} has a footer with values of other kinds than kvprofile writes; sweep again")
    return header


def _document(path: Path, metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Returns the header as it is written, of this format or an older one."""
    foreign = (
        f"{path} was not written by kvprofile: its footer has no valid key {FOOTER_KEY!r}; give a profile's folder"
    )
    try:
        header: dict[str, Any] = parse_json(metadata[FOOTER_KEY.encode()])
        made_by = header["format_version"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(foreign) from error
    if isinstance(made_by, bool) or not isinstance(made_by, int) or made_by < 1:
        raise BadInput(foreign)
    if made_by > FORMAT_VERSION:
        raise NewerFormat(
            f"{path} was made by a newer kvprofile (format {made_by}, this reads up to {FORMAT_VERSION}): "
            "pip install -U kvprofile"
        )
    return header


def _ends_answers(data: Mapping[str, Any]) -> bool:
    stop = data["stop"]
    texts = isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)
    return texts and bool(stop) and isinstance(data.get("task"), str)


def _of_right_kinds(header: Mapping[str, Any]) -> bool:
    models = [header[role] for role in ("sender", "receiver")]
    texts = [
        *(header[key] for key in _TEXTS),
        *(header["metrics"] if isinstance(header["metrics"], list) else [None]),
        *(model[key] for model in models for key in _TEXTS_OF_MODELS),
        *(data[key] for data in header["datasets"] for key in DATASET_KEYS),
    ]
    optional = [header["bounds"], *(model[f"{key}_sha256"] for model in models for key in ("template", "config"))]
    resamples = header["resamples"]
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(text, str | None) for text in optional)
        and isinstance(header["strategies"], dict | None)
        and isinstance(header["end_ids"], list | None)
        and all(_ends_answers(data) for data in header["datasets"] if "stop" in data)
        and type(resamples) is int
        and 1 <= resamples <= _MOST_RESAMPLES
    )
