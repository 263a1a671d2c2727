"""Why a profile no longer tells what its recipe would measure now, as data. Loads no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from kvprofile.errors import BadInput
from kvprofile.identity import FINGERPRINTS
from kvprofile.recipe import Recipe, load_recipe
from kvprofile.store.reader import RECIPE_FILE, Profile
from kvprofile.store.schema import FORMAT_VERSION, ends_of

_CLOCKS_DIFFER = timedelta(days=1)


class Reason(NamedTuple):
    """One thing that changed, or was never recorded.

    Attributes:
        what: `missing`, `unreadable`, `format`, `recipe`, `weights`, `tokenizer`, `chat template`, `config`, `end tokens`,
            `data`, `metric`, `strategy`, `age` or `asked`.
        detail: In words.
    """

    what: str
    detail: str


class Present(NamedTuple):
    """What a sweep of a recipe would record now.

    Attributes:
        sender: Fingerprints by key of a header.
        receiver: Likewise.
        end_ids: Token ids that end an answer.
        datasets: Each data source, as in a header.
        metrics: `name@version`.
        strategies: Version by name.
        recipe_sha256: Hash of the recipe.
    """

    sender: Mapping[str, str]
    receiver: Mapping[str, str]
    end_ids: list[int]
    datasets: list[dict[str, Any]]
    metrics: list[str]
    strategies: Mapping[str, int]
    recipe_sha256: str


def present(recipe: Recipe, fetch: bool = False) -> Present:
    """Looks up what a sweep of the recipe would record now.

    Args:
        recipe: The recipe.
        fetch: Whether to fetch weights on the hub whose hashes were never seen here; otherwise they count as changed.

    Raises:
        BadInput: If its models or data are not there.
    """
    from kvprofile.models.checkpoint import looked_up
    from kvprofile.samples import datasets_of, load_parts, metrics_of
    from kvprofile.strategies import load_all

    parts = load_parts(recipe)
    sender, receiver = (
        looked_up(text, recipe.models, recipe.search_folders, fetch) for text in (recipe.sender, recipe.receiver)
    )
    return Present(
        sender=sender.fingerprint._asdict(),
        receiver=receiver.fingerprint._asdict(),
        end_ids=list(receiver.end_ids),
        datasets=datasets_of(parts),
        metrics=metrics_of(parts),
        strategies={name: strategy.version for name, strategy in load_all().items()},
        recipe_sha256=recipe.sha256(),
    )


def why_stale(
    profile: Profile | None, now: Present, max_age: timedelta | None = None, at: datetime | None = None
) -> list[Reason]:
    """Returns why a profile must be measured again, nothing if it need not.

    Args:
        profile: The newest of the pair, None if there is none.
        now: What a sweep would record now.
        max_age: How old it may be.
        at: The present time.
    """
    if profile is None:
        return [Reason("missing", "the pair has no profile")]
    header = profile.header
    found = [*_of_models(header, now), *_of_data(header, now)]
    if (made_by := header.get("migrated_from")) is not None:
        found.append(Reason("format", f"it was made by format {made_by}; {FORMAT_VERSION} records more"))
    if recipe_sha256(profile) != now.recipe_sha256:
        found.append(Reason("recipe", "the recipe has other settings than it was made by"))
    if differing := sorted(set(now.metrics) ^ set(header["metrics"])):
        found.append(Reason("metric", f"scored otherwise now: {', '.join(differing)}"))
    for name, version in (header["strategies"] or {}).items():
        if now.strategies.get(name, version) != version:
            found.append(Reason("strategy", f"{name} was version {version}, is {now.strategies[name]}"))
    if max_age is not None:
        found += _of_age(header, max_age, at or datetime.now(UTC))
    return found


def _of_models(header: Mapping[str, Any], now: Present) -> list[Reason]:
    roles: tuple[Literal["sender", "receiver"], ...] = ("sender", "receiver")
    found = [
        Reason(what, f"the {role}'s {what} changed")
        for role in roles
        for key, what in FINGERPRINTS.items()
        # What an older format did not record is told by its format.
        if header[role][key] is not None and header[role][key] != getattr(now, role)[key]
    ]
    if header["end_ids"] is not None and header["end_ids"] != now.end_ids:
        found.append(Reason("end tokens", "the tokens that end an answer changed"))
    return found


def _of_data(header: Mapping[str, Any], now: Present) -> list[Reason]:
    recorded, asked = (
        Counter((one["name"], one["sha256"], one["sample_ids_sha256"]) for one in held)
        for held in (header["datasets"], now.datasets)
    )
    names = dict.fromkeys(name for name, *_ in [*(asked - recorded), *(recorded - asked)])
    found = [Reason("data", f"the records of {name} are others than were measured") for name in names]
    if ends_of(header["datasets"]) != ends_of(now.datasets):
        found.append(Reason("stop texts", "the texts that end an answer changed"))
    return found


def recipe_sha256(profile: Profile) -> str:
    """Returns the hash of a profile's recipe as a recipe of today, whose newer settings have their defaults."""
    try:
        return load_recipe(str(profile.folder / RECIPE_FILE)).sha256()
    except (BadInput, OSError):
        return str(profile.header["recipe_sha256"])


def _of_age(header: Mapping[str, Any], max_age: timedelta, at: datetime) -> list[Reason]:
    try:
        made = datetime.fromisoformat(header["created_at"])
    except ValueError:
        return [Reason("age", "when it was made is not known")]
    age = at - (made if made.tzinfo else made.replace(tzinfo=UTC))
    if age < -_CLOCKS_DIFFER:
        return [Reason("age", "it was made in the future, so a clock was or is wrong")]
    return [Reason("age", f"it is {age.days} days old")] if age > max_age else []
