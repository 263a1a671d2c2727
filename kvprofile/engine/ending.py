"""What ends an answer: an end token, or a text that the answer may not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


def _unknown(token_ids: Sequence[int]) -> str:
    raise ValueError("an ending with stop texts must be told how to decode")


class Ending(NamedTuple):
    """Where an answer ends, beside its limit of tokens.

    Attributes:
        ids: End tokens; the first of these is an answer's last id.
        stop: Texts; the token that completes one is an answer's last id.
        decode: Token ids to text.
    """

    ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] = _unknown

    def reached(self, answer: Sequence[int]) -> bool:
        """Returns whether the last of an answer's ids ends it, where none before did."""
        if answer[-1] in self.ids:
            return True
        if not self.stop:
            return False
        text = self.decode(answer)
        return any(one in text for one in self.stop)

    def text(self, answer: Sequence[int]) -> str:
        """Returns an answer's text up to the first stop text."""
        text = self.decode(answer)
        return text[: min((at for one in self.stop if (at := text.find(one)) >= 0), default=None)]
