"""What decides a measurement, as data: two runs with equal identity may share their parts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

FINGERPRINTS = {
    "weights_sha256": "weights",
    "tokenizer_sha256": "tokenizer",
    "template_sha256": "chat template",
    "config_sha256": "config",
}
"""What makes a model the same model, by key of a profile's header, in words for people."""


@dataclass(frozen=True)
class RunIdentity:
    """Every field takes part in the hash; what must not (batch size, device index, worker count) is not a field.

    Attributes:
        version: Raised when what a part holds changes.
        sender, receiver: Fingerprints of weights, tokenizer, template and config.
        samples: Per sample its id, task, data set, hashes of context, suffix and references, and decode limit.
        metrics: `name@version` per task and data set.
        strategies: Version by name.
        known: Groups that an adaptive search began with.
        anew: Whether it went on to the coarse grid in any case.
    """

    sender: tuple[str, ...]
    receiver: tuple[str, ...]
    samples: tuple[tuple[Any, ...], ...]
    metrics: tuple[str, ...]
    strategies: tuple[tuple[str, int], ...]
    granularity: tuple[int, ...]
    references: str
    search: str
    known: tuple[tuple[int, int], ...]
    anew: bool
    end_ids: tuple[int, ...]
    dtype: str
    attention: str
    quantization: str
    device_type: str
    torch: str
    transformers: str
    store_text: bool
    seed: int
    confidence: float
    resamples: int
    version: int = 4

    def sha256(self) -> str:
        """Returns the hash of all fields by name."""
        return json_sha256(dataclasses.asdict(self))


def json_sha256(value: Any) -> str:
    """Returns the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
