from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvprofile.cli import main
from tests.tiny import tiny_tokenizer
from tests.tiny_models import LAYERS, save_adapter, save_model


def check(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["kvprofile", "check", "--device", "cpu", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_model(tmp_path / "m")
    adapted = f"{base}+{save_adapter(tmp_path / 'lora')}"
    capsys.readouterr()
    assert check(monkeypatch, adapted, base, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["compatible"]
    assert (document["sender"]["name"], document["receiver"]["name"]) == ("m+lora", "m")
    assert len(document["receiver"]["weights_sha256"]) == 64
    assert [entry["layer"] for entry in document["distances"]] == list(range(LAYERS))
    assert check(monkeypatch, adapted, base) == 0
    shown = capsys.readouterr().out
    assert document["sender"]["weights_sha256"][:12] in shown
    assert f"{document['distances'][1]['key']:.4f}" in shown
    assert "They are a pair." in shown


def test_swapped_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_tokenizer().train_new_from_iterator(["zebras zigzag", "quick foxes"], 300)
    models = save_model(tmp_path / "a", tokenizer=other), save_model(tmp_path / "b")
    capsys.readouterr()
    assert check(monkeypatch, *models, "--json") == 2
    shown = capsys.readouterr()
    assert not json.loads(shown.out)["compatible"]
    (sentence,) = (line for line in shown.err.splitlines() if line.startswith("kvprofile:"))
    assert '"b" cannot read the cache of "a": tokenizer differs, at token' in sentence
    assert "the sender has id" in sentence
    assert check(monkeypatch, *models) == 2
    assert "They are no pair." in capsys.readouterr().out


def test_two_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(monkeypatch, save_model(tmp_path / "a"), save_model(tmp_path / "b", num_hidden_layers=2)) == 2
    assert "layers differs, sender 3, receiver 2" in capsys.readouterr().err


def test_wrong_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(monkeypatch, "a", "b", "--dtype", "float8") == 2
    assert "float8" in capsys.readouterr().err
