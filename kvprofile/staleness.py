"""Why a profile no longer tells what its recipe would measure now, as data. Loads no model."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from kvprofile.errors import BadInput
from kvprofile.identity import FINGERPRINTS
from kvprofile.recipe import Recipe, load_recipe
from kvprofile.store.reader import RECIPE_FILE, Profile
from kvprofile.store.schema import FORMAT_VERSION


class Reason(NamedTuple):
    """One thing that changed, or was never recorded.

    Attributes:
        what: `missing`, `format`, `recipe`, `weights`, `tokenizer`, `chat template`, `config`, `data`, `metric`, `strategy`
            or `age`.
        detail: In words.
    """

    what: str
    detail: str


class Present(NamedTuple):
    """What a sweep of a recipe would record now.

    Attributes:
        sender: Fingerprints by key of a header.
        receiver: Likewise.
        datasets: Name and hashes of each data source.
        metrics: `name@version`.
        strategies: Version by name.
        recipe_sha256: Hash of the recipe.
    """

    sender: Mapping[str, str]
    receiver: Mapping[str, str]
    datasets: list[dict[str, str]]
    metrics: list[str]
    strategies: Mapping[str, int]
    recipe_sha256: str


def present(recipe: Recipe) -> Present:
    """Looks up what a sweep of the recipe would record now.

    Raises:
        BadInput: If its models or data are not there.
    """
    from kvprofile.models.checkpoint import fingerprint_of
    from kvprofile.samples import datasets_of, load_parts, metrics_of
    from kvprofile.strategies import load_all

    parts = load_parts(recipe)
    models = [fingerprint_of(text, recipe.models, recipe.search_folders) for text in (recipe.sender, recipe.receiver)]
    return Present(
        sender=models[0]._asdict(),
        receiver=models[1]._asdict(),
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
    if _recipe_sha256(profile) != now.recipe_sha256:
        found.append(Reason("recipe", "the recipe has other settings than it was made by"))
    if differing := sorted(set(now.metrics) ^ set(header["metrics"])):
        found.append(Reason("metric", f"scored otherwise now: {', '.join(differing)}"))
    for name, version in (header["strategies"] or {}).items():
        if now.strategies.get(name, version) != version:
            found.append(Reason("strategy", f"{name} was version {version}, is {now.strategies[name]}"))
    if max_age is not None and (age := (at or datetime.now(UTC)) - _made_at(header)) > max_age:
        found.append(Reason("age", f"it is {age.days} days old"))
    return found


def _of_models(header: Mapping[str, Any], now: Present) -> list[Reason]:
    roles: tuple[Literal["sender", "receiver"], ...] = ("sender", "receiver")
    return [
        Reason(what, f"the {role}'s {what} changed")
        for role in roles
        for key, what in FINGERPRINTS.items()
        # What an older format did not record is told by its format.
        if header[role][key] is not None and header[role][key] != getattr(now, role)[key]
    ]


def _of_data(header: Mapping[str, Any], now: Present) -> list[Reason]:
    recorded = {one["name"]: one for one in header["datasets"]}
    found = [
        Reason("data", f"{name} is no longer asked") for name in recorded.keys() - {d["name"] for d in now.datasets}
    ]
    for one in now.datasets:
        if one["name"] not in recorded:
            found.append(Reason("data", f"{one['name']} was not measured"))
        elif one != {key: recorded[one["name"]][key] for key in one}:
            found.append(Reason("data", f"the records of {one['name']} changed"))
    return found


def _recipe_sha256(profile: Profile) -> str:
    """Returns the hash of a profile's recipe as a recipe of today, whose newer settings have their defaults."""
    try:
        return load_recipe(str(profile.folder / RECIPE_FILE)).sha256()
    except (BadInput, OSError):
        return str(profile.header["recipe_sha256"])


def _made_at(header: Mapping[str, Any]) -> datetime:
    try:
        made = datetime.fromisoformat(header["created_at"])
    except ValueError:
        raise BadInput(
            f'the profile says it was made at "{header["created_at"]}", which is no date; sweep again'
        ) from None
    return made if made.tzinfo else made.replace(tzinfo=UTC)
