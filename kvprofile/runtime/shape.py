"""Whether a JSON value has the shape that a JSON Schema says, as far as `profile.schema.json` needs. Standard library only.

NOTE: Stricter than draft 2020-12 in one thing: an integer is written without a fraction, `1` and not `1.0`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

KEYWORDS = frozenset({
    "$schema", "$id", "$defs", "$ref", "title", "description", "type", "const", "required", "properties",
    "additionalProperties", "items", "minItems", "maxItems", "maxLength", "pattern", "minimum", "maximum",
})  # fmt: skip
"""What a schema may use: any other word would be passed over in silence."""

_KINDS: dict[str, type | tuple[type, ...]] = {
    **{"object": dict, "array": list, "string": str, "boolean": bool},
    **{"integer": int, "number": (int, float), "null": type(None)},
}


def misfit(value: Any, schema: Schema, root: Schema | None = None, place: str = "it") -> str | None:
    """Returns the first place where a value of `json.loads` is not what the schema says, None if it fits."""
    return next(_misfits(value, schema, schema if root is None else root, place), None)


def _misfits(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
    if "$ref" in schema:
        yield from _misfits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, place)
    kinds = schema.get("type")
    if kinds is not None and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield f"{place} is of another kind"
        return
    if "const" in schema and (value != schema["const"] or isinstance(value, bool)):
        yield f"{place} is not {schema['const']}"
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", math.inf):
            yield f"{place} is too long"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{place} is written otherwise"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf):
        yield f"{place} is out of range"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            yield f"{place} has {len(value)} entries"
        for i, held in enumerate(value if "items" in schema else ()):
            yield from _misfits(held, schema["items"], root, f"{place}[{i}]")
    if isinstance(value, dict):
        yield from _of_object(value, schema, root, place)


def _of_object(value: dict[str, Any], schema: Schema, root: Schema, place: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place} has no {name}"
    for name, held in value.items():
        if name in known:
            yield from _misfits(held, known[name], root, f"{place}.{name}")
        elif schema.get("additionalProperties", True) is False:
            yield f"{place} has {name[:40]!r}, which is not known"


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind]) and not (isinstance(value, float) and not math.isfinite(value))
