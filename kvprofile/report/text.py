"""Texts from models, files and footers made harmless for a terminal."""

from __future__ import annotations


def harmless(value: object) -> str:
    r"""Returns the value as one line of printable text, with escapes such as `\x1b` in place of everything else.

    Control characters could move the cursor or change colours, bidirectional marks reorder what is read, and lone
    surrogates cannot be encoded. Rich's markup is only safe in a `rich.text.Text`.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))
