"""The report as a document: what it says, that it escapes, its size, its figures."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from kvprofile.cli import app
from kvprofile.limits import parse_loss
from kvprofile.report.html import report_html
from kvprofile.store.reader import load
from tests.profile_factory import (
    add_sensitivity,
    add_timings,
    change_rows,
    layer_timings,
    measurements,
    publish_profile,
)

HOSTILE = "<script>alert('x')</script> $\\alpha$ \u202e\x1b[31m & \"quoted\" " + "漢" * 200


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


class Tags(HTMLParser):
    """Counts tags and collects texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") or (name in ("src", "href") and tag != "use") for name, _ in attrs), (
            tag,
            attrs,
        )

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def report(folder: Path, limit: str = "5%") -> str:
    return report_html(load(folder), parse_loss(limit), "point")


@pytest.mark.parametrize("name", ["kv_bytes_per_token", "context_tokens_median"])
def test_bytes_that_are_not_known_are_a_dash(tmp_path: Path, name: str) -> None:
    folder = publish_profile(tmp_path)
    (row,) = re.findall(r'<tr class="chosen">.*?</tr>', report(folder))
    assert '<td class="n">102.4 kB</td>' in row
    change_rows(folder, lambda row: row.update({name: None}))
    (row,) = re.findall(r'<tr class="chosen">.*?</tr>', report(folder))
    assert "102.4 kB" not in row
    assert ">0 B<" not in row


def test_it_says_what_pareto_says(tmp_path: Path) -> None:
    text = report(publish_profile(tmp_path))
    assert "Cheapest plan measured within 5%: layers 2–3 (2 of 6)" in text
    assert "May receiver read the cache of sender?" in text
    assert "<h3>Had there been no labels</h3>" in text
    points = json.loads(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text)[0])["points"]
    assert any(point[2].startswith("layers 2–3 (2 of 6), f1 0.7") for point in points)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text).replace("http-equiv", ""), "nothing from the network"


def test_hostile_texts_are_texts(tmp_path: Path) -> None:
    rows = measurements(sources=[("qa", HOSTILE)])
    for row in rows:
        row["output_text"] = HOSTILE
        row["sample_id"] += HOSTILE
    model = {"name": HOSTILE, "architecture": HOSTILE}
    folder = publish_profile(tmp_path, rows, sources=[("qa", HOSTILE)], device=HOSTILE)
    add_timings(folder)
    held = load(folder)
    for role in ("sender", "receiver"):
        held.header[role].update(model)
    text = report_html(held, parse_loss("5%"), "point")
    add_timings(plainly := publish_profile(tmp_path / "plain"))
    plain = Tags(report(plainly))
    hostile = Tags(text)
    assert hostile.tags.count("script") == plain.tags.count("script")
    assert any("<script>alert('x')</script>" in piece for piece in hostile.texts)


def test_one_plan_and_thousands(tmp_path: Path) -> None:
    few = publish_profile(tmp_path / "few", layers=1, granularity=(1,))
    assert "layer 0 (1 of 1)" in report(few)
    many = publish_profile(tmp_path / "many", layers=100, samples=2, granularity=(1,))
    text = report(many)
    assert len(text.encode()) < 3_000_000
    assert text.count("recomputed, 2 of 2 samples") > 5000


def test_a_profile_without_its_measurements_has_a_report(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    for name in ("measurements.parquet", "samples.parquet"):
        (folder / name).unlink()
    assert "Cheapest plan measured within 5%" in report(folder)


def test_the_command_writes_report_and_figures(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    found = json.loads(run("report", folder, "--plots", tmp_path / "plots", "--json").stdout)
    assert Path(found["report"]) == folder / "report.html"
    names = {Path(path).name.split("-")[0] for path in found["figures"]}
    assert names == {"frontier", "groups", "differences"}
    for path in map(Path, found["figures"]):
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in start
        assert b"var(--" not in path.read_bytes()
    again = (folder / "report.html").read_bytes()
    run("report", folder)
    assert (folder / "report.html").read_bytes() == again, "the same profile gives the same report"


def test_time_to_first_token_is_drawn_where_layers_were_timed(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    before = report(folder)
    assert "break-even" not in before
    assert "first token" not in before
    add_timings(folder)
    text = report(folder)
    assert "<figcaption>Time to first token over bandwidth, contexts of 100 tokens</figcaption>" in text
    assert "with a suffix of 10 tokens, modelled from layer times that were measured on cpu" in text
    assert "<dt>break-even</dt>" in text
    data = [json.loads(held) for held in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text)]
    (wire,) = [one for one in data if any("break" in p[2] or "first token" in p[2] for p in one["points"])]
    said = [point[2] for point in wire["points"]]
    for plan in ("full_prefill", "full_reuse", "layer 2 (1 of 6)", "layers 2–3 (2 of 6)"):
        assert any(one.startswith(f"{plan} at ") and "first token after" in one for one in said)
    low, high = wire["place"]["x"]
    assert (low, high) == (round(low), round(high)), "whole decades, as logarithms"
    (at,) = [point for point in wire["points"] if point[2].startswith("layers 2–3 (2 of 6): before full_prefill above")]
    even = json.loads(run("cost", folder, "--json").stdout)["blocks"][0]["contexts"][0]["plans"][2]["break_even_gbps"]
    assert 10 ** at[0] == pytest.approx(even["overlapped"])
    assert at[1] == pytest.approx(6 * 1.0 + 6 * 0.5 + 0.25)
    assert all(low <= x <= high for x, *_ in wire["points"])
    assert all(0 <= y <= wire["place"]["y"][1] for _, y, _ in wire["points"])
    found = json.loads(run("report", folder, "--plots", tmp_path / "plots", "--json").stdout)
    assert {Path(path).suffix for path in found["figures"] if Path(path).name.startswith("wire-")} == {".png", ".svg"}


def test_no_figure_where_the_median_context_was_not_timed(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    add_timings(folder, layer_timings(lengths=(200, 400)))
    assert "<figcaption>Time to first token" not in report(folder)


def test_a_cache_that_is_slower_than_any_prefill_is_drawn(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    add_timings(
        folder, [{**row, "read_ms": 1e4, "recompute_ms": row["recompute_ms"] and 1e-6} for row in layer_timings()]
    )
    text = report(folder)
    assert "<figcaption>Time to first token" in text
    assert run("cost", folder).exit_code == 0


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("report", publish_profile(tmp_path / "store"), "-o", tmp_path / "file" / "report.html")
    assert "cannot write" in str(result.exception)


def test_without_a_plan_within_the_limit(tmp_path: Path) -> None:
    rows = measurements(sources=[("qa", "hotpotqa")])
    for row in rows:
        if row["strategy"] == "layer_group":
            row["value"] *= 0.5
    text = report(publish_profile(tmp_path, rows), "5%")
    assert "No plan that saves prefill loses at most 5%: use full_prefill or accept more loss." in text
    assert "Cheapest plan" not in text


def test_ids_in_the_page_are_unique(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path, sources=[("qa", "a"), ("code", "b")])
    add_timings(folder)
    ids = re.findall(r'\bid="([^"]+)"', report(folder))
    assert len(ids) == len(set(ids)) > 50


def test_agreement_is_called_so(tmp_path: Path) -> None:
    text = report(publish_profile(tmp_path, references="none"))
    assert "Without references: f1 is agreement with the receiver's own full prefill." in text
    assert "Had there been no labels" not in text
    output = run("pareto", tmp_path).output
    assert "f1 of agreement with the receiver's own full prefill" in output


def test_fresh_data_and_layers_are_shown(tmp_path: Path) -> None:
    """Measured by the commands, on a tiny pair."""
    from kvprofile.recipe import load_recipe, with_options
    from kvprofile.sweep import sweep
    from tests.test_validation import write_data
    from tests.tiny_sweep import Silent, write_pair

    profile = sweep(
        with_options(load_recipe(str(write_pair(tmp_path))), references="none"), tmp_path / "store", Silent()
    )
    run("validate", profile, "--dataset", write_data(tmp_path / "<b>fresh.jsonl", range(3)))
    for direction in ([], ["--reverse"]):
        assert run("sensitivity", profile, *direction).exit_code == 0
    text = report(profile, "60%")
    assert "<td>&lt;b&gt;fresh</td>" in text
    assert "<b>fresh" not in text
    assert "The other direction: the sender reads a layer of the receiver&#39;s" in text
    points = "".join(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text))
    assert "on \\u003cb\\u003efresh: loss" in points
    assert "layer 0: loss" in points


def test_the_map_and_its_sets_are_shown(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    add_sensitivity(folder)
    text = report(folder)
    assert "<p>Critical layers: 2, 3.</p>" in text
    assert "<td>1, 3</td><td>2–3</td>" in text
    output = run("sensitivity", folder).output
    assert "critical layers (loss above 10%): 2, 3" in output
    assert "1, 3  layers 2–3 (2 of 6)" in output
    document = json.loads(run("sensitivity", folder, "--json").stdout)
    (one,) = document["blocks"][0]["sets_against_groups"]
    assert one["difference_points"] == pytest.approx(-20 * document_quality(folder))
    assert (one["set_e_layers"], one["group"]) == (2, [2, 4])


def document_quality(folder: Path) -> float:
    rows = load(folder).rows.to_pylist()
    return float(next(r["quality"] for r in rows if r["strategy"] == "full_prefill" and r["metric"] == "f1"))


def test_parameters_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = publish_profile(tmp_path)
    add_sensitivity(folder)
    path = folder / "sensitivity" / "forward.parquet"
    table = pq.read_table(path)
    rows = [{**row, "params": "<script>" if row["params"] else None} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    assert "are no parameters" in str(run("report", folder).exception)
