"""The wire format of a sender's cache: one frame for E, one for each layer's K/V.

    frame    = preamble, header, body
    preamble = magic (8 bytes), wire version (u32), bytes of the header (u32), bytes of the body (u64); little-endian
    header   = JSON: kind, layer, tensors (shape and dtype by name), sha256 of the body, and the request it belongs to
    body     = a safetensors blob: `entering` (1, S, E) for E; `keys` and `values` (1, G, S, D) for K/V, keys after rotary

The receiver knows everything but the numbers beforehand, from its own model and the request, so a header says nothing that is
believed: what differs from the expected is refused before memory is taken for the body, and nothing is ever unpickled.
The hash finds damage, not malice: whoever can write to the link can write a hash, so the link itself must be trusted.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from kvprofile.cost.timeline import Carried, Mode, link_order
from kvprofile.engine.cache import ContextKV
from kvprofile.engine.transport import LinkFailed
from kvprofile.layers import LayerRange

WIRE_VERSION = 1
MAGIC = b"KVFRAME\n"
MOST_HEADER_BYTES = 4096
"""Of a frame's header, and of the header in a safetensors blob."""

_PREAMBLE = struct.Struct("<8sIIQ")
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_OTHER = {
    "kind": "a frame of another kind",
    "layer": "a frame of another layer",
    "tensors": "a frame of another shape or dtype",
    "sender_weights_sha256": "a frame of another sender",
    "context_sha256": "a frame of another context",
    "plan": "a frame of another plan",
}

Receive = Callable[[memoryview], int]
"""Reads some bytes into the buffer and returns how many; 0 at the end."""


class RequestIdentity(NamedTuple):
    """What a request is about; every frame names it, and one that names another is refused.

    Attributes:
        sender_weights_sha256: Fingerprint of the model that wrote the cache (`kvprofile.models.fingerprint`).
        context_sha256: Over the context ids as little-endian int32.
        group: The plan: layers that the receiver recomputes; `LayerRange(0, 0)` for full reuse.
    """

    sender_weights_sha256: str
    context_sha256: str
    group: LayerRange

    def as_dict(self) -> dict[str, Any]:
        strategy = "layer_group" if self.group.length else "full_reuse"
        return {
            "sender_weights_sha256": self.sender_weights_sha256,
            "context_sha256": self.context_sha256,
            "plan": {"strategy": strategy, "start_layer": self.group.start, "stop_layer": self.group.stop},
        }


class Part(NamedTuple):
    """What one frame carries, with data on the sender's side and without (device `meta`) on the receiver's."""

    kind: Carried
    layer: int
    tensors: dict[str, torch.Tensor]

    def __str__(self) -> str:
        return f"layer {self.layer}" if self.kind == "kv" else f"E of layer {self.layer}"

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Frame(NamedTuple):
    """One frame, ready to send."""

    head: bytes
    body: bytes


def parts(group: LayerRange, mode: Mode, kv: ContextKV, entering: Callable[[int], torch.Tensor]) -> Iterator[Part]:
    """Yields what the link carries for a plan, in its order.

    Args:
        group: Layers to recompute.
        mode: See `kvprofile.cost.timeline`.
        kv: K/V of every layer.
        entering: Returns the hidden states that enter a layer, `(1, S, E)`.
    """
    for kind, layer in link_order(group, len(kv), mode):
        yield Part(kind, layer, {"entering": entering(layer)} if kind == "e" else kv[layer]._asdict())


def pack(part: Part, identity: RequestIdentity) -> Frame:
    """Returns the frame of one part."""
    # Copied: safetensors refuses tensors that share memory, as keys and values of a fused projection do.
    held = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        for name, tensor in part.tensors.items()
    }
    body = save(held)
    header = {**_described(part), **identity.as_dict(), "sha256": hashlib.sha256(body).hexdigest()}
    text = json.dumps(header, separators=(",", ":")).encode()
    return Frame(_PREAMBLE.pack(MAGIC, WIRE_VERSION, len(text), len(body)) + text, body)


def unpack(
    receive: Receive, expected: Part, identity: RequestIdentity, buffer_of: Callable[[int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Reads a frame; its bytes are hashed as they come.

    Args:
        receive: The link.
        expected: What has to come.
        identity: The request it has to belong to.
        buffer_of: Returns a uint8 buffer of so many bytes on the host; the tensors are views of it.

    Raises:
        LinkFailed: If anything else comes, or less.
    """
    preamble = bytearray(_PREAMBLE.size)
    _fill(receive, memoryview(preamble))
    magic, version, header_bytes, body_bytes = _PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        raise LinkFailed("no frame begins here")
    if version != WIRE_VERSION:
        age = "newer" if version > WIRE_VERSION else "older"
        raise LinkFailed(f"wire version {version} is {age} than {WIRE_VERSION}, which this kvprofile reads")
    if header_bytes > MOST_HEADER_BYTES:
        raise LinkFailed(f"a header of {header_bytes} bytes; the most is {MOST_HEADER_BYTES}")
    text = bytearray(header_bytes)
    _fill(receive, memoryview(text))
    header = _parsed(text)
    for name, value in (*_described(expected).items(), *identity.as_dict().items()):
        if header.get(name) != value:
            raise LinkFailed(f"{_OTHER[name]} came")
    if not expected.data_bytes <= body_bytes <= expected.data_bytes + MOST_HEADER_BYTES:
        raise LinkFailed(f"a body of {body_bytes} bytes for tensors of {expected.data_bytes}")
    buffer = buffer_of(body_bytes)
    digest = hashlib.sha256()
    _fill(receive, buffer.numpy().data, digest.update)
    if header.get("sha256") != digest.hexdigest():
        raise LinkFailed("hash differs")
    return _views(buffer, expected)


def _described(part: Part) -> dict[str, Any]:
    tensors = {name: {"dtype": _dtype(t), "shape": list(t.shape)} for name, t in part.tensors.items()}
    return {"kind": part.kind, "layer": part.layer, "tensors": tensors}


def _dtype(tensor: torch.Tensor) -> str:
    return _DTYPES.get(tensor.dtype, str(tensor.dtype))


def _fill(receive: Receive, view: memoryview, each: Callable[[memoryview], None] = lambda _: None) -> None:
    done = 0
    while done < len(view):
        count = receive(view[done:])
        if not count:
            raise LinkFailed(f"the link ends {len(view) - done} bytes early")
        each(view[done : done + count])
        done += count


def _parsed(text: bytes | bytearray) -> dict[str, Any]:
    try:
        value = json.loads(bytes(text))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise LinkFailed("a header that is no JSON object")
    return value


def _views(buffer: torch.Tensor, expected: Part) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors blob in place; the library's own reader would copy them."""
    length = int.from_bytes(buffer[:8].numpy().tobytes(), "little")
    if length > MOST_HEADER_BYTES:
        raise LinkFailed("a safetensors header that is too long")
    held = _parsed(buffer[8 : 8 + length].numpy().tobytes())
    held.pop("__metadata__", None)
    data, begins, views = buffer[8 + length :], 0, {}
    fits = held.keys() == expected.tensors.keys() and len(data) == expected.data_bytes and length % 8 == 0
    # As safetensors lays them out: wide dtypes first, then by name, without a gap.
    for name in sorted(expected.tensors, key=lambda name: (-expected.tensors[name].element_size(), name)):
        wanted = expected.tensors[name]
        ends = begins + wanted.nbytes
        said = {"dtype": _dtype(wanted), "shape": list(wanted.shape), "data_offsets": [begins, ends]}
        if not fits or held[name] != said:
            raise LinkFailed("a body that does not hold what its header says")
        views[name] = data[begins:ends].view(wanted.dtype).view(wanted.shape)
        begins = ends
    return views
