"""`kvprofile chain`: what a second hop costs, where B's mixed state serves C."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.arguments import RemoteCodeOption
from kvprofile.cli.options import local_store, parse_ranges, recipe_with
from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.cli.progress import Display
from kvprofile.report.text import print_line


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: kvprofile chain demo-base+demo/sender demo-base+demo/receiver demo-base "
        "--dataset hotpotqa_profile --first 0:16 --second 8:18"
    )(chain)


def chain(
    a: Annotated[
        str, typer.Argument(metavar="A", help="Writes the cache: hub id[@revision], folder, .gguf file, BASE+ADAPTER.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Reads it and passes on what it then holds; named likewise.")],
    c: Annotated[str, typer.Argument(metavar="C", help="Reads that and answers; named likewise.")],
    dataset: Annotated[str, typer.Option(help="Bundled name, .jsonl/.parquet/.csv file or hub:NAME.")],
    first: Annotated[
        list[str],
        typer.Option(help="Layers START:STOP, stop excluded, that B recomputes; several as 0:8,0:16 or repeated."),
    ],
    second: Annotated[list[str], typer.Option(help="Layers that C recomputes; every first with every second.")],
    task: Annotated[str, typer.Option(help="qa, summarization or code.")] = "qa",
    contexts: Annotated[int, typer.Option(help="Records of the data set.")] = 20,
    references: Annotated[
        str, typer.Option(help="data, or none: agreement with the reader's own full prefill, without labels.")
    ] = "data",
    max_context_tokens: Annotated[int | None, typer.Option(help="Longer contexts are cut in the middle.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of records and of the bootstrap.")] = 0,
    confidence: Annotated[float, typer.Option(help="Of every bound by itself.")] = 0.95,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    attention: Annotated[str, typer.Option(help="auto, or Transformers' name of the attention kernel.")] = "auto",
    trust_remote_code: RemoteCodeOption = False,
    folder: Annotated[str, typer.Option("--out", help="Folder of measured chains.")] = "outputs/chains",
    as_json: JsonFlag = False,
) -> None:
    """Measure what is lost when B reads A's cache and C reads what B then holds, against every hop by itself.

    B holds A's K/V outside the layers it recomputed and its own inside. Interrupted, it goes on when the same command is run
    again; a chain that is kept is not measured again.
    """
    place = local_store(folder, "chain", pushed=False)
    from kvprofile.chain import Groups, measure_chain
    from kvprofile.report.chain import chain_document, print_chain

    groups = Groups(parse_ranges(first, "--first"), parse_ranges(second, "--second"))
    recipe = recipe_with(
        None,
        {
            "sender": a,
            "receiver": c,
            "dataset": dataset,
            "task": task,
            "contexts": contexts,
            "references": references,
            "max_context_tokens": max_context_tokens,
            "seed": seed,
            "confidence": confidence,
            "dtype": dtype,
            "device": device,
            "attention": attention,
            "trust_remote_code": trust_remote_code,
        },
    )
    with Display() as display:
        found = measure_chain(recipe, b, groups, place, display)
    document = chain_document(found.header, found.table, *groups)
    if as_json:
        print_json({**document, "file": str(found.file)})
    else:
        print_chain(out(), document)
        print_line(out(), f"kept in {found.file}")
