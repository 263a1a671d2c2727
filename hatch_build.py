"""Puts the bundled recipes and data sets into wheels, and only there.

An editable install finds them in the checkout; copies in site-packages would go stale, and their folder would be
taken for the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BundledFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the folders to a standard wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            for name in ("recipes", "datasets"):
                build_data["force_include"][str(Path(self.root) / name)] = f"kvprofile/_bundled/{name}"
