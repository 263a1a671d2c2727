"""Batched greedy decoding: rows whose contexts and suffixes are equally long go through the reader together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvprofile.engine.cache import ContextKV, RowsCache
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.fidelity import Draft, Fidelity, fidelity
from kvprofile.engine.tree import Tree, apart, fan_out

NOT_FINITE = -1
"""Stands for a token that could not be chosen, since the logits were not finite; such an answer ends there."""


class Row(NamedTuple):
    """The answer of one row, and how close it stays to the draft."""

    token_ids: tuple[int, ...]
    fidelity: Fidelity | None


@dataclass(eq=False)
class _Going:
    """A row on its way.

    Attributes:
        context: What it reads.
        answer: Its tokens so far.
        fidelity: To the draft.
        cache: Where its own tokens are kept; None once the answer has ended.
        nodes: For every layer, its row in `cache`.
    """

    context: ContextKV
    answer: list[int]
    fidelity: Fidelity | None
    cache: RowsCache | None
    nodes: tuple[int, ...]

    def own(self, layer: int) -> tuple[RowsCache, int]:
        """Returns where the row's own tokens of a layer are kept."""
        assert self.cache is not None
        return self.cache, self.nodes[layer]


@torch.inference_mode()
def greedy_rows(
    reader: Decoder,
    contexts: Sequence[ContextKV],
    draft: Draft,
    suffix: Sequence[int],
    max_new_tokens: int,
    ending: Ending,
    together: int,
) -> list[Row]:
    """Returns the greedy answer of every row: the ids that `reference.greedy` gives one at a time.

    A pass over the tree of rows reads the suffix and a draft of the answer (greedy speculative decoding, arXiv 2211.17192). Rows
    that agree with all of the draft are done. The others go on together, token by token: a row joins at the position of its first
    difference, so that no row is padded, and rows with equal answers so far are a tree again.

    Args:
        reader: The model that answers.
        contexts: B contexts of S tokens each; what two of them share must be the same object.
        draft: A guess of the answer.
        suffix: T token ids, the same for all rows.
        max_new_tokens: Limit on the answer.
        ending: What ends an answer earlier, and has ended the draft if it is shorter.
        together: Rows of one verifying pass.
    """
    room = len(suffix) + max_new_tokens

    def ended(answer: tuple[int, ...]) -> bool:
        return answer[-1] == NOT_FINITE or len(answer) == max_new_tokens or ending.reached(answer)

    def free_ended(rows: Sequence[_Going]) -> None:
        answers = {answer: ended(answer) for answer in {tuple(row.answer) for row in rows}}
        for row in rows:
            if answers[tuple(row.answer)]:
                row.cache = None  # else it would outlive its other rows

    rows: list[_Going] = []
    for first in range(0, len(contexts), together):
        verified = _verify(reader, contexts[first : first + together], suffix, draft, room)
        free_ended(verified)
        rows += verified
    batch: _Batch | None = None
    for length in range(1, max_new_tokens):
        going = [row for row in rows if len(row.answer) == length and row.cache is not None]
        if going:
            if batch is None or not batch.holds(going):
                batch = _Batch(reader, going, len(suffix) + length - 1, room, batch)
            batch.step()
            free_ended(going)
    return [Row(tuple(row.answer), row.fidelity) for row in rows]


def _verify(
    reader: Decoder, contexts: Sequence[ContextKV], suffix: Sequence[int], draft: Draft, room: int
) -> list[_Going]:
    """Reads suffix and draft behind every context, and takes each answer up to its first difference from the draft."""
    tree = _tree(reader, contexts)
    cache = reader.rows_cache(tree.contexts, room)
    given = torch.tensor([[*suffix, *draft.token_ids[:-1]]]).expand(1 + max(tree.parents[0]), -1)
    question, answer = given[:, : len(suffix) - 1], given[:, len(suffix) - 1 :]
    if question.shape[1]:
        reader.read(question, cache, tree.parents)
    logits = reader.logits(answer, cache, keep=len(draft.token_ids), parents=tree.parents)
    verified = [
        (_agreed(chosen, draft.token_ids), fidelity(draft, row))
        for chosen, row in zip(_choose(logits), logits, strict=True)
    ]
    return [
        _Going(context, list(verified[nodes[-1]][0]), verified[nodes[-1]][1], cache, nodes)
        for context, nodes in zip(contexts, zip(*tree.nodes, strict=True), strict=True)
    ]


class _Batch:
    """Rows with equally long answers, which go on token by token.

    Args:
        reader: The model that answers.
        rows: The rows; their own tokens are copied here.
        held: How many own tokens each has read.
        room: Own tokens at most.
        before: The batch whose place this one takes, if any.
    """

    def __init__(self, reader: Decoder, rows: Sequence[_Going], held: int, room: int, before: _Batch | None) -> None:
        self._reader, self._rows = reader, rows
        answers: dict[tuple[int, ...], int] = {}
        inputs = [answers.setdefault(tuple(row.answer), len(answers)) for row in rows]
        self._tree = _tree(reader, [row.context for row in rows], inputs)
        self._different = len(answers)
        self._cache = reader.rows_cache(self._tree.contexts, room)
        origins = [
            [rows[row].own(layer) for row in self._tree.leaders(layer)] for layer in range(len(self._tree.nodes))
        ]
        self._cache.take(origins, held, before._cache if before else None)
        for row, nodes in zip(rows, zip(*self._tree.nodes, strict=True), strict=True):
            row.cache, row.nodes = self._cache, nodes

    def holds(self, rows: Sequence[_Going]) -> bool:
        """Whether these are the batch's rows, and those whose answers were equal still agree."""
        return rows == self._rows and len({tuple(row.answer) for row in rows}) == self._different

    def step(self) -> None:
        """Adds one token to every answer."""
        inputs, leaves = self._tree.parents[0], self._tree.nodes[-1]
        last = {inputs[row.nodes[0]]: row.answer[-1] for row in self._rows}
        new = torch.tensor([[last[number]] for number in range(len(last))])
        chosen = _choose(self._reader.logits(new, self._cache, keep=1, parents=self._tree.parents))
        for row, leaf in zip(self._rows, leaves, strict=True):
            row.answer += chosen[leaf]


def _tree(reader: Decoder, contexts: Sequence[ContextKV], inputs: Sequence[int] = ()) -> Tree:
    return fan_out(contexts, inputs) if reader.shares_contexts else apart(contexts)


def _choose(logits: torch.Tensor) -> list[list[int]]:
    """Returns the best token per row and position of `(B, n, vocabulary)` logits, `NOT_FINITE` where there is none."""
    best = logits.argmax(dim=-1)
    finite = logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()
    return best.masked_fill(~finite, NOT_FINITE).tolist()


def _agreed(chosen: Sequence[int], draft: Sequence[int]) -> list[int]:
    """Returns the chosen tokens up to the first one that differs from the draft."""
    answer: list[int] = []
    for token, guessed in zip(chosen, draft, strict=True):
        answer.append(token)
        if token != guessed:
            break
    return answer
