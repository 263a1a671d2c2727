"""`kvprofile recipe`: list, print, copy and check recipes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprofile.cli.output import JsonFlag, log, out, print_json
from kvprofile.report.text import print_line

if TYPE_CHECKING:
    from kvprofile.recipe import Recipe

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a bundled recipe.")]


def register(app: typer.Typer) -> None:
    recipe = typer.Typer(help="List, print, copy and check recipes.", no_args_is_help=True, rich_markup_mode=None)
    recipe.command("ls", epilog="Example: kvprofile recipe ls")(ls)
    recipe.command("show", epilog="Example: kvprofile recipe show demo --resolved")(show)
    recipe.command("cp", epilog="Example: kvprofile recipe cp demo my.yaml")(cp)
    recipe.command("validate", epilog="Example: kvprofile recipe validate my.yaml")(validate)
    app.add_typer(recipe, name="recipe")


def ls(as_json: JsonFlag = False) -> None:
    """List the bundled recipes."""
    from kvprofile.recipe import bundled_recipes, load_recipe

    entries = []
    for name, path in bundled_recipes().items():
        recipe = load_recipe(str(path))
        what = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        entries.append({"name": name, "path": str(path), "about": what, **_summary(recipe)})
    if as_json:
        print_json(entries)
        return
    width = max(len(entry["name"]) for entry in entries)
    for entry in entries:
        print_line(out(), f"{entry['name']:{width}}  {entry['about']}")


def show(
    recipe: RecipeArgument,
    resolved: Annotated[bool, typer.Option("--resolved", help="Fill in every default.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print a recipe; --json prints it resolved."""
    from kvprofile.recipe import load_recipe, recipe_path, to_yaml

    loaded = load_recipe(recipe)
    if as_json:
        print_json({"sha256": loaded.sha256(), "recipe": loaded.model_dump(mode="json")})
    else:
        typer.echo((to_yaml(loaded) if resolved else recipe_path(recipe).read_text(encoding="utf-8")).rstrip("\n"))


def cp(
    recipe: RecipeArgument,
    target: Annotated[Path, typer.Argument(help="New file, or a folder.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Copy a recipe as a start for one of your own."""
    from kvprofile.errors import BadInput
    from kvprofile.recipe import recipe_path

    source = recipe_path(recipe)
    target = target / source.name if target.is_dir() else target
    if target.exists() and not force:
        raise BadInput(f"{target} exists; give another name or --force")
    text = source.read_text(encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    if as_json:
        print_json({"source": str(source), "path": str(target)})
    else:
        print_line(out(), str(target))


def validate(recipe: RecipeArgument, as_json: JsonFlag = False) -> None:
    """Check keys, tasks, metrics, data and model paths; only hub data and `evaluate` metrics need the network."""
    from kvprofile.recipe import load_recipe

    loaded = load_recipe(recipe)
    report = _checked(loaded)
    if as_json:
        print_json({"valid": True, "sha256": loaded.sha256(), **report})
        return
    for source in report["data"]:
        print_line(
            log(),
            f"{source['dataset']}: {source['records']} records, {source['contexts']} used, task {source['task']}, "
            f"metrics {', '.join(source['metrics'])}",
        )
    print_line(out(), f"{recipe} is valid: {report['receiver']} from {report['sender']}")


def _checked(recipe: Recipe) -> dict[str, Any]:
    from kvprofile.data.prompts import task_of
    from kvprofile.data.records import choose, load_dataset
    from kvprofile.models.reference import parse
    from kvprofile.scoring import metric

    names = {role: parse(text, recipe.search_folders).name for role, text in _pair(recipe).items()}
    sources = []
    for source in recipe.data:
        task = task_of(source)
        metrics = [metric(name).identity for name in task.metrics]
        data = load_dataset(source, recipe.folder, with_answers=recipe.references == "data")
        chosen = choose(data, recipe.contexts, recipe.seed)
        sources.append(
            {
                "dataset": data.name,
                "sha256": data.sha256,
                "task": task.name,
                "records": len(data.records),
                "contexts": len(chosen),
                "metrics": metrics,
            }
        )
    return {**names, "data": sources}


def _pair(recipe: Recipe) -> dict[str, str]:
    return {"sender": recipe.sender, "receiver": recipe.receiver}


def _summary(recipe: Recipe) -> dict[str, Any]:
    data = [{"dataset": source.name, "task": source.task} for source in recipe.data]
    return {**_pair(recipe), "data": data, "contexts": recipe.contexts, "granularity": list(recipe.granularity)}
