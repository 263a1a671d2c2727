"""Which runs may share their parts: those whose every declared field is equal, and no others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvprofile.identity import RunIdentity
from kvprofile.recipe import load_recipe
from kvprofile.sweep import sweep
from tests.tiny_sweep import RECORDS, Silent, write_pair


def identity(**changes: Any) -> RunIdentity:
    held: dict[str, Any] = {
        "sender": ("weights", "tokenizer"),
        "receiver": ("other weights", "tokenizer"),
        "samples": (("r0", "qa", "data", "hash", (1, 2), ("answer",), 0, 32),),
        "metrics": ("qa/data/f1@1",),
        "strategies": (("full_reuse", 1),),
        "granularity": (1, 2),
        "references": "data",
        "search": "exhaustive",
        "known": ((0, 1),),
        "anew": False,
        "end_ids": (2,),
        "dtype": "float32",
        "attention": "sdpa",
        "quantization": "null",
        "device_type": "cpu",
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "store_text": True,
        "seed": 0,
        "confidence": 0.95,
        "resamples": 200,
    }
    return RunIdentity(**{**held, **changes})


def other(value: Any) -> Any:
    """Returns a value of the same type that differs as little as can be."""
    match value:
        case bool():
            return not value
        case tuple():
            return (*value[:-1], other(value[-1]))
        case str():
            return f"{value}x"
        case _:
            return value + 1


def test_equal_values_are_one_run() -> None:
    assert identity().sha256() == identity().sha256()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RunIdentity)])
def test_every_field_decides(field: str) -> None:
    plain = identity()
    changed = identity(**{field: other(getattr(plain, field))})
    assert changed.sha256() != plain.sha256()


def test_a_pair_is_ordered() -> None:
    plain = identity()
    assert identity(sender=plain.receiver, receiver=plain.sender).sha256() != plain.sha256()


class StoppedAfter(Silent):
    """Progress that interrupts the sweep once so many samples are measured."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples

    def sample_done(self) -> None:
        super().sample_done()
        if self.measured == self._samples:
            raise KeyboardInterrupt


def test_another_weight_of_the_sender_resumes_nothing(tmp_path: Path) -> None:
    recipe, out = load_recipe(str(write_pair(tmp_path))), tmp_path / "store"
    for resumed in (0, 1):
        told = StoppedAfter(1)
        with pytest.raises(KeyboardInterrupt):
            sweep(recipe, out, told)
        assert told.resumed == resumed
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    told = Silent()
    sweep(recipe, out, told)
    assert (told.resumed, told.measured) == (0, RECORDS)
