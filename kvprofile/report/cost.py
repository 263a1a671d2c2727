"""What plans cost on the wire: bytes, time to first token over bandwidths, break-even; as a document and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from kvprofile.cost.layer_times import (
    LayerTimes,
    break_even_gbps,
    full_prefill_request,
    kv_bytes_per_layer,
    not_timed,
    request_of,
)
from kvprofile.cost.timeline import GBPS, MODES, Link, Mode, first_tokens_ms
from kvprofile.errors import BadInput
from kvprofile.layers import PLAN_COLUMNS, plan_key
from kvprofile.report.frontier import Block, Row, frontier_blocks, plan_text
from kvprofile.report.terminal import add_row, new_table, number, print_table
from kvprofile.report.text import print_line, size
from kvprofile.store.reader import Profile
from kvprofile.units import bandwidth_text, duration_text

_WIDTH_FOR_BYTES = 110


class Wire(NamedTuple):
    """What caches travel through, several at a time.

    Attributes:
        gbps: Bandwidths, in Gbit/s.
        latency_ms: Before the first byte.
    """

    gbps: tuple[float, ...]
    latency_ms: float = 0.0


class WireCost(NamedTuple):
    """What one plan costs for one context length.

    Attributes:
        row: The plan's.
        kv_bytes: Of reused layers, to ship; None if the profile does not say.
        e_bytes: Of hidden states, to ship, likewise.
        first_token_ms: By mode, one for each bandwidth; None if the timeline cannot serve the plan.
        break_even: By mode, in Gbit/s, as `break_even_gbps` says; None for full prefill itself and where there are no times.
        not_known: Why there are no times.
    """

    row: Row
    kv_bytes: int | None
    e_bytes: int | None
    first_token_ms: dict[Mode, tuple[float, ...]] | None
    break_even: dict[Mode, float | None] | None
    not_known: str | None


class CostBlock(NamedTuple):
    """The costs of one task, dataset and metric.

    Attributes:
        block: What they are of.
        contexts: By context tokens.
        untimed: Why there is no time at some of them.
    """

    block: Block
    contexts: dict[int, list[WireCost]]
    untimed: dict[int, str]


def layer_times(profile: Profile) -> LayerTimes | None:
    """Returns the profile's layer times, None if it was made before there were any.

    Raises:
        BadInput: If they cannot be.
    """
    table = profile.timings()
    return None if table is None else LayerTimes.from_rows(table.to_pylist())


def cost_blocks(
    profile: Profile, wire: Wire, tokens: Sequence[int] | None, modes: Sequence[Mode] = MODES, **only: Any
) -> list[CostBlock]:
    """Returns the costs of the frontier's plans, full reuse and full prefill per task and dataset.

    Args:
        profile: The profile.
        wire: The link.
        tokens: Context lengths; the median of each block's contexts if None.
        modes: Those wanted.
        only: As for `frontier_blocks`: `task`, `dataset`, `metric`.

    Raises:
        BadInput: If the profile has no layer times, none for any such context, or not what is asked for.
    """
    times = layer_times(profile)
    if times is None:
        raise BadInput(
            f"{profile.folder} has no layer times; sweep again with this version of kvprofile to measure them"
        )
    found = [(block, tokens or [median_tokens(block)]) for block in frontier_blocks(profile, **only)]
    asked = {length for _, lengths in found for length in lengths}
    untimed = {length: why for length in asked if (why := _not_timed_at(times, length))}
    if untimed.keys() == asked:
        raise BadInput(untimed[min(asked)])
    return [
        CostBlock(
            block,
            {at: wire_costs(block, times, at, wire, modes, untimed.get(at)) for at in lengths},
            {at: untimed[at] for at in lengths if at in untimed},
        )
        for block, lengths in found
    ]


def _not_timed_at(times: LayerTimes, tokens: int) -> str | None:
    try:
        times.at(tokens)
    except BadInput as error:
        return str(error)
    return None


def wire_costs(
    block: Block, times: LayerTimes, tokens: int, wire: Wire, modes: Sequence[Mode], untimed: str | None = None
) -> list[WireCost]:
    """Returns the costs of full reuse, the frontier's plans and full prefill, by recompute.

    Args:
        block: One task, dataset and metric.
        times: Of the profile.
        tokens: The context's length.
        wire: The link.
        modes: Those wanted.
        untimed: Why `times` has none at that length, None where it has.
    """
    arms = [block.arms[name] for name in ("full_reuse", "full_prefill") if name in block.arms]
    rows = {plan_key(row): row for row in (*arms, *block.frontier)}
    layer_bytes = kv_bytes_per_layer(block.rows)
    ordered = sorted(rows.values(), key=lambda row: (row["strategy"] == "full_prefill", row["recompute_fraction"]))
    return [_wire_cost(row, layer_bytes, times, tokens, wire, modes, untimed) for row in ordered]


def median_tokens(block: Block) -> int:
    """Returns the median length of the block's contexts.

    Raises:
        BadInput: If the profile does not say.
    """
    known = (row["context_tokens_median"] for row in block.rows)
    median = next((tokens for tokens in known if tokens is not None), None)
    if median is None:
        raise BadInput("the profile does not say how long its contexts are; give --tokens")
    return int(median)


def _wire_cost(
    row: Row,
    layer_bytes: Sequence[int],
    times: LayerTimes,
    tokens: int,
    wire: Wire,
    modes: Sequence[Mode],
    untimed: str | None,
) -> WireCost:
    kv_bytes, e_bytes = (bytes_of(row[name], tokens) for name in ("kv_bytes_per_token", "e_bytes_per_token"))
    if reason := not_timed(row) or untimed:
        return WireCost(row, kv_bytes, e_bytes, None, None, reason)
    request = request_of(row, layer_bytes, times, tokens)
    links = [Link(gbps * GBPS, wire.latency_ms) for gbps in wire.gbps]
    first = {mode: tuple(first_tokens_ms([request], link, mode)[0] for link in links) for mode in modes}
    if row["strategy"] == "full_prefill":
        return WireCost(row, kv_bytes, e_bytes, first, None, None)
    (full_ms,) = first_tokens_ms([full_prefill_request(times, tokens)], Link(GBPS), "overlapped")
    even = {mode: break_even_gbps(request, full_ms, wire.latency_ms, mode) for mode in modes}
    return WireCost(row, kv_bytes, e_bytes, first, even, None)


def bytes_of(per_token: int | None, tokens: int | None) -> int | None:
    """Returns the bytes of a context, None where either factor is not known."""
    return None if per_token is None or tokens is None else per_token * tokens


def cost_document(profile: Profile, blocks: Sequence[CostBlock], wire: Wire, mode: Mode) -> dict[str, Any]:
    """Returns what `--json` says: times in the order of `bandwidths_gbps`; `break_even_gbps` null for no bandwidth, 0 for any."""
    times = layer_times(profile)
    assert times is not None
    return {
        "profile": str(profile.folder),
        "profile_id": profile.header["profile_id"],
        "device": profile.header["device"],
        "timed_context_tokens": list(times.lengths),
        "suffix_tokens": times.suffix_tokens,
        "bandwidths_gbps": list(wire.gbps),
        "latency_ms": wire.latency_ms,
        "mode": mode,
        "blocks": [
            {
                **{name: getattr(block, name) for name in ("task", "dataset", "metric")},
                "contexts": [
                    {"context_tokens": tokens, "plans": [_plan_document(cost) for cost in costs]}
                    for tokens, costs in contexts.items()
                ],
            }
            for block, contexts, _ in blocks
        ],
    }


def _plan_document(cost: WireCost) -> dict[str, Any]:
    row = cost.row
    same = (*PLAN_COLUMNS, "recompute_fraction", "quality", "loss_rel", "loss_points", "on_frontier")
    return {
        "plan": plan_text(row),
        **{name: row[name] for name in same},
        "kv_bytes": cost.kv_bytes,
        "e_bytes": cost.e_bytes,
        "modelled_first_token_ms": cost.first_token_ms,
        "break_even_gbps": cost.break_even,
        "not_known": cost.not_known,
    }


def print_costs(console: Console, profile: Profile, blocks: Sequence[CostBlock], wire: Wire, mode: Mode) -> None:
    """Prints one table for each block and context length."""
    times = layer_times(profile)
    assert times is not None
    wide = not console.is_terminal or console.width >= _WIDTH_FOR_BYTES
    for block, contexts, untimed in blocks:
        for tokens, costs in contexts.items():
            print_line(console, f"{block.task} / {block.dataset}, {block.metric}; contexts of {tokens} tokens")
            print_table(console, _table(block, costs, wire, mode, wide))
            for cost in costs:
                if cost.not_known and cost.not_known != untimed.get(tokens):
                    print_line(console, f"{plan_text(cost.row)}: not known, {cost.not_known}")
            if tokens in untimed:
                print_line(console, f"no times: {untimed[tokens]}")
            console.print()
    if not wide:
        print_line(console, "(KV and E to ship: in a wider terminal, or with --json)")
    latency = f"latency {duration_text(wire.latency_ms)}" if wire.latency_ms else "no latency"
    print_line(
        console,
        f"Time to first token of a lone request, {mode}, {latency}: modelled from layer times measured on "
        f"{profile.header['device']}, with a suffix of {times.suffix_tokens} tokens.",
    )
    print_line(console, "Break-even: above this bandwidth the plan's first token comes before full_prefill's.")


def _table(block: Block, costs: Sequence[WireCost], wire: Wire, mode: Mode, wide: bool) -> Any:
    rates = [f"at\n{bandwidth_text(gbps)}" for gbps in wire.gbps]
    table = new_table("plan", block.metric, *(["KV to\nship", "E to\nship"] if wide else []), *rates, "break-\neven")
    for cost in costs:
        first = cost.first_token_ms
        add_row(
            table,
            [
                plan_text(cost.row),
                number(cost.row["quality"], 3),
                *([None if count is None else size(count) for count in (cost.kv_bytes, cost.e_bytes)] if wide else []),
                *([None] * len(wire.gbps) if first is None else map(duration_text, first[mode])),
                None if cost.break_even is None else break_even_text(cost.break_even[mode]),
            ],
        )
    return table


def break_even_text(gbps: float | None) -> str:
    """Returns a break-even bandwidth in words."""
    if gbps is None:
        return "none"
    return bandwidth_text(gbps) if gbps > 0 else "any"
