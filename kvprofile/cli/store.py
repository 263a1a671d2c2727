"""`kvprofile store`: what a store holds, whether it is sound, what may go, and copies to and from remote stores."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.arguments import ProfileArgument
from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.report.text import print_line, size

_DEFAULT = "outputs"
StoreOption = Annotated[
    str | None,
    typer.Option("--out", help=f"The store: a folder, or a URL such as s3://bucket/profiles; {_DEFAULT} if not given."),
]
StoreArgument = Annotated[
    str | None, typer.Argument(help="The store, or the folder of one pair; the same as --out.", show_default=False)
]
VersionArgument = Annotated[str, typer.Argument(help="The version's folder, such as outputs/PAIR/v0003.")]


def register(app: typer.Typer) -> None:
    store = typer.Typer(help="Look after the profiles of a store.", no_args_is_help=True, rich_markup_mode=None)
    store.command("ls", epilog="Example: kvprofile store ls --out outputs")(ls)
    store.command("verify", epilog="Example: kvprofile store verify --out outputs")(verify)
    store.command("prune", epilog="Example: kvprofile store prune --keep 5 --older-than 90d --yes")(prune)
    store.command("pin", epilog="Example: kvprofile store pin outputs/PAIR/v0003")(pin)
    store.command("unpin", epilog="Example: kvprofile store unpin outputs/PAIR/v0003")(unpin)
    store.command("accept", epilog="Example: kvprofile store accept outputs/PAIR/v0003")(accept)
    store.command("unaccept", epilog="Example: kvprofile store unaccept outputs/PAIR/v0003")(unaccept)
    store.command("push", epilog="Example: kvprofile store push outputs/PAIR/v0003 s3://bucket/profiles")(push)
    store.command("pull", epilog="Example: kvprofile store pull s3://bucket/profiles --out outputs")(pull)
    app.add_typer(store, name="store")


def _one(folder: str | None, option: str | None) -> str:
    """Returns the store that was named as an argument or by --out."""
    from kvprofile.errors import BadInput

    if folder is not None and option is not None:
        raise BadInput(f"{folder} and --out {option} are given; give one of them")
    return folder or option or _DEFAULT


def ls(folder: StoreArgument = None, option: StoreOption = None, as_json: JsonFlag = False) -> None:
    """List every version of every pair; an empty store is an empty list."""
    from kvprofile.report.overview import print_entries
    from kvprofile.store import index

    store = _one(folder, option)
    entries = index.ls(store)
    if as_json:
        print_json([{**entry._asdict(), "path": str(entry.path)} for entry in entries])
    else:
        print_entries(out(), entries, store)


def verify(
    folder: Annotated[
        str | None,
        typer.Argument(help="A store, the folder of one pair, or one version; the same as --out.", show_default=False),
    ] = None,
    option: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check hashes, tables, headers, and that the published numbers are those of the measurements; tell what belongs to nothing.

    Exits with 1 if anything is broken. Unfinished runs and leftovers are remarks, not faults.
    """
    from kvprofile.store.verify import verify as check
    from kvprofile.store.verify import verify_named

    store = _one(folder, option)
    verdict = check(store) if folder is None else verify_named(folder)
    if as_json:
        findings = [finding._asdict() for finding in verdict.findings]
        print_json({"store": store, "checked": verdict.checked, "sound": verdict.sound, "findings": findings})
    else:
        for finding in verdict.findings:
            print_line(out(), f"{finding.severity:6} {finding.path}: {finding.what}; {finding.mend}")
        faults = sum(finding.severity == "fault" for finding in verdict.findings)
        counts = {"version": verdict.checked, "fault": faults, "remark": len(verdict.findings) - faults}
        versions, *found = (f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items())
        print_line(out(), f"{versions} checked, {', '.join(found)}")
    if not verdict.sound:
        raise typer.Exit(1)


def prune(
    keep: Annotated[int, typer.Option(help="How many of the newest versions of each pair stay.")],
    folder: StoreArgument = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only versions of at least this age go, such as 90d or 12h.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes/--dry-run", help="Remove it, or only tell what would go.")] = False,
    option: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove old versions, and what killed processes left; tell only what would go, unless --yes is given.

    Of each pair and recipe the newest version that was not rejected stays, whatever is pinned or validated, and what these
    were made to replace.
    """
    from kvprofile.limits import parse_age
    from kvprofile.store.retention import prune as remove

    store = _one(folder, option)
    age = None if older_than is None else parse_age(older_than)
    gone, kept = remove(store, keep, age, really=yes)
    if as_json:
        told = {"removals": [removal._asdict() for removal in gone], "kept": [one._asdict() for one in kept]}
        print_json({"store": store, "removed": yes, **told})
        return
    for one in kept:
        print_line(out(), f"kept {one.path}: {one.why}")
    for removal in gone:
        print_line(
            out(), f"{'removed' if yes else 'would remove'} {removal.path} ({size(removal.bytes)}): {removal.why}"
        )
    total = size(sum(removal.bytes for removal in gone))
    print_line(out(), f"{len(gone)} {'removed' if yes else 'would go; --yes removes them'}, {total}")


def pin(profile: ProfileArgument, as_json: JsonFlag = False) -> None:
    """Keep a version whatever `store prune` is asked."""
    _pin(profile, True, as_json)


def unpin(profile: ProfileArgument, as_json: JsonFlag = False) -> None:
    """Let `store prune` remove a version again."""
    _pin(profile, False, as_json)


def _pin(profile: str, pinned: bool, as_json: bool) -> None:
    from kvprofile.store.retention import pin as set_pin

    folder = set_pin(profile, pinned)
    if as_json:
        print_json({"profile": str(folder), "pinned": pinned})
    else:
        print_line(out(), f"{folder} is {'pinned' if pinned else 'not pinned'}")


def accept(version: VersionArgument, as_json: JsonFlag = False) -> None:
    """Let a version serve that `reprofile --fail-if-worse` rejected."""
    from kvprofile.store.retention import accept as set_accepted

    folder = set_accepted(version)
    if as_json:
        print_json({"profile": str(folder), "accepted": True})
    else:
        print_line(out(), f"{folder} is accepted")


def unaccept(version: VersionArgument, as_json: JsonFlag = False) -> None:
    """Let the rejection of an accepted version hold again, so that it does not serve."""
    from kvprofile.store.retention import unaccept as take_back

    folder = take_back(version)
    if as_json:
        print_json({"profile": str(folder), "accepted": False})
    else:
        print_line(out(), f"{folder} is rejected again")


def push(
    profile: ProfileArgument,
    url: Annotated[str, typer.Argument(help="The remote store, such as s3://bucket/profiles.")],
    as_json: JsonFlag = False,
) -> None:
    """Publish a copy of a version, with its validations, in a remote store, under the next number there."""
    from kvprofile.store.transfer import push as copy

    copied = copy(profile, url)
    if as_json:
        print_json({"profile": copied.place, "already_there": copied.already_there})
    else:
        print_line(out(), f"{copied.place}{' (it was there already)' if copied.already_there else ''}")


def pull(
    url: Annotated[
        str, typer.Argument(help="A version, a pair or a store with one pair, such as s3://bucket/profiles.")
    ],
    store: Annotated[str, typer.Option("--out", help="The store to copy it into: a folder.")] = "outputs",
    as_json: JsonFlag = False,
) -> None:
    """Publish a copy of a remote version, with its validations, in a local store, under the next number there."""
    from kvprofile.store.transfer import pull as copy

    copied = copy(url, store)
    if as_json:
        print_json({"profile": copied.place, "already_there": copied.already_there})
    else:
        print_line(out(), f"{copied.place}{' (it was there already)' if copied.already_there else ''}")
