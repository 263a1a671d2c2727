from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvprofile.report.terminal import add_row, new_table, number, percent, print_line, print_table
from kvprofile.report.text import harmless


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain – ünïcode 中", "plain – ünïcode 中"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x9b31m", r"\x9b31m"),
        ("a\u202eb\u2028c", r"a\u202eb\u2028c"),
        ("\ud800", r"\ud800"),
        (None, "None"),
    ],
)
def test_harmless(text: object, shown: str) -> None:
    assert harmless(text) == shown


def test_markup_in_cells_and_lines_is_text() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    table = new_table("[red]plan[/red]")
    add_row(table, ["[bold]x[/bold] :smile:"])
    add_row(table, [None])
    print_table(console, table)
    print_line(console, "[link=http://x]y[/link]\x07")
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("[red]plan[/red]", "[bold]x[/bold] :smile:", "–", "[link=http://x]y[/link]\\x07"):
        assert text in printed


def test_numbers() -> None:
    assert percent(0.12345) == "12.3%"
    assert percent(-0.0001) == "0.0%"
    assert percent(None) is None
    assert number(-0.04, 1) == "0.0"
