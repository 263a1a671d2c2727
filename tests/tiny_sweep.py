"""A pair of tiny models with data and a recipe in a folder: everything a sweep needs, in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from kvprofile.recipe import load_recipe
from kvprofile.sweep import sweep
from tests.tiny_models import save_adapter, save_model

RECORDS = 4


def write_pair(folder: Path, **changes: Any) -> Path:
    """Writes base, adapter and data; returns the recipe's path. `changes` go into the base's config."""
    save_model(folder / "base", **changes)
    save_adapter(folder / "adapter", **changes)
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for number in range(RECORDS):
            context = f"Box {number} holds {number + 3} red stones. " * (number + 1)
            record = {"id": f"r{number}", "context": context, "question": "How many?", "answers": [str(number + 3)]}
            file.write(json.dumps(record) + "\n")
    recipe = {
        "sender": "base+adapter",
        "receiver": "base",
        "models": {"dtype": "float32", "device": "cpu"},
        "data": [{"dataset": "data.jsonl", "task": "qa", "max_new_tokens": 6, "prompt": {"after": " {question} A:"}}],
        "contexts": RECORDS,
        "granularity": [1, 2],
        "resamples": 200,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), "utf-8")
    return path


class Silent:
    """Progress that shows nothing and remembers what it was told."""

    def __init__(self) -> None:
        self.remarks: list[str] = []
        self.measured = 0
        self.begun = False

    def say(self, remark: str) -> None:
        self.remarks.append(remark)

    def begin(self, samples: int, plans: int, done: int) -> None:
        self.begun, self.resumed = True, done

    def plans_done(self, count: int) -> None: ...

    def sample_done(self) -> None:
        self.measured += 1


def sweep_quietly(recipe: Path, out: Path) -> None:
    """Runs a sweep, to be called in a process of its own."""
    sweep(load_recipe(str(recipe)), out, Silent())
