"""Command-line options laid over a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprofile.layers import LayerRange
    from kvprofile.recipe import Recipe

MAX_STARTS_ALONE = (
    "--max-starts chooses by all samples of a task at every granularity; give no --split, --all-tasks, --granularity or "
    "--rule certified"
)


def recipe_with(recipe: str | None, options: Mapping[str, Any]) -> Recipe:
    """Returns a recipe file with options laid over it, or a recipe made of options alone.

    Args:
        recipe: Path or bundled name, None for options alone.
        options: By name, None where not given: fields of `Recipe` and `ModelOptions`; `granularity` as text such as `1,2,3`;
            `dataset`, which replaces all data sets, and its `task`.

    Raises:
        BadInput: If something needed is not given or a value is not allowed.
    """
    from kvprofile.errors import BadInput
    from kvprofile.recipe import ModelOptions, load_recipe, parse_recipe, with_options

    given = {name: value for name, value in options.items() if value is not None}
    models = {name: given.pop(name) for name in ModelOptions.model_fields if name in given}
    if "granularity" in given:
        given["granularity"] = _units(given["granularity"])
    if "dataset" in given:
        given["data"] = ({"dataset": given.pop("dataset"), "task": given.pop("task", "qa")},)
    elif "task" in given:
        raise BadInput("--task says how --dataset is asked and scored; give both")
    base = load_recipe(recipe) if recipe else None
    needed = {"sender": "--sender", "receiver": "--receiver", "data": "--dataset"}
    missing = [option for name, option in needed.items() if name not in given]
    if base is None and missing:
        raise BadInput(f"give a recipe, or {', '.join(missing)}; kvprofile recipe ls shows the bundled recipes")
    if "device" in models:
        models["device_map"] = None  # where --device says, and nowhere else
    if models:
        given["models"] = {**(base.models.model_dump() if base else {}), **models}
    return with_options(base, **given) if base else parse_recipe(given, Path.cwd(), "options")


def local_store(store: str, command: str, pushed: bool = True) -> Path:
    """Returns the folder that a command measures into; `pushed` if what it makes can be copied to a store at a URL afterwards.

    Raises:
        BadInput: If it is a URL.
    """
    from kvprofile.errors import BadInput
    from kvprofile.resources import expanded

    if "://" in store:
        then = f", then `kvprofile store push PROFILE {store}`" if pushed else ""
        raise BadInput(f"{command} works in a folder; give one with --out{then}")
    return expanded(store)


def require_folder(profile: str, command: str) -> None:
    """Refuses a profile at a URL, for commands that keep their result beside it.

    Raises:
        BadInput: If it is one.
    """
    from kvprofile.errors import BadInput

    if "://" in profile:
        raise BadInput(
            f"{command} keeps its result beside the profile, and {profile} cannot be changed; "
            f"`kvprofile store pull {profile}` makes a copy that can"
        )


def parse_bytes(size: str | None) -> int | None:
    """Returns the bytes of a size such as `12GB`, None for None."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from kvprofile.errors import BadInput

    if size is not None and size.strip().isdigit():
        raise BadInput(f'--memory-limit "{size}" has no unit; write {size}GB or {size}MB')
    try:
        return TypeAdapter(ByteSize | None).validate_python(size)
    except ValidationError as error:
        raise BadInput(f'--memory-limit "{size}" is not a size; write 12GB or 800MB') from error


def parse_ranges(texts: Sequence[str], option: str) -> tuple[LayerRange, ...]:
    """Returns the layer ranges of an option such as `0:8,0:16`, each once.

    Raises:
        BadInput: If one is no range.
    """
    from kvprofile.errors import BadInput
    from kvprofile.layers import LayerRange

    ranges = []
    for word in ",".join(texts).split(","):
        match = re.fullmatch(r"\s*(\d{1,5}):(\d{1,5})\s*", word, re.ASCII)
        found = LayerRange(int(match[1]), int(match[2])) if match else None
        if found is None or found.length < 1:
            raise BadInput(
                f'{option} "{word[:40]}" is no range of layers; write START:STOP such as 8:18, stop excluded'
            )
        ranges.append(found)
    return tuple(dict.fromkeys(ranges))


def _units(text: str) -> tuple[int, ...]:
    from kvprofile.errors import BadInput

    try:
        return tuple(int(unit) for unit in text.split(","))
    except ValueError:
        raise BadInput(f'granularity "{text}" is not a list of units; write 1,2,3') from None
