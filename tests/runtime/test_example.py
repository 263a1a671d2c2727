"""The example of a server runs as it stands, and takes nothing of kvprofile but its runtime."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.profile_factory import header, publish_profile

SERVER = Path(__file__).parents[2] / "examples" / "server.py"


def run(store: Path, check: Path) -> list[str]:
    words = [sys.executable, str(SERVER), str(store), str(check)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(name="check")
def _check(tmp_path: Path) -> Path:
    file = tmp_path / "check.json"
    file.write_text(json.dumps({"compatible": True, **{role: header()[role] for role in ("sender", "receiver")}}))
    return file


def test_it_serves_by_a_profile_of_its_models(tmp_path: Path, check: Path) -> None:
    folder = publish_profile(tmp_path / "store", samples=300)
    said = run(tmp_path / "store", check)
    assert str(folder) in said[0]
    assert said[1].startswith("fewest recomputed layers: ")
    assert said[3] == "fewest recomputed layers: 3 waiting"
    assert said[2] == said[4]
    assert said[2].startswith("kvprofile-approximate-v1-")


def test_it_prefills_for_models_that_were_not_measured(tmp_path: Path, check: Path) -> None:
    publish_profile(tmp_path / "store", samples=2, sender={**header()["sender"], "weights_sha256": "9" * 64})
    said = run(tmp_path / "store", check)
    assert said[0].endswith("the sender's weights changed since v0001")
    assert said[1] == said[3] == "full prefill: no profile of these models"
    assert said[2].startswith("kvprofile-exact-v1-")


def test_it_imports_the_runtime_only() -> None:
    imported = [
        node.module for node in ast.walk(ast.parse(SERVER.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    assert [name for name in imported if name and name.startswith("kvprofile")] == ["kvprofile.runtime"]
    assert len(SERVER.read_text("utf-8").splitlines()) <= 45
