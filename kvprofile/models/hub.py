"""What the hub's own metadata tell of a checkpoint, so that nothing large is fetched to see whether it changed."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download

from kvprofile.models.fingerprint import checkpoint_names

_TIMEOUT_SECONDS = 10


def weight_hashes(hub_id: str, revision: str | None) -> dict[str, str] | None:
    """Returns the SHA-256 of the files that weights would be read from now, by name; None if the hub cannot be asked.

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

        return {name: hashes[name] for name in checkpoint_names(names.__contains__, read)}
    except (OSError, KeyError, ValueError):  # no network, no such repository any more, or files without a hash
        return None
