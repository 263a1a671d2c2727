import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvprofile.cli import app
from kvprofile.errors import BadInput
from kvprofile.recipe import bundled_recipes, load_recipe


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["recipe", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("name", sorted(bundled_recipes()))
def test_every_shipped_recipe_is_valid(name: str) -> None:
    result = run("validate", name, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["valid"]
    assert document["sha256"] == load_recipe(name).sha256()
    assert document["data"][0]["contexts"] == load_recipe(name).contexts


def test_ls_names_all() -> None:
    entries = json.loads(run("ls", "--json").stdout)
    assert {entry["name"] for entry in entries} == set(bundled_recipes()) >= {"demo", "hotpotqa", "own_data", "code"}
    assert all(name in run("ls").stdout for name in bundled_recipes())


def test_show_prints_the_file_or_every_default() -> None:
    assert run("show", "demo").stdout.strip() == bundled_recipes()["demo"].read_text(encoding="utf-8").strip()
    assert "resamples: 10000" in run("show", "demo", "--resolved").stdout
    assert json.loads(run("show", "demo", "--json").stdout)["recipe"]["resamples"] == 10_000


def test_cp_copies_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("cp", "demo", "my.yaml").stdout.strip() == "my.yaml"
    assert load_recipe("my.yaml").sha256() == load_recipe("demo").sha256()
    with pytest.raises(BadInput, match=r"my\.yaml exists"):
        run("cp", "code", "my.yaml")
    assert load_recipe("my.yaml").sha256() == load_recipe("demo").sha256()
    run("cp", "code", "my.yaml", "--force")
    assert load_recipe("my.yaml").sha256() == load_recipe("code").sha256()
    assert json.loads(run("cp", "demo", ".", "--json").stdout)["path"] == "demo.yaml"


def test_a_copied_recipe_still_finds_what_is_bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("cp", "own_data", "my.yaml")
    assert json.loads(run("validate", "my.yaml", "--json").stdout)["data"][0]["records"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("task: qa", "task: qu"), 'unknown task "qu"'),
        (("metrics: [f1]", "metrics: [f11]"), 'no metric "f11"'),
        (("contexts: 4", "contexts: 5"), "tickets has 4 records, fewer than the 5"),
        (("tickets.jsonl", "none.jsonl"), "none.jsonl is neither"),
        (("sender: demo-base+demo/sender", "sender: ./none"), "none"),
    ],
)
def test_validate_refuses(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = bundled_recipes()["own_data"].read_text(encoding="utf-8")
    assert change[0] in text
    (tmp_path / "my.yaml").write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        run("validate", str(tmp_path / "my.yaml"))
