"""Importing the runtime is cheap, and reading an export takes the standard library only."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprofile.runtime import load_profile
from kvprofile.runtime.export import export_text
from tests.profile_factory import publish_profile

HEAVY = {"torch", "transformers", "pandas", "numpy", "pyarrow", "datasets", "pydantic", "filelock", "rich", "typer"}
AT_MOST_MS = 150


def loaded(program: str) -> set[str]:
    """Returns which heavy packages a program has loaded at its end."""
    code = f"import sys\n{program}\nprint(*sorted({HEAVY} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_loads_nothing_heavy() -> None:
    assert loaded("import kvprofile.runtime") == set()


def test_parquet_takes_pyarrow_and_an_export_nothing(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, samples=2)
    file = tmp_path / "profile.json"
    file.write_text(export_text(load_profile(folder)))
    choose = "from kvprofile.runtime import load_profile\nassert load_profile({!r}).choose('1%').start_layer == 2"
    assert loaded(choose.format(str(file))) == set()
    assert loaded(choose.format(str(folder))) <= {"pyarrow", "numpy"}, "pyarrow takes numpy where it is installed"


@pytest.mark.slow
def test_importing_takes_little_longer_than_starting() -> None:
    def median_ms(program: str) -> float:
        taken = []
        for _ in range(6):
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            taken.append(1000 * (time.perf_counter() - begun))
        return statistics.median(taken[1:])

    assert median_ms("import kvprofile.runtime") - median_ms("pass") < AT_MOST_MS
