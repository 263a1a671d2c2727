"""`kvprofile check`: whether two models are a pair, with reasons, and how far apart they are."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprofile.cli.arguments import RemoteCodeOption
from kvprofile.cli.output import JsonFlag, log, out, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvprofile.models.compatibility import Compatibility
    from kvprofile.models.distance import LayerDistance
    from kvprofile.models.loading import LoadedModel


class Dtype(StrEnum):
    """What `ModelOptions.dtype` allows."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


_BAR = 30
_REFERENCE = "Hub id, hub-id@revision, folder, .gguf file, BASE+ADAPTER, or demo-base."


def register(app: typer.Typer) -> None:
    app.command(
        "check",
        epilog="Example: kvprofile check demo-base+demo/sender demo-base+demo/receiver",
    )(check)


def check(
    sender: Annotated[str, typer.Argument(help=f"The model that writes the cache. {_REFERENCE}", show_default=False)],
    receiver: Annotated[str, typer.Argument(help="The model that reads it, named likewise.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="auto is bfloat16 on CUDA, else float32.")] = Dtype.auto,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    attention: Annotated[str, typer.Option(help="Transformers' attention kernel.")] = "auto",
    trust_remote_code: RemoteCodeOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Tells whether RECEIVER can read the KV cache of SENDER, with reasons, and how far apart their layers are.

    Exits with 2 if they are no pair.
    """
    from kvprofile.models.compatibility import compare
    from kvprofile.models.loading import load_pair
    from kvprofile.recipe import ModelOptions

    options = ModelOptions(dtype=dtype.value, device=device, attention=attention, trust_remote_code=trust_remote_code)
    with log().status("loading both models"):
        pair = load_pair(sender, receiver, options)
        found = compare(*pair)
    if as_json:
        print_json(_document(pair, found))
    else:
        for part in _parts(pair, found):
            out().print(part)
    found.require(*(model.reference.name for model in pair))


def _document(pair: tuple[LoadedModel, LoadedModel], found: Compatibility) -> dict[str, Any]:
    models = {
        role: {
            "name": model.reference.name,
            "commit": model.commit,
            "dtype": model.dtype,
            **model.fingerprint._asdict(),
        }
        for role, model in zip(("sender", "receiver"), pair, strict=True)
    }
    return {
        "compatible": found.ok,
        **models,
        "reasons": [reason._asdict() for reason in found.reasons],
        "distances": [distance._asdict() for distance in found.distances],
    }


def _parts(pair: tuple[LoadedModel, LoadedModel], found: Compatibility) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    def plain(*columns: str) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
        for column in columns:
            table.add_column(column)
        return table

    models = plain("", "model", "weights", "tokenizer", "template")
    for role, model in zip(("sender", "receiver"), pair, strict=True):
        print_ = model.fingerprint
        digests = (print_.weights_sha256, print_.tokenizer_sha256, print_.template_sha256)
        models.add_row(role, Text(model.reference.name), *(digest[:12] for digest in digests))
    reasons = plain("", "compared", "result")
    for reason in found.reasons:
        mark = "ok" if reason.ok else ("NO" if reason.fatal else "note")
        reasons.add_row(mark, reason.name, Text(reason.detail))
    parts: list[RenderableType] = [models, "", reasons]
    if found.distances:
        parts += ["", "Relative distance of the key and value projections, ‖W_sender − W_receiver‖ / ‖W_receiver‖:"]
        distances = plain("layer", "key", "value", "")
        largest = max((max(d.key or 0, d.value or 0) for d in found.distances), default=0)
        for distance in found.distances:
            distances.add_row(str(distance.layer), *_numbers(distance), Text(_bar(distance, largest)))
        parts.append(distances)
    return [*parts, "", "They are a pair." if found.ok else "They are no pair."]


def _numbers(distance: LayerDistance) -> list[str]:
    return ["–" if value is None else f"{value:.4f}" for value in (distance.key, distance.value)]


def _bar(distance: LayerDistance, largest: float) -> str:
    """Returns the larger of both distances as a bar, and the note."""
    size = max(distance.key or 0, distance.value or 0)
    bar = "█" * round(_BAR * size / largest) if largest else ""
    return f"{bar} {distance.note}".strip() if distance.note else bar
