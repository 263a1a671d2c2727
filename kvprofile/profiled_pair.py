"""The pair of a published profile, loaded again to measure more; any other pair is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvprofile.data.prompts import Sample
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.executor import Question, Readers
from kvprofile.errors import BadInput
from kvprofile.models.loading import LoadedModel, load_pair
from kvprofile.recipe import Recipe, load_recipe, with_options
from kvprofile.run import Progress, end_ids_of
from kvprofile.store.reader import Profile, parse_json


class ProfiledPair(NamedTuple):
    """Both models of a profile, with the recipe it was made by."""

    recipe: Recipe
    sender: LoadedModel
    receiver: LoadedModel
    readers: Readers

    def question(self, sample: Sample) -> Question:
        return Question(sample.suffix_token_ids, sample.max_new_tokens, end_ids_of(self.receiver))

    def text_of(self, token_ids: Sequence[int]) -> str:
        text: str = self.receiver.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

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
    trust_remote_code: bool = False,
) -> ProfiledPair:
    """Loads the models that a profile was made of.

    Args:
        profile: The profile.
        progress: Who is told.
        sender: Where the sender is now, if not where the recipe says.
        receiver: Likewise.
        trust_remote_code: Whether a checkpoint may bring code that is run; what the profile's recipe says does not count, since
            anybody may have written it.

    Raises:
        BadInput: If a model is not there, or is not the one that was profiled.
    """
    recipe = profile_recipe(profile)
    dtype, attention = profile.header["receiver"]["dtype"], profile.header["attention"]
    models = {
        **recipe.models.model_dump(),
        "dtype": dtype,
        "attention": attention,
        "trust_remote_code": trust_remote_code,
    }
    changes = {"sender": sender or recipe.sender, "receiver": receiver or recipe.receiver, "models": models}
    recipe = with_options(recipe, **changes)
    progress.say(f"loading {recipe.sender} and {recipe.receiver}")
    loaded = load_pair(recipe.sender, recipe.receiver, recipe.models, recipe.search_folders)
    for role, model in zip(("sender", "receiver"), loaded, strict=True):
        _require_same(profile.header[role], model, role)
    return ProfiledPair(recipe, *loaded, Readers(*(Decoder(model.model) for model in loaded)))


def profile_recipe(profile: Profile) -> Recipe:
    """Returns the recipe of a profile; its relative paths start where those of the original did."""
    folder: Any = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        folder = parse_json((profile.folder / "environment.json").read_bytes())["recipe_folder"]
    known = isinstance(folder, str) and Path(folder).is_dir()
    return load_recipe(str(profile.folder / "recipe.yaml"), Path(folder) if known else None)


def _require_same(header: Mapping[str, Any], model: LoadedModel, role: str) -> None:
    for name, what in (("weights", "weights"), ("tokenizer", "tokenizer"), ("template", "chat template")):
        recorded = header.get(f"{name}_sha256")
        if recorded is not None and recorded != getattr(model.fingerprint, f"{name}_sha256"):
            raise BadInput(
                f"{model.reference.name} is not the {role} of this profile: its {what} differ; name the profiled one with "
                f"--{role}, or sweep again"
            )
