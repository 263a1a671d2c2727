"""The commands of a document, as written: parsed, and run one after the other on a tiny pair in place of the demo's."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
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

MAY_ANSWER_NO = ("pareto", "select", "validate", "reprofile")
"""Commands that exit with 1 where no plan is good enough, as with random weights."""


def commands(document: str, programs: tuple[str, ...] = ("kvprofile",)) -> list[str]:
    """Returns the lines of the document's `sh` blocks that call one of the programs."""
    lines = "\n".join(blocks(document, "sh")).splitlines()
    return [line for line in lines if line.split(" ")[0] in programs]


def blocks(document: str, language: str) -> list[str]:
    """Returns the text of a document's code blocks in one language."""
    text = (ROOT / document).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def parse(words: list[str], command: Any = None, name: str = "kvprofile", parent: Any = None) -> Any:
    """Returns the context of the innermost command, without running anything."""
    command = command or typer.main.get_command(app)
    context = command.make_context(name, list(words), parent=parent)
    if not hasattr(command, "resolve_command"):
        return context
    inner_name, inner, rest = command.resolve_command(context, words)
    return parse(rest, inner, inner_name, context)


def run_in_order(lines: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs commands in `folder` and returns what each printed; `> FILE` is honoured, programs other than kvprofile get a shell.

    Recipes and data are the bundled ones, only the weights are tiny and random.
    """
    room = {"max_position_embeddings": 2048}  # longer contexts are cut
    monkeypatch.setenv("KVPROFILE_CACHE", str(folder / "cache"))
    save_model(folder / "cache" / "models" / f"{demo.NAME}-{demo.WHEEL_SHA256[:12]}", **room)
    shutil.copytree(resource("recipes"), folder / "recipes", ignore=shutil.ignore_patterns("sender", "receiver"))
    for seed, adapter in enumerate(("sender", "receiver"), start=1):
        save_adapter(folder / "recipes" / "demo" / adapter, seed=seed, **room)
    (folder / "demo").symlink_to(folder / "recipes" / "demo")  # a copied recipe looks beside itself first
    monkeypatch.chdir(folder)
    printed = []
    for line in lines:
        if not line.startswith("kvprofile "):
            own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            run = subprocess.run(
                line, shell=True, check=True, capture_output=True, text=True, env={**os.environ, "PATH": own}
            )
            printed.append(run.stdout)
            continue
        words, _, target = (shlex.split(part, comments=True) for part in line.partition(" > "))
        words = words[1:]
        result = CliRunner().invoke(app, words)
        printed.append(result.stdout)
        if target:
            Path(target[0]).write_text(result.stdout, "utf-8")
        answers_no = words[0] in MAY_ANSWER_NO and result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert result.exit_code == 0 or answers_no, f"{line}: {result.output} {result.exception!r}"
    return printed
