"""The example of a server runs as it stands, and takes nothing of kvprofile but its runtime."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvprofile.runtime import Fingerprint, ProfileStore
from kvprofile.store import reader
from tests.profile_factory import add_timings, header, layer_timings, publish_profile

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVER, UPDATE = EXAMPLES / "server.py", EXAMPLES / "update_adapter.py"


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


def test_it_takes_what_is_in_time(tmp_path: Path, check: Path) -> None:
    slow = [
        {**row, "recompute_ms": row["recompute_ms"] and 20 * row["recompute_ms"]}
        for row in layer_timings(lengths=(500, 2000))
    ]
    add_timings(publish_profile(tmp_path / "store", samples=300), slow)
    said = run(tmp_path / "store", check)
    assert said[1] == "best quality within 500 ms: 403 ms"
    assert said[3] == "fewest recomputed layers: 3 waiting"
    add_timings(tmp_path / "store" / "receiver__from__sender" / "v0001", layer_timings(lengths=(500, 2000)))
    said = run(tmp_path / "store", check)
    assert said[1] == "full prefill: it takes 63 ms of 500 ms, and nothing waits"
    assert said[2].startswith("kvprofile-exact-v1-")


def test_it_prefills_where_the_policy_is_not_enough(tmp_path: Path, check: Path) -> None:
    publish_profile(tmp_path / "store", samples=2, sources=[("qa", "a"), ("qa", "b")])
    said = run(tmp_path / "store", check)
    assert said[1] == "full prefill: the profile has several values of dataset; choose one of a, b"
    assert said[2].startswith("kvprofile-exact-v1-")


def test_it_keeps_current_through_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = runpy.run_path(str(SERVER))
    publish_profile(tmp_path, samples=2)
    pair = {role: Fingerprint.of(header()[role]) for role in ("sender", "receiver")}
    watch, stop, failed = ProfileStore(tmp_path).watch(**pair), threading.Event(), threading.Event()
    pairs = reader.pairs

    def fail_once(store: Path) -> list[Path]:
        if failed.is_set():
            return pairs(store)
        failed.set()
        raise PermissionError("not just now")

    monkeypatch.setattr(reader, "pairs", fail_once)
    refresher = threading.Thread(target=server["keep_current"], args=(watch, 0.01, stop))
    refresher.start()
    try:
        assert failed.wait(30)
        second = publish_profile(tmp_path, samples=2)
        until = time.monotonic() + 30
        while watch.found.profile.folder != second and refresher.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        stop.set()
        refresher.join()
    assert watch.found.profile.folder == second


def test_it_prefills_for_models_that_were_not_measured(tmp_path: Path, check: Path) -> None:
    publish_profile(tmp_path / "store", samples=2, sender={**header()["sender"], "weights_sha256": "9" * 64})
    said = run(tmp_path / "store", check)
    assert said[0].endswith("the sender's weights changed since v0001")
    assert said[1] == said[3] == "full prefill: no profile of these models"
    assert said[2].startswith("kvprofile-exact-v1-")


def test_its_policy_shows_a_plan_on_few_samples(tmp_path: Path, check: Path) -> None:
    """As on the demo, where upper bounds lie far above what was measured."""
    publish_profile(tmp_path / "store", samples=20)
    said = run(tmp_path / "store", check)
    assert said[1].startswith("fewest recomputed layers: ")


@pytest.mark.parametrize("words", [[], ["."], ["a", "b", "c"]])
@pytest.mark.parametrize("script", [SERVER, UPDATE])
def test_wrong_arguments_are_told_the_usage(script: Path, words: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"usage: python examples/{script.name} ")
    assert "Traceback" not in done.stderr


def test_the_update_says_what_it_changed(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    before = {"a": torch.linspace(-1, 1, 50), "b": torch.ones(3, 2)}
    save_file(before, file)
    words = [sys.executable, str(UPDATE), str(tmp_path)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said == f"{file}: moved 2 tensors by about 5% of their spread\n"
    after = load_file(file)
    assert 0 < float((after["a"] - before["a"]).std()) < 0.1
    assert torch.equal(after["b"], before["b"]), "no spread"


def test_it_imports_the_runtime_only() -> None:
    imported = [
        node.module for node in ast.walk(ast.parse(SERVER.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    assert [name for name in imported if name and name.startswith("kvprofile")] == ["kvprofile.runtime"]
    assert len(SERVER.read_text("utf-8").splitlines()) <= 45
