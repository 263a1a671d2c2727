"""Everything that goes wrong: one sentence, the right exit code, nothing written over. Run with -s to read the table."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml

from kvprofile import cli
from kvprofile.cli.options import parse_bytes
from kvprofile.errors import BadInput
from kvprofile.store.schema import FORMAT_VERSION
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


def newer_profile(folder: Path) -> Arguments:
    return ["show", str(publish_profile(folder / "profiles", format_version=FORMAT_VERSION + 1))]


def unwritable_store(folder: Path) -> Arguments:
    (folder / "store").mkdir(mode=0o500)
    if os.access(folder / "store", os.W_OK):
        pytest.skip("root may write anywhere")
    return sweep(folder)


def no_plan(folder: Path) -> Arguments:
    return ["pareto", str(publish_profile(folder / "profiles")), "--granularity", "3", "--max-loss", "1pt"]


class Fault(NamedTuple):
    """Makes a function raise."""

    where: str
    error: BaseException


class Case(NamedTuple):
    """A command line and what comes of it.

    Attributes:
        arguments: Writes what the command reads, and returns it.
        part: What the sentence must hold.
        code: The exit code; 1 answers on standard output, all others complain on standard error.
        fault: What goes wrong beside the arguments.
    """

    arguments: Callable[[Path], Arguments]
    part: str
    code: int = 2
    fault: Fault | None = None


FULL_DISK = OSError(errno.ENOSPC, "No space left on device", "part.parquet")
ANSWER = "kvprofile.engine.executor._answer_block"

CASES: dict[str, Case] = {
    "missing data file": Case(lambda f: sweep(f, data=[{"dataset": "gone.jsonl", "task": "qa"}]), "gone.jsonl"),
    "empty data file": Case(lambda f: data(f, ""), "no records"),
    "record without a field": Case(lambda f: data(f, record(answers=None)), '"answers"'),
    "context of zero tokens": Case(lambda f: data(f, record(context=" ")), "empty"),
    "contexts beyond the data": Case(lambda f: sweep(f, contexts=99), "fewer than the 99"),
    "unknown recipe key": Case(lambda f: sweep(f, granulariti=[1]), 'did you mean "granularity"'),
    "unknown metric": Case(lambda f: data(f, record(), metrics=["rouge_1"]), 'did you mean "rouge_l"'),
    "unknown task": Case(lambda f: data(f, record(), task="qaa"), 'did you mean "qa"'),
    "granularity 0": Case(lambda f: sweep(f, granularity=[0]), "granularity"),
    "seed below 0": Case(lambda f: sweep(f, seed=-1), "seed should be greater than or equal to 0"),
    "unknown search": Case(lambda f: [*sweep(f), "--search", "clever"], "exhaustive"),
    "memory limit of no size": Case(lambda f: [*sweep(f), "--memory-limit", "much"], "12GB"),
    "memory limit below the models": Case(lambda f: [*sweep(f), "--memory-limit", "1MB"], "--memory-limit"),
    "granularity beyond the layers": Case(lambda f: sweep(f, granularity=[7]), "granularity 7"),
    "missing recipe": Case(lambda f: ["sweep", str(f / "gone.yaml")], "gone.yaml"),
    "neither recipe nor options": Case(lambda f: ["sweep"], "--sender"),
    "model folder without config": Case(no_config, "config.json"),
    "two architectures": Case(two_architectures, "layers"),
    "two tokenizers": Case(two_tokenizers, "token"),
    "adapter of another base": Case(foreign_adapter, "adapter"),
    "encoder–decoder": Case(encoder_decoder, "decoder"),
    "store is a file": Case(store_is_a_file, "--out"),
    "truncated Parquet": Case(truncated_profile, "profile.parquet"),
    "foreign Parquet": Case(foreign_parquet, "profile.parquet"),
    "missing profile": Case(lambda f: ["show", str(f / "nothing")], "nothing"),
    "loss that is no loss": Case(lambda f: ["pareto", str(publish_profile(f / "p")), "--max-loss", "much"], "much"),
    "profile of a newer kvprofile": Case(newer_profile, "pip install -U kvprofile"),
    "unwritable store": Case(unwritable_store, "--out"),
    "no plan within the loss": Case(no_plan, "use full_prefill", 1),
    "full disk": Case(sweep, "the disk is full", 3, Fault("kvprofile.sweep.write_table", FULL_DISK)),
    "Ctrl-C": Case(sweep, "run the same command again", 3, Fault("kvprofile.sweep.write_table", KeyboardInterrupt())),
    "out of memory": Case(sweep, "--max-context-tokens", 4, Fault(ANSWER, torch.OutOfMemoryError("no room"))),
    "host out of memory": Case(sweep, "--max-context-tokens", 4, Fault("kvprofile.run.load_pair", MemoryError())),
    "a fault of kvprofile": Case(sweep, "--debug", 4, Fault(ANSWER, ZeroDivisionError("x"))),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_and_the_exit_code(
    name: str, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pair, tmp_path, dirs_exist_ok=True)
    case = CASES[name]
    arguments = case.arguments(tmp_path)
    if case.fault:
        monkeypatch.setattr(case.fault.where, raising(case.fault.error))
    monkeypatch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
    monkeypatch.setattr(sys, "argv", ["kvprofile", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    shown = capsys.readouterr()
    lines = (shown.out if case.code == 1 else shown.err).splitlines()
    sentence = next((line for line in lines if case.part in line), "")
    print(f"{name:32} exit {exit_.value.code}  {sentence}")
    assert sentence, lines
    assert exit_.value.code == case.code
    assert "Traceback" not in shown.err
    assert not list((tmp_path / "store").glob("*/v*"))
    if case.code != 1:
        assert sentence.startswith("kvprofile: ")
        assert sentence == lines[-1]
        assert not shown.out


def raising(error: BaseException) -> Callable[..., None]:
    def function(*_: object, **__: object) -> None:
        raise error

    return function


def test_no_traceback_leaves_a_subprocess(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from kvprofile.cli import explained, main; main()",
        "sweep",
        str(tmp_path / "gone.yaml"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1)


def test_a_memory_limit_needs_a_unit() -> None:
    with pytest.raises(BadInput, match="has no unit; write 8GB"):
        parse_bytes("8")
    assert parse_bytes("8GB") == 8_000_000_000


def test_a_read_only_file_system_is_bad_input() -> None:
    sentence, code = cli.explained(OSError(errno.EROFS, "Read-only file system", "/mnt/store"))
    assert (code, "check the path" in sentence) == (2, True)
