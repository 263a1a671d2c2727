"""Draws validations on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from kvprofile.report.terminal import add_row, new_table, number, percent, print_table
from kvprofile.report.text import print_line


def loss_text(value: float | None, unit: str) -> str | None:
    """Returns a loss of a validation: in per cents for `%`, in points for `pt`."""
    return percent(value) if unit == "%" else value if value is None else f"{number(value, 1)} pt"


def verdict(plan: Mapping[str, Any]) -> str:
    """Returns in words whether a promise held on fresh data."""
    if plan["promised_at_most"] is None:
        return "none made"
    if plan["held"] is None:
        return "not known"
    if plan["held"]:
        return "held, bounded" if plan["bounded"] else "held"
    return "broken beyond chance" if plan["beyond_chance"] else "broken, may be chance"


def promises_held(validation: Mapping[str, Any]) -> bool:
    """Returns whether something was promised and all of it is known to have held."""
    promised = [plan for plan in validation["plans"] if plan["promised_at_most"] is not None]
    return bool(promised) and all(plan["held"] for plan in promised)


def print_transfer(console: Console, validations: Sequence[Mapping[str, Any]]) -> None:
    """Prints the loss of every plan where it was profiled and on every data set it was validated on."""
    shown = [one for one in validations if one["plans"]]
    if len(shown) < 2:
        return
    plans: dict[str, list[Mapping[str, Any] | None]] = {}
    for place, one in enumerate(shown):
        for plan in one["plans"]:
            plans.setdefault(plan["plan"], [None] * len(shown))[place] = plan
    print_line(console, "losses where profiled, and on data that the profile never saw")
    table = new_table("plan", "profiled", *(one["dataset"] for one in shown))
    for name, found in plans.items():
        first = next(plan for plan in found if plan)
        fresh = [plan and loss_text(plan["loss"], plan["unit"]) for plan in found]
        add_row(table, [name, loss_text(first["profiled_loss"], first["unit"]), *fresh])
    print_table(console, table)


def print_validation(console: Console, validation: Mapping[str, Any]) -> None:
    """Prints one validation, plan by plan."""
    limit = validation["max_loss"]
    promise = f"a loss of at most {limit}" if limit else "each plan's upper bound in the profile"
    print_line(
        console,
        f"{validation['task']} / {validation['dataset']}, {validation['metric']}, {validation['samples']} samples that the "
        f"profile never saw; promised: {promise}; bounds one-sided at {100 * validation['confidence']:g}%, each plan by itself",
    )
    losses = ("promised", "profiled\nloss", "fresh\nloss", "at\nleast", "at\nmost")
    table = new_table("plan", *losses, validation["metric"], "promise")
    for plan in validation["plans"]:
        names = ("promised_at_most", "profiled_loss", "loss", "loss_lower", "loss_upper")
        add_row(
            table,
            [
                plan["plan"],
                *(loss_text(plan[name], plan["unit"]) for name in names),
                number(plan["quality"], 3),
                verdict(plan),
            ],
        )
    print_table(console, table)
    print_line(console, _sentence(validation))
    if "file" in validation:
        print_line(console, f"kept in {validation['file']}")
    console.print()


def _sentence(validation: Mapping[str, Any]) -> str:
    promised = [plan for plan in validation["plans"] if plan["promised_at_most"] is not None]
    if not promised:
        return "No plan of these promised anything: none is within the limit in the profile."
    held = sum(plan["held"] is True for plan in promised)
    chance = sum(plan["held"] is False and not plan["beyond_chance"] for plan in promised)
    also = f", {chance} of the others within what chance can do" if chance else ""
    full = number(validation["full_prefill_quality"], 3)
    return f"{held} of {len(promised)} promises held{also}; full_prefill scores {full} here."
