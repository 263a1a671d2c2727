"""Progress of anything long, on standard error."""

from __future__ import annotations

import time
from typing import Any

from kvprofile.cli.output import log
from kvprofile.report.text import duration, print_line


class Display:
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

    def __enter__(self) -> Display:
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
