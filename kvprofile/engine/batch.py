"""Batched greedy decoding: rows whose contexts and suffixes are equally long go through the reader together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvprofile.engine.cache import ContextKV
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.fidelity import Draft, Fidelity, fidelity
from kvprofile.engine.tree import apart, fan_out

NOT_FINITE = -1
"""Stands for a token that could not be chosen, since the logits were not finite; such an answer ends there."""


class Row(NamedTuple):
    """The answer of one row, and how close it stays to the draft."""

    token_ids: tuple[int, ...]
    fidelity: Fidelity | None


@torch.inference_mode()
def greedy_rows(
    reader: Decoder,
    contexts: Sequence[ContextKV],
    suffix: Sequence[int],
    draft: Draft,
    max_new_tokens: int,
    end_ids: frozenset[int],
) -> list[Row]:
    """Returns the greedy answer of every row: the ids that `reference.greedy` gives one at a time.

    One pass over the tree of rows reads the suffix and a draft of the answer (greedy speculative decoding, arXiv 2211.17192).
    Rows that agree with all of the draft are done; the others go on in batches that share the position of their first difference,
    so no row is padded.

    Args:
        reader: The model that answers.
        contexts: B contexts of S tokens each; what two of them share must be the same object.
        suffix: T token ids, the same for all rows.
        draft: A guess of the answer.
        max_new_tokens: Limit on the answer.
        end_ids: An answer ends with the first of these, which is its last id.
    """
    ends = end_ids | {NOT_FINITE}
    tree = fan_out(contexts) if reader.shares_contexts else apart(contexts)
    cache = reader.rows_cache(tree.contexts, len(suffix) + max_new_tokens)
    given = torch.tensor([[*suffix, *draft.token_ids[:-1]]]).expand(1 + max(tree.parents[0]), -1)
    logits = reader.logits(given, cache, keep=len(draft.token_ids), parents=tree.parents)
    verified = [
        (_verified(guess, draft.token_ids, ends), fidelity(draft, row))
        for guess, row in zip(_choose(logits), logits, strict=True)
    ]
    answers = [list(verified[leaf][0]) for leaf in tree.nodes[-1]]

    pending: dict[int, list[int]] = {}
    for row, answer in enumerate(answers):
        if answer[-1] not in ends and len(answer) < max_new_tokens:
            pending.setdefault(len(answer), []).append(row)
    for length, rows in pending.items():
        part = cache.select([[nodes[row] for row in rows] for nodes in tree.nodes], len(suffix) + length - 1)
        while rows:
            new = torch.tensor([[answers[row][-1]] for row in rows])
            for row, (token,) in zip(rows, _choose(reader.logits(new, part, keep=1)), strict=True):
                answers[row].append(token)
            length += 1
            going = [i for i, row in enumerate(rows) if answers[row][-1] not in ends and length < max_new_tokens]
            if len(going) < len(rows):
                rows = [rows[i] for i in going]
                part = part.select([going] * len(tree.nodes), len(suffix) + length - 1) if rows else part
    return [Row(tuple(answer), verified[leaf][1]) for answer, leaf in zip(answers, tree.nodes[-1], strict=True)]


def _choose(logits: torch.Tensor) -> list[list[int]]:
    """Returns the best token per row and position of `(B, n, vocabulary)` logits, `NOT_FINITE` where there is none."""
    best = logits.argmax(dim=-1)
    return best.masked_fill(~logits.isfinite().all(dim=-1), NOT_FINITE).tolist()


def _verified(guess: Sequence[int], draft: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Returns the chosen tokens up to the first end token or the first one that differs from the draft."""
    answer: list[int] = []
    for token, guessed in zip(guess, draft, strict=True):
        answer.append(token)
        if token in ends or token != guessed:
            break
    return answer
