"""Prompts as token ids: each record becomes context and suffix ids that every arm reads unchanged."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvprofile.data.records import Record
from kvprofile.data.tasks import TASKS, Task
from kvprofile.errors import BadInput, did_you_mean
from kvprofile.recipe import DataSource


@dataclass(frozen=True)
class Sample:
    """A record in the receiver's token ids.

    Attributes:
        context_token_ids: `S` ids, with everything of the chat template that precedes the context.
        suffix_token_ids: `T` ids: the rest of the user message and the generation prompt.
        head_tokens: Leading context ids that precede the record's own context; all that `no_context` keeps.
        truncated_tokens: Ids cut from the middle of the context.
        boundary_moved: Whether tokenising context and suffix together would have given other ids (before any cut).
        stop: Texts that end an answer.
        context_sha256: Over the context ids as little-endian int32.
    """

    sample_id: str
    task: str
    dataset: str
    context_token_ids: tuple[int, ...]
    suffix_token_ids: tuple[int, ...]
    references: tuple[str, ...]
    head_tokens: int
    truncated_tokens: int
    boundary_moved: bool
    max_new_tokens: int
    stop: tuple[str, ...]
    context_sha256: str


def task_of(source: DataSource) -> Task:
    """Returns the task of a data source, with the source's own prompt, metrics and limit where it has them.

    Raises:
        BadInput: If there is no such task.
    """
    task = TASKS.get(source.task)
    if task is None:
        known = ", ".join(TASKS)
        raise BadInput(f'unknown task "{source.task}"{did_you_mean(source.task, TASKS)}; tasks are {known}')
    if source.prompt:
        after = source.prompt.after
        bare = after.replace("{question}", "")
        task = dataclasses.replace(task, before=source.prompt.before, after=after, after_without_question=bare)
    return dataclasses.replace(
        task,
        metrics=source.metrics or task.metrics,
        max_new_tokens=source.max_new_tokens or task.max_new_tokens,
    )


def build_sample(
    tokenizer: Any,
    record: Record,
    task: Task,
    *,
    dataset: str,
    max_new_tokens: int,
    stop: tuple[str, ...],
    max_context_tokens: int | None,
    chat_template: bool,
) -> Sample:
    """Splits a record's prompt exactly at the end of its context and returns both parts as token ids.

    The context is tokenised without knowledge of what follows, as a sender that prefetches it would do.

    Raises:
        BadInput: If the context is blank, the template changes the message, or a limit leaves nothing of the context.
    """
    if not record.context.strip():
        raise BadInput(f'record "{record.id}" of {dataset} has an empty context; drop it or give it one')
    before, after = task.parts(record.context, record.question)
    templated = chat_template and bool(getattr(tokenizer, "chat_template", None))
    left, right = _rendered(tokenizer, before, after, record.id) if templated else (before, after)
    bos = [] if templated else _bos(tokenizer)
    context = bos + _ids(tokenizer, left)
    joint = bos + _ids(tokenizer, left + right)
    # Where the joint ids begin with the context's, their rest is the suffix: SentencePiece tokenizers would put a space
    # in front of a suffix tokenised alone.
    moved = joint[: len(context)] != context
    suffix = _ids(tokenizer, right) if moved else joint[len(context) :]
    if not suffix:
        raise BadInput(
            f'record "{record.id}" of {dataset} has no prompt after its context; give the task a longer prompt'
        )
    own = record.context if left.endswith(record.context) else record.context.lstrip()
    head = _common_prefix(bos + _ids(tokenizer, left[: len(left) - len(own)]), context)
    kept = _cut(context, head, max_context_tokens, record.id)
    return Sample(
        sample_id=record.id,
        task=task.name,
        dataset=dataset,
        context_token_ids=tuple(kept),
        suffix_token_ids=tuple(suffix),
        references=record.answers,
        head_tokens=head,
        truncated_tokens=len(context) - len(kept),
        boundary_moved=moved,
        max_new_tokens=max_new_tokens,
        stop=stop,
        context_sha256=token_sha256(kept),
    )


def token_sha256(ids: Sequence[int]) -> str:
    """Returns the SHA-256 of token ids as little-endian int32."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def _rendered(tokenizer: Any, before: str, after: str, record_id: str) -> tuple[str, str]:
    """Returns the text the chat template makes of the message, cut at the end of the context."""
    from jinja2 import TemplateError

    message = [{"role": "user", "content": before + after}]
    try:
        text: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise BadInput(f"the chat template refuses a lone user message ({error}); set chat_template: false") from error
    # Templates may strip the message; the part before must then still stand in front of the cut, or the cut is wrong.
    for tail in (after, after.rstrip()):
        cut = text.rfind(tail)
        if cut >= 0 and text[:cut].endswith((before, before.lstrip())):
            return text[:cut], text[cut:]
    raise BadInput(
        f'the chat template changes the message of record "{record_id}", so that the end of its context '
        "cannot be found; set chat_template: false"
    )


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _bos(tokenizer: Any) -> list[int]:
    """Returns the token a tokenizer puts in front of plain text; one it puts behind has no place before a suffix."""
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("a", verbose=False)["input_ids"][:1] != [bos]:
        return []
    return [bos]


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _cut(ids: list[int], head: int, limit: int | None, record_id: str) -> list[int]:
    """Returns the first and the last half of too long a context; the head always stays whole."""
    if limit is None or len(ids) <= limit:
        return ids
    if limit <= head:
        raise BadInput(
            f'a context of {limit} tokens leaves nothing of record "{record_id}" behind its {head} leading prompt '
            "tokens; raise max_context_tokens"
        )
    first = max((limit + 1) // 2, head)
    return ids[:first] + ids[len(ids) - (limit - first) :]
