"""The README's commands."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.documented import commands, parse, run_in_order

COMMANDS = commands("README.md")


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) >= 7


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    assert parse(words).command_path.startswith(f"kvprofile {words[0]}")


def test_a_wrong_command_does_not() -> None:
    with pytest.raises(Exception, match="no-such-option"):
        parse(["sweep", "--no-such-option"])


def test_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_order(COMMANDS, tmp_path, monkeypatch)
    profiles = sorted(path.parent.name for path in (tmp_path / "outputs").rglob("profile.parquet"))
    assert len(profiles) == 2, profiles
