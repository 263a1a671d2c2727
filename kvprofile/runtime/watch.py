"""A store's answer that is kept current while a server runs. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprofile.runtime.store import Found, ProfileStore


class Watch:
    """A store's answer, kept current: `found` costs nothing and may be read by any thread, `refresh` looks at the store.

    Attributes:
        question: The arguments of `ProfileStore.find`.

    Raises:
        BadInput: If the store cannot be listed.
    """

    def __init__(self, store: ProfileStore, question: Mapping[str, Any]) -> None:
        self.question: Mapping[str, Any] = MappingProxyType(dict(question))
        self._store = store
        self._lock = threading.Lock()
        # Looked at before the search: what is published meanwhile is then found by the next refresh.
        state = store.state()
        self._found = store.find(**self.question)
        self._state = state if _is_whole(self._found) else None

    @property
    def found(self) -> Found:
        """The last answer. A profile that was taken from it goes on to work when a newer one is there."""
        return self._found

    def refresh(self) -> bool:
        """Looks whether versions or validations came or went or were rejected, and only then reads.

        What could not be read is tried again by every refresh: the error may have passed.

        Returns:
            Whether the answer changed.

        Raises:
            BadInput: If the store cannot be listed, be it a folder or a URL; the last answer stays, and the next refresh looks
                again.
        """
        with self._lock:
            state = self._store.state()
            if state == self._state:
                return False
            found = self._store.find(**self.question)
            self._state = state if _is_whole(found) else None
            if _told(found) == _told(self._found):
                return False
            self._found = found
            return True


def _is_whole(found: Found) -> bool:
    """Returns whether everything that an answer depends on could be read."""
    return not found.unread and not (found.profile and found.profile.unread)


def _told(found: Found) -> tuple[Any, ...]:
    """Returns what tells two answers apart: a published version never changes, but files beside it come and go."""
    profile = found.profile
    own = profile and (profile.folder, profile.validations, profile.timings, profile.unread)
    return own, found.nearest, found.unread
