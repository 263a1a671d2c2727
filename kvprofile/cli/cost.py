"""`kvprofile cost`: bytes and time to first token of plans over bandwidths."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.arguments import MetricOption, OnlyDatasetOption, OnlyTaskOption, ProfileArgument
from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.report.text import print_line


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile cost outputs --bandwidth 1,10,100Gbps --latency 1ms")(cost)


def cost(
    profile: ProfileArgument,
    tokens: Annotated[
        str | None, typer.Option(help="Context lengths, such as 1024,4096; the median of the contexts if not given.")
    ] = None,
    bandwidth: Annotated[str, typer.Option(help="Of the link, such as 10Gbps or 25GB/s.")] = "1,10,100,200Gbps",
    latency: Annotated[str, typer.Option(help="Before the first byte, such as 1ms.")] = "0ms",
    mode: Annotated[
        str,
        typer.Option(
            help="load_all: E and the K/V of every layer, then compute. load_reused: without the K/V of recomputed layers. "
            "overlapped: recompute as soon as E is there, K/V meanwhile."
        ),
    ] = "overlapped",
    task: OnlyTaskOption = None,
    dataset: OnlyDatasetOption = None,
    metric: MetricOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell what the frontier's plans, full reuse and full prefill ship, and when each gives its first token.

    Times are modelled from layer times that the sweep measured. Break-even is the bandwidth above which a plan's first
    token comes before full prefill's.
    """
    from kvprofile.cost.timeline import GBPS, MODES, parse_mode
    from kvprofile.report.cost import Wire, cost_blocks, cost_document, print_costs
    from kvprofile.store.reader import load
    from kvprofile.units import parse_bandwidths, parse_milliseconds, parse_tokens

    wire, by = Wire(tuple(b / GBPS for b in parse_bandwidths(bandwidth)), parse_milliseconds(latency)), parse_mode(mode)
    lengths = None if tokens is None else parse_tokens(tokens)
    loaded = load(profile)
    blocks = cost_blocks(loaded, wire, lengths, MODES if as_json else (by,), task=task, dataset=dataset, metric=metric)
    if as_json:
        print_json(cost_document(loaded, blocks, wire, by))
        return
    print_costs(out(), loaded, blocks, wire, by)
    print_line(out(), f"profile: {loaded.folder}")
