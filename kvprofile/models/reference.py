"""What a user writes to name a model: hub id, `hub-id@revision`, folder, `.gguf` file, `BASE+ADAPTER`. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvprofile.errors import BadInput
from kvprofile.resources import expanded, resource

DEMO_BASE = "demo-base"
"""The word for the demo's base model, which is fetched when it is first loaded."""

_CHECKPOINT = re.compile(r"checkpoint-\d+")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelReference(NamedTuple):
    """A base model and, where there is one, a PEFT adapter on it.

    Attributes:
        base: Absolute path of a folder or `.gguf` file, a hub id, or `demo-base`.
        revision: Branch, tag or commit of a hub id; None for the default branch and for local models.
        adapter: Absolute path of an adapter folder or a hub id.
        adapter_revision: Like `revision`, for the adapter.
    """

    base: str
    revision: str | None = None
    adapter: str | None = None
    adapter_revision: str | None = None

    @property
    def name(self) -> str:
        """A short name for people and file names, such as `SmolLM2-135M-Instruct@v1+qa`."""
        name = _short(self.base) + (f"@{self.revision[:12]}" if self.revision else "")
        if self.adapter:
            name += f"+{_short(self.adapter)}" + (f"@{self.adapter_revision[:12]}" if self.adapter_revision else "")
        return name


def parse(text: str, folders: Sequence[Path] = ()) -> ModelReference:
    """Returns what `text` names; nothing is loaded and the network is not asked.

    Relative paths are looked up in `folders`, then in the working directory, then among the bundled recipes. A path
    that exists wins over a hub id of the same spelling, and over `+` and `@` as separators.

    Raises:
        BadInput: If a part is neither a path that exists nor spelled like a hub id.
    """
    text = text.strip()
    base, adapter = _split(text, folders)
    if adapter is None:
        return ModelReference(*_part(base, text, folders))
    return ModelReference(*_part(base, text, folders), *_part(adapter, text, folders))


def _split(text: str, folders: Sequence[Path]) -> tuple[str, str | None]:
    if "+" not in text or _find(text, folders):
        return text, None
    splits = [(text[:i], text[i + 1 :]) for i, sign in enumerate(text) if sign == "+"]
    here = [(base, adapter) for base, adapter in splits if base == DEMO_BASE or _find(base, folders)]
    both = [(base, adapter) for base, adapter in here if _find(adapter, folders)]
    return (both or here or splits)[0]


def _part(part: str, text: str, folders: Sequence[Path]) -> tuple[str, str | None]:
    """Returns (path or hub id, revision) of one side of the reference."""
    if not part:
        raise BadInput(
            f'model "{text}" lacks a part; write a hub id, hub-id@revision, a folder, a .gguf file or BASE+ADAPTER'
        )
    if part == DEMO_BASE:
        return part, None
    if path := _find(part, folders):
        return str(path), None
    hub_id, _, revision = part.partition("@")
    if part.startswith((".", "/", "~", "\\")) or part.endswith(".gguf") or not _HUB_ID.fullmatch(hub_id):
        raise BadInput(f'there is no model folder or file "{part}" here, and that is no hub id; check the path')
    return hub_id, revision or None


def _find(part: str, folders: Sequence[Path]) -> Path | None:
    """Returns the absolute path of a folder or file, None if there is none."""
    if not part.strip():
        return None
    path = expanded(part)
    places = [Path()] if path.is_absolute() else [*folders, Path.cwd(), resource("recipes")]
    candidates = ((place / path).absolute() for place in places)
    return next((c for c in candidates if c.is_dir() or (c.is_file() and c.suffix == ".gguf")), None)


def _short(place: str) -> str:
    """Returns a hub id as it is; of a path its last part, with the folder above a training run's `checkpoint-500`."""
    path = Path(place)
    if not path.is_absolute():
        return place
    name = path.name.removesuffix(".gguf") or place
    return f"{path.parent.name}/{name}" if _CHECKPOINT.fullmatch(name) else name
