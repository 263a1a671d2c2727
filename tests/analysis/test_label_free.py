from __future__ import annotations

import pyarrow as pa
import pytest

from kvprofile.analysis.label_free import rankings
from kvprofile.analysis.scores import Scores, all_scores
from kvprofile.layers import PlanKey
from kvprofile.store.schema import MEASUREMENTS
from tests.profile_factory import measurements

QA = ("qa", "hotpotqa")


def table(kl_sign: float = 1.0) -> tuple[pa.Table, Scores, list[PlanKey]]:
    rows = measurements(sources=[QA])
    for row in rows:
        row["kl"] *= kl_sign
        row["output_text"] = "full" if row["strategy"] == "full_prefill" else f"{row['value']:.3f}"
    made = pa.Table.from_pylist(rows, schema=MEASUREMENTS)
    scores = next(one for one in all_scores(made) if one.metric == "f1")
    return made, scores, [key for key in scores.plans if key[0] in ("layer_group", "full_reuse")]


def test_perfect_and_reversed_rankings() -> None:
    made, scores, plans = table()
    found = {one.measure: one for one in rankings(scores, plans, made, lambda output, full: float(output))}
    assert found["mean_kl"].rank_correlation == pytest.approx(1.0)
    assert found["agreement"].rank_correlation == pytest.approx(1.0)
    assert found["mean_kl"].plans == len(plans)
    made, scores, plans = table(kl_sign=-1.0)
    assert rankings(scores, plans, made, None)[0].rank_correlation == pytest.approx(-1.0)


def test_agreement_compares_with_full_prefills_own_text() -> None:
    made, scores, plans = table()
    seen = set()

    def agree(output: str, full: str) -> float:
        seen.add(full)
        return 0.0

    found = {one.measure: one for one in rankings(scores, plans, made, agree)}
    assert seen == {"full"}
    assert found["agreement"].rank_correlation is None, "constant"
