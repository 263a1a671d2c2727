"""The consumer against the reference executor and the timeline; see test_broken_links.py and test_lost_links.py for failures."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprofile.cost.timeline import MODES, LayerCost, Link, Mode, Request, first_tokens_ms
from kvprofile.engine.cache import KV, LaterCache
from kvprofile.engine.consumer import Served, consume, ship
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.executor import Question
from kvprofile.engine.reference import Capture, capture, greedy, partial_prefill
from kvprofile.engine.transport import FolderSink, FolderSource, SocketSource, Throttle
from kvprofile.errors import BadInput, GateFailed
from kvprofile.layers import LayerRange
from tests.engine.architectures import CONFIGS, LAYERS, tiny_decoder
from tests.engine.links import CONTEXT, QUESTION, SENDER, frames, sending, shipping

GROUPS = [LayerRange(0, 0), LayerRange(0, 2), LayerRange(1, 3), LayerRange(3, 4), LayerRange(0, LAYERS)]
ROOT = Path(__file__).resolve().parents[2]


def expected(receiver: Decoder, theirs: Capture, group: LayerRange) -> tuple[int, ...]:
    mixed = partial_prefill(receiver, theirs, group) if group.length else theirs.kv
    return greedy(receiver, mixed, *QUESTION)


@pytest.mark.parametrize("timeout_ms", [float("inf"), float("nan"), 1e300, 0.0, -1.0])
def test_a_timeout_that_cannot_be_is_refused(timeout_ms: float, tmp_path: Path) -> None:
    """And does not throw a good cache away."""
    receiver = tiny_decoder("llama", 2)
    with sending([]) as link:
        for source in (link.source, FolderSource(tmp_path)):
            with pytest.raises(BadInput, match=r"a timeout of .* ms cannot be; give one above 0"):
                consume(receiver, CONTEXT, QUESTION, GROUPS[1], SENDER, source, timeout_ms=timeout_ms)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_id_that_is_no_int32_is_refused(token: int, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a token id that is no int32"):
        consume(tiny_decoder("llama", 2), [5, token], QUESTION, GROUPS[1], SENDER, FolderSource(tmp_path))


def test_a_sender_refuses_an_unknown_mode(tmp_path: Path) -> None:
    theirs, mode = capture(tiny_decoder("llama", 1), CONTEXT), "bogus"
    with pytest.raises(BadInput, match='"bogus" is no way to load a cache; take one of load_all'):
        ship(theirs, GROUPS[1], SENDER, FolderSink(tmp_path), mode)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def over_socket(receiver: Decoder, theirs: Capture, group: LayerRange, mode: Mode) -> Served:
    with shipping(theirs, group, mode) as link:
        return consume(receiver, CONTEXT, QUESTION, group, SENDER, link.source, mode)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_answers_are_the_reference_executors(architecture: str, tmp_path: Path) -> None:
    sender, receiver = tiny_decoder(architecture, 1), tiny_decoder(architecture, 2)
    theirs, hooks = capture(sender, CONTEXT), _hooks(receiver)
    answers = set()
    for group in GROUPS:
        for mode in MODES:
            served = over_socket(receiver, theirs, group, mode)
            assert served.fallback is None
            assert served.token_ids == expected(receiver, theirs, group), (group, mode)
            answers.add(served.token_ids)
    assert len(answers) >= 2, "nothing was spliced"
    ship(theirs, GROUPS[2], SENDER, FolderSink(tmp_path / "request"))
    served = consume(receiver, CONTEXT, QUESTION, GROUPS[2], SENDER, FolderSource(tmp_path / "request"))
    assert (served.fallback, served.token_ids) == (None, expected(receiver, theirs, GROUPS[2]))
    assert _hooks(receiver) == hooks


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "deepseek_v3", "bloom"])
def test_bfloat16(architecture: str, tmp_path: Path) -> None:
    sender, receiver = (Decoder(tiny_decoder(architecture, seed).model.to(torch.bfloat16)) for seed in (1, 2))
    theirs = capture(sender, CONTEXT)
    for group in GROUPS:
        served = over_socket(receiver, theirs, group, "overlapped")
        assert (served.fallback, served.token_ids) == (None, expected(receiver, theirs, group))


@pytest.mark.parametrize("mode", MODES)
def test_a_folder_is_read_while_it_is_written(mode: Mode, tmp_path: Path) -> None:
    receiver, theirs, group = tiny_decoder(seed=2), capture(tiny_decoder(seed=1), CONTEXT), LayerRange(1, 3)
    throttle = Throttle(Link(bytes_per_ms=300))
    writer = threading.Thread(target=ship, args=(theirs, group, SENDER, FolderSink(tmp_path, throttle), mode))
    writer.start()
    served = consume(receiver, CONTEXT, QUESTION, group, SENDER, FolderSource(tmp_path), mode)
    writer.join()
    assert (served.fallback, served.token_ids) == (None, expected(receiver, theirs, group))
    assert not list(tmp_path.glob(".tmp-*"))


class TestOrder:
    """What waits for what. Senders wait for the receiver, so that no clock decides; one that never comes ends in a fallback."""

    def test_recompute_begins_when_e_is_there(self) -> None:
        receiver, theirs, group = tiny_decoder(seed=2), capture(tiny_decoder(seed=1), CONTEXT), LayerRange(1, 3)
        started = threading.Event()
        whole = frames(theirs, group)

        def rest() -> Iterator[bytes]:
            yield whole[0]
            started.wait(5)
            yield from whole[1:]

        with sending(rest()) as link, receiver.before_layers(lambda layer: started.set() if layer == 1 else None):
            served = consume(receiver, CONTEXT, QUESTION, group, SENDER, link.source, timeout_ms=4000)
        assert served.fallback is None
        assert [(e.what, e.layer) for e in served.events[:2]] == [("e", 1), ("recompute", 1)]
        assert [e.layer for e in served.events if e.what == "kv"] == [0, 3]

    def test_the_suffix_is_read_while_later_layers_come(self) -> None:
        receiver, theirs, group = tiny_decoder(seed=2), capture(tiny_decoder(seed=1), CONTEXT), LayerRange(0, 1)
        reading = threading.Event()
        whole = frames(theirs, group)

        def rest() -> Iterator[bytes]:
            yield from whole[:2]
            reading.wait(5)
            yield whole[2]

        passes = Counter[int]()

        def tell(layer: int) -> None:
            passes[layer] += 1
            if (layer, passes[layer]) == (2, 2):  # the first pass hands the context past it
                reading.set()

        with sending(rest()) as link, receiver.before_layers(tell):
            served = consume(receiver, CONTEXT, QUESTION, group, SENDER, link.source, timeout_ms=4000)
        assert served.fallback is None
        order = [(e.what, e.layer) for e in served.events]
        assert order.index(("read", 2)) < order.index(("kv", 3)) < order.index(("read", 3))
        assert served.token_ids == expected(receiver, theirs, group)

    @pytest.mark.parametrize("mode", ["load_all", "load_reused"])
    def test_other_modes_load_first(self, mode: Mode) -> None:
        receiver, theirs, group = tiny_decoder(seed=2), capture(tiny_decoder(seed=1), CONTEXT), LayerRange(1, 3)
        computing = threading.Event()
        *most, last = frames(theirs, group, mode)

        def rest() -> Iterator[bytes]:
            yield from most
            computing.wait(0.2)
            yield last

        with sending(rest()) as link, receiver.before_layers(lambda layer: computing.set()):
            events = consume(receiver, CONTEXT, QUESTION, group, SENDER, link.source, mode).events
        layers = [0, 1, 2, 3] if mode == "load_all" else [0, 3]
        order = [("e", 1), *(("kv", layer) for layer in layers), ("recompute", 1), ("recompute", 2)]
        assert [(e.what, e.layer) for e in events] == [*order, *(("read", layer) for layer in range(LAYERS))]
        assert [e.at_ms for e in events] == sorted(e.at_ms for e in events)


@pytest.mark.slow
@pytest.mark.parametrize("share", [4.0, 1.0, 0.1])
@pytest.mark.parametrize("mode", MODES)
def test_times_are_the_timelines(mode: Mode, share: float) -> None:
    """Layers that sleep and a throttled link: nothing may come sooner than the model says, nor much later on a calm machine."""
    receiver, theirs, group = tiny_decoder(seed=2), capture(tiny_decoder(seed=1), CONTEXT), LayerRange(1, 3)
    e_bytes, *kv_bytes = map(len, frames(theirs, group, "load_all"))
    layers = [LayerCost(size, recompute_ms=100, read_ms=50) for size in kv_bytes]
    compute_ms = 100 * group.length + 50 * LAYERS
    link = Link((e_bytes + kv_bytes[0] + kv_bytes[3]) / compute_ms / share, latency_ms=20)
    (modelled,) = first_tokens_ms([Request(group, layers, e_bytes)], link, mode)
    measured = []
    with sleeping_layers(receiver, group):
        while len(measured) < 4 and min(measured, default=1e9) > 1.15 * modelled:
            begun = time.monotonic()
            with shipping(theirs, group, mode, Throttle(link)) as sender:
                served = consume(
                    receiver, CONTEXT, QUESTION._replace(max_new_tokens=1), group, SENDER, sender.source, mode
                )
            measured.append(1000 * (time.monotonic() - begun))
            assert served.fallback is None
    assert modelled <= min(measured) <= 1.15 * modelled


@contextmanager
def sleeping_layers(receiver: Decoder, group: LayerRange) -> Iterator[None]:
    """Lets every layer take 100 ms for the context, if it is one of the group, and 50 ms for the suffix."""

    def sleep(layer: int, output: Any) -> None:
        tokens = (output[0] if isinstance(output, tuple) else output).shape[1]
        if tokens == len(QUESTION.suffix):
            time.sleep(0.05)
        elif group.start <= layer < group.stop:
            time.sleep(0.1)

    hooks = [
        module.register_forward_hook(lambda _module, _args, output, layer=layer: sleep(layer, output))
        for layer, module in enumerate(receiver.layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_a_throttled_link_takes_its_time() -> None:
    receiver, theirs, group = tiny_decoder(seed=2), capture(tiny_decoder(seed=1), CONTEXT), LayerRange(1, 3)
    link, carried = Link(bytes_per_ms=100, latency_ms=50), sum(map(len, frames(theirs, group)))
    begun = time.monotonic()
    with shipping(theirs, group, "overlapped", Throttle(link)) as sender:
        served = consume(receiver, CONTEXT, QUESTION, group, SENDER, sender.source)
    assert served.fallback is None
    assert 1000 * (time.monotonic() - begun) >= 50 + carried / 100


def test_a_throttle_keeps_to_the_bandwidth_and_makes_up_for_late_wakeups() -> None:
    now = 100.0
    late = iter([0.0, 0.015, 0.0, 0.0])

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + next(late)

    throttle = Throttle(Link(bytes_per_ms=1000, latency_ms=5), lambda: now, sleep)
    ends = []
    for _ in range(4):
        throttle.wait(10_000)
        ends.append(round(1000 * (now - 100), 6))
    assert ends == [15, 40, 40, 45]  # the second woke 15 ms late, the third was through meanwhile
    now += 10
    begun = now  # what an idle link could have carried is lost, but for CATCH_UP_MS
    throttle.wait(1_000_000)
    assert 1000 * (now - begun) == pytest.approx(980)


SENDER_PROCESS = """
import socket, sys
from pathlib import Path
from kvprofile.engine.consumer import ship
from kvprofile.engine.executor import Question
from kvprofile.engine.reference import capture
from kvprofile.engine.transport import FolderSink, SocketSink
from kvprofile.layers import LayerRange
from tests.engine.architectures import tiny_decoder
from tests.engine.links import CONTEXT, SENDER

where = sys.argv[1]
sink = SocketSink(socket.create_connection(("127.0.0.1", int(where)))) if where.isdigit() else FolderSink(Path(where))
ship(capture(tiny_decoder(seed=1), CONTEXT), LayerRange(1, 3), SENDER, sink)
sink.close()
"""


@pytest.mark.parametrize("transport", ["socket", pytest.param("folder", marks=pytest.mark.slow)])
def test_a_sender_in_another_process(transport: str, tmp_path: Path) -> None:
    receiver, group = tiny_decoder(seed=2), LayerRange(1, 3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        where = str(listener.getsockname()[1]) if transport == "socket" else str(tmp_path / "request")
        with subprocess.Popen([sys.executable, "-c", SENDER_PROCESS, where], cwd=ROOT) as process:
            source = SocketSource(listener.accept()[0]) if transport == "socket" else FolderSource(Path(where))
            served = consume(receiver, CONTEXT, QUESTION, group, SENDER, source, timeout_ms=60_000)
            assert process.wait(60) == 0
    assert served.fallback is None
    assert served.token_ids == expected(receiver, capture(tiny_decoder(seed=1), CONTEXT), group)


@pytest.mark.parametrize(
    ("group", "question", "mode"),
    [
        (LayerRange(1, LAYERS + 1), QUESTION, "overlapped"),
        (LayerRange(3, 1), QUESTION, "overlapped"),
        (LayerRange(-1, 1), QUESTION, "overlapped"),
        (LayerRange(1, 2), QUESTION._replace(suffix=()), "overlapped"),
        (LayerRange(1, 2), QUESTION._replace(max_new_tokens=0), "overlapped"),
        (LayerRange(1, 2), QUESTION, "eager"),
    ],
)
def test_what_cannot_be_asked_is_refused(group: LayerRange, question: Question, mode: Mode, tmp_path: Path) -> None:
    with sending([]) as link, pytest.raises(BadInput):
        consume(tiny_decoder(), CONTEXT, question, group, SENDER, link.source, mode)
    if question == QUESTION and mode == "overlapped":
        with pytest.raises(BadInput, match="is no group of layers of a model with 4"):
            ship(capture(tiny_decoder(), CONTEXT), group, SENDER, FolderSink(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_layer_is_not_read_before_its_context_is_there() -> None:
    part = torch.zeros(1, 2, 1, 8)
    cache = LaterCache(2, tokens=23)
    assert cache.get_seq_length() == 23
    with pytest.raises(GateFailed, match="before its context"):
        cache.update(part, part, 0)
    cache.fill(0, KV(part, part))
    assert cache.update(part, part, 0)[0].shape[-2] == 2


def _hooks(decoder: Decoder) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in decoder.model.modules())


@pytest.mark.parametrize("places", [{"model.embed_tokens": 0, "model.layers": 1}, {"a": "cpu", "b": "disk"}])
def test_a_receiver_on_several_devices_is_refused(places: dict[str, Any]) -> None:
    receiver = tiny_decoder()
    receiver.model.hf_device_map = places
    with sending([]) as link, pytest.raises(BadInput, match="the receiver is spread over"):
        consume(receiver, CONTEXT, QUESTION, GROUPS[2], SENDER, link.source)


def test_a_receiver_on_one_device_by_a_map_is_served() -> None:
    receiver, theirs = tiny_decoder(seed=2), capture(tiny_decoder(seed=1), CONTEXT)
    receiver.model.hf_device_map = {"model": "cpu", "lm_head": "cpu"}
    assert over_socket(receiver, theirs, GROUPS[2], "overlapped").fallback is None
