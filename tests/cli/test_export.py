"""`kvprofile export`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pyarrow as pa
import pytest

from kvprofile.errors import BadInput
from kvprofile.runtime import load_profile
from kvprofile.runtime.export import schema
from tests.command import run
from tests.profile_factory import publish_profile


@pytest.fixture(name="store", scope="module")
def _store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("store")
    publish_profile(out)
    return out


def test_standard_output_is_the_document(store: Path, tmp_path: Path) -> None:
    result = run("export", store)
    assert result.exit_code == 0
    jsonschema.validate(json.loads(result.stdout), schema(), jsonschema.Draft202012Validator)
    assert run("export", store, "-o", tmp_path / "p.json").stdout.replace("\n", "") == str(tmp_path / "p.json")
    assert (tmp_path / "p.json").read_text() == result.stdout
    assert load_profile(tmp_path / "p.json").choose("5%") == load_profile(store).choose("5%")
    assert run("export", tmp_path / "p.json").stdout == result.stdout


def test_an_arrow_file(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.arrow"
    said = json.loads(run("export", store, "--format", "arrow", "-o", file, "--json").stdout)
    assert said == {"export": str(file), "format": "arrow", "bytes": file.stat().st_size}
    assert pa.ipc.open_file(file).read_all().num_rows == len(load_profile(store).rows)
    assert [path.name for path in tmp_path.iterdir()] == ["p.arrow"], "nothing temporary stays"


def test_an_arrow_file_needs_a_name(store: Path) -> None:
    result = run("export", store, "--format", "arrow")
    assert isinstance(result.exception, BadInput)
    assert "give -o" in str(result.exception)
    assert result.stdout == ""


def test_a_file_that_cannot_be_written_leaves_nothing(store: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for folder in (tmp_path / "taken", ".", "/", ""):
        error = run("export", store, "-o", folder).exception
        assert isinstance(error, BadInput)
        assert "is a folder; give -o a file" in str(error)
    assert isinstance(run("export", store, "-o", tmp_path / "none" / "p.json").exception, FileNotFoundError)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_two_exports_to_one_file_at_once(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, file = Path.replace, tmp_path / "p.json"

    def overtaken(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", original)
        assert run("export", store, "-o", file).exit_code == 0
        return original(self, target)

    monkeypatch.setattr(Path, "replace", overtaken)
    assert run("export", store, "-o", file).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
