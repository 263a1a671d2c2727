"""The timeline of link and compute: the paper's toy example, a simulation tick by tick, and what must hold of any request."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprofile.cost.timeline import MODES, LayerCost, Link, Mode, Request, first_tokens_ms, parse_mode, timeline
from kvprofile.errors import BadInput
from kvprofile.layers import LayerRange

ALWAYS_ALIKE = settings(max_examples=150, deadline=None, derandomize=True, database=None)
MOST_LAYERS = 5


@pytest.mark.parametrize(("mode", "expected"), [("load_all", 47), ("load_reused", 30), ("overlapped", 17)])
def test_the_papers_toy_example(mode: Mode, expected: int) -> None:
    layers = [LayerCost(kv_bytes=1, recompute_ms=1, read_ms=0)] * 10
    one_to_three = Request(LayerRange(0, 3), layers, e_bytes=1, arrives_ms=2)
    four_to_ten = Request(LayerRange(3, 10), layers, e_bytes=1)
    assert sum(first_tokens_ms([four_to_ten, one_to_three], Link(1), mode)) == expected


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Requests in whole milliseconds and bytes, so that a simulation by ticks is exact."""
    small = st.integers(0, 4)
    count = draw(st.integers(1, MOST_LAYERS))
    layers = [LayerCost(draw(small), draw(small), draw(small)) for _ in range(count)]
    start = draw(st.integers(0, count))
    group = LayerRange(start, draw(st.integers(start, count)))
    return Request(group, layers, draw(small), draw(small), draw(st.integers(0, 20)))


class Job(NamedTuple):
    """What one resource does in one piece: `ticks` of work that may begin once the jobs named in `after` are done."""

    name: tuple[object, ...]
    ticks: int
    after: list[tuple[object, ...]]


def jobs_of(number: int, request: Request, mode: Mode, latency: int) -> tuple[list[Job], list[Job], list[Job]]:
    """Returns the jobs of link, compute and mere waiting for one request, from the description of the modes alone."""
    recomputed = list(range(*request.group))
    shipped = [i for i in range(len(request.layers)) if mode == "load_all" or i not in recomputed]
    begin = [("arrival", number)]
    if mode != "overlapped" and number > 0:
        begin.append(("outside", number - 1))
    link = []
    if recomputed and recomputed[0] > 0 and request.e_bytes:
        link.append(Job(("e", number), request.e_bytes, begin))
    link += [Job(("kv", number, i), request.layers[i].kv_bytes, begin) for i in shipped if request.layers[i].kv_bytes]
    names = [job.name for job in link]
    waits = [Job(("latency", number), latency, begin)]
    link = [job._replace(after=[*job.after, waits[0].name]) for job in link]
    compute = []
    for i in recomputed:
        needs = names if mode != "overlapped" else [("e", number)] if ("e", number) in names else []
        compute.append(Job(("recompute", number, i), request.layers[i].recompute_ms, [*begin, *needs]))
    for i, layer in enumerate(request.layers):
        needs = names if mode != "overlapped" else [("kv", number, i)] if ("kv", number, i) in names else []
        compute.append(Job(("read", number, i), layer.read_ms, [*begin, *needs]))
    compute.append(Job(("outside", number), request.outside_ms, begin))
    return link, compute, waits


def simulated(all_requests: list[Request], latency: int, mode: Mode) -> list[float]:
    """Returns the times to first token by a simulation in ticks of 1 ms; 1 byte takes a tick. Waiting needs no resource."""
    queues: list[list[Job]] = [[], []]
    for number, request in enumerate(all_requests):
        link, compute, waits = jobs_of(number, request, mode, latency)
        queues[0] += link
        queues[1] += compute
        queues.append(waits)
    left = [[job.ticks for job in queue] for queue in queues]
    done: dict[tuple[object, ...], int] = {}
    now = 0
    while any(queues):
        done |= {("arrival", i): now for i, request in enumerate(all_requests) if request.arrives_ms == now}
        went_on = True
        worked = [False] * len(queues)
        while went_on:  # what takes no time, and what it lets begin, still happens at this tick
            went_on = False
            for place, queue in enumerate(queues):
                while queue and left[place][0] == 0 and all(name in done for name in queue[0].after):
                    done[queue.pop(0).name] = now
                    left[place].pop(0)
                    went_on = True
        for place, queue in enumerate(queues):
            if queue and all(name in done for name in queue[0].after):
                left[place][0] -= 1
                worked[place] = True
        now += 1
        assert now < 10_000, "a job waits for ever"
        for place, queue in enumerate(queues):
            if worked[place] and left[place][0] == 0:
                done[queue.pop(0).name] = now
                left[place].pop(0)
    return [done["outside", i] - request.arrives_ms for i, request in enumerate(all_requests)]


@ALWAYS_ALIKE
@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 5), st.sampled_from(MODES))
def test_it_is_what_a_simulation_by_ticks_gives(served: list[Request], latency: int, mode: Mode) -> None:
    assert first_tokens_ms(served, Link(1, latency), mode) == simulated(served, latency, mode)


@ALWAYS_ALIKE
@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 5), st.sampled_from(MODES))
def test_a_resource_does_one_thing_at_a_time_and_the_link_carries_the_closed_form(
    served: list[Request], latency: int, mode: Mode
) -> None:
    steps = timeline(served, Link(1, latency), mode)
    for resource in ("link", "compute"):
        own = [step for step in steps if step.resource == resource]
        assert all(one.ends_ms <= other.begins_ms for one, other in pairwise(own))
    for number, request in enumerate(served):
        carried = sum(s.ends_ms - s.begins_ms for s in steps if (s.request, s.resource) == (number, "link"))
        kv = sum(layer.kv_bytes for layer in request.layers)
        if mode != "load_all":
            kv -= sum(layer.kv_bytes for layer in request.layers[slice(*request.group)])
        assert carried == kv + (request.e_bytes if request.group.start > 0 and request.group.length > 0 else 0)
        begun = min(s.begins_ms for s in steps if s.request == number)
        assert begun >= request.arrives_ms


@ALWAYS_ALIKE
@given(requests(), st.integers(0, 5))
def test_a_lone_request_is_served_soonest_overlapped(request: Request, latency: int) -> None:
    all_layers, reused, overlapped = (first_tokens_ms([request], Link(1, latency), mode)[0] for mode in MODES)
    assert overlapped <= reused <= all_layers


@ALWAYS_ALIKE
@given(
    requests(), st.sampled_from([0.125, 0.5, 1, 4, 64]), st.sampled_from([0.125, 0.5, 1, 4, 64]), st.sampled_from(MODES)
)
def test_more_bandwidth_is_never_later(request: Request, one: float, other: float, mode: Mode) -> None:
    slow, fast = (first_tokens_ms([request], Link(rate, 1), mode)[0] for rate in sorted((one, other)))
    assert fast <= slow


@ALWAYS_ALIKE
@given(st.lists(requests(), min_size=1, max_size=3), st.integers(0, 5), st.integers(0, 5), st.sampled_from(MODES))
def test_more_latency_is_never_sooner(served: list[Request], one: int, other: int, mode: Mode) -> None:
    short, long = (first_tokens_ms(served, Link(1, latency), mode) for latency in sorted((one, other)))
    assert all(a <= b for a, b in zip(short, long, strict=True))


def in_order(request: Request, order: tuple[int | None, ...]) -> float:
    """Returns the time to first token if the link carries E (None) and the layers' K/V in the given order."""
    sizes = {None: request.e_bytes} | {i: layer.kv_bytes for i, layer in enumerate(request.layers)}
    there, now = {}, 0.0
    for item in order:
        now += sizes[item]
        there[item] = now
    computed = there.get(None, 0.0)
    for i in range(*request.group):
        computed += request.layers[i].recompute_ms
    for i, layer in enumerate(request.layers):
        computed = max(computed, there.get(i, 0.0)) + layer.read_ms
    return computed + request.outside_ms


@ALWAYS_ALIKE
@given(requests())
def test_no_other_order_on_the_link_gives_a_first_token_sooner(request: Request) -> None:
    lone = request._replace(arrives_ms=0)
    items: list[int | None] = [i for i in range(len(lone.layers)) if not lone.group.start <= i < lone.group.stop]
    if lone.group.start > 0 and lone.group.length > 0:
        items.append(None)
    best = min(in_order(lone, order) for order in permutations(items))
    assert first_tokens_ms([lone], Link(1), "overlapped") == [best]


def test_who_ships_nothing_waits_for_no_latency() -> None:
    full = Request(LayerRange(0, 2), [LayerCost(0, 3, 1)] * 2, e_bytes=0, outside_ms=1)
    assert [first_tokens_ms([full], Link(1, latency_ms=50), mode) for mode in MODES] == [[9]] * 3


def test_modes_by_name() -> None:
    assert [parse_mode(name) for name in MODES] == list(MODES)
    with pytest.raises(BadInput, match='did you mean "overlapped"'):
        parse_mode("overlap")
