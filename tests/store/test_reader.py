from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvprofile.errors import BadInput
from kvprofile.json_text import parse_json
from kvprofile.store.index import ls
from kvprofile.store.reader import load, resolve
from kvprofile.store.retention import prune
from kvprofile.store.schema import FORMAT_VERSION, PROFILE
from kvprofile.store.verify import verify
from kvprofile.store.writer import write_table
from tests.profile_factory import header, publish_profile


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    return publish_profile(tmp_path / "outputs", samples=2, granularity=(3,))


def test_every_way_of_naming_a_profile_leads_to_it(folder: Path) -> None:
    for path in (folder, folder / "profile.parquet", folder.parent, folder.parent.parent):
        assert resolve(str(path)) == folder


def test_newest_version_is_by_number(folder: Path) -> None:
    folder.rename(folder.parent / "v9999")
    newest = publish_profile(folder.parent.parent, samples=2, granularity=(3,))
    assert newest.name == "v10000"
    assert resolve(folder.parent) == newest


def test_store_with_two_pairs_lists_them(folder: Path) -> None:
    store = folder.parent.parent
    publish_profile(store, samples=2, granularity=(3,), sender={**header()["sender"], "name": "other"})
    with pytest.raises(BadInput, match=r"2 pairs.*receiver__from__other.*receiver__from__sender"):
        resolve(store)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no profile at"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="kvprofile sweep"):
        resolve(tmp_path)
    (tmp_path / "other.parquet").touch()
    with pytest.raises(BadInput, match="is not a profile"):
        resolve(tmp_path / "other.parquet")


def test_round_trip(folder: Path) -> None:
    profile = load(folder)
    assert profile.header["receiver"]["name"] == "receiver"
    assert profile.rows.schema.names == PROFILE.names
    assert len(profile.samples()) == 2
    assert len(profile.measurements()) == 2 * 2 * (4 + 3)


@pytest.mark.parametrize("keep", [0, 3, 100, -9, -200])
def test_truncated(folder: Path, keep: int) -> None:
    path = folder / "profile.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"profile\.parquet is truncated"):
        load(folder)


def test_damaged_page(folder: Path) -> None:
    path = folder / "measurements.parquet"
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"measurements\.parquet is truncated"):
        load(folder).measurements()


def test_missing_table(folder: Path) -> None:
    (folder / "samples.parquet").unlink()
    with pytest.raises(BadInput, match="incomplete"):
        load(folder).samples()


def test_foreign_parquet(folder: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), folder / "profile.parquet")
    with pytest.raises(BadInput, match="not written by kvprofile"):
        load(folder)


@pytest.mark.parametrize("footer", ["no json", "[]", "{}", '{"format_version": "1"}', '{"format_version": true}'])
def test_foreign_footer(folder: Path, footer: str) -> None:
    table = pq.read_table(folder / "profile.parquet").replace_schema_metadata({"kvprofile": footer})
    pq.write_table(table, folder / "profile.parquet")
    with pytest.raises(BadInput, match="not written by kvprofile"):
        load(folder)


def test_newer_format_names_the_command(folder: Path) -> None:
    table = pa.table({"columns": ["of the future"]})
    future = json.dumps({"format_version": FORMAT_VERSION + 1, "unknown": {}})
    pq.write_table(table.replace_schema_metadata({"kvprofile": future}), folder / "profile.parquet")
    message = (
        rf"newer kvprofile \(format {FORMAT_VERSION + 1}, this reads up to {FORMAT_VERSION}\): pip install -U kvprofile"
    )
    with pytest.raises(BadInput, match=message):
        load(folder)


def test_missing_column_and_wrong_type(folder: Path) -> None:
    path = folder / "profile.parquet"
    whole = pq.read_table(path)
    write_table(whole.drop_columns(["loss_rel"]), path, header())
    with pytest.raises(BadInput, match="no column loss_rel"):
        load(folder)
    texts = pa.array(["many"] * len(whole))
    write_table(whole.set_column(whole.schema.get_field_index("quality"), "quality", texts), path, header())
    with pytest.raises(BadInput, match=r"profile\.parquet"):
        load(folder)


def test_incomplete_footer(folder: Path) -> None:
    table = pq.read_table(folder / "profile.parquet").replace_schema_metadata({"kvprofile": '{"format_version": 1}'})
    pq.write_table(table, folder / "profile.parquet")
    with pytest.raises(BadInput, match="incomplete footer"):
        load(folder)


def test_more_columns_than_known_are_ignored(folder: Path) -> None:
    path = folder / "profile.parquet"
    whole = pq.read_table(path)
    write_table(whole.append_column("extra", pa.array([0] * len(whole))), path, header())
    assert load(folder).rows.schema.names == PROFILE.names


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("recompute_fraction", None),
        ("n_planned", None),
        ("metric", None),
        ("granularity", 0),
        ("stop_layer", None),
        ("start_layer", 40),
        ("quality", float("nan")),
        ("n_scored", 99),
        ("recomputed_layers", 500),
        ("recomputed_layers", -1),
        ("recomputed_layers", 2),
        ("recompute_fraction", 0.0),
        ("kv_bytes_per_token", -1),
        ("e_bytes_per_token", -1),
        ("prefill_flops", -1.0),
        ("full_prefill_flops", -1.0),
        ("measured_prefill_ms", -1.0),
    ],
)
def test_a_row_that_cannot_be_is_refused(column: str, value: object, folder: Path) -> None:
    table = pq.read_table(folder / "profile.parquet")
    rows = table.to_pylist()
    group = next(row for row in rows if row["start_layer"] is not None)
    group[column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), folder / "profile.parquet")
    with pytest.raises(BadInput, match="has a row with"):
        load(folder)


def test_a_flipped_bit_is_seen(folder: Path) -> None:
    """Every page has a checksum; a flip outside of pages breaks the file's structure or nothing that is read."""
    path, sound = folder / "profile.parquet", load(folder).rows
    data = path.read_bytes()
    for offset in range(8, len(data), max(1, len(data) // 150)):
        path.write_bytes(bytes([*data[:offset], data[offset] ^ 4, *data[offset + 1 :]]))
        try:
            assert load(folder).rows.equals(sound), f"the flip at {offset} changed what was read"
        except BadInput:
            continue


def test_a_version_that_was_emptied_is_passed_over(folder: Path) -> None:
    (folder.parent / "v9999").mkdir()
    assert load(folder.parent).folder == folder


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', "[" * 100_000, "1e999", "[-1e999]"])
def test_json_of_strangers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|deeply"):
        parse_json(text)


@pytest.mark.parametrize(
    ("strategy", "changes", "said"),
    [
        ("layer_group", {"start_layer": None, "stop_layer": None}, "a layer_group of no layers"),
        ("full_reuse", {"recomputed_layers": 3, "recompute_fraction": 0.5}, "3 of 6 layers recomputed by full_reuse"),
        ("full_prefill", {"recomputed_layers": 0, "recompute_fraction": 0.0}, "0 of 6 layers"),
        ("layer_group", {"recomputed_layers": 2, "recompute_fraction": 1 / 3}, "2 of 6 layers"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    folder: Path, strategy: str, changes: dict[str, object], said: str
) -> None:
    table = pq.read_table(folder / "profile.parquet")
    rows = table.to_pylist()
    next(row for row in rows if row["strategy"] == strategy).update(changes)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), folder / "profile.parquet")
    with pytest.raises(BadInput, match=f"has a row with {said}"):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"profile_id": ["x"]},
        {"version": [1]},
        {"version": 0},
        {"version": True},
        {"version": 1.0},
        {"version": 2**31},
        {"device": None},
        {"datasets": [{"name": 1, "sha256": "e", "sample_ids_sha256": "f"}]},
        {"datasets": [{"name": "x", "sha256": ["e"], "sample_ids_sha256": "f"}]},
        {"datasets": [{"name": "x", "sha256": "e", "sample_ids_sha256": None}]},
    ],
)
def test_a_header_with_values_of_other_kinds_is_refused(folder: Path, changes: dict[str, object]) -> None:
    path = folder / "profile.parquet"
    write_table(pq.read_table(path), path, header(**changes))
    with pytest.raises(BadInput, match=r"has a footer with values of other kinds|has a footer whose version"):
        load(folder)
    (entry,) = ls(folder.parent.parent)
    assert entry.problem is not None
    assert not verify(folder.parent.parent).sound
    assert prune(folder.parent.parent, 1, really=False).removals == []


VALIDATION = {
    **{"task": "qa", "dataset": "musique", "metric": "f1", "created_at": "2026-02-01T00:00:00Z", "samples": 20},
    **{"overlap_left_out": 0, "max_loss": "1%", "confidence": 0.95, "full_prefill_quality": 0.5},
}
PLAN = {
    **{"plan": "layers 2–3 (2 of 6)", "strategy": "layer_group", "start_layer": 2, "stop_layer": 4, "params": None},
    **{"recompute_fraction": 1 / 3, "unit": "%", "promised_at_most": 0.01, "profiled_loss": 0.0, "loss": 0.0},
    **{"loss_lower": 0.0, "loss_upper": None, "quality": 0.5, "baseline_quality": 0.5},
    **{"held": True, "bounded": False, "beyond_chance": None},
}


@pytest.mark.parametrize(
    ("of_all", "of_plan"),
    [
        ({}, {}),
        ({"samples": 10**400}, {}),
        ({"samples": True}, {}),
        ({"samples": -1}, {}),
        ({"confidence": 2.0}, {}),
        ({"full_prefill_quality": 10**400}, {}),
        ({}, {"loss": 10**400}),
        ({}, {"loss": -(10**400)}),
        ({}, {"quality": 10**301}),
        ({}, {"recompute_fraction": 1.5}),
        ({}, {"start_layer": -1}),
        ({}, {"stop_layer": True}),
        ({}, {"held": 1}),
    ],
)
def test_a_validation_with_numbers_that_cannot_be_is_none(
    folder: Path, of_all: dict[str, object], of_plan: dict[str, object]
) -> None:
    (folder / "validations").mkdir()
    made = {**VALIDATION, **of_all, "plans": [{**PLAN, **of_plan}]}
    path = folder / "validations" / "x-0001.parquet"
    write_table(load(folder).measurements(), path, {**load(folder).header, "validation": made})
    if not of_all and not of_plan:
        (read,) = load(folder).validations()
        assert read == {**made, "file": str(path)}
        return
    with pytest.raises(BadInput, match="holds no validation"):
        load(folder).validations()
