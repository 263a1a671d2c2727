"""The wire format: what the library reads, what is refused before memory is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save

from kvprofile.engine.consumer import request_identity
from kvprofile.engine.frames import MAGIC, MOST_HEADER_BYTES, Part, pack, unpack
from kvprofile.engine.reference import capture
from kvprofile.engine.transport import LinkFailed
from kvprofile.layers import LayerRange
from tests.engine.architectures import tiny_decoder
from tests.engine.links import CONTEXT, SENDER, body_of, frames, with_lengths

GROUP = LayerRange(1, 3)
IDENTITY = request_identity(SENDER, CONTEXT, GROUP)


def test_bodies_are_safetensors_that_the_library_reads() -> None:
    theirs = capture(tiny_decoder(seed=1), CONTEXT)
    entering, first, _ = map(body_of, frames(theirs, GROUP))
    assert torch.equal(load(entering)["entering"], theirs.entering[1])
    held = load(first)
    assert torch.equal(held["keys"], theirs.kv[0].keys)
    assert torch.equal(held["values"], theirs.kv[0].values)


def test_tensors_that_share_memory() -> None:
    """As keys and values of a fused projection do; safetensors itself refuses them."""
    both = torch.arange(96, dtype=torch.float32).reshape(1, 2, 6, 8)
    part = Part("kv", 0, {"keys": both[..., :5], "values": both[..., 5:]})
    with pytest.raises(RuntimeError):
        save(part.tensors)
    expected = Part("kv", 0, {name: tensor.to("meta") for name, tensor in part.tensors.items()})
    read = _unpacked(b"".join(pack(part, IDENTITY)), expected)
    assert torch.equal(read["keys"], both[..., :5])
    assert torch.equal(read["values"], both[..., 5:])


def test_bytes_may_come_one_at_a_time() -> None:
    part = Part("e", 1, {"entering": torch.randn(1, 3, 4, dtype=torch.bfloat16)})
    frame = b"".join(pack(part, IDENTITY))
    assert frame.startswith(MAGIC)
    assert torch.equal(_unpacked(frame, part, at_once=1)["entering"], part.tensors["entering"])


def test_no_memory_is_taken_for_what_is_refused() -> None:
    part = Part("e", 1, {"entering": torch.randn(1, 3, 4)})
    frame = with_lengths(b"".join(pack(part, IDENTITY)), None, 48 + MOST_HEADER_BYTES + 1)

    def none(count: int) -> torch.Tensor:
        raise AssertionError(f"{count} bytes taken")

    with pytest.raises(LinkFailed, match="a body of"):
        unpack(_reader(frame, 100), part, IDENTITY, none)


def test_full_reuse_names_its_strategy() -> None:
    theirs = capture(tiny_decoder(seed=1), CONTEXT)
    plan = b'"plan":{"strategy":"full_reuse","start_layer":0,"stop_layer":0}'
    assert all(plan in frame for frame in frames(theirs, LayerRange(2, 2)))


def _reader(frame: bytes, at_once: int) -> Callable[[memoryview], int]:
    place = 0

    def receive(into: memoryview) -> int:
        nonlocal place
        piece = frame[place : place + min(at_once, len(into))]
        into[: len(piece)] = piece
        place += len(piece)
        return len(piece)

    return receive


def _unpacked(frame: bytes, expected: Part, at_once: int = 1000) -> dict[str, torch.Tensor]:
    return unpack(_reader(frame, at_once), expected, IDENTITY, lambda count: torch.empty(count, dtype=torch.uint8))
