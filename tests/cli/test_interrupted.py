"""What a stopped process says and returns: `kill`, Ctrl-C and a reader that went away."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprofile import cli
from tests.tiny_sweep import write_pair


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_says_how_to_go_on(stop: signal.Signals, tmp_path: Path) -> None:
    recipe = write_pair(tmp_path)
    command = [
        sys.executable,
        "-c",
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from kvprofile.cli import main; main()",
        "sweep",
        str(recipe),
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/**/lock")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(stop)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 3, said
    assert said.strip().splitlines()[-1] == "kvprofile: interrupted; run the same command again to go on from here"


def test_memory_that_runs_out_anywhere_gets_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory() -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(cli, "app", no_memory)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 4
    assert "--max-context-tokens" in capsys.readouterr().err
