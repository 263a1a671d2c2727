"""Recipes: a YAML file becomes a frozen, checked description of one sweep. Knows no model and reads no data."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from kvprofile.errors import BadInput, did_you_mean
from kvprofile.identity import json_sha256
from kvprofile.resources import expanded, resource

SearchMethod = Literal["exhaustive", "adaptive"]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                raise BadInput(f'unknown key "{key}"{did_you_mean(str(key), cls.model_fields)}; known keys are {known}')
        return values


class ModelOptions(_Options):
    """How both models are loaded.

    Attributes:
        dtype: `auto` is bfloat16 on CUDA and float32 elsewhere.
        device: Such as `cpu` or `cuda:0`; `auto` takes CUDA where there is any.
        device_map: Accelerate's, for models that do not fit one device.
        attention: Transformers' name of the attention kernel; `auto` is the model's own default.
        quantization: Keyword arguments of Transformers' quantisation config, such as `{"load_in_4bit": true}`.
        trust_remote_code: Whether a checkpoint may bring code that is run.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Text = "auto"
    device_map: Text | None = None
    attention: Text = "auto"
    quantization: dict[str, Any] | None = None
    trust_remote_code: bool = False


class FieldMapping(_Options):
    """Which column of the data holds what.

    Attributes:
        id: Null where the data has none; the record's content then names it.
        question: Null where the data has none.
    """

    id: Text | None = "id"
    context: Text = "context"
    question: Text | None = "question"
    answers: Text = "answers"


class Prompt(_Options):
    """Replaces the task's prompt: the user message is `before` + context + `after`.

    Attributes:
        before: Part of the shared context.
        after: Part of the suffix; `{question}` is filled in.
    """

    before: str = ""
    after: str

    @field_validator("after")
    @classmethod
    def _not_blank(cls, after: str) -> str:
        # The end of the context is found by the text that follows it, and decoding needs at least one suffix token.
        if not after.strip():
            raise ValueError("may not be blank: it is what the receiver reads after the context")
        return after


class DataSource(_Options):
    """One data set under one task.

    Attributes:
        dataset: Name of a bundled set, path of a .jsonl, .parquet or .csv file, or `hub:NAME`.
        split: Split of a hub data set.
        subset: Configuration of a hub data set.
        metrics: None takes the task's.
        max_new_tokens: None takes the task's.
        stop: Texts that end an answer, which is scored up to there; their order says nothing.
    """

    dataset: Text
    task: Text
    split: Text | None = None
    subset: Text | None = None
    fields: FieldMapping = FieldMapping()
    metrics: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    max_new_tokens: Count | None = None
    stop: tuple[Text, ...] = ()
    prompt: Prompt | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _texts(cls, stop: Any) -> Any:
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError('has to be a list of texts that are not empty, such as stop: ["\\n\\n"]')
        return tuple(sorted(set(stop)))

    @property
    def name(self) -> str:
        """Value of the `dataset` column."""
        if self.dataset.startswith("hub:"):
            return ":".join(filter(None, (self.dataset.removeprefix("hub:"), self.subset, self.split)))
        return Path(self.dataset).stem if Path(self.dataset).suffix else self.dataset

    @model_validator(mode="after")
    def _question_is_asked(self) -> Self:
        if self.prompt and self.fields.question is not None and "{question}" not in self.prompt.after:
            raise ValueError(
                "has a prompt whose `after` lacks {question}, so that the question would never be asked; put it in, or set "
                "fields.question: null"
            )
        return self

    @model_validator(mode="after")
    def _split_only_on_the_hub(self) -> Self:
        if (self.split or self.subset) and not self.dataset.startswith("hub:"):
            raise ValueError(
                f'has split or subset, which only hub data sets have; write "hub:{self.dataset}" or drop it'
            )
        return self


class Recipe(_Options):
    """Everything that decides what a sweep measures.

    Attributes:
        sender: Hub id, `hub-id@revision`, folder, `.gguf` file, `BASE+ADAPTER` or `demo-base`.
        contexts: Records of each data source.
        granularity: Layers in a unit, for each grid of layer groups.
        references: `data` scores answers against the data's references; `none` needs none and scores how far they agree with
            the receiver's own full prefill.
        search: `exhaustive` measures every group on every record, `adaptive` those that a search does not leave.
        max_context_tokens: Longer contexts are cut in the middle.
        chat_template: False sends prompts without the tokenizer's chat template.
        resamples: Of the bootstrap.
        store_text: False keeps texts and token ids out of the profile.
    """

    sender: Text
    receiver: Text
    models: ModelOptions = ModelOptions()
    data: Annotated[tuple[DataSource, ...], Field(min_length=1)]
    contexts: Count = 50
    granularity: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 3)
    references: Literal["data", "none"] = "data"
    search: SearchMethod = "exhaustive"
    max_context_tokens: Count | None = None
    chat_template: bool = True
    seed: Annotated[int, Field(ge=0)] = 0
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    resamples: Annotated[int, Field(ge=1, le=10**6)] = 10_000
    store_text: bool = True
    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def folder(self) -> Path:
        """Where the recipe's file lies; its relative paths are looked up from here first."""
        return self._folder

    @property
    def search_folders(self) -> tuple[Path, ...]:
        """Where relative model paths are looked up, in this order."""
        return self._folder, Path.cwd(), resource("recipes")

    @field_validator("granularity")
    @classmethod
    def _sorted_once(cls, units: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(units)))

    @model_validator(mode="after")
    def _sources_differ(self) -> Self:
        seen: set[tuple[str, str]] = set()
        for source in self.data:
            if (source.name, source.task) in seen:
                raise ValueError(f'holds "{source.name}" with task {source.task} twice; rename one file or drop one')
            seen.add((source.name, source.task))
        return self

    def sha256(self) -> str:
        """Returns the hash of the declared fields; where the file lies, its layout, and the device do not change it."""
        declared = self.model_dump(mode="json", exclude={"models": {"device", "device_map"}})
        for source in declared["data"]:
            if not source["stop"]:
                del source["stop"]  # recipes without keep the hash that profiles made before recorded
        return json_sha256(declared)


def load_recipe(path_or_name: str, folder: Path | None = None) -> Recipe:
    """Reads a recipe from a path, or by the name of a bundled one; its relative paths start at `folder`, else at its own.

    Raises:
        BadInput: If there is no such recipe or it does not hold what a recipe holds.
    """
    path = recipe_path(path_or_name)
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise BadInput(f"{path} uses aliases (*name), which a recipe does not need; write the values out")
        values = yaml.safe_load(text)
        json.dumps(values)
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text; give a recipe in YAML") from error
    except (ValueError, TypeError, RecursionError) as error:  # a date, bytes, or lists without end
        raise BadInput(f"{path} is not a recipe ({str(error)[:100]}); put names in quotes") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise BadInput(f"{path} is not valid YAML{line}: {getattr(error, 'problem', None) or 'unreadable'}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path} holds no keys such as sender, receiver and data; see kvprofile recipe show demo")
    return parse_recipe(values, folder or path.resolve().parent, str(path))


def parse_recipe(values: Mapping[str, Any], folder: Path, origin: str = "recipe") -> Recipe:
    """Returns the checked recipe of plain values; `origin` is what its errors name.

    Raises:
        BadInput: If a key is unknown or missing, or a value is not allowed.
    """
    try:
        recipe = Recipe.model_validate(dict(values))
    except BadInput as error:
        raise BadInput(f"{origin}: {error}") from None
    except ValidationError as error:
        raise BadInput(f"{origin}: {_sentence(error)}") from None
    recipe._folder = folder
    return recipe


def with_options(recipe: Recipe, **changes: Any) -> Recipe:
    """Returns the recipe with some fields changed and checked again; its folder stays.

    Raises:
        BadInput: If a value is not allowed.
    """
    return parse_recipe({**recipe.model_dump(), **changes}, recipe.folder, "options")


def to_yaml(recipe: Recipe) -> str:
    """Returns the recipe with every default filled in; loading it gives the same `sha256()`."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def bundled_recipes() -> dict[str, Path]:
    """Returns the bundled recipes by name."""
    return {path.stem: path for path in sorted(resource("recipes").glob("*.yaml"))}


def recipe_path(path_or_name: str) -> Path:
    """Returns the file of a recipe given by path or bundled name.

    Raises:
        BadInput: If there is none.
    """
    path = expanded(path_or_name)
    if path.is_file():
        return path
    bundled = bundled_recipes()
    name = path_or_name.removeprefix("recipes/").removesuffix(".yaml")
    if name in bundled:
        return bundled[name]
    what = "is a folder, not a recipe" if path.is_dir() else "is neither a file nor a bundled recipe"
    raise BadInput(f"{path_or_name} {what}{did_you_mean(name, bundled)}; kvprofile recipe ls shows the bundled ones")


def _sentence(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_context=False)
    within = {one["loc"][:depth] for one in details for depth in range(len(one["loc"]))}
    # Where the only entry of a list is wrong, pydantic says beside it that the list is too short.
    details = [one for one in details if one["type"] != "too_short" or one["loc"] not in within]
    first = details[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        sentence = f"{place} is missing"
    else:
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("tuple", "list")
        message = message[:1].lower() + message[1:]
        given = "" if first["type"] == "value_error" else f", not {_short(first['input'])}"
        sentence = f"{place or 'data'} {message}{given}"
    return f"{sentence} (and {len(details) - 1} more)" if len(details) > 1 else sentence


def _short(value: Any) -> str:
    text = reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
