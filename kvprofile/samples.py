"""What a recipe asks: its data sources, and their records in the receiver's token ids. Loads no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprofile.analysis.profile_table import Source
from kvprofile.data.prompts import Sample, build_sample, task_of
from kvprofile.data.records import Dataset, Record, choose, load_dataset
from kvprofile.errors import BadInput, GateFailed
from kvprofile.identity import json_sha256
from kvprofile.recipe import DataSource, Recipe
from kvprofile.scoring import Metric, metric

if TYPE_CHECKING:
    from kvprofile.models.loading import LoadedModel
    from kvprofile.run import Progress


@dataclass(frozen=True)
class Part:
    """One data source of a recipe, ready to measure."""

    source: DataSource
    data: Dataset
    records: tuple[Record, ...]
    metrics: tuple[Metric, ...]

    @property
    def key(self) -> Source:
        return self.source.task, self.source.name


def load_parts(recipe: Recipe) -> tuple[Part, ...]:
    """Returns the recipe's data sources with the records chosen from each; loads no model.

    Raises:
        BadInput: If data, task or metric cannot be used.
    """
    return tuple(load_part(recipe, source, recipe.contexts) for source in recipe.data)


def load_part(recipe: Recipe, source: DataSource, contexts: int | None) -> Part:
    """Returns a data source with so many of its records, None for all of them; as for `load_parts`."""
    data = load_dataset(source, recipe.folder, with_answers=recipe.references == "data")
    metrics = tuple(metric(name) for name in task_of(source).metrics)
    names = [one.name for one in metrics]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f'metric "{repeated}" is asked for twice on {source.name}; name it once')
    return Part(source, data, choose(data, contexts or len(data.records), recipe.seed), metrics)


def datasets_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns each data source as a profile's header holds it: name, hashes, and any stop texts with its task."""
    return [
        {
            "name": part.source.name,
            "sha256": part.data.sha256,
            "sample_ids_sha256": json_sha256([record.id for record in part.records]),
            **({"task": part.source.task, "stop": list(part.source.stop)} if part.source.stop else {}),
        }
        for part in parts
    ]


def metrics_of(parts: Sequence[Part]) -> list[str]:
    """Returns `name@version` of every metric, as a profile's header holds them."""
    return sorted({one.identity for part in parts for one in part.metrics})


def build_samples(recipe: Recipe, parts: Sequence[Part], tokenizer: Any, configs: Sequence[Any]) -> tuple[Sample, ...]:
    """Returns every chosen record in the receiver's token ids, cut where its context is too long for one of the models.

    Raises:
        BadInput: If a record cannot be asked, or a stop text holds a special token, which no answer's text does.
    """
    for part in parts:
        for text in part.source.stop:
            if special := next((one for one in tokenizer.all_special_tokens if one in text), None):
                raise BadInput(
                    f'the stop text "{text}" of {part.source.name} holds the special token {special}, which is never part of an '
                    "answer's text; drop it: end tokens end answers by themselves"
                )
    names = ("max_position_embeddings", "max_seq_len")
    known = [getattr(config.get_text_config(decoder=True), name, None) for config in configs for name in names]
    longest = min((positions for positions in known if positions is not None), default=None)
    return tuple(_sample(recipe, part, record, tokenizer, longest) for part in parts for record in part.records)


def _sample(recipe: Recipe, part: Part, record: Record, tokenizer: Any, longest: int | None) -> Sample:
    task = task_of(part.source)

    def build(limit: int | None) -> Sample:
        return build_sample(
            tokenizer,
            record,
            task,
            dataset=part.source.name,
            max_new_tokens=task.max_new_tokens,
            stop=part.source.stop,
            max_context_tokens=limit,
            chat_template=recipe.chat_template,
        )

    sample = build(recipe.max_context_tokens)
    room = None if longest is None else longest - len(sample.suffix_token_ids) - sample.max_new_tokens
    if room is not None and len(sample.context_token_ids) > room:
        if room < 1:
            raise BadInput(
                f'the question of record "{record.id}" and {sample.max_new_tokens} answer tokens leave no room for a '
                f"context in the models' {longest} positions; shorten the question or lower max_new_tokens"
            )
        sample = build(room)
    return sample


def require_same_ids(sample: Sample, sender: LoadedModel, receiver: LoadedModel) -> None:
    """Raises GateFailed where the models' tokenizers turn a context into different ids."""
    text = receiver.tokenizer.decode(sample.context_token_ids)
    ours, theirs = (m.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for m in (receiver, sender))
    if ours != theirs:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise GateFailed(
            f'sender and receiver turn the context of "{sample.sample_id}" into different token ids from position {at} on '
            f"({theirs[at : at + 3]} and {ours[at : at + 3]}); their tokenizers must be equal"
        )


def remark_on(samples: Sequence[Sample], progress: Progress) -> None:
    """Tells how many contexts are cut, and how many prompts would read otherwise in one piece."""
    if cut := [s for s in samples if s.truncated_tokens]:
        most = max(s.truncated_tokens for s in cut)
        progress.say(f"{len(cut)} of {len(samples)} contexts are cut in the middle, by up to {most} tokens")
    if moved := sum(s.boundary_moved for s in samples):
        progress.say(
            f"{moved} of {len(samples)} prompts would have other ids if context and suffix were tokenised together; "
            "every plan reads them apart, so none is favoured"
        )


_OF_SAMPLE = (
    *("sample_id", "task", "dataset", "context_sha256", "suffix_token_ids", "references"),
    *("head_tokens", "max_new_tokens"),
)


def sample_identity(samples: Iterable[Sample]) -> tuple[tuple[Any, ...], ...]:
    """Returns what of the samples is part of an identity."""
    # Behind all others, so that samples without stop texts keep the identity they had before there were any.
    return tuple((*(getattr(sample, name) for name in _OF_SAMPLE), *sample.stop) for sample in samples)
