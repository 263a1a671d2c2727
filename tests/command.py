"""Runs commands of the command line inside the test's own process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from kvprofile.cli import app


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def document(*words: object) -> Any:
    """Returns the JSON document that a command prints."""
    return json.loads(run(*words, "--json").stdout)
