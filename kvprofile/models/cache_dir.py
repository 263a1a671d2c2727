"""Where kvprofile keeps what can be made again: the demo's base model and weight fingerprints. No torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvprofile.resources import expanded


def cache_dir() -> Path:
    """Returns the user's cache folder: `KVPROFILE_CACHE`, else the platform's place; it need not exist yet."""
    if given := os.environ.get("KVPROFILE_CACHE"):
        return expanded(given).absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvprofile"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "kvprofile" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvprofile"
