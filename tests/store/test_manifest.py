from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kvprofile.errors import BadInput
from kvprofile.store.manifest import parse_manifest, read_manifest
from kvprofile.store.writer import publish
from tests.profile_factory import publish_profile


def test_a_published_version_names_all_its_files_with_their_hashes(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, samples=2, granularity=(3,))
    document = json.loads((folder / "manifest.json").read_bytes())
    assert document["manifest_version"] == 1
    assert set(document["files"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    for name, held in document["files"].items():
        content = (folder / name).read_bytes()
        assert held == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def test_a_rejection_is_named_and_what_comes_later_is_not(tmp_path: Path) -> None:
    def build(folder: Path, version: int) -> None:
        for name in ("rejected.json", "pinned", "report.html", ".DS_Store", "n"):
            (folder / name).write_text("{}")
        (folder / "validations").mkdir()

    manifest = read_manifest(publish(tmp_path, build))
    assert manifest is not None
    assert set(manifest) == {"rejected.json", "n"}


def test_older_profiles_have_none() -> None:
    assert read_manifest(Path(__file__).parent / "format_1") is None


RECORD = {"sha256": "a" * 64, "bytes": 1}


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b'{"manifest_version": 1}',
        json.dumps({"manifest_version": True, "files": {}}).encode(),
        json.dumps({"manifest_version": 0, "files": {}}).encode(),
        *(
            json.dumps({"manifest_version": 1, "files": {name: RECORD}}).encode()
            for name in (
                "../x",
                "/etc/passwd",
                "a/b",
                "validations/../x",
                ".hidden",
                "validations/",
                "manifest.json",
                "",
            )
        ),
        *(
            json.dumps({"manifest_version": 1, "files": {"x": RECORD | change}}).encode()
            for change in ({"sha256": "A" * 64}, {"sha256": 1}, {"bytes": -1}, {"bytes": "1"}, {"bytes": True})
        ),
        b"[" * 100_000,
    ],
)
def test_what_is_no_manifest_is_refused(document: bytes) -> None:
    with pytest.raises(BadInput, match="copy the version again"):
        parse_manifest(document, "here")


def test_a_newer_manifest_names_the_mend() -> None:
    with pytest.raises(BadInput, match="pip install -U kvprofile"):
        parse_manifest(b'{"manifest_version": 2}', "here")


@pytest.mark.parametrize("name", ["a b", "ünicode", "a\nb"])
def test_a_version_with_a_file_that_no_manifest_can_name_is_not_published(tmp_path: Path, name: str) -> None:
    def build(folder: Path, version: int) -> None:
        (folder / name).touch()

    with pytest.raises(BadInput, match="is no name of a file of a version"):
        publish(tmp_path, build)
    assert list(tmp_path.glob("v*")) == list(tmp_path.glob(".tmp-*")) == []


def test_files_beside_a_version_may_be_named() -> None:
    document = json.dumps({"manifest_version": 1, "files": {"validations/musique-0001.parquet": RECORD}})
    assert list(parse_manifest(document.encode(), "here")) == ["validations/musique-0001.parquet"]
