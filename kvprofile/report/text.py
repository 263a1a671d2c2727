"""Words for people: texts from models and files made harmless for a terminal, sizes, durations."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text


def harmless(value: object) -> str:
    r"""Returns the value as one line of printable text, with escapes such as `\x1b` in place of everything else.

    Control characters could move the cursor or change colours, bidirectional marks reorder what is read, and lone
    surrogates cannot be encoded. Rich's markup is only safe in a `rich.text.Text`.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


def print_line(console: Console, line: str) -> None:
    """Prints a line of any text, unwrapped and without its markup or control characters taking effect."""
    console.print(Text(harmless(line)), soft_wrap=True)


def short_list(texts: Sequence[str]) -> str:
    """Returns texts as they would be written in a list, each cut where it is long."""
    return ", ".join(repr(one if len(one) <= 40 else f"{one[:39]}…") for one in texts)


def size(count: int) -> str:
    """Returns bytes such as `1.2 MB`, in powers of 1000."""
    if count < 1000:
        return f"{count} B"
    power = min(len(str(count)) - 1, 14) // 3
    return f"{count / 1000**power:.1f} {'kMGT'[power - 1]}B"


def duration(seconds: float) -> str:
    """Returns a duration such as `95 s`, `12 min` or `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
