"""What the hub's own metadata tell of a checkpoint, so that nothing large is fetched to see whether it changed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

from kvprofile.models import failures
from kvprofile.models.fingerprint import checkpoint_names

_TIMEOUT_SECONDS = 10


class Listed(NamedTuple):
    """The weight files of a repository at one commit.

    Attributes:
        commit: The commit.
        hashes: SHA-256 of the files that weights would be read from, by name.
    """

    commit: str
    hashes: dict[str, str]


def listed(hub_id: str, revision: str | None) -> Listed | None:
    """Returns what weights would be read from now; None if the hub cannot be asked, or does not hash them.

    Args:
        hub_id: Such as `org/model`.
        revision: Branch, tag or commit; None for the default branch.
    """
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        info = HfApi().model_info(hub_id, revision=revision, timeout=_TIMEOUT_SECONDS, files_metadata=True)
        hashes = {file.rfilename: file.lfs.sha256 for file in info.siblings or () if file.lfs}
        names = {file.rfilename for file in info.siblings or ()}

        def read(name: str) -> str:
            return Path(hf_hub_download(hub_id, name, revision=info.sha)).read_text("utf-8")

        return Listed(info.sha, {name: hashes[name] for name in checkpoint_names(names.__contains__, read)})
    except Exception:  # whatever the hub's library and its transport raise: the answer is that it cannot be asked
        return None


def fetched(hub_id: str, files: Listed) -> Path:
    """Returns the folder of the hub's cache that holds the weight files, which are fetched if they are not there.

    Raises:
        BadInput: If the hub cannot be reached any more.
    """
    index = "*.index.json"
    with failures.explained(hub_id):
        return Path(snapshot_download(hub_id, revision=files.commit, allow_patterns=[*files.hashes, index]))
