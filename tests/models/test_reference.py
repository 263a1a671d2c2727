from pathlib import Path

import pytest

from kvprofile.errors import BadInput
from kvprofile.models.reference import ModelReference, parse


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folder(*parts: str) -> Path:
    path = Path.cwd().joinpath(*parts)
    path.mkdir(parents=True)
    return path


def test_hub_ids_with_and_without_revision() -> None:
    assert parse("org/model") == ModelReference("org/model")
    assert parse("org/model@v1.0") == ModelReference("org/model", "v1.0")
    assert parse("org/model@v1+me/adapter@v2") == ModelReference("org/model", "v1", "me/adapter", "v2")


def test_folder_wins_over_hub_id_and_over_separators() -> None:
    assert parse("org/model").base == "org/model"
    local, odd = folder("org", "model"), folder("c++@home")
    assert parse("org/model").base == str(local)
    assert parse("c++@home") == ModelReference(str(odd))


def test_base_with_plus_and_adapter_folder() -> None:
    base, adapter = folder("a+b"), folder("lora")
    assert parse("a+b+lora") == ModelReference(str(base), adapter=str(adapter))


def test_given_folders_come_before_the_working_directory() -> None:
    folder("m")
    first = folder("recipe", "m")
    assert parse("m", [first.parent]).base == str(first)
    assert parse("m", [first]).base == str(Path.cwd() / "m")


def test_bundled_adapters_are_found_from_anywhere() -> None:
    found = parse("demo-base+demo/receiver")
    assert found.base == "demo-base"
    assert Path(found.adapter or "").joinpath("adapter_config.json").is_file()
    assert found.name == "demo-base+receiver"


def test_gguf_file() -> None:
    file = folder("g") / "tiny.Q4_1.gguf"
    file.touch()
    assert parse("g/tiny.Q4_1.gguf").base == str(file)
    assert parse("g/tiny.Q4_1.gguf").name == "tiny.Q4_1"


@pytest.mark.parametrize("text", ["/no/such/folder", "./nothing", "a/b/c", "x.gguf", "+lora", "org/m+", "", "a b"])
def test_what_is_nothing_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse(text)


def test_an_empty_part_is_not_the_working_directory() -> None:
    with pytest.raises(BadInput, match="lacks a part"):
        parse("org/model+")


def test_models_of_different_owners_and_runs_have_different_names(tmp_path: Path) -> None:
    assert parse("owner/model").name == "owner/model"
    (tmp_path / "run-a" / "checkpoint-500").mkdir(parents=True)
    assert parse("run-a/checkpoint-500", [tmp_path]).name == "run-a/checkpoint-500"
