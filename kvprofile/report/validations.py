"""Draws validations on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from kvprofile.report.terminal import add_row, new_table, number, percent, print_table
from kvprofile.report.text import print_line

HONEST = "one-sided at {:g}%, each plan by itself"


def loss_text(value: float | None, unit: str) -> str | None:
    """Returns a loss of a validation: per cents for `%`, points for `pt`."""
    return percent(value) if unit == "%" else number(value, 1)


def verdict(plan: Mapping[str, Any]) -> str:
    """Returns in words whether a promise held on fresh data."""
    if plan["held"] is None:
        return "not known"
    if plan["held"]:
        return "held, bounded" if plan["bounded"] else "held"
    return "broken beyond chance" if plan["beyond_chance"] else "broken"


def print_validation(console: Console, validation: Mapping[str, Any]) -> None:
    """Prints one validation, plan by plan."""
    limit = validation["max_loss"]
    promise = f"a loss of at most {limit}" if limit else "each plan's upper bound in the profile"
    print_line(
        console,
        f"{validation['task']} / {validation['dataset']}, {validation['metric']}, {validation['samples']} samples that the "
        f"profile never saw; promised: {promise}; bounds {HONEST.format(100 * validation['confidence'])}",
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
    console.print()
