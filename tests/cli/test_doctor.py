from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvprofile.cli import app
from kvprofile.models import machine


def doctor(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unplugged:
        def head(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.utils.get_session", Unplugged)
    monkeypatch.setenv("KVPROFILE_CACHE", str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(b"12345")
    found = json.loads(doctor("--json", "--out", str(tmp_path / "not" / "yet")))
    assert found["hub"]["reachable"] is False
    assert found["hub"]["reason"] == "no route to host"
    assert found["cache"]["bytes"] == 5
    assert found["outputs"]["disk_free_bytes"] > 0
    assert found["versions"]["torch"]
    assert found["devices"][-1]["device"] == "cpu"
    assert found["attention_kernels"]["sdpa"]
    shown = doctor()
    assert "no route to host" in shown
    assert found["versions"]["transformers"] in shown


def test_offline_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.utils.get_session", pytest.fail)
    assert machine.hub()["reason"] == "HF_HUB_OFFLINE is set"


def test_reachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        status_code = 200

        def head(self, *_: Any, timeout: float) -> Session:
            assert timeout <= 5
            return self

    monkeypatch.setattr("huggingface_hub.utils.get_session", Session)
    assert machine.hub()["reachable"] is True
    monkeypatch.setattr(Session, "status_code", 503)
    assert "503" in machine.hub()["reason"]
