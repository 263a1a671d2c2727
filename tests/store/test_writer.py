from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvprofile.store.reader import versions
from kvprofile.store.temporary import temporary_beside, writer_of
from kvprofile.store.writer import pair_folder, publish, write_table
from tests.profile_factory import header


def write_number(folder: Path, version: int) -> None:
    (folder / "n").write_text(str(version), encoding="utf-8")


def publish_slowly(pair: Path) -> None:
    def build(folder: Path, version: int) -> None:
        write_number(folder, version)
        time.sleep(0.3)

    publish(pair, build)


def test_versions_count_up(tmp_path: Path) -> None:
    assert publish(tmp_path / "pair", write_number).name == "v0001"
    second = publish(tmp_path / "pair", write_number)
    assert (second.name, (second / "n").read_text(encoding="utf-8")) == ("v0002", "2")


def test_number_is_above_the_newest_not_the_count(tmp_path: Path) -> None:
    (tmp_path / "v0009").mkdir()
    assert publish(tmp_path, write_number).name == "v0010"


def test_a_crash_in_build_leaves_no_version_and_no_leftover(tmp_path: Path) -> None:
    def crash(folder: Path, version: int) -> None:
        write_number(folder, version)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        publish(tmp_path, crash)
    assert versions(tmp_path) == []
    assert list(tmp_path.glob(".tmp-*")) == []


def test_what_a_killed_publisher_left_is_removed_and_never_a_version(tmp_path: Path) -> None:
    leftover = tmp_path / ".tmp-killed"
    leftover.mkdir()
    write_number(leftover, 1)
    assert versions(tmp_path) == []
    assert publish(tmp_path, write_number).name == "v0001"
    assert not leftover.exists()


def test_two_processes_get_two_versions(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=publish_slowly, args=(tmp_path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert [(n, (path / "n").read_text(encoding="utf-8")) for n, path in versions(tmp_path)] == [(1, "1"), (2, "2")]


def test_footer_lies_under_its_key_as_json(tmp_path: Path) -> None:
    write_table(pa.table({"x": [1]}), tmp_path / "t.parquet", header(receiver_note="grüße"))
    metadata = pq.read_metadata(tmp_path / "t.parquet").metadata
    assert "grüße".encode() in metadata[b"kvprofile"]
    assert pq.read_metadata(tmp_path / "t.parquet").row_group(0).column(0).compression == "ZSTD"


@pytest.mark.parametrize("key", ["seed", "sender", "datasets"])
def test_footer_without_a_required_key_is_not_written(tmp_path: Path, key: str) -> None:
    footer = header()
    del footer[key]
    with pytest.raises(ValueError, match=key):
        write_table(pa.table({"x": [1]}), tmp_path / "t.parquet", footer)
    assert list(tmp_path.iterdir()) == []


def test_footer_with_an_incomplete_model_or_dataset_is_not_written(tmp_path: Path) -> None:
    footer = header(datasets=[{"name": "x"}])
    del footer["receiver"]["weights_sha256"]
    with pytest.raises(ValueError, match=r"receiver\.weights_sha256, datasets\.0\.sha256"):
        write_table(pa.table({"x": [1]}), tmp_path / "t.parquet", footer)


def test_a_failed_write_keeps_the_old_table_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    write_table(pa.table({"x": [1]}), path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        write_table(pa.table({"x": [2]}), path)
    assert pq.read_table(path)["x"].to_pylist() == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_pair_folder_names_both_and_is_safe(tmp_path: Path) -> None:
    assert pair_folder(tmp_path, "org/s", "r@v1.0+lora") == tmp_path / "r@v1.0+lora__from__org--s"
    for hostile in ("../../etc", "a\x00b", "x:y", "..", "", "n" * 400, "[red]x[/red]"):
        folder = pair_folder(tmp_path, hostile, "r")
        assert folder.parent == tmp_path
        folder.mkdir()
    assert pair_folder(tmp_path, "a:b", "r") != pair_folder(tmp_path, "a?b", "r")


def test_two_threads_write_one_table_under_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, original = tmp_path / "t.parquet", pq.write_table

    def overtaken(*arguments: object, **options: object) -> None:
        monkeypatch.setattr(pq, "write_table", original)
        write_table(pa.table({"x": [2]}), path)
        original(*arguments, **options)

    monkeypatch.setattr(pq, "write_table", overtaken)
    write_table(pa.table({"x": [1]}), path)
    assert pq.read_table(path)["x"].to_pylist() == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]
    name = temporary_beside(path)
    assert (name.parent, writer_of(name), writer_of(path)) == (tmp_path, os.getpid(), None)


def test_a_footer_of_an_older_format_needs_what_its_format_does(tmp_path: Path) -> None:
    old = {key: held for key, held in header(format_version=1).items() if key not in ("strategies", "bounds")}
    write_table(pa.table({"x": [1]}), tmp_path / "t.parquet", old)
    with pytest.raises(ValueError, match="strategies"):
        write_table(pa.table({"x": [1]}), tmp_path / "t.parquet", {**old, "format_version": 2})
