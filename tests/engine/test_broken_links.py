"""Whatever goes wrong with a link ends in the receiver's own full prefill, soon, with the reason and nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from kvprofile.engine.consumer import consume
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.frames import MOST_HEADER_BYTES
from kvprofile.engine.reference import Capture, capture
from kvprofile.layers import LayerRange
from tests.engine.architectures import tiny_decoder
from tests.engine.links import (
    CONTEXT,
    GROUP,
    PREAMBLE,
    QUESTION,
    SENDER,
    Sending,
    changed_header,
    fell_back,
    flipped,
    frames,
    receiver,
    sending,
    theirs,
    with_body,
    with_header_text,
    with_lengths,
    with_version,
)

HASH_OF_NOTHING = "0" * 64


def fallback_of(link: Sending, timeout_ms: float = 20_000) -> str:
    remarks: list[str] = []
    begun = time.monotonic()
    with link:
        served = consume(
            receiver(), CONTEXT, QUESTION, GROUP, SENDER, link.source, timeout_ms=timeout_ms, say=remarks.append
        )
    assert time.monotonic() - begun < 10, "it hung"
    return fell_back(served, remarks)


def _other_capture(**changes: object) -> Capture:
    other = tiny_decoder(seed=1)
    if "dtype" in changes:
        other = Decoder(other.model.to(changes["dtype"]))
    return capture(other, changes.get("context", CONTEXT))  # type: ignore[arg-type]


DAMAGED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "nothing": (lambda whole: [], "E of layer 1: the link ends 24 bytes early"),
    "half of the preamble": (lambda whole: [whole[0][:10]], "E of layer 1: the link ends 14 bytes early"),
    "half of the header": (lambda whole: [whole[0][: PREAMBLE + 9]], "E of layer 1: the link ends"),
    "half of E": (lambda whole: [whole[0][:-7]], "E of layer 1: the link ends 7 bytes early"),
    "half of K/V": (lambda whole: [whole[0], whole[1], whole[2][:-1000]], "layer 3: the link ends 1000 bytes early"),
    "no last layer": (lambda whole: whole[:2], "layer 3: the link ends 24 bytes early"),
    "a layer left out": (lambda whole: [whole[0], whole[2]], "layer 0: a frame of another layer came"),
    "no E": (lambda whole: whole[1:], "E of layer 1: a frame of another kind came"),
    "one bit of the first number": (lambda whole: [whole[0], flipped(whole[1], -1), whole[2]], "layer 0: hash differs"),
    "one bit of E": (lambda whole: [flipped(whole[0], -500), *whole[1:]], "E of layer 1: hash differs"),
    "another hash": (
        lambda whole: [*whole[:2], changed_header(whole[2], sha256=HASH_OF_NOTHING)],
        "layer 3: hash differs",
    ),
    "no hash": (lambda whole: [changed_header(whole[0], sha256=None), *whole[1:]], "E of layer 1: hash differs"),
    "garbage": (lambda whole: [bytes(range(256)) * 20], "E of layer 1: no frame begins here"),
    "garbage after E": (lambda whole: [whole[0], bytes(range(256)) * 20], "layer 0: no frame begins here"),
    "a newer wire": (
        lambda whole: [with_version(whole[0], 2), *whole[1:]],
        "E of layer 1: wire version 2 is newer than 1, which this kvprofile reads",
    ),
    "an older wire": (
        lambda whole: [with_version(whole[0], 0)],
        "E of layer 1: wire version 0 is older than 1, which this kvprofile reads",
    ),
    "a huge header": (
        lambda whole: [with_lengths(whole[0], 2**32 - 1, None)],
        f"E of layer 1: a header of 4294967295 bytes; the most is {MOST_HEADER_BYTES}",
    ),
    "a huge body": (
        lambda whole: [with_lengths(whole[0], None, 2**63)],
        f"E of layer 1: a body of {2**63} bytes for tensors of {23 * 32 * 4}",
    ),
    "a small body": (
        lambda whole: [with_lengths(whole[0], None, 100)],
        "E of layer 1: a body of 100 bytes for tensors of",
    ),
    "a header that is a list": (
        lambda whole: [with_header_text(whole[0], b"[]")],
        "E of layer 1: a header that is no JSON object",
    ),
    "a header that is not UTF-8": (
        lambda whole: [with_header_text(whole[0], b"\xff\xfe{}")],
        "E of layer 1: a header that is no JSON object",
    ),
    "a deep header": (
        lambda whole: [with_header_text(whole[0], b"[" * MOST_HEADER_BYTES)],
        "E of layer 1: a header that is no JSON object",
    ),
    "an empty header": (lambda whole: [with_header_text(whole[0], b"{}")], "E of layer 1: a frame of another kind"),
    "a safetensors header without end": (
        lambda whole: [with_body(whole[0], lambda body: b"\xff" * 8 + body[8:])],
        "E of layer 1: a safetensors header that is too long",
    ),
    "no safetensors": (
        lambda whole: [with_body(whole[0], lambda body: body[:8] + b"x" + body[9:])],
        "E of layer 1: a header that is no JSON object",
    ),
    "tensors of other names": (
        lambda whole: [with_body(whole[0], lambda body: body.replace(b'"entering"', b'"centring"'))],
        "E of layer 1: a body that does not hold what its header says",
    ),
    "values where keys are": (
        lambda whole: [whole[0], with_body(whole[1], lambda body: body.replace(b"[1472,2944]", b"[0,1472]   "))],
        "layer 0: a body that does not hold what its header says",
    ),
    "another sender": (
        lambda whole: frames(theirs(), GROUP, sender="00" * 32),
        "E of layer 1: a frame of another sender came",
    ),
    "another context": (
        lambda whole: frames(_other_capture(context=CONTEXT[::-1]), GROUP),
        "E of layer 1: a frame of another context came",
    ),
    "another plan": (
        lambda whole: frames(theirs(), LayerRange(1, 2)),
        "E of layer 1: a frame of another plan came",
    ),
    "a longer context": (
        lambda whole: frames(_other_capture(context=(*CONTEXT, 5)), GROUP),
        "E of layer 1: a frame of another shape or dtype came",
    ),
    "another dtype": (
        lambda whole: frames(_other_capture(dtype=torch.bfloat16), GROUP),
        "E of layer 1: a frame of another shape or dtype came",
    ),
    "other heads": (
        lambda whole: frames(capture(tiny_decoder("gpt_neox"), CONTEXT), GROUP),
        "layer 0: a frame of another shape or dtype came",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_link_ends_in_a_full_prefill(damage: str) -> None:
    change, reason = DAMAGED[damage]
    assert fallback_of(sending(change(frames(theirs(), GROUP)))).startswith(reason)


@pytest.mark.parametrize("mode", ["load_all", "load_reused", "overlapped"])
def test_every_mode_falls_back(mode: str) -> None:
    whole, remarks = frames(theirs(), GROUP, mode), []
    with sending(whole[:-1]) as link:
        served = consume(receiver(), CONTEXT, QUESTION, GROUP, SENDER, link.source, mode, say=remarks.append)
    assert fell_back(served, remarks) == "layer 3: the link ends 24 bytes early"
