"""The generated reference of commands says what the commands say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_docs_cli_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, "scripts/make_cli_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
