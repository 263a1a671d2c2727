"""The commands of a document, as written: parsed, and run one after the other on a tiny pair in place of the demo's."""

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

ROOT = Path(__file__).resolve().parent.parent

MAY_ANSWER_NO = ("pareto", "select", "validate")
"""Commands that exit with 1 where no plan is good enough, as with random weights."""


def commands(document: str) -> list[str]:
    """Returns the lines of the document's `sh` blocks that call kvprofile."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / document).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^kvprofile .+$", "\n".join(blocks), flags=re.MULTILINE)


def parse(words: list[str], command: Any = None, name: str = "kvprofile", parent: Any = None) -> Any:
    """Returns the context of the innermost command, without running anything."""
    command = command or typer.main.get_command(app)
    context = command.make_context(name, list(words), parent=parent)
    if not hasattr(command, "resolve_command"):
        return context
    inner_name, inner, rest = command.resolve_command(context, words)
    return parse(rest, inner, inner_name, context)


def run_in_order(lines: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs commands in `folder`; recipes and data are the bundled ones, only the weights are tiny and random."""
    room = {"max_position_embeddings": 2048}  # longer contexts are cut
    monkeypatch.setenv("KVPROFILE_CACHE", str(folder / "cache"))
    save_model(folder / "cache" / "models" / f"{demo.NAME}-{demo.WHEEL_SHA256[:12]}", **room)
    shutil.copytree(resource("recipes"), folder / "recipes", ignore=shutil.ignore_patterns("sender", "receiver"))
    for seed, adapter in enumerate(("sender", "receiver"), start=1):
        save_adapter(folder / "recipes" / "demo" / adapter, seed=seed, **room)
    (folder / "demo").symlink_to(folder / "recipes" / "demo")  # a copied recipe looks beside itself first
    monkeypatch.chdir(folder)
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        result = CliRunner().invoke(app, words)
        answers_no = words[0] in MAY_ANSWER_NO and result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert result.exit_code == 0 or answers_no, f"{line}: {result.output} {result.exception!r}"
