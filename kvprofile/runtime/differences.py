"""Why a profile is not about the models that a server runs, as data and in words. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvprofile.identity import FINGERPRINTS
from kvprofile.runtime.fingerprint import Fingerprint, Pair, is_digest, same_model


class Difference(NamedTuple):
    """One reason why a profile must not be used.

    Attributes:
        what: `sender.weights_sha256` and the like, `direction`, `dtype`, `task`, `dataset`, `metric`, `rejected` or `file`.
        words: The same for people.
    """

    what: str
    words: str


def differences(
    pair: Pair, sender: Fingerprint, receiver: Fingerprint, version: str, made_by: Callable[[], int]
) -> list[Difference]:
    """Returns what keeps a profile's pair from being sender and receiver; nothing if it is exactly they.

    Args:
        pair: The profile's.
        sender: The one asked for.
        receiver: The one asked for.
        version: How the profile is called, such as `v0003`.
        made_by: Tells the format that the profile was written in; asked only where it lacks a digest.
    """
    if sender != receiver and same_model(sender, pair.receiver) and same_model(receiver, pair.sender):
        return [Difference("direction", f"direction is reversed: in {version} this sender reads from this receiver")]
    roles = (("sender", sender, pair.sender), ("receiver", receiver, pair.receiver))
    return [found for role, asked, held in roles for found in _of_model(role, asked, held, version, made_by)]


def _of_model(
    role: str, asked: Fingerprint, held: Fingerprint, version: str, made_by: Callable[[], int]
) -> Iterator[Difference]:
    for name, noun in FINGERPRINTS.items():
        wanted, known = getattr(asked, name), getattr(held, name)
        if wanted is None:
            words = f"the {role}'s {noun} is not known; give its {name} as `kvprofile check --json` prints it"
        elif not is_digest(wanted):
            words = f"the {role}'s {name} asked for is no SHA-256 of 64 lower-case hexadecimal digits"
        elif known is None:
            words = f"{version} was made by format {made_by()}, which recorded no {noun}: sweep again"
        elif wanted != known:
            words = f"the {role}'s {noun} changed since {version}"
        else:
            continue
        yield Difference(f"{role}.{name}", words)
