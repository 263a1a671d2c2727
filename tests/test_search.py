"""The adaptive search on made-up losses, where the best groups are known, and from end to end on a tiny pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvprofile import search as search_module
from kvprofile.layers import LayerRange, groups
from kvprofile.recipe import load_recipe, with_options
from kvprofile.search import REUSE, SEARCHED, Removed, Request, finish, search
from kvprofile.store.reader import load
from kvprofile.sweep import sweep
from tests.tiny_sweep import Silent, write_pair

LAYERS, SAMPLES = 30, 20
CRITICAL = frozenset(range(9, 14))


@cache
def kl(group: LayerRange, sample: int) -> float:
    """Few layers matter; starting deep costs, and samples differ far more than groups do."""
    missed = len(CRITICAL - set(range(*group)))
    own = np.random.default_rng([sample, group.start, group.stop]).normal(0, 0.02)
    return float(
        np.exp(np.random.default_rng(sample).normal(0, 0.5)) * (0.02 + missed + own + 0.005 * (LAYERS - group.length))
    )


def run(
    allowed: list[LayerRange],
    units: tuple[int, ...],
    samples: int = SAMPLES,
    answer: Callable[[LayerRange, int], float | None] = kl,
) -> tuple[list[Removed], int, dict[int, set[LayerRange]]]:
    requests: list[Request] = []

    def kls(request: Request) -> dict[LayerRange, float | None]:
        requests.append(request)
        return {group: answer(group, request.sample) for group in (*request.groups, REUSE)}

    removed = finish(search(allowed, units, samples), kls)
    asked: dict[int, set[LayerRange]] = {}
    for request in requests:
        seen = asked.setdefault(request.sample, set())
        assert not seen & set(request.groups), "asked twice"
        seen.update(request.groups)
    return removed, sum(len(request.groups) for request in requests), asked


@pytest.mark.parametrize("units", [(1,), (1, 2, 3), (2,), (3,)])
def test_the_best_groups_are_measured_on_all_samples_and_most_others_are_not(units: tuple[int, ...]) -> None:
    allowed = sorted({g for unit in units for g in groups(LAYERS, unit)})
    removed, measured, asked = run(allowed, units)
    assert measured < len(allowed) * SAMPLES / 2
    left = {why.group for why in removed}
    finalists = set(allowed) - left
    assert len(left) == len(removed)
    assert all(finalists <= groups_of_sample for groups_of_sample in asked.values())
    assert set(asked) == set(range(SAMPLES))
    smallest = min((g for g in allowed if set(range(*g)) >= CRITICAL), key=lambda g: g.length)
    assert smallest in finalists


def test_every_removed_group_says_why() -> None:
    removed, _, asked = run(groups(LAYERS), (1,))
    for why in removed:
        assert why.samples == sum(why.group in seen for seen in asked.values())
        assert (why.round == 0) == (why.samples == 0) == (why.rival is None)
        if why.rival is not None:
            assert why.rival.length <= why.group.length
            assert why.mean_kl is not None
            assert why.rival_mean_kl is not None


def test_the_race_ends_for_groups_that_later_samples_show_to_be_far() -> None:
    late = LayerRange(0, 20)

    def answer(group: LayerRange, sample: int) -> float:
        return 1.0 + (group == late and sample >= SEARCHED) - 0.001 * group.length + 0.01 * (sample % 3)

    removed, *_ = run(groups(LAYERS), (1,), 9, answer)
    why = next(why for why in removed if why.group == late)
    assert SEARCHED < why.samples < 9
    assert "95%" in why.reason


def test_groups_that_cannot_be_measured_are_left() -> None:
    removed, *_ = run(groups(4), (1,), 6, lambda g, _: None if g.start == 1 else 1.0 - 0.1 * g.length)
    assert {g for g in groups(4) if g.start == 1} <= {why.group for why in removed}


@pytest.mark.parametrize("layers", [28, 30, 32])
@pytest.mark.parametrize("units", [(1,), (2,), (3,), (1, 2, 3)])
def test_every_start_can_be_reached(layers: int, units: tuple[int, ...]) -> None:
    """A start that alone is good is found, wherever on the grids it lies, if the loss falls towards it."""
    allowed = sorted({g for unit in units for g in groups(layers, unit)})
    for start in sorted({g.start for g in allowed}):
        removed, *_ = run(
            allowed, units, 5, lambda g, _, start=start: 1.0 + 0.3 * abs(g.start - start) - 0.001 * g.length
        )  # type: ignore[misc]
        longest = max(g for g in allowed if g.start == start)
        assert longest not in {why.group for why in removed}, start


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("value", [0.0, None, 1.0])
def test_few_samples_and_equal_losses(samples: int, value: float | None) -> None:
    removed, _, asked = run(groups(LAYERS), (1,), samples, lambda *_: value)
    assert set(asked) == set(range(samples))
    everywhere = set.intersection(*asked.values())
    if value is not None:  # else nothing was measured, though asked for
        assert not everywhere & {why.group for why in removed}
    assert everywhere | {why.group for why in removed} == set(groups(LAYERS))


def test_a_sweep_marks_what_was_not_measured_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "MOST_STARTS", 0)  # else four layers are too few to leave any
    recipe = load_recipe(str(write_pair(tmp_path)))
    whole = load(sweep(recipe, tmp_path / "exhaustive", Silent()))
    told = Silent()
    folder = sweep(with_options(recipe, search="adaptive"), tmp_path / "adaptive", told)
    adaptive = load(folder)
    assert told.measured == recipe.contexts > SEARCHED
    key = ("sample_id", "metric", "strategy", "start_layer", "stop_layer")
    exhaustive = {tuple(r[name] for name in key): r for r in whole.measurements().to_pylist()}
    rows = adaptive.measurements().to_pylist()
    assert len({tuple(r[name] for name in key) for r in rows}) == len(rows)
    for row in rows:
        there = exhaustive[tuple(row[name] for name in key)]
        same = ("value", "baseline_value", "output_token_ids", "status")
        assert {n: row[n] for n in same} == {n: there[n] for n in same}
    removed = {(r["start_layer"], r["stop_layer"]) for r in pq.read_table(folder / "search.parquet").to_pylist()}
    assert removed
    for row in adaptive.rows.to_pylist():
        if row["start_layer"] is not None:
            left = (row["start_layer"], row["stop_layer"]) in removed
            assert left == (row["n_scored"] < row["n_planned"])
            assert not (left and row["on_frontier"])
    again = Silent()
    assert sweep(with_options(recipe, search="adaptive"), tmp_path / "adaptive", again).name == "v0002"


def test_a_killed_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = with_options(load_recipe(str(write_pair(tmp_path))), search="adaptive")
    expected = load(sweep(recipe, tmp_path / "whole", Silent()))
    from kvprofile import sweep as module

    real, made = module.write_table, []

    def fails_at_the_fourth(table: object, path: Path, *rest: object) -> None:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(path)
        real(table, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_table", fails_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        sweep(recipe, tmp_path / "cut", Silent())
    monkeypatch.setattr(module, "write_table", real)
    taken_up = load(sweep(recipe, tmp_path / "cut", Silent()))
    quality = ["strategy", "start_layer", "stop_layer", "metric", "n_scored", "quality", "loss_rel", "on_frontier"]
    assert taken_up.rows.select(quality).equals(expected.rows.select(quality))


def best_by_kl(shift: int = 0) -> list[LayerRange]:
    """The groups that none beats on both recompute and mean KL, moved by some layers."""
    means = {g: float(np.mean([kl(g, s) for s in range(SAMPLES)])) for g in groups(LAYERS)}
    lowest, found = float("inf"), []
    for group in sorted(means, key=lambda g: (g.length, means[g])):
        if means[group] < lowest:
            lowest = means[group]
            found.append(group)
    allowed = set(groups(LAYERS))
    return [g for g in (LayerRange(g.start + shift, g.stop + shift) for g in found) if g in allowed]


class TestFromAKnownFrontier:
    def run(self, known: list[LayerRange]) -> tuple[list[Removed], list[Request]]:
        requests: list[Request] = []

        def answer(request: Request) -> dict[LayerRange, float | None]:
            requests.append(request)
            return {group: kl(group, request.sample) for group in (*request.groups, REUSE)}

        return finish(search(groups(LAYERS), (1,), SAMPLES, known=known), answer), requests

    def test_unmoved_it_is_measured_with_its_neighbours_and_no_grid(self) -> None:
        known = best_by_kl()
        removed, requests = self.run(known)
        assert not {why.group for why in removed} & set(known)
        near = {LayerRange(g.start + a, g.stop + b) for g in known for a in (-1, 0, 1) for b in (-1, 0, 1)}
        first = {g for request in requests if request.round == 1 for g in request.groups}
        assert set(known) <= first <= near
        starts = {g.start for g in known} | {0}
        assert {g.start for request in requests if request.round > 1 for g in request.groups} <= starts
        asked = sum(len(request.groups) for request in requests)
        assert asked < len(groups(LAYERS)) * SAMPLES / 4

    def test_known_groups_are_measured_on_all_samples_even_if_they_are_beaten(self) -> None:
        worst = LayerRange(20, 29)
        known = [*best_by_kl(), worst]
        removed, requests = self.run(known)
        assert worst not in {why.group for why in removed}
        assert {request.sample for request in requests if worst in request.groups} == set(range(SAMPLES))

    def test_moved_it_is_searched_for(self) -> None:
        known = best_by_kl(shift=6)
        removed, requests = self.run(known)
        assert {2} < {request.round for request in requests if request.sample < SEARCHED}
        finalists = set(groups(LAYERS)) - {why.group for why in removed}
        smallest = min((g for g in groups(LAYERS) if set(range(*g)) >= CRITICAL), key=lambda g: g.length)
        assert {smallest, *known} <= finalists

    def test_nothing_is_asked_twice(self) -> None:
        for known in (best_by_kl(), best_by_kl(shift=6)):
            seen = set()
            for request in self.run(known)[1]:
                for group in request.groups:
                    assert (request.sample, group) not in seen
                    seen.add((request.sample, group))
