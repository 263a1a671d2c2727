"""The README's commands, as written: parsed, and run one after the other on a tiny pair in place of the demo's."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvprofile.cli import app
from kvprofile.models import demo
from kvprofile.resources import resource
from tests.tiny_models import save_adapter, save_model

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


def test_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes and data are the bundled ones; only the weights are tiny and random."""
    room = {"max_position_embeddings": 8192}
    monkeypatch.setenv("KVPROFILE_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "cache" / "models" / f"{demo.NAME}-{demo.WHEEL_SHA256[:12]}", **room)
    shutil.copytree(resource("recipes"), tmp_path / "recipes", ignore=shutil.ignore_patterns("sender", "receiver"))
    for seed, adapter in enumerate(("sender", "receiver"), start=1):
        save_adapter(tmp_path / "recipes" / "demo" / adapter, seed=seed, **room)
    (tmp_path / "demo").symlink_to(tmp_path / "recipes" / "demo")  # a copied recipe looks beside itself first
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        answers_no = command.startswith("kvprofile pareto") and result.exit_code == 1
        assert result.exit_code == 0 or answers_no, f"{command}: {result.output}"
    profiles = sorted(path.parent.name for path in (tmp_path / "outputs").rglob("profile.parquet"))
    assert len(profiles) == 2, profiles
