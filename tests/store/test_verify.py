"""What `store verify` must see: every broken thing is put into a sound store, one at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvprofile.store.reader import read_measurements
from kvprofile.store.schema import FORMAT_VERSION, MEASUREMENTS
from kvprofile.store.soundness import Finding
from kvprofile.store.verify import verify, verify_named
from kvprofile.store.writer import write_table
from tests.profile_factory import add_sensitivity, fail, header, measurements, publish_profile

QA = [("qa", "hotpotqa"), ("code", "stdlib")]
FORMAT_1 = Path(__file__).parent / "format_1"


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    rows = measurements(samples=3, sources=QA)
    fail(rows[-1])
    return publish_profile(tmp_path / "store", rows, samples=3, sources=QA)


def findings(folder: Path) -> list[Finding]:
    return verify(folder.parent.parent).findings


def test_a_sound_store_has_nothing_to_say(folder: Path) -> None:
    add_sensitivity(folder)
    (folder / "report.html").touch()
    (folder / "pinned").touch()
    assert verify(folder.parent.parent) == (1, [])
    assert verify(folder.parent.parent).sound
    assert verify_named(str(folder)) == (1, [])


def test_a_profile_of_format_1_is_sound_but_for_what_was_not_yet_written() -> None:
    verdict = verify_named(str(FORMAT_1))
    assert {one.severity for one in verdict.findings} == {"remark"}
    assert "no manifest" in verdict.findings[0].what


def rewritten(path: Path, change: Callable[[list[dict[str, Any]]], None], **footer: Any) -> None:
    """Changes a table and its manifest's hash with it, so that only its content gives it away."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    held = (table.schema.metadata or {}).get(b"kvprofile")
    own = {**json.loads(held), **footer} if held else None
    write_table(pa.Table.from_pylist(rows, schema=table.schema.remove_metadata()), path, own)
    (path.parent / "manifest.json").unlink(missing_ok=True)


def column(name: str, value: Any, where: str = "layer_group") -> Callable[[Path], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["strategy"] == where and row[name] is not None)
        row[name] = value(row[name])

    return lambda folder: rewritten(folder / "profile.parquet", change)


def a_byte(folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_bytes(path.read_bytes()[:-2] + b"1\n")


def no_measurements(folder: Path) -> None:
    (folder / "measurements.parquet").unlink()


def other_header(folder: Path) -> None:
    rewritten(folder / "measurements.parquet", lambda rows: None, seed=7)


def lost_measurement(folder: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[:] = [r for r in rows if (r["sample_id"], r["strategy"]) != ("s1", "full_reuse")]

    rewritten(folder / "measurements.parquet", change)


def lost_sample(folder: Path) -> None:
    rewritten(folder / "samples.parquet", lambda rows: rows.pop())


def truncated(folder: Path) -> None:
    path = folder / "samples.parquet"
    path.write_bytes(path.read_bytes()[:100])
    (folder / "manifest.json").unlink()


def no_column(folder: Path) -> None:
    table, footer = read_measurements(folder / "measurements.parquet", with_header=True)
    write_table(table.drop_columns(["kl"]), folder / "measurements.parquet", footer)
    (folder / "manifest.json").unlink()


def twice(folder: Path) -> None:
    rewritten(folder / "profile.parquet", lambda rows: rows.append(rows[-1]))


def lost_search(folder: Path) -> None:
    for name in ("profile.parquet", "measurements.parquet"):
        rewritten(folder / name, lambda rows: None, search="adaptive")


def too_new(folder: Path) -> None:
    rewritten(folder / "profile.parquet", lambda rows: None, format_version=FORMAT_VERSION + 1)


def no_profile(folder: Path) -> None:
    (folder / "profile.parquet").unlink()
    (folder / "manifest.json").unlink()


def other_number(folder: Path) -> None:
    folder.rename(folder.with_name("v0007"))


def other_pair(folder: Path) -> None:
    folder.parent.rename(folder.parent.with_name("a__from__b"))


def two_pairs(folder: Path) -> None:
    other = publish_profile(folder.parent.parent, samples=2, receiver={**header()["receiver"], "name": "other"})
    shutil.move(other, folder.with_name("v0002"))
    rewritten(folder.with_name("v0002") / "profile.parquet", lambda rows: None, version=2)
    rewritten(folder.with_name("v0002") / "measurements.parquet", lambda rows: None, version=2)


def foreign_map(folder: Path) -> None:
    add_sensitivity(folder)
    rewritten(folder / "sensitivity" / "forward.parquet", lambda rows: None, profile_id="another")


def no_validation(folder: Path) -> None:
    (folder / "validations").mkdir()
    table, footer = read_measurements(folder / "measurements.parquet", with_header=True)
    write_table(table, folder / "validations" / "x-0001.parquet", footer)


def broken_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"manifest_version": 1, "files": {"../x": {}}}')


def short_manifest(folder: Path) -> None:
    document = json.loads((folder / "manifest.json").read_bytes())
    del document["files"]["samples.parquet"]
    (folder / "manifest.json").write_text(json.dumps(document))


class Fault(NamedTuple):
    """Something that breaks a sound version, and what must be said of it."""

    make: Callable[[Path], None]
    said: str


FAULTS = {
    "a byte": Fault(a_byte, "not the one that was published"),
    "no measurements": Fault(no_measurements, "the manifest names it, and it is missing"),
    "another header": Fault(other_header, "differs from that of profile.parquet (seed)"),
    "a quality": Fault(column("quality", lambda q: q + 1e-9), "quality of 1 rows is not what"),
    "a loss": Fault(column("loss_points", lambda x: x - 0.5), "loss_points of 1 rows"),
    "a count": Fault(column("n_scored", lambda n: n - 1, "full_reuse"), "n_scored of 1 rows"),
    "a divergence": Fault(column("mean_kl", lambda x: x / 2, "full_reuse"), "mean_kl of 1 rows"),
    "the frontier": Fault(column("on_frontier", lambda x: not x), "on_frontier of 1 rows"),
    "a bound": Fault(column("loss_points_upper", lambda x: x - 0.1), "loss_points_upper of 1 rows"),
    "a lost measurement": Fault(lost_measurement, "n_scored of 4 rows"),
    "a lost sample": Fault(lost_sample, "2 samples of code/stdlib, and 3 were planned"),
    "a lost sample, measured": Fault(lost_sample, "1 measured samples are not in it, such as s2 of code/stdlib"),
    "a truncated table": Fault(truncated, "truncated"),
    "a missing column": Fault(no_column, "no column kl"),
    "a plan twice": Fault(twice, "a plan stands in it twice"),
    "a lost search": Fault(lost_search, "search.parquet is missing"),
    "a newer format": Fault(too_new, "made by a newer kvprofile"),
    "no profile": Fault(no_profile, "it has no profile.parquet"),
    "another number": Fault(other_number, "its folder says version 7, its header 1"),
    "another pair": Fault(other_pair, "it is of the pair receiver__from__sender, and lies in a__from__b"),
    "two pairs in one folder": Fault(
        two_pairs, "its versions are of 2 pairs (other from sender, receiver from sender)"
    ),
    "a map of another profile": Fault(foreign_map, "measured for another profile"),
    "a validation that is none": Fault(no_validation, "holds no validation"),
    "a broken manifest": Fault(broken_manifest, "is no manifest"),
    "a short manifest": Fault(short_manifest, "does not name samples.parquet"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(name: str, folder: Path) -> None:
    FAULTS[name].make(folder)
    found = [one for one in findings(folder) if one.severity == "fault"]
    assert any(FAULTS[name].said in one.what for one in found), found
    for one in found:
        assert one.path.startswith(str(folder.parent.parent))
        assert one.mend
        assert "\n" not in one.what
    assert not verify(folder.parent.parent).sound


def test_rounding_is_not_a_fault_and_bounds_of_another_method_are_not_compared(folder: Path) -> None:
    column("quality", lambda q: q * (1 + 1e-15))(folder)
    assert not [one for one in findings(folder) if one.severity == "fault"]
    column("loss_points_upper", lambda x: x - 0.1)(folder)
    for name in ("profile.parquet", "measurements.parquet"):
        rewritten(folder / name, lambda rows: None, bounds="percentile@1")
    (remark,) = [one for one in findings(folder) if "percentile@1" in one.what]
    assert remark.severity == "remark"
    assert verify(folder.parent.parent).sound


def test_other_weights_under_one_name_are_an_update(folder: Path) -> None:
    retrained = {**header()["sender"], "weights_sha256": "9" * 64}
    publish_profile(folder.parent.parent, samples=2, sender=retrained, profile_id="other", version=2)
    assert verify(folder.parent.parent).sound


def test_what_is_unfinished_or_belongs_to_nothing_is_a_remark(folder: Path) -> None:
    store, pair = folder.parent.parent, folder.parent
    (pair / ".tmp-killed").mkdir()
    (pair / ".tmp-killed" / "x").write_bytes(b"12345")
    (pair / "run-0123456789abcdef").mkdir()
    part = pa.Table.from_pylist(measurements(samples=1, sources=QA), schema=MEASUREMENTS)
    for number in range(3):
        write_table(part, pair / "run-0123456789abcdef" / f"{number}.parquet")
    (pair / "run-0123456789abcdef" / ".tmp-1-x.parquet").touch()
    (folder / "validations" / ".run-1").mkdir(parents=True)
    write_table(part, folder / "validations" / ".run-1" / "0.parquet")
    for stranger in (folder / "notes.txt", pair / "old", store / "README"):
        stranger.touch()
    publish_profile(store / "demo", samples=2)
    found = {one.path: one for one in findings(folder)}
    said = {
        pair / ".tmp-killed": "(5 bytes)",
        pair / "run-0123456789abcdef": "unfinished run: 3 parts measured",
        folder / "validations" / ".run-1": "unfinished validation, 1 parts measured",
        folder / "notes.txt": "belongs to nothing",
        pair / "old": "belongs to nothing",
        store / "README": "belongs to nothing",
        store / "demo": "a store of its own",
    }
    for path, what in said.items():
        assert what in found[str(path)].what
    assert set(found) == {str(path) for path in said}
    assert verify(store).sound


def test_a_finished_run_is_no_remark(folder: Path) -> None:
    (folder.parent / "run-0123456789abcdef").mkdir()
    (folder.parent / "run-0123456789abcdef" / "lock").touch()
    assert findings(folder) == []


def test_measured_chains_and_the_lock_of_reprofile_belong_to_a_store(folder: Path) -> None:
    store = folder.parent.parent
    chain = store / "chains" / "c__from__b__from__a"
    (chain / ".run-0123456789abcdef").mkdir(parents=True)
    (chain / "hotpotqa-0123456789abcdef.parquet").touch()
    (store / ".reprofile").mkdir()
    (store / ".reprofile" / "lock").touch()
    assert findings(folder) == []
    (chain / "notes.txt").touch()
    (store / "empty").mkdir()
    assert [one.path for one in findings(folder)] == [str(store / "chains"), str(store / "empty")]


def test_copies_of_one_profile_are_told(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("v0002"))
    assert any("v0001, v0002 are copies of one profile" in one.what for one in findings(folder))
