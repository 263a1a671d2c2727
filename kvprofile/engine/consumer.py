"""The reference consumer: a receiver in another process than the sender answers over a cache that comes through a link.

The sender ships E, the hidden states that enter the first recomputed layer, and then the K/V of reused layers. The receiver
recomputes its group as soon as E is there, while K/V still come, and reads the suffix layer by layer as their K/V come
(arXiv 2411.02820). Answers are those of `partial_prefill` and `greedy`, token for token;
whatever goes wrong with the link ends in the receiver's own full prefill.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from kvprofile.cost.timeline import MODES, Mode
from kvprofile.data.prompts import token_sha256
from kvprofile.engine.cache import KV, LaterCache, prefilled_cache
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.executor import Question
from kvprofile.engine.frames import RequestIdentity, pack, parts
from kvprofile.engine.loader import Event, Loader
from kvprofile.engine.reference import Capture, answer_ids
from kvprofile.engine.transport import LinkFailed, Sink, Source
from kvprofile.errors import BadInput
from kvprofile.layers import LayerRange

TIMEOUT_MS = 30_000.0
LONGEST_TIMEOUT_MS = 86_400_000.0


@dataclass(frozen=True)
class Served:
    """An answer and how it came about.

    Attributes:
        token_ids: The answer; the id that ends it, if one does, is the last.
        first_token_ms: From the call of `consume` to the first id, with the time lost on a link that failed.
        fallback: Why the sender's cache was not used and the receiver prefilled the context itself; None if it was used.
        events: In the order in which they happened.
    """

    token_ids: tuple[int, ...]
    first_token_ms: float
    fallback: str | None
    events: tuple[Event, ...]


def request_identity(sender_weights_sha256: str, token_ids: Sequence[int], group: LayerRange) -> RequestIdentity:
    """Returns what the frames of a request have to name.

    Raises:
        BadInput: If a token id is no int32.
    """
    try:
        context_sha256 = token_sha256(token_ids)
    except struct.error as error:
        raise BadInput(f"the context has a token id that is no int32 ({error}); give ids of the vocabulary") from error
    return RequestIdentity(sender_weights_sha256, context_sha256, _normal(group))


def ship(
    capture: Capture, group: LayerRange, sender_weights_sha256: str, sink: Sink, mode: Mode = "overlapped"
) -> None:
    """Sends what one request needs of a sender's prefill, frame by frame; a throttle in the sink limits the bandwidth.

    Args:
        capture: The sender's; K/V `(1, G, S, D)` per layer, keys after rotary, and hidden states `(1, S, E)` entering each layer.
        group: Layers that the receiver recomputes; empty for full reuse.
        sender_weights_sha256: Fingerprint of the sender's weights.
        sink: Where to; stays open.
        mode: As the receiver's.

    Raises:
        BadInput: If the group is none of the sender's or the mode is unknown.
        OSError: If the receiver has gone.
    """
    _check_group(group, len(capture.kv))
    _check_mode(mode)
    identity = request_identity(sender_weights_sha256, capture.token_ids, group)
    shipped = parts(identity.group, mode, capture.kv, lambda layer: capture.entering[layer])
    for number, part in enumerate(shipped):
        sink.send(number, pack(part, identity))


def consume(
    receiver: Decoder,
    token_ids: Sequence[int],
    question: Question,
    group: LayerRange,
    sender_weights_sha256: str,
    source: Source,
    mode: Mode = "overlapped",
    timeout_ms: float = TIMEOUT_MS,
    say: Callable[[str], None] = lambda remark: None,
) -> Served:
    """Returns the greedy answer over a sender's cache, or over the receiver's own prefill if the link fails.

    Args:
        receiver: Recomputes `group` from the hidden states that come, reads the suffix and answers.
        token_ids: The context, S ids.
        question: What follows it, T ids.
        group: Layers to recompute; empty for full reuse. From layer 0 on, no hidden states are needed.
        sender_weights_sha256: Fingerprint of the sender that the plan was profiled with; frames of another are refused.
        source: Where frames come from; it is closed at the end, whatever happens.
        mode: `overlapped`, or one of the two that load first and compute then.
        timeout_ms: Until the last frame has to be there; above 0, at most a day.
        say: Called with a sentence if the sender's cache is not used.

    Raises:
        BadInput: If the group is none of the receiver's, the context or the answer has no token, a token id is no int32, the
            mode is unknown, the timeout cannot be, or the receiver is spread over several devices.
    """
    begun = time.monotonic()
    with closing(source):
        identity = request_identity(sender_weights_sha256, token_ids, group)
        _check(receiver, identity.group, token_ids, question, mode)
        if not 0 < timeout_ms <= LONGEST_TIMEOUT_MS:
            raise BadInput(f"a timeout of {timeout_ms} ms cannot be; give one above 0 and up to {LONGEST_TIMEOUT_MS:g}")
        kv, hidden = receiver.context_like(len(token_ids))
        expected = list(parts(identity.group, mode, kv, lambda _: hidden))
        loader = Loader(source, expected, identity, receiver.devices[0], begun, timeout_ms)
        reason = None
        try:
            with loader.running():
                answer = _answer(receiver, token_ids, question, identity.group, loader, mode)
                first = next(answer)
        except LinkFailed as failure:
            reason = str(failure)
    if reason is not None:
        say(f"the sender's cache is not used, the receiver prefills the context itself: {reason}")
        own = receiver.recompute(token_ids, receiver.all_layers, None)
        answer = answer_ids(receiver, prefilled_cache(own), *question)
        first = next(answer)
    first_token_ms = 1000 * (time.monotonic() - begun)
    return Served((first, *answer), first_token_ms, reason, tuple(loader.events))


def _normal(group: LayerRange) -> LayerRange:
    return group if group.length else LayerRange(0, 0)


def _check_group(group: LayerRange, layers: int) -> None:
    if not 0 <= group.start <= group.stop <= layers:
        raise BadInput(
            f"[{group.start}, {group.stop}) is no group of layers of a model with {layers}; give a start and a stop up to that"
        )


def _check(receiver: Decoder, group: LayerRange, token_ids: Sequence[int], question: Question, mode: Mode) -> None:
    _check_group(group, len(receiver.layers))
    if not token_ids or not question.suffix or question.max_new_tokens < 1:
        raise BadInput("context, suffix and answer need at least one token each")
    _check_mode(mode)
    places = sorted({str(place) for place in getattr(receiver.model, "hf_device_map", {}).values()})
    if len(places) > 1:
        raise BadInput(
            f"the receiver is spread over {', '.join(places)}, and caches are loaded to one device; load it whole on one"
        )


def _check_mode(mode: Mode) -> None:
    if mode not in MODES:
        raise BadInput(f'"{mode}" is no way to load a cache; take one of {", ".join(MODES)}')


def _answer(
    receiver: Decoder, token_ids: Sequence[int], question: Question, group: LayerRange, loader: Loader, mode: Mode
) -> Iterator[int]:
    """Yields the answer's ids; what the first one needs of the link is waited for layer by layer."""
    if mode != "overlapped":
        loader.wait_for_all()
    recomputed_layers, cache = range(*group), LaterCache(len(receiver.layers), len(token_ids))
    if group.length:
        entering = loader.take("e", group.start)["entering"] if group.start > 0 else None

        def recompute(layer: int) -> None:
            loader.check()
            if layer in recomputed_layers:
                loader.note("recompute", layer)

        with receiver.before_layers(recompute):
            for layer, kv in zip(recomputed_layers, receiver.recompute(token_ids, group, entering), strict=True):
                cache.fill(layer, kv)

    def read(layer: int) -> None:
        if layer not in recomputed_layers:
            cache.fill(layer, KV(**loader.take("kv", layer)))
        loader.note("read", layer)

    answer = answer_ids(receiver, cache, *question)
    with receiver.before_layers(read):
        first = next(answer)
    yield first
    yield from answer
