"""Arguments and options that several commands declare alike."""

from __future__ import annotations

from typing import Annotated

import typer

ProfileArgument = Annotated[
    str, typer.Argument(help="A profile's folder, its profile.parquet, a pair's folder or a store.")
]
LossOption = Annotated[str | None, typer.Option(help="Loss to accept: 1% (relative) or 1pt (points).")]
RULE_HELP = "Which loss must be within --max-loss: point (measured), bound (upper bound) or certified."
RuleOption = Annotated[str, typer.Option(help=RULE_HELP)]
SplitOption = Annotated[
    float | None, typer.Option(help="Share of the samples that chooses, such as 0.5; the others judge.")
]
MetricOption = Annotated[str | None, typer.Option(help="Metric; the task's first if not given.")]
OneTaskOption = Annotated[str | None, typer.Option(help="Needed if the profile has several.")]
OnlyTaskOption = Annotated[str | None, typer.Option(help="Only this task.")]
OnlyDatasetOption = Annotated[str | None, typer.Option(help="Only this dataset.")]
ConfidenceOption = Annotated[float | None, typer.Option(help="Of the upper bounds; the profile's own if not given.")]
MaxStartsOption = Annotated[
    int | None,
    typer.Option(
        help="Only plans that start at layer 0 or at one of so many layers, whose E is kept: those with the best mean "
        "quality over all levels of recompute, whatever --max-loss."
    ),
]
MemoryOption = Annotated[
    str | None, typer.Option(help="Most memory on the device, such as 12GB; what is free if not said.")
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 …; the recipe's if not given.")]
RemoteCodeOption = Annotated[
    bool, typer.Option(help="Let a checkpoint, or a metric of evaluate, bring code that is run.")
]
