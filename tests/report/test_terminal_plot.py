from __future__ import annotations

from pathlib import Path

from kvprofile.limits import parse_loss
from kvprofile.report.frontier import frontier_blocks
from kvprofile.report.terminal_plot import frontier_plot
from kvprofile.store.reader import load
from tests.profile_factory import measurements, publish_profile


def test_plans_lie_where_their_recompute_and_quality_are(tmp_path: Path) -> None:
    (block,) = frontier_blocks(load(publish_profile(tmp_path)), limit=parse_loss("5%"))
    lines = frontier_plot(block)
    body = [line[9:] for line in lines[:11]]
    assert body[0].startswith("-" * 20 + "*" + "-"), "two of six layers, as good as full prefill"
    assert body[-1][0] == "o", "full reuse, the worst of those that serve"
    assert body[5][10] == "o", "one layer, half-way"
    assert lines[0].split("|")[0].strip() == f"{block.selected['quality']:.3f}"  # type: ignore[index]
    assert all(len(line) < 75 for line in lines)


def test_nothing_to_draw(tmp_path: Path) -> None:
    rows = measurements(sources=[("qa", "hotpotqa")])
    for row in rows:
        row["value"] = 0.5
    (block,) = frontier_blocks(load(publish_profile(tmp_path, rows)))
    assert frontier_plot(block) == []
