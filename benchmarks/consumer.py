"""Measures the time to first token of the reference consumer and sets the timeline's model against it, on the demo pair.

    python benchmarks/consumer.py --out benchmarks/results/consumer.json

A sender in a process of its own captures the context, packs its frames and waits. The receiver asks over TCP on this machine;
the clock starts with the request. The sender throttles to three bandwidths: the link takes four times what the receiver computes,
as long, and a tenth. Every round measures each layer's recompute and read with nothing to wait for, and then serves all nine
cells; the model gets the medians of the layers, the bandwidth, and the bytes of K/V and E without the frames' headers. Ratios are
of medians. Answers are compared with the reference executor's. The receiver computes with --threads threads; leave a core to link
and hash.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvprofile.cost.timeline import MODES, LayerCost, Link, Mode, Request, first_tokens_ms
from kvprofile.engine.cache import LaterCache
from kvprofile.engine.consumer import Served, consume, request_identity
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question
from kvprofile.engine.frames import pack, parts
from kvprofile.engine.reference import Capture, answer_ids, capture, greedy, partial_prefill
from kvprofile.engine.timing import layer_clock
from kvprofile.engine.transport import SocketSink, SocketSource, Throttle
from kvprofile.layers import LayerRange
from kvprofile.models.loading import load_model, load_pair
from kvprofile.models.machine import cpu_name
from kvprofile.recipe import load_recipe, with_options
from kvprofile.samples import build_samples, load_parts

LATENCY_MS = 5.0
LINK_PER_COMPUTE = (4.0, 1.0, 0.1)
BAR = 0.15


class Case(NamedTuple):
    """What is asked for in every cell."""

    context: tuple[int, ...]
    question: Question
    group: LayerRange
    sender_sha256: str
    answer: tuple[int, ...]


class Costs(NamedTuple):
    """One run of the receiver's computation with nothing to wait for."""

    recompute_ms: dict[int, float]
    read_ms: dict[int, float]
    outside_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--group", type=int, nargs=2, default=[8, 19], metavar=("START", "STOP"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sender", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sender:
        run_sender()
        return
    torch.set_num_threads(options.threads)
    recipe = load_recipe("demo")
    sender, receiver = load_pair(recipe.sender, recipe.receiver, recipe.models, recipe.search_folders)
    few = with_options(recipe, contexts=4)
    samples = build_samples(few, load_parts(few), receiver.tokenizer, [sender.model.config, receiver.model.config])
    context = tuple(token for sample in samples for token in sample.context_token_ids)[: options.tokens]
    question, group = Question(samples[0].suffix_token_ids, 4, Ending()), LayerRange(*options.group)
    theirs, reader = capture(Decoder(sender.model), context), Decoder(receiver.model)
    answer = greedy(reader, partial_prefill(reader, theirs, group), *question)
    case = Case(context, question, group, sender.fingerprint.weights_sha256, answer)
    result = {
        "machine": cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": receiver.dtype,
        "torch": torch.__version__,
        "load_average_before": os.getloadavg()[0],
        **measure(reader, theirs, case, options.repeats),
        "load_average_after": os.getloadavg()[0],
    }
    if options.out:
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(result))


def measure(reader: Decoder, theirs: Capture, case: Case, repeats: int) -> dict[str, Any]:
    """Returns measured and modelled times of the nine cells."""
    layer_costs(reader, theirs, case)  # warms up
    first = layer_costs(reader, theirs, case)
    compute_ms = sum(first.recompute_ms.values()) + sum(first.read_ms.values()) + first.outside_ms
    kv_bytes = [kv.keys.nbytes + kv.values.nbytes for kv in theirs.kv]
    e_bytes = theirs.entering[0].nbytes
    reused = sum(size for layer, size in enumerate(kv_bytes) if not case.group.start <= layer < case.group.stop)
    links = [Link((e_bytes + reused) / compute_ms / share, LATENCY_MS) for share in LINK_PER_COMPUTE]
    cells = [(link, mode) for link in links for mode in MODES]
    measured: dict[tuple[Link, Mode], list[float]] = {cell: [] for cell in cells}
    costs = []
    with sender_process(case) as port:
        for _ in range(repeats):
            costs.append(layer_costs(reader, theirs, case))
            for cell in cells:
                took, served = first_token_ms(reader, case, port, *cell)
                assert (served.fallback, served.token_ids) == (None, case.answer), (served.fallback, cell)
                measured[cell].append(took)
    request = modelled_request(case, costs, kv_bytes, e_bytes)
    rows = []
    for (link, mode), times in measured.items():
        (modelled,) = first_tokens_ms([request], link, mode)
        row = {
            "gbps": link.bytes_per_ms / 125_000,
            "mode": mode,
            "measured_ms": times,
            "median_measured_ms": statistics.median(times),
            "modelled_ms": modelled,
            "measured_per_modelled": statistics.median(times) / modelled,
        }
        print(
            f"{row['gbps']:8.3f} Gbit/s  {mode:<12} measured {row['median_measured_ms']:8.0f} ms "
            f"({min(times):.0f}–{max(times):.0f})  modelled {modelled:8.0f} ms  ratio {row['measured_per_modelled']:.3f}",
            flush=True,
        )
        rows.append(row)
    return {
        "context_tokens": len(case.context),
        "suffix_tokens": len(case.question.suffix),
        "start_layer": case.group.start,
        "stop_layer": case.group.stop,
        "layers": len(kv_bytes),
        "latency_ms": LATENCY_MS,
        "compute_ms": [sum(c.recompute_ms.values()) + sum(c.read_ms.values()) + c.outside_ms for c in costs],
        "recompute_ms": [cost.recompute_ms for cost in request.layers],
        "read_ms": [cost.read_ms for cost in request.layers],
        "outside_ms": request.outside_ms,
        "cells": rows,
        "cells_within_15_percent": sum(abs(row["measured_per_modelled"] - 1) <= BAR for row in rows),
    }


def modelled_request(case: Case, costs: Sequence[Costs], kv_bytes: Sequence[int], e_bytes: int) -> Request:
    """Returns the request as the timeline takes it, from the medians of the rounds."""
    layers = [
        LayerCost(
            size,
            statistics.median(cost.recompute_ms.get(layer, 0.0) for cost in costs),
            statistics.median(cost.read_ms[layer] for cost in costs),
        )
        for layer, size in enumerate(kv_bytes)
    ]
    return Request(case.group, layers, e_bytes, statistics.median(cost.outside_ms for cost in costs))


def layer_costs(reader: Decoder, theirs: Capture, case: Case) -> Costs:
    """Returns what each layer takes, with all K/V at hand; `outside_ms` is what both passes take besides."""
    cache = LaterCache(len(reader.layers), len(case.context))
    with layer_clock(reader) as recomputing:
        own = reader.recompute(case.context, case.group, theirs.entering[case.group.start])
    for layer, kv in enumerate((*theirs.kv[: case.group.start], *own, *theirs.kv[case.group.stop :])):
        cache.fill(layer, kv)
    with layer_clock(reader) as reading:
        next(answer_ids(reader, cache, *case.question))
    recomputed, read = recomputing.milliseconds(), reading.milliseconds()
    outside = recomputed.pop(None) + read.pop(None)
    ran = {layer: ms for layer, ms in recomputed.items() if case.group.start <= layer < case.group.stop}
    return Costs(ran, read, outside)


def first_token_ms(reader: Decoder, case: Case, port: int, link: Link, mode: Mode) -> tuple[float, Served]:
    begun = time.monotonic()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall((json.dumps({"mode": mode, **link._asdict()}) + "\n").encode())
    asked = 1000 * (time.monotonic() - begun)
    served = consume(
        reader,
        case.context,
        case.question,
        case.group,
        case.sender_sha256,
        SocketSource(connection),
        mode,
        timeout_ms=300_000,
    )
    return asked + served.first_token_ms, served


@contextmanager
def sender_process(case: Case) -> Iterator[int]:
    """Runs a sender and gives the port it listens on."""
    command = [sys.executable, __file__, "--sender"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps({"context": case.context, "group": case.group}) + "\n")
        process.stdin.close()
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def run_sender() -> None:
    """Captures the context that standard input names, prints a port and serves requests one after the other."""
    torch.set_num_threads(1)
    asked = json.loads(sys.stdin.readline())
    group, recipe = LayerRange(*asked["group"]), load_recipe("demo")
    model = load_model(recipe.sender, recipe.models, recipe.search_folders)
    theirs = capture(Decoder(model.model), asked["context"])
    identity = request_identity(model.fingerprint.weights_sha256, theirs.token_ids, group)
    packed = {
        mode: [pack(part, identity) for part in parts(group, mode, theirs.kv, theirs.entering.__getitem__)]
        for mode in MODES
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection.makefile("r") as lines:
                request = json.loads(lines.readline())
            sink = SocketSink(connection, Throttle(Link(request["bytes_per_ms"], request["latency_ms"])))
            for number, frame in enumerate(packed[request["mode"]]):
                sink.send(number, frame)
            sink.close()


if __name__ == "__main__":
    main()
