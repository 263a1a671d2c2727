"""The command line: one thin file per command, heavy imports inside the bodies."""

from __future__ import annotations

import errno
import importlib
import io
import pkgutil
import signal
import sys
import traceback

import typer

from kvprofile import __version__
from kvprofile.errors import OUT_OF_MEMORY, KvprofileError, is_out_of_memory
from kvprofile.report.text import harmless

app = typer.Typer(
    name="kvprofile",
    help="Measures which layers a receiver must recompute to reuse a sender's KV cache, at what loss and what saving.",
    epilog="Any command takes --debug for a traceback. Exit codes: 0 done, 1 the answer is no, 2 bad input, "
    "3 interrupted but resumable, 4 internal error.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


_TYPER_INTERRUPTED = 130
"""What Typer exits with after a KeyboardInterrupt, which it keeps to itself."""


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"kvprofile {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    pass


for _module in sorted(pkgutil.iter_modules(__path__, f"{__name__}."), key=lambda m: m.name):
    _register = getattr(importlib.import_module(_module.name), "register", None)
    if _register:
        _register(app)


def main() -> None:
    """Runs the command line; every error becomes one sentence on standard error and an exit code."""
    debug = "--debug" in sys.argv
    sys.argv = [a for a in sys.argv if a != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without our dashes gets escapes, no failure
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is an interrupt like Ctrl-C
    try:
        app()
    except SystemExit as end:
        if end.code == _TYPER_INTERRUPTED:
            _fail("interrupted; run the same command again to go on from here", 3, debug)
        if isinstance(end.__context__, OSError) and end.__context__.errno == errno.EPIPE:
            sys.exit(0)  # whoever read the output has enough
        for late in (signal.SIGINT, signal.SIGTERM):
            signal.signal(late, signal.SIG_IGN)  # the work is done; a signal now must not change what is returned
        raise
    except Exception as error:
        _fail(*explained(error), debug)


def explained(error: Exception) -> tuple[str, int]:
    """Returns what is said of an error in one sentence, and the exit code."""
    if isinstance(error, KvprofileError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        return _of_the_system(error)
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, 4
    summary = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"internal error ({summary}); run again with --debug for the traceback", 4


def _of_the_system(error: OSError) -> tuple[str, int]:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" at {error.filename}" if error.filename else ""
        return f"the disk is full{place}; free some space and run the same command again to go on", 3
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return f"{error.strerror}: {str(error.filename)[:60]}…; give a path that exists", 2
    kinds = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
    if isinstance(error, kinds) or error.errno == errno.EROFS:
        return f"{error.strerror}: {error.filename}; check the path and its permissions", 2
    return f"{error}; run again with --debug for the traceback", 4


def _fail(sentence: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    typer.echo(f"kvprofile: {harmless(sentence)}", err=True)
    sys.exit(code)
