"""Answers that stop texts end: at the token that completes one, in every path, and scored up to there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvprofile.engine.batch import NOT_FINITE, greedy_rows
from kvprofile.engine.cache import KV
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question, Readers, answer_plans, draft_of
from kvprofile.engine.reference import capture, greedy, partial_prefill
from kvprofile.layers import LayerRange, Plan, groups
from kvprofile.strategies import load_all
from tests.engine.architectures import CONTEXT, LAYERS, SUFFIX, tiny_decoder

LIMIT = 12


def letters(token_ids: Sequence[int]) -> str:
    return "".join("abcdefgh"[one % 8] for one in token_ids)


class TestReached:
    def test_the_token_that_completes_a_text_ends_the_answer(self) -> None:
        ending = Ending(stop=("cd", "x"), decode=letters)
        assert [ending.reached((0, 1, 2, 3)[:n]) for n in (1, 2, 3, 4)] == [False, False, False, True]

    def test_an_end_token_needs_no_text(self) -> None:
        assert Ending(frozenset({7})).reached((1, 7))
        assert not Ending(frozenset({7})).reached((7, 1)), "only the last token is looked at"

    def test_without_stop_texts_nothing_is_decoded(self) -> None:
        def never(token_ids: Sequence[int]) -> str:
            raise AssertionError

        assert not Ending(frozenset({7}), (), never).reached((1, 2))


class TestText:
    def test_it_goes_up_to_the_first_of_all_stop_texts(self) -> None:
        ending = Ending(stop=("ef", "cd"), decode=letters)
        assert ending.text((0, 1, 2, 3, 4, 5)) == "ab"
        assert ending.text((4, 5, 2, 3)) == ""

    def test_without_one_it_is_whole(self) -> None:
        assert Ending(stop=("zz",), decode=letters).text((0, 1)) == "ab"
        assert Ending(decode=letters).text((0, 1)) == "ab"


def test_stop_texts_without_a_decoder_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="decode"):
        Ending(stop=("x",)).reached((1,))


def test_what_cannot_be_decoded_is_not() -> None:
    """A row without finite logits ends before anybody asks for its text."""

    def strict(token_ids: Sequence[int]) -> str:
        assert min(token_ids) >= 0
        return letters(token_ids)

    reader = tiny_decoder(seed=2)
    own = capture(reader, CONTEXT).kv
    broken = tuple(KV(kv.keys * torch.nan, kv.values) for kv in own)
    question = Question(SUFFIX, LIMIT, Ending(stop=("zz",), decode=strict))
    rows = greedy_rows(reader, [own, broken], draft_of(reader, own, question), *question, 8)
    assert rows[1].token_ids == (NOT_FINITE,)
    assert rows[0].token_ids == greedy(reader, own, *question)


def test_all_plans_stop_where_one_at_a_time_does() -> None:
    sender, receiver = tiny_decoder(seed=1), tiny_decoder(seed=2)
    kv = capture(sender, CONTEXT)
    contexts = {group: partial_prefill(receiver, kv, group) for group in groups(LAYERS)}
    whole = {group: greedy(receiver, context, SUFFIX, LIMIT, Ending()) for group, context in contexts.items()}
    # Two texts of two tokens: one in the middle of the draft, one in the middle of an answer that lacks it.
    draft = letters(whole[receiver.all_layers])
    other = next(text for text in map(letters, whole.values()) if draft[4:6] not in text)
    ending = Ending(frozenset({2}), (draft[4:6], other[6:8]), letters)
    question = Question(SUFFIX, LIMIT, ending)
    plans = [Plan("layer_group", group) for group in groups(LAYERS)]
    caches = ContextCaches(sender, receiver, CONTEXT, 3)
    answers = {
        a.plan.range: a.token_ids for a in answer_plans(Readers(sender, receiver), caches, question, plans, load_all())
    }
    expected = {group: _cut(ids, ending) for group, ids in whole.items()}
    assert answers == expected
    assert {group: greedy(receiver, context, *question) for group, context in contexts.items()} == expected
    lengths = {len(ids) for ids in expected.values()}
    assert len(lengths) >= 3, lengths
    assert expected[LayerRange(0, LAYERS)] != whole[LayerRange(0, LAYERS)], "the draft was not stopped"


def _cut(ids: Sequence[int], ending: Ending) -> tuple[int, ...]:
    """Returns an answer up to its end, found without the code under test."""
    for length in range(1, len(ids) + 1):
        text = letters(ids[:length])
        if ids[length - 1] in ending.ids or any(one in text for one in ending.stop):
            return tuple(ids[:length])
    return tuple(ids)
