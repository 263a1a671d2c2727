"""Layer times between measured lengths, requests from a profile's rows, break-even bandwidths."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprofile.cost.layer_times import (
    LayerMs,
    LayerTimes,
    break_even_gbps,
    full_prefill_request,
    kv_bytes_per_layer,
    not_timed,
    request_of,
)
from kvprofile.cost.timeline import GBPS, MODES, LayerCost, Link, Request, first_tokens_ms
from kvprofile.errors import BadInput
from kvprofile.layers import LayerRange, layer_params, set_params

LAYERS = 4
TIMES = LayerTimes(
    {
        100: LayerMs((1.0, 2.0, 3.0, 4.0), (0.1, 0.2, 0.3, 0.4), 0.5),
        300: LayerMs((5.0, 6.0, 7.0, 8.0), (0.3, 0.4, 0.5, 0.6), 0.7),
    },
    suffix_tokens=10,
)


def timing_rows(times: LayerTimes = TIMES) -> list[dict[str, Any]]:
    rows = []
    for tokens in times.lengths:
        ms = times.at(tokens)
        same = {"context_tokens": tokens, "suffix_tokens": times.suffix_tokens, "repeats": 3}
        rows += [
            {**same, "layer": layer, "recompute_ms": recompute, "read_ms": read}
            for layer, (recompute, read) in enumerate(zip(ms.recompute, ms.read, strict=True))
        ]
        rows.append({**same, "layer": None, "recompute_ms": None, "read_ms": ms.outside})
    return rows


def row(
    strategy: str,
    start: int | None = None,
    stop: int | None = None,
    sizes: tuple[int, ...] = (10,) * LAYERS,
    **changes: Any,
) -> dict[str, Any]:
    ships = strategy != "full_prefill"
    reused = [size for i, size in enumerate(sizes) if start is None or stop is None or not start <= i < stop]
    return {
        "strategy": strategy,
        "start_layer": start,
        "stop_layer": stop,
        "params": None,
        "total_layers": len(sizes),
        "kv_bytes_per_token": sum(reused) if ships else 0,
        "e_bytes_per_token": 7 if start else 0,
        **changes,
    }


def groups(sizes: tuple[int, ...], unit: int = 1) -> list[dict[str, Any]]:
    edges = sorted({*range(0, len(sizes), unit), len(sizes)})
    return [row("layer_group", a, b, sizes) for a in edges for b in edges if a < b]


def test_measured_lengths_are_as_measured_and_others_lie_between() -> None:
    times = LayerTimes.from_rows(reversed(timing_rows()))
    assert (times.lengths, times.layers, times.suffix_tokens) == ((100, 300), LAYERS, 10)
    for tokens in times.lengths:
        assert times.at(tokens) == TIMES.at(tokens)
    recompute, read, outside = times.at(150)
    assert recompute == pytest.approx((2, 3, 4, 5))
    assert read == pytest.approx((0.15, 0.25, 0.35, 0.45))
    assert outside == pytest.approx(0.55)


@pytest.mark.parametrize("tokens", [0, 99, 301, 10**6])
def test_what_was_not_measured_is_not_guessed(tokens: int) -> None:
    with pytest.raises(BadInput, match=f"timed at contexts of 100 to 300 tokens, not at {tokens};"):
        TIMES.at(tokens)


def test_the_right_two_lengths_are_taken() -> None:
    three = {s: LayerMs((ms,), (0.0,), 0.0) for s, ms in ((10, 0.0), (20, 100.0), (40, 0.0))}
    times = LayerTimes(three, 1)
    assert [times.at(tokens).recompute[0] for tokens in (10, 15, 20, 30, 40)] == [0, 50, 100, 50, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.pop(1),
        lambda rows: rows.pop(),
        lambda rows: rows.pop(0),
        lambda rows: rows.clear(),
        lambda rows: rows.append(rows[2]),
        lambda rows: rows[0].update(layer=4),
        lambda rows: rows[0].update(layer=-1),
        lambda rows: rows[0].update(recompute_ms=None),
        lambda rows: rows[0].update(recompute_ms=float("nan")),
        lambda rows: rows[0].update(read_ms=None),
        lambda rows: rows[0].update(read_ms=-1.0),
        lambda rows: rows[0].update(read_ms=float("inf")),
        lambda rows: rows[0].update(read_ms=1e300),
        lambda rows: rows[0].update(suffix_tokens=11),
        lambda rows: rows[0].update(repeats=0),
        lambda rows: rows[0].update(context_tokens=None),
        lambda rows: [one.update(context_tokens=one["context_tokens"] - 100) for one in rows],
        lambda rows: rows[-1].update(recompute_ms=1.0),
    ],
)
def test_times_that_cannot_be_are_refused(change: Any) -> None:
    rows = timing_rows()
    change(rows)
    with pytest.raises(BadInput, match=r"layer times .* sweep again"):
        LayerTimes.from_rows(rows)


@pytest.mark.parametrize("sizes", [(10, 10, 10, 10), (1, 20, 3, 0), (7, 7, 100, 7)])
def test_groups_tell_the_bytes_of_each_layer(sizes: tuple[int, ...]) -> None:
    assert kv_bytes_per_layer([*groups(sizes), row("full_reuse", sizes=sizes)]) == sizes


def test_layers_that_no_group_parts_share_evenly() -> None:
    sizes = (10, 1, 4, 5, 6)
    rows = [row("full_reuse", sizes=sizes), *groups(sizes, unit=2)]
    assert kv_bytes_per_layer(rows) == (6, 5, 5, 4, 6)
    assert kv_bytes_per_layer(rows[:1]) == (6, 5, 5, 5, 5)


def test_bytes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadInput, match="no full_reuse"):
        kv_bytes_per_layer(groups((1, 2)))
    rows = [row("full_reuse", sizes=(1, 2)), row("layer_group", 0, 1, (1, 2), kv_bytes_per_token=5)]
    with pytest.raises(BadInput, match="contradict"):
        kv_bytes_per_layer(rows)
    wrong = row("layer_group", 1, 3, kv_bytes_per_token=21)
    with pytest.raises(BadInput, match="bytes of a layer_group"):
        request_of(wrong, (10,) * LAYERS, TIMES, 100)


def test_a_plans_request() -> None:
    sizes = (10, 20, 30, 40)
    request = request_of(row("layer_group", 1, 3, sizes), sizes, TIMES, 100, arrives_ms=5.0)
    assert (request.group, request.e_bytes, request.outside_ms, request.arrives_ms) == (LayerRange(1, 3), 700, 0.5, 5.0)
    assert request.layers == [(1000, 1.0, 0.1), (2000, 2.0, 0.2), (3000, 3.0, 0.3), (4000, 4.0, 0.4)]
    reuse = request_of(row("full_reuse", sizes=sizes), sizes, TIMES, 100)
    assert (reuse.group, reuse.e_bytes, reuse.layers) == (LayerRange(0, 0), 0, request.layers)
    full = request_of(row("full_prefill", sizes=sizes), sizes, TIMES, 100)
    assert full == full_prefill_request(TIMES, 100)
    assert (full.group, {layer.kv_bytes for layer in full.layers}) == (LayerRange(0, LAYERS), {0})
    for mode in MODES:
        assert first_tokens_ms([full], Link(1e-9, 1e9), mode) == [pytest.approx(10 + 1 + 0.5)]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (row("layer_set", params=set_params([1, 3])), "hidden states of its own"),
        (row("single_layer_reuse", params=layer_params(2)), "diagnostic"),
        (row("sender_alone"), "does not know what sender_alone"),
        (row("layer_group"), "does not know"),
        (row("layer_group", 1, 2, kv_bytes_per_token=None), "does not say how many bytes"),
        (row("layer_group", 1, 2, e_bytes_per_token=None), "does not say how many bytes"),
        (row("full_reuse", e_bytes_per_token=None), "does not say how many bytes"),
    ],
)
def test_what_the_timeline_cannot_serve_is_refused_with_the_reason(plan: dict[str, Any], reason: str) -> None:
    assert reason in str(not_timed(plan))
    with pytest.raises(BadInput, match=reason):
        request_of(plan, (10,) * LAYERS, TIMES, 100)


def test_times_of_another_model_are_refused() -> None:
    with pytest.raises(BadInput, match="layer times are of 4 layers, the plan of 2"):
        request_of(row("full_reuse", sizes=(1, 2)), (1, 2), TIMES, 100)


def closed_form(request: Request, full_ms: float, latency: float) -> float | None:
    """Returns the overlapped break-even in bytes per millisecond: each byte that comes must leave time for what waits for it."""
    reads = [layer.read_ms for layer in request.layers]
    recompute = sum(request.layers[i].recompute_ms for i in range(*request.group))
    if recompute + sum(reads) + request.outside_ms >= full_ms:
        return None
    came, rates = 0, []
    moves: list[tuple[int, float]] = []
    if request.group.start > 0 and request.group.length > 0:
        moves.append((request.e_bytes, recompute + sum(reads)))
    moves += [
        (layer.kv_bytes, sum(reads[i:]))
        for i, layer in enumerate(request.layers)
        if not request.group.start <= i < request.group.stop
    ]
    for size, behind in moves:
        came += size
        if size == 0:
            continue
        left = full_ms - latency - behind - request.outside_ms
        if left <= 0:
            return None
        rates.append(came / left)
    return max(rates, default=0.0)


costs = st.builds(LayerCost, st.integers(0, 10**7), st.floats(0.01, 50), st.floats(0.01, 5))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(costs, min_size=1, max_size=6), st.data(), st.sampled_from([0.0, 0.5, 20.0]))
def test_break_even_is_the_closed_form(layers: list[LayerCost], data: st.DataObject, latency: float) -> None:
    start = data.draw(st.integers(0, len(layers)))
    group = LayerRange(start, data.draw(st.integers(start, len(layers))))
    request = Request(group, layers, e_bytes=10**5, outside_ms=0.5, arrives_ms=3.0)
    everything = Request(
        LayerRange(0, len(layers)), [layer._replace(kv_bytes=0) for layer in layers], 0, outside_ms=0.5
    )
    (full_ms,) = first_tokens_ms([everything], Link(1), "overlapped")
    expected = closed_form(request, full_ms, latency)
    found = break_even_gbps(request, full_ms, latency, "overlapped")
    if expected is None or group.length == len(layers):  # all layers recomputed is no earlier than itself
        assert found is None
    else:
        assert found == pytest.approx(expected / GBPS, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_on_either_side_of_break_even(mode: Any) -> None:
    sizes = (1000, 1000, 1000, 1000)
    full_ms = first_tokens_ms([full_prefill_request(TIMES, 200)], Link(1), mode)[0]
    request = request_of(row("layer_group", 1, 2, sizes), sizes, TIMES, 200)
    at = break_even_gbps(request, full_ms, 0.5, mode)
    assert at is not None
    below, above = (
        first_tokens_ms([request], Link(at * GBPS * factor, 0.5), mode)[0] for factor in (1 - 1e-6, 1 + 1e-6)
    )
    assert above < full_ms < below
    assert break_even_gbps(request, full_ms, full_ms, mode) is None, "the latency alone is as long"


def test_no_bandwidth_matters_to_who_ships_nothing() -> None:
    layers = [LayerCost(0, 5.0, 1.0)] * 3
    request = Request(LayerRange(0, 1), layers, e_bytes=0)
    assert break_even_gbps(request, 18.0, 100.0, "overlapped") == 0
    assert break_even_gbps(request, 8.0, 0.0, "overlapped") is None, "no earlier than itself"


@pytest.mark.parametrize("ms", [5e-324, 1e-323, 1e-318])
@pytest.mark.parametrize("mode", MODES)
def test_times_next_to_nothing_break_even_nowhere(ms: float, mode: Any) -> None:
    request = Request(LayerRange(0, 0), [LayerCost(10**6, 0.0, 0.0)] * 3, e_bytes=0)
    assert break_even_gbps(request, ms, 0.0, mode) is None


def test_the_largest_break_even_is_finite() -> None:
    request = Request(LayerRange(0, 0), [LayerCost(1, 0.0, 0.0)], e_bytes=0)
    assert break_even_gbps(request, 1e-300, 0.0, "overlapped") == pytest.approx(1e300 / GBPS)


def test_it_needs_the_standard_library_only() -> None:
    code = "import json, sys, kvprofile.cost.layer_times; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    loaded = set(
        json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    )
    assert not loaded & {"numpy", "pyarrow", "torch", "pydantic", "rich", "typer"}


@pytest.mark.parametrize("name", ["context_tokens", "recompute_ms", "read_ms"])
@pytest.mark.parametrize("value", [10**400, float("inf")])
def test_numbers_beyond_a_double_are_bad_input(name: str, value: float) -> None:
    rows = timing_rows()
    rows[0][name] = value
    with pytest.raises(BadInput, match="the layer times"):
        LayerTimes.from_rows(rows)
