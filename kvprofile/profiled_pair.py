"""The pair of a published profile, loaded again to measure more; any other pair is refused."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvprofile.analysis.profile_table import Source
from kvprofile.data.prompts import task_of
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.executor import Readers
from kvprofile.errors import BadInput
from kvprofile.identity import FINGERPRINTS
from kvprofile.json_text import parse_json
from kvprofile.models.loading import LoadedModel, load_pair
from kvprofile.recipe import Recipe, load_recipe, with_options
from kvprofile.run import Progress
from kvprofile.scoring import BUILT_IN, Metric, metric
from kvprofile.store.reader import RECIPE_FILE, Profile


class ProfiledPair(NamedTuple):
    """Both models of a profile, with the recipe it was made by."""

    recipe: Recipe
    sender: LoadedModel
    receiver: LoadedModel
    readers: Readers

    def reversed(self) -> ProfiledPair:
        """Returns the pair with the models' roles exchanged."""
        return ProfiledPair(
            self.recipe, self.receiver, self.sender, Readers(self.readers.receiver, self.readers.sender)
        )


def load_profiled_pair(
    profile: Profile,
    progress: Progress,
    sender: str | None = None,
    receiver: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> ProfiledPair:
    """Loads the models that a profile was made of.

    Args:
        profile: The profile.
        progress: Who is told.
        sender: Where the sender is now, if not where the recipe says.
        receiver: Likewise.
        device: Where to compute, if not where the recipe says.
        trust_remote_code: Whether a checkpoint or a metric may bring code that is run; what the profile's recipe says does
            not count, since anybody may have written it.

    Raises:
        BadInput: If a model is not there, or is not the one that was profiled, or a metric is another version now.
    """
    recipe = profile_recipe(profile)
    _require_metrics(profile, recipe, trust_remote_code)
    dtype, attention = profile.header["receiver"]["dtype"], profile.header["attention"]
    models = {
        **recipe.models.model_dump(),
        "dtype": dtype,
        "attention": attention,
        "trust_remote_code": trust_remote_code,
    }
    if device is not None:
        models |= {"device": device, "device_map": None}
    changes = {"sender": sender or recipe.sender, "receiver": receiver or recipe.receiver, "models": models}
    recipe = with_options(recipe, **changes)
    progress.say(f"loading {recipe.sender} and {recipe.receiver}")
    loaded = load_pair(recipe.sender, recipe.receiver, recipe.models, recipe.search_folders)
    for role, model in zip(("sender", "receiver"), loaded, strict=True):
        _require_same(profile.header[role], model, role)
    if (kernel := loaded[1].model.config._attn_implementation) != attention:
        raise BadInput(
            f"the profile was measured with the attention kernel {attention}, this machine takes {kernel} for its receiver; "
            "sweep again"
        )
    return ProfiledPair(recipe, *loaded, Readers(*(Decoder(model.model) for model in loaded)))


def profile_recipe(profile: Profile) -> Recipe:
    """Returns the recipe of a profile; its relative paths start where those of the original did."""
    folder: Any = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        folder = parse_json((profile.folder / "environment.json").read_bytes())["recipe_folder"]
    known = isinstance(folder, str) and Path(folder).is_dir()
    return load_recipe(str(profile.folder / RECIPE_FILE), Path(folder) if known else None)


def profile_metrics(recipe: Recipe) -> dict[Source, list[Metric]]:
    """Returns the metrics of every task and data set of a profile's recipe, in their order."""
    return {(one.task, one.name): [metric(name) for name in task_of(one).metrics] for one in recipe.data}


def _require_metrics(profile: Profile, recipe: Recipe, trust_remote_code: bool) -> None:
    names = {name for one in recipe.data for name in task_of(one).metrics}
    if foreign := sorted(names - {*BUILT_IN}) if not trust_remote_code else []:
        raise BadInput(
            f'the profile\'s metric "{foreign[0]}" is code of the evaluate library; give --trust-remote-code to run it'
        )
    recorded = set(profile.header["metrics"])
    for one in (one for metrics in profile_metrics(recipe).values() for one in metrics):
        if one.identity not in recorded:
            raise BadInput(
                f"the profile was scored by {', '.join(sorted(recorded))}, this is {one.identity}; sweep again"
            )


def _require_same(header: Mapping[str, Any], model: LoadedModel, role: str) -> None:
    for key, what in FINGERPRINTS.items():
        if header[key] is not None and header[key] != getattr(model.fingerprint, key):
            raise BadInput(
                f"{model.reference.name} is not the {role} of this profile: its {what} differ; name the profiled one with "
                f"--{role}, or sweep again"
            )
