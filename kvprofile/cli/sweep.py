"""`kvprofile sweep`: measures a pair and publishes its profile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvprofile.cli.options import recipe_with
from kvprofile.cli.output import JsonFlag, log, out, print_json
from kvprofile.errors import BadInput
from kvprofile.report.text import duration, print_line


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile sweep recipes/demo.yaml --contexts 6 --granularity 3")(sweep)


def sweep(
    recipe: Annotated[str | None, typer.Argument(help="A recipe file or the name of a bundled one.")] = None,
    sender: Annotated[str | None, typer.Option(help="Hub id[@revision], folder, .gguf file or BASE+ADAPTER.")] = None,
    receiver: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Bundled name, .jsonl/.parquet/.csv file or hub:NAME.")] = None,
    task: Annotated[str | None, typer.Option(help="qa, summarization or code.")] = None,
    contexts: Annotated[int | None, typer.Option(help="Records of each data set; 50 if not said.")] = None,
    granularity: Annotated[str | None, typer.Option(help="Layers in a unit, per grid; 1,2,3 if not said.")] = None,
    search: Annotated[str | None, typer.Option(help="exhaustive or adaptive: only groups near the frontier.")] = None,
    max_context_tokens: Annotated[int | None, typer.Option(help="Longer contexts are cut in the middle.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = None,
    attention: Annotated[str | None, typer.Option(help="auto, or Transformers' name of the attention kernel.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the choice of records and of the bootstrap.")] = None,
    no_text: Annotated[bool, typer.Option("--no-text", help="Store no texts and no token ids.")] = False,
    memory_limit: Annotated[
        str | None, typer.Option(help="Most memory on the device, such as 12GB; what is free if not said.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Let a checkpoint bring code that is run.")] = False,
    store: Annotated[Path, typer.Option("--out", help="Store of profiles.")] = Path("outputs"),
    as_json: JsonFlag = False,
) -> None:
    """Measures every way of reusing the sender's cache on a pair, and publishes the profile.

    Interrupted, it goes on where it stood when the same command is run again.
    """
    from kvprofile.sweep import sweep as run

    options = {
        "sender": sender,
        "receiver": receiver,
        "dataset": dataset,
        "task": task,
        "contexts": contexts,
        "granularity": granularity,
        "search": search,
        "max_context_tokens": max_context_tokens,
        "seed": seed,
        "store_text": False if no_text else None,
        "dtype": dtype,
        "device": device,
        "attention": attention,
        "trust_remote_code": True if trust_remote_code else None,
    }
    with _Display() as display:
        folder = run(recipe_with(recipe, options), store, display, _bytes(memory_limit))
    if as_json:
        print_json({"profile": str(folder)})
    else:
        print_line(out(), str(folder))


def _bytes(size: str | None) -> int | None:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return TypeAdapter(ByteSize | None).validate_python(size)
    except ValidationError as error:
        raise BadInput(f'--memory-limit "{size}" is not a size; write 12GB or 800MB') from error


class _Display:
    """Progress on standard error: a bar with time left on a terminal, a line per sample elsewhere."""

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._console = log()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("plans"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: Any = None
        self._samples = self._resumed = self._done = 0
        self._begun = time.monotonic()

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, remark: str) -> None:
        print_line(self._console, remark)

    def begin(self, samples: int, plans: int, done: int) -> None:
        if done:
            self.say(f"going on: {done} of {samples} samples are already measured")
        self._samples, self._resumed, self._done = samples, done, done
        self._begun = time.monotonic()
        self._task = self._bar.add_task(self._title(), total=samples * plans, completed=done * plans)

    def plans_done(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def sample_done(self) -> None:
        self._done += 1
        self._bar.update(self._task, description=self._title())
        if not self._console.is_terminal:
            spent = time.monotonic() - self._begun
            left = spent / (self._done - self._resumed) * (self._samples - self._done)
            self.say(f"{self._title()}, about {duration(left)} left")

    def _title(self) -> str:
        return f"sample {self._done} of {self._samples}"
