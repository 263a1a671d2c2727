"""Writes docs/cli.md from the commands' own help; with --check it only tells whether the file says what they say.

python scripts/make_cli_reference.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from kvprofile.cli import app

PLACE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
WIDTH = 110
HEAD = "# Commands\n\nWhat `kvprofile COMMAND --help` prints; written by `python scripts/make_cli_reference.py`.\n"


def sections(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    """Yields a section of Markdown for a command and each one below it."""
    context = command.context_class(command, info_name=name, parent=parent, terminal_width=WIDTH)
    help_text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield f"\n## {context.command_path}\n\n```text\n{help_text}\n```\n"
    for below in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from sections(command.get_command(context, below), below, context)


def main() -> None:
    text = HEAD + "".join(sections(typer.main.get_command(app), "kvprofile"))
    if sys.argv[1:] == ["--check"]:
        same = PLACE.is_file() and PLACE.read_text("utf-8") == text
        sys.exit(None if same else f"{PLACE} is not what the commands say; run python scripts/make_cli_reference.py")
    PLACE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
