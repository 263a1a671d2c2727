"""A profile as one JSON document that any language reads, or as an Arrow file of its rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvprofile.errors import BadInput
from kvprofile.identity import json_sha256
from kvprofile.json_text import parse_json
from kvprofile.runtime.profile import RuntimeProfile, thawed
from kvprofile.runtime.shape import misfit
from kvprofile.store.checks import row_problem

SUFFIX = ".json"
EXPORT_VERSION = 1
SCHEMA_FILE = "profile.schema.json"
_LARGEST_BYTES = 256 * 2**20


@functools.cache
def schema() -> Mapping[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of an export."""
    held: Mapping[str, Any] = json.loads(Path(__file__).with_name(SCHEMA_FILE).read_text("utf-8"))
    return held


def export_document(profile: RuntimeProfile) -> dict[str, Any]:
    """Returns a profile as the document that `schema` describes."""
    columns = schema()["$defs"]["plan"]["properties"]
    document = {
        "kvprofile_export": EXPORT_VERSION,
        "header": thawed(profile.header),
        "plans": [{name: row[name] for name in columns} for row in profile.rows],
        "validations": [
            {name: held for name, held in thawed(one).items() if name != "file"} for one in profile.validations
        ],
        "layer_times": thawed(profile.timings),
    }
    return {**document, "sha256": json_sha256(document)}


def export_text(profile: RuntimeProfile) -> str:
    """Returns a profile as the text of a JSON document, without NaN or infinity."""
    return json.dumps(export_document(profile), ensure_ascii=True, indent=1, allow_nan=False) + "\n"


def read_export(path: Path) -> RuntimeProfile:
    """Returns the profile that `export_text` wrote, which anybody may have changed. Reads no other file.

    Raises:
        BadInput: If it is too large, no JSON, of another shape, changed since, or made by a newer kvprofile.
    """
    if path.stat().st_size > _LARGEST_BYTES:
        raise BadInput(f"{path} is larger than any profile; give what `kvprofile export` wrote")
    try:
        document = parse_json(path.read_bytes())
        if wrong := _problem(document):
            raise BadInput(f"{path} is no export of a profile ({wrong}); export again")
        kept = {name: held for name, held in document.items() if name != "sha256"}
        if json_sha256(kept) != document["sha256"]:
            raise BadInput(f"{path} was changed after it was exported; export again")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is no JSON document; give what `kvprofile export` wrote") from error
    return RuntimeProfile(path, document["header"], document["plans"], document["validations"], document["layer_times"])


def write_arrow(profile: RuntimeProfile, path: Path) -> None:
    """Writes the rows as an Arrow IPC file; the key `kvprofile` of its schema's metadata holds the header as JSON."""
    import pyarrow as pa

    from kvprofile.store.schema import FOOTER_KEY, PROFILE

    header = json.dumps(thawed(profile.header), ensure_ascii=False, sort_keys=True, allow_nan=False)
    table = pa.Table.from_pylist([dict(row) for row in profile.rows], schema=PROFILE)
    table = table.replace_schema_metadata({FOOTER_KEY: header})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _problem(document: Any) -> str | None:
    """Returns why a value from a file is no export that this version reads, None if it is one."""
    version = document.get("kvprofile_export") if isinstance(document, dict) else None
    if type(version) is int and version > EXPORT_VERSION:
        return f"made by a newer kvprofile, version {version}: pip install -U kvprofile"
    return misfit(document, schema()) or next(
        (f"a row with {why}" for row in document["plans"] if (why := row_problem(row))), None
    )
