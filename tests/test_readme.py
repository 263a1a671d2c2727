"""The README's commands exist as written: names, options and kinds of values."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from kvprofile.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^kvprofile .+$", "\n".join(BLOCKS), flags=re.MULTILINE)


def parse(command: Any, name: str, words: list[str], parent: Any = None) -> Any:
    """Returns the context of the innermost command, without running anything."""
    context = command.make_context(name, list(words), parent=parent)
    if not hasattr(command, "resolve_command"):
        return context
    inner_name, inner, rest = command.resolve_command(context, words)
    return parse(inner, inner_name, rest, context)


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) >= 7


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    assert parse(typer.main.get_command(app), "kvprofile", words).command_path.startswith(f"kvprofile {words[0]}")


def test_a_wrong_command_does_not() -> None:
    with pytest.raises(Exception, match="no-such-option"):
        parse(typer.main.get_command(app), "kvprofile", ["sweep", "--no-such-option"])
