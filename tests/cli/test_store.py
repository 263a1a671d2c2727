"""`kvprofile store`, and the commands that read or refuse a URL, as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from kvprofile.errors import BadInput
from kvprofile.store.reader import versions
from tests.command import run
from tests.profile_factory import publish_profile

PAIR = "receiver__from__sender"


def document(*args: object) -> object:
    return json.loads(run(*args, "--json").stdout)


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        publish_profile(tmp_path / "outputs", profile_id=f"profile-{number}", version=number)
    return tmp_path / "outputs"


@pytest.fixture(name="url")
def _url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path) -> Iterator[str]:
    monkeypatch.setenv("KVPROFILE_CACHE", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}/team"
    assert run("store", "push", store, url).output.strip() == f"{url}/{PAIR}/v0001"
    yield url
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def test_ls_tells_what_a_version_holds(store: Path) -> None:
    folder = store / PAIR / "v0002"
    (folder / "rejected.json").write_text('{"reason": "worse\\u001b[31m by 3 points"}')
    (folder / "pinned").touch()
    (folder / "validations").mkdir()
    (folder / "validations" / "x-0001.parquet").write_bytes(b"12345")
    entry = json.loads(run("store", "ls", "--out", store, "--json").stdout)[1]
    expected = {"plans": 25, "samples": 8, "format": 2, "search": "exhaustive", "pinned": True, "validations": 1}
    assert {key: entry[key] for key in expected} == expected
    assert entry["rejected"] == "worse\x1b[31m by 3 points"
    assert entry["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    output = run("store", "ls", "--out", store).output
    assert "rejected: worse\\x1b[31m by 3 points; pinned; validated 1 time" in output
    assert "\x1b" not in output


def test_ls_and_show_tell_whether_a_rejection_holds(store: Path) -> None:
    folder = store / PAIR / "v0002"
    (folder / "rejected.json").write_text('{"reason": "worse"}')
    assert "rejected: worse" in run("show", folder).output
    assert run("store", "accept", folder).exit_code == 0
    assert "accepted (was rejected: worse)" in run("store", "ls", "--out", store).output
    assert "accepted (was rejected: worse)" in run("show", folder).output
    shown = document("show", folder)
    assert isinstance(shown, dict)
    assert (shown["rejected"], shown["accepted"]) == (None, "worse")
    assert document("store", "unaccept", folder) == {"profile": str(folder), "accepted": False}
    assert run("store", "accept", folder).exit_code == 0
    assert run("store", "unaccept", folder).output == f"{folder} is rejected again\n"
    assert "rejected" not in run("show", store / PAIR / "v0001").output


def test_verify_prints_a_finding_a_line_and_exits_1_for_faults(store: Path) -> None:
    (store / "README").touch()
    ended = run("store", "verify", "--out", store)
    assert ended.exit_code == 0
    assert ended.output.splitlines() == [
        f"remark {store}/README: it belongs to nothing; remove it if it is not yours",
        "3 versions checked, 0 faults, 1 remark",
    ]
    broken = store / PAIR / "v0002" / "recipe.yaml"
    broken.write_text("seed: 5\n")
    ended = run("store", "verify", "--out", store)
    assert ended.exit_code == 1
    assert f"fault  {broken}: its content is not the one that was published; copy it again" in ended.output
    found = document("store", "verify", "--out", store)
    assert isinstance(found, dict)
    assert (found["checked"], found["sound"], len(found["findings"])) == (3, False, 2)
    assert set(found["findings"][0]) == {"severity", "path", "what", "mend"}
    assert run("store", "verify", store / PAIR / "v0001").exit_code == 0
    assert run("store", "verify", store / PAIR / "v0002").exit_code == 1


def test_prune_tells_first_and_removes_when_told(store: Path) -> None:
    dry = run("store", "prune", "--keep", 2, "--out", store)
    assert dry.exit_code == 0
    assert f"would remove {store / PAIR / 'v0001'}" in dry.output
    assert "1 would go; --yes removes them" in dry.output
    assert len(versions(store / PAIR)) == 3
    found = document("store", "prune", "--keep", 1, "--older-than", "1d", "--out", store)
    assert isinstance(found, dict)
    assert (found["removed"], len(found["removals"])) == (False, 2)
    assert document("store", "prune", "--keep", 1, "--older-than", "999w", "--out", store) == {
        **{"store": str(store), "removed": False, "removals": []},
        "kept": [{"path": f"{store}/{PAIR}/v000{n}", "why": "younger than 6993 days"} for n in (1, 2)],
    }
    run("store", "pin", store / PAIR / "v0001")
    output = run("store", "prune", "--keep", 1, "--yes", "--out", store).output
    assert f"removed {store / PAIR / 'v0002'}" in output
    assert f"kept {store / PAIR / 'v0001'}: pinned\n" in output
    assert [number for number, _ in versions(store / PAIR)] == [1, 3]
    assert document("store", "unpin", store / PAIR / "v0001") == {"profile": f"{store}/{PAIR}/v0001", "pinned": False}
    run("store", "prune", "--keep", 1, "--yes", "--out", store)
    assert [number for number, _ in versions(store / PAIR)] == [3]


@pytest.mark.parametrize("scope", ["store", "pair"])
def test_a_store_or_a_pair_is_named_as_an_argument_too(store: Path, scope: str) -> None:
    place = store if scope == "store" else store / PAIR
    (store / PAIR / "v0001" / "recipe.yaml").write_text("seed: 5\n")
    found = document("store", "verify", place)
    assert isinstance(found, dict)
    assert (found["checked"], found["sound"], found["store"]) == (3, False, str(place))
    assert document("store", "verify", "--out", place) == found
    listed = document("store", "ls", place)
    assert isinstance(listed, list)
    assert [entry["version"] for entry in listed] == [1, 2, 3]
    assert run("store", "prune", place, "--keep", 1, "--yes").exit_code == 0
    assert [number for number, _ in versions(store / PAIR)] == [3]


def test_a_version_is_no_store_and_two_stores_are_refused(store: Path) -> None:
    version = store / PAIR / "v0003"
    for command in (("ls", version), ("prune", "--keep", 1, version), ("verify", "--out", version)):
        assert "is one version; give its pair" in str(run("store", *command).exception)
    for command in (("ls",), ("verify",), ("prune", "--keep", 1)):
        error = run("store", *command, store, "--out", "other").exception
        assert isinstance(error, BadInput)
        assert "give one of them" in str(error)
    version.joinpath("profile.parquet").unlink()
    assert run("store", "verify", version).exit_code != 0


def test_prune_needs_to_know_how_many_stay(store: Path) -> None:
    assert run("store", "prune", "--out", store).exit_code == 2
    assert isinstance(run("store", "prune", "--keep", 0, "--out", store).exception, BadInput)


def test_commands_that_read_take_a_url(url: str, store: Path, tmp_path: Path) -> None:
    newest = store / PAIR / "v0003"
    for command in (("pareto", "--max-loss", "5%"), ("show",), ("select", "--max-loss", "5%")):
        there, here = (run(command[0], place, *command[1:], "--json") for place in (url, newest))
        assert there.exit_code == here.exit_code == 0, there.exception
        told = {json.loads(ended.stdout).get("profile_id", "x") for ended in (there, here)}
        assert len(told) == 1
    assert run("compare", url, newest).exit_code == 0
    assert run("report", url, "-o", tmp_path / "r.html").exit_code == 0
    assert (tmp_path / "r.html").stat().st_size > 10_000
    assert isinstance(run("report", url).exception, BadInput)
    listed = document("store", "ls", "--out", url)
    assert isinstance(listed, list)
    assert [entry["path"] for entry in listed] == [f"{url}/{PAIR}/v0001"]
    assert run("store", "verify", "--out", url).exit_code == 0
    assert run("store", "verify", f"{url}/{PAIR}/v0001").output == "1 version checked, 0 faults, 0 remarks\n"
    assert document("store", "pull", url, "--out", tmp_path / "copy") == {
        "profile": str(tmp_path / "copy" / PAIR / "v0001"),
        "already_there": False,
    }


@pytest.mark.parametrize(
    ("command", "mend"),
    [
        (("sweep", "demo", "--out", "s3://bucket/x"), "kvprofile store push PROFILE s3://bucket/x"),
        (("validate", "s3://bucket/x", "--dataset", "musique"), "kvprofile store pull s3://bucket/x"),
        (("sensitivity", "s3://bucket/x"), "kvprofile store pull s3://bucket/x"),
        (("store", "pin", "s3://bucket/x"), "kvprofile store pull s3://bucket/x"),
    ],
)
def test_commands_that_measure_refuse_a_url(command: tuple[str, ...], mend: str) -> None:
    error = run(*command).exception
    assert isinstance(error, BadInput)
    assert mend in str(error)


@pytest.mark.parametrize("command", ["ls", "verify", "prune", "pin", "unpin", "accept", "unaccept", "push", "pull"])
def test_help_shows_an_example(command: str) -> None:
    assert f"Example: kvprofile store {command}" in run("store", command, "--help").output
