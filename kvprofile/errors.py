"""The one tree of errors a user can meet. Each message is one sentence that names the thing and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar


class KvprofileError(Exception):
    """Base of all errors that are shown as one sentence; `exit_code` is what the process returns."""

    exit_code = 4


class BadInput(KvprofileError):
    """What the user gave cannot be used: files, models, data, options."""

    exit_code = 2


class NewerFormat(BadInput):
    """A file that a newer kvprofile made."""


class Interrupted(KvprofileError):
    """Work stopped half-way, nothing is lost, and the same command goes on."""

    exit_code = 3


class OutOfMemory(KvprofileError):
    """A device or the host ran out of memory."""

    exit_code = 4


OUT_OF_MEMORY = (
    "out of memory; use shorter contexts (--max-context-tokens), a smaller dtype (--dtype bfloat16) or a larger device"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or torch, which need not be installed, says that memory ran out."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


class GateFailed(KvprofileError):
    """The engine would not be exact on this pair, so nothing was measured."""

    exit_code = 2


Word = TypeVar("Word", bound=str)


def one_of(text: str, known: Sequence[Word], what: str) -> Word:
    """Returns the known word that a text is.

    Args:
        text: What a user wrote.
        known: The words, for people in this order.
        what: What they are, in the singular.

    Raises:
        BadInput: If it is none of them.
    """
    for word in known:
        if word == text:
            return word
    raise BadInput(f'there is no {what} "{text[:40]}"{did_you_mean(text, known)}; {what}s are {", ".join(known)}')


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean "x"?)` for the closest known word, else the empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f' (did you mean "{close[0]}"?)' if close else ""
