from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvprofile.errors import BadInput
from kvprofile.scoring import BUILT_IN, metric

GOLDEN = Path(__file__).parent.parent / "golden"

SCRIPT = """
import datasets
import evaluate


class Length(evaluate.Metric):
    def _info(self):
        texts = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(texts))

    def _compute(self, predictions, references):
        return {"other": 7.0, "length": min(len(predictions[0]), len(references[0]))}
"""


def golden_cases() -> list[Any]:
    cases = []
    for name in BUILT_IN:
        document = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
        for case in document["cases"]:
            cases.append(pytest.param(name, document["tolerance"], case, id=f"{name}-{case['output'][:20]!r}"))
    return cases


@pytest.mark.parametrize(("name", "tolerance", "case"), golden_cases())
def test_golden_values(name: str, tolerance: float, case: dict[str, Any]) -> None:
    score = metric(name).score(case["output"], case["references"])
    assert score == pytest.approx(case["expected"], abs=tolerance + 1e-12)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_golden_file_has_the_looping_or_the_empty_answer(name: str) -> None:
    outputs = [c["output"] for c in json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["cases"]]
    assert "" in outputs
    assert any(len(words) > 2 and len(set(words)) == 1 for words in (o.split() for o in outputs))


def test_identity_names_the_library_and_what_it_does() -> None:
    assert metric("rouge_l").identity.startswith("rouge_l@rouge-score-0.")
    assert metric("rouge_l").identity.endswith("-unstemmed")
    assert "rapidfuzz-" in metric("code_similarity").version


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = tmp_path / "length.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_metric_of_evaluate_by_path(script: Path) -> None:
    length = metric(f"evaluate:{script}")
    assert length.name == "length"
    assert length.version.startswith("evaluate-")
    assert length.score("abcd", ["a", "abc"]) == 3.0


def test_metric_of_evaluate_changes_identity_with_its_script(script: Path) -> None:
    before = metric(str(script)).identity
    script.write_text(SCRIPT.replace("min", "max"), encoding="utf-8")
    assert metric(str(script)).identity != before


def test_metric_of_evaluate_that_cannot_score_is_refused_at_once(script: Path) -> None:
    script.write_text(SCRIPT.replace("return {", "raise KeyError('sources') or {"), encoding="utf-8")
    with pytest.raises(BadInput, match="sources"):
        metric(str(script))


def test_unknown_metric_suggests_a_built_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import evaluate

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("nowhere")

    monkeypatch.setattr(evaluate, "load", refuse)
    with pytest.raises(BadInput, match=r'no metric "rouge_1" \(did you mean "rouge_l"\?\).*nowhere'):
        metric("rouge_1")


def test_metric_where_lower_is_better_is_refused() -> None:
    with pytest.raises(BadInput, match="lower when better"):
        metric("evaluate:wer")
