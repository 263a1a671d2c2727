"""Publishers and pruners that are killed at any moment: a reader sees whole versions, numbers only grow, nothing is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.profile_factory import publish_profile

ROOT = Path(__file__).resolve().parents[2]
KILLS = 200


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    sound = publish_profile(tmp_path / "store", samples=2, granularity=(3,))
    shutil.move(sound, tmp_path / "sound")
    (tmp_path / "sound" / "manifest.json").unlink()
    command = [sys.executable, "-m", "tests.store.killing", str(tmp_path), "7", str(KILLS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["kills"] == KILLS
    assert result["met"] > 0.8 * KILLS, "most of the signals must come before the work is done"
