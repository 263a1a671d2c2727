"""What a runtime takes of one version's folder, strictly or as far as it can be read. Takes pyarrow, where it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprofile.errors import BadInput
from kvprofile.runtime.profile import RuntimeProfile

if TYPE_CHECKING:
    from kvprofile.store.reader import Profile


def from_reader(profile: Profile) -> RuntimeProfile:
    """Returns what a runtime takes of a profile that was read as a whole.

    Raises:
        BadInput: If a validation or the layer times beside it cannot be read.
    """
    table = profile.timings()
    timings = [] if table is None else table.to_pylist()
    return RuntimeProfile(profile.folder, profile.header, profile.rows.to_pylist(), profile.validations(), timings)


def is_rejected(folder: Path) -> bool:
    """Returns whether somebody said that a version must not be used."""
    from kvprofile.store.reader import rejection

    return rejection(folder) is not None


def load_folder(folder: Path) -> Profile:
    """Returns the profile in a version's folder.

    Raises:
        BadInput: If its file or that of its measurements is truncated, foreign, changed, or made by a newer kvprofile.
    """
    from kvprofile.store.reader import MEASUREMENTS_FILE, load, read_header

    profile = load(folder)
    measurements = folder / MEASUREMENTS_FILE
    if measurements.is_file() and read_header(measurements) != profile.header:
        raise BadInput(f"{folder} has two headers that differ, so one was changed; copy it again or sweep again")
    return profile


def readable(profile: Profile) -> RuntimeProfile:
    """Returns a profile with what can be read of the validations and layer times beside it; `unread` tells the rest."""
    from kvprofile.store.reader import TIMINGS_FILE, VALIDATIONS_FOLDER

    unread: dict[str, str] = {}
    validations: list[dict[str, Any]] = []
    timings: list[dict[str, Any]] = []
    for file in validation_files(profile.folder):
        try:
            validations.append(profile.validation(file))
        except (BadInput, OSError) as error:
            unread[f"{VALIDATIONS_FOLDER}/{file.name}"] = str(error)
    try:
        table = profile.timings()
        timings = [] if table is None else table.to_pylist()
    except (BadInput, OSError) as error:
        unread[TIMINGS_FILE] = str(error)
    rows = profile.rows.to_pylist()
    return RuntimeProfile(profile.folder, profile.header, rows, validations, timings, unread=unread)


def validation_files(folder: Path) -> list[Path]:
    """Returns the validations beside a profile, oldest first."""
    from kvprofile.store.reader import VALIDATIONS_FOLDER

    return sorted((folder / VALIDATIONS_FOLDER).glob("[!.]*.parquet"), key=lambda file: file.stem[-4:])
