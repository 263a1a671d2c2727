"""Every bad input: one sentence, the right exit code, nothing written over. Run with -s to read the table."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
import yaml

from kvprofile import cli
from tests.profile_factory import publish_profile
from tests.tiny import tiny_tokenizer
from tests.tiny_models import save_adapter, save_model
from tests.tiny_sweep import write_pair

Arguments = list[str]


def sweep(folder: Path, **changes: object) -> Arguments:
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text("utf-8"))
    (folder / "changed.yaml").write_text(yaml.safe_dump({**recipe, **changes}), "utf-8")
    return ["sweep", str(folder / "changed.yaml"), "--out", str(folder / "store")]


def data(folder: Path, text: str, task: str = "qa", **source: object) -> Arguments:
    (folder / "other.jsonl").write_text(text, "utf-8")
    return sweep(folder, data=[{"dataset": "other.jsonl", "task": task, **source}], contexts=1)


def record(**changes: object) -> str:
    held: dict[str, object] = {"id": "a", "context": "Some text.", "question": "What?", "answers": ["x"]}
    return json.dumps({k: v for k, v in {**held, **changes}.items() if v is not None})


def no_config(folder: Path) -> Arguments:
    (folder / "empty").mkdir()
    return sweep(folder, receiver="empty")


def two_architectures(folder: Path) -> Arguments:
    save_model(folder / "deeper", num_hidden_layers=4)
    return sweep(folder, receiver="deeper")


def two_tokenizers(folder: Path) -> Arguments:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["stones"])
    save_model(folder / "retold", tokenizer=tokenizer)
    return sweep(folder, sender="retold")


def foreign_adapter(folder: Path) -> Arguments:
    save_adapter(folder / "wide", hidden_size=64)
    return sweep(folder, sender="base+wide")


def encoder_decoder(folder: Path) -> Arguments:
    transformers.T5Config(d_model=8, num_layers=1, num_heads=1).save_pretrained(folder / "t5")
    return sweep(folder, receiver="t5")


def truncated_profile(folder: Path) -> Arguments:
    profile = publish_profile(folder / "profiles") / "profile.parquet"
    profile.write_bytes(profile.read_bytes()[:200])
    return ["pareto", str(profile)]


def foreign_parquet(folder: Path) -> Arguments:
    pq.write_table(pa.table({"a": [1]}), folder / "profile.parquet")
    return ["pareto", str(folder / "profile.parquet")]


def store_is_a_file(folder: Path) -> Arguments:
    return [*sweep(folder)[:-1], str(folder / "data.jsonl")]


CASES: dict[str, tuple[Callable[[Path], Arguments], str]] = {
    "missing data file": (lambda f: sweep(f, data=[{"dataset": "gone.jsonl", "task": "qa"}]), "gone.jsonl"),
    "empty data file": (lambda f: data(f, ""), "no records"),
    "record without a field": (lambda f: data(f, record(answers=None)), '"answers"'),
    "context of zero tokens": (lambda f: data(f, record(context=" ")), "empty"),
    "contexts beyond the data": (lambda f: sweep(f, contexts=99), "fewer than the 99"),
    "unknown recipe key": (lambda f: sweep(f, granulariti=[1]), 'did you mean "granularity"'),
    "unknown metric": (lambda f: data(f, record(), metrics=["rouge_1"]), 'did you mean "rouge_l"'),
    "unknown task": (lambda f: data(f, record(), task="qaa"), 'did you mean "qa"'),
    "granularity 0": (lambda f: sweep(f, granularity=[0]), "granularity"),
    "granularity beyond the layers": (lambda f: sweep(f, granularity=[7]), "granularity 7"),
    "missing recipe": (lambda f: ["sweep", str(f / "gone.yaml")], "gone.yaml"),
    "neither recipe nor options": (lambda f: ["sweep"], "--sender"),
    "model folder without config": (no_config, "config.json"),
    "two architectures": (two_architectures, "layers"),
    "two tokenizers": (two_tokenizers, "token"),
    "adapter of another base": (foreign_adapter, "adapter"),
    "encoder–decoder": (encoder_decoder, "decoder"),
    "store is a file": (store_is_a_file, "--out"),
    "truncated Parquet": (truncated_profile, "profile.parquet"),
    "foreign Parquet": (foreign_parquet, "profile.parquet"),
    "missing profile": (lambda f: ["show", str(f / "nothing")], "nothing"),
    "loss that is no loss": (lambda f: ["pareto", str(publish_profile(f / "p")), "--max-loss", "much"], "much"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(
    case: str, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pair, tmp_path, dirs_exist_ok=True)
    arguments, part = CASES[case][0](tmp_path), CASES[case][1]
    monkeypatch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
    monkeypatch.setattr(sys, "argv", ["kvprofile", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    shown = capsys.readouterr()
    sentence = shown.err.splitlines()[-1]
    print(f"{case:32} exit {exit_.value.code}  {sentence}")
    assert exit_.value.code == 2
    assert sentence.startswith("kvprofile: ")
    assert part in sentence
    assert "Traceback" not in shown.err
    assert not shown.out
    assert not list((tmp_path / "store").glob("*/v*"))


def test_no_traceback_leaves_a_subprocess(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from kvprofile.cli import main; main()", "sweep", str(tmp_path / "gone.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1)
