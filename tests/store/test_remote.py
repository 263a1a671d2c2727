"""Remote stores, on fsspec's file system in memory: what lies there, what is read, and what is refused."""

from __future__ import annotations

import errno
import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest

from kvprofile.errors import BadInput, Interrupted
from kvprofile.runtime import load_profile
from kvprofile.store import transfer
from kvprofile.store.index import ls
from kvprofile.store.manifest import read_manifest
from kvprofile.store.reader import format_version, load, read_measurements, rejection, resolve
from kvprofile.store.remote_files import Remote
from kvprofile.store.retention import pin, prune
from kvprofile.store.transfer import pull, push
from kvprofile.store.verify import verify, verify_named
from kvprofile.store.writer import write_table
from tests.profile_factory import add_sensitivity, header, publish_profile

PAIR = "receiver__from__sender"
MEMORY = fsspec.filesystem("memory")


def made(tmp_path: Path, number: int = 1, **changes: object) -> Path:
    """Publishes locally, with an id and a day of its own."""
    own = {"profile_id": f"profile-{number}", "created_at": f"2026-01-{number:02d}T00:00:00Z"}
    return publish_profile(tmp_path / "local", samples=2, granularity=(3,), **own | changes)


def stored(url: str, name: str) -> str:
    return f"{url.removeprefix('memory:/')}/{name}"


def flip(url: str, name: str) -> None:
    content = bytearray(MEMORY.cat_file(stored(url, name)))
    content[len(content) // 2] ^= 1
    MEMORY.pipe_file(stored(url, name), bytes(content))


def test_pushed_is_read_by_every_name(tmp_path: Path, url: str) -> None:
    folder = made(tmp_path)
    copied = push(str(folder), url)
    assert copied == (f"{url}/{PAIR}/v0001", False)
    for name in (url, f"{url}/", f"{url}/{PAIR}", copied.place, f"{copied.place}/profile.parquet"):
        profile = load(name)
        assert profile.rows.equals(load(folder).rows)
        assert profile.measurements().equals(load(folder).measurements())
        assert profile.folder.is_relative_to(tmp_path / "cache")
    assert load_profile(url).choose("100%") == load_profile(folder).choose("100%")
    assert verify(url) == (1, [])


def test_numbers_go_on_and_headers_go_with_them(tmp_path: Path, url: str) -> None:
    first, second = made(tmp_path), made(tmp_path, 2)
    assert push(str(second), url).place.endswith("v0001")
    assert push(str(first), url).place.endswith("v0002")
    assert load(f"{url}/{PAIR}/v0001").header["profile_id"] == "profile-2"
    assert load(f"{url}/{PAIR}/v0001").header["version"] == 1
    assert [entry.version for entry in ls(url)] == [1, 2]
    assert verify(url) == (2, [])


def test_the_same_profile_is_published_once(tmp_path: Path, url: str) -> None:
    folder = made(tmp_path)
    push(str(folder), url)
    assert push(str(folder), url) == (f"{url}/{PAIR}/v0001", True)
    pulled = pull(url, str(tmp_path / "other"))
    assert pulled == (str(tmp_path / "other" / PAIR / "v0001"), False)
    assert pull(url, str(tmp_path / "other")) == (pulled.place, True)


def test_what_lies_beside_a_version_goes_along(tmp_path: Path, url: str) -> None:
    folder = made(tmp_path)
    add_sensitivity(folder)
    (folder / "report.html").touch()
    push(str(folder), url)
    kept = load(url).sensitivity()
    assert kept is not None
    assert kept.equals(load(folder).sensitivity())
    assert not (resolve(url) / "report.html").exists()
    pulled = Path(pull(url, str(tmp_path / "other")).place)
    assert load(pulled).sensitivity() is not None
    assert set(read_manifest(pulled) or ()) == set(read_manifest(folder) or ())
    assert verify(tmp_path / "other") == (1, [])
    assert verify(url) == (1, [])


def test_a_second_read_takes_the_copy(tmp_path: Path, url: str) -> None:
    push(str(made(tmp_path)), url)
    folder = resolve(url)
    asked: list[str] = []
    original = Remote.download
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Remote, "download", lambda self, name, to: (asked.append(name), original(self, name, to)))
        assert resolve(url) == folder
        assert asked == []
        (folder / "samples.parquet").write_bytes(b"torn")
        assert len(load(url).samples()) == 2
    assert asked == [f"{PAIR}/v0001/samples.parquet"]


def test_a_list_copies_small_files_only(tmp_path: Path, url: str) -> None:
    push(str(made(tmp_path)), url)
    (entry,) = ls(url)
    assert (entry.path, entry.plans, entry.samples, entry.search) == (f"{url}/{PAIR}/v0001", 7, 2, "exhaustive")
    assert entry.bytes > (tmp_path / "local" / PAIR / "v0001" / "measurements.parquet").stat().st_size
    copied = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert copied == {"profile.parquet", "manifest.json"}


@pytest.mark.parametrize("name", ["measurements.parquet", "profile.parquet", "recipe.yaml"])
def test_a_flipped_byte_is_refused_and_leaves_nothing(tmp_path: Path, url: str, name: str) -> None:
    place = push(str(made(tmp_path)), url).place
    flip(url, f"{PAIR}/v0001/{name}")
    with pytest.raises(BadInput, match=f"{name} is not the file that its manifest names"):
        pull(url, str(tmp_path / "other"))
    assert not list((tmp_path / "other").glob("*/v*"))
    assert not list((tmp_path / "cache").rglob(name))
    assert not list((tmp_path / "cache").rglob(".tmp-*"))
    verdict = verify(url)
    assert any(
        one.path == f"{place}/{name}" and "not the one that was published" in one.what for one in verdict.findings
    )
    assert not verdict.sound
    assert not verify_named(place).sound


def test_a_copy_that_was_changed_in_the_cache_is_not_pulled(tmp_path: Path, url: str) -> None:
    push(str(made(tmp_path)), url)
    cached = resolve(url)
    (cached / "recipe.yaml").write_bytes(b"seed: 1\n")
    with pytest.raises(BadInput, match=r"recipe\.yaml: its content is not the one .*; remove .* and pull again"):
        pull(url, str(tmp_path / "other"))
    assert not list((tmp_path / "other").glob("*/v*"))
    shutil.rmtree(cached)
    assert pull(url, str(tmp_path / "other")).already_there is False


def test_two_readers_copy_one_version_to_one_cache(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    push(str(made(tmp_path)), url)
    original = Remote.download

    def overtaken(self: Remote, name: str, to: Path) -> None:
        original(self, name, to)
        monkeypatch.setattr(Remote, "download", original)
        resolve(url)

    monkeypatch.setattr(Remote, "download", overtaken)
    folder = resolve(url)
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *(read_manifest(folder) or ())}


def test_a_version_replaced_under_its_number_is_refused(tmp_path: Path, url: str) -> None:
    push(str(made(tmp_path)), url)
    resolve(url)
    MEMORY.rm(stored(url, PAIR), recursive=True)
    push(str(made(tmp_path, 2)), url)
    with pytest.raises(BadInput, match=r"is not what was read before: .* has another hash"):
        resolve(url)
    (entry,) = ls(url)
    assert entry.problem is not None


def test_nothing_is_there_before_its_manifest(tmp_path: Path, url: str) -> None:
    push(str(made(tmp_path)), url)
    push(str(made(tmp_path, 2)), url)
    MEMORY.rm_file(stored(url, f"{PAIR}/v0002/manifest.json"))
    assert load(url).header["profile_id"] == "profile-1"
    assert len(ls(url)) == 1
    with pytest.raises(BadInput, match="there is no profile at"):
        load(f"{url}/{PAIR}/v0002")
    verdict = verify(url)
    assert verdict.sound
    assert [one.path for one in verdict.findings] == [f"{url}/{PAIR}/v0002"]
    assert push(str(made(tmp_path, 3)), url).place.endswith("v0003"), "a claimed number is not taken again"


def test_rejected_versions_are_passed_over(tmp_path: Path, url: str) -> None:
    bad = made(tmp_path)
    (bad / "rejected.json").write_text('{"reason": "worse"}')
    push(str(bad), url)
    with pytest.raises(BadInput, match=r"all 1 versions in .* are rejected \(the newest: worse\)"):
        resolve(url)
    good = made(tmp_path, 2)
    push(str(good), url)
    (good / "rejected.json").write_text('{"reason": "worse"}')
    assert push(str(made(tmp_path, 3)), url)
    later = made(tmp_path, 4)
    (later / "rejected.json").write_text('{"reason": "worse still"}')
    place = push(str(later), url).place
    assert load(url).header["profile_id"] == "profile-3"
    assert load(place).header["profile_id"] == "profile-4"
    assert [entry.rejected for entry in ls(url)] == ["worse", None, None, "worse still"]


def test_a_rejection_may_be_told_after_publishing_and_ended(tmp_path: Path, url: str) -> None:
    for number in (1, 2, 3):
        push(str(made(tmp_path, number)), url)
    place = f"{url}/{PAIR}/v0003"
    load(place)
    MEMORY.pipe_file(stored(url, f"{PAIR}/v0003/rejected.json"), b'{"reason": "worse"}')
    assert load(url).header["profile_id"] == "profile-2"
    assert [entry.rejected for entry in ls(url)] == [None, None, "worse"]
    with pytest.raises(BadInput, match="was rejected"):
        load_profile(place)
    assert rejection(Path(pull(place, str(tmp_path / "copy")).place)) == "worse"
    later = datetime.now(UTC) + timedelta(days=2)
    assert [gone.path for gone in prune(url, 1, really=False, now=later).removals] == [f"{url}/{PAIR}/v0001"]
    MEMORY.rm_file(stored(url, f"{PAIR}/v0003/rejected.json"))
    assert load_profile(place).folder == resolve(url), "it was withdrawn"
    MEMORY.pipe_file(stored(url, f"{PAIR}/v0003/rejected.json"), b"{}")
    MEMORY.pipe_file(stored(url, f"{PAIR}/v0003/accepted"), b"")
    assert load(url).header["profile_id"] == "profile-3"
    assert [entry.rejected for entry in ls(url)] == [None, None, None]
    assert [entry.accepted for entry in ls(url)] == [None, None, "rejected.json tells no reason"]
    assert load_profile(place).choose("100%") is not None
    with pytest.raises(BadInput, match=r"v0001 is a copy of this profile without accepted"):
        pull(place, str(tmp_path / "copy"))
    assert verify(url).sound
    prune(url, 1, really=True, now=later)
    assert [entry.version for entry in ls(url)] == [3]


def test_what_was_added_since_is_not_taken_for_copied(tmp_path: Path, url: str) -> None:
    folder = made(tmp_path)
    place = push(str(folder), url).place
    pulled = Path(pull(url, str(tmp_path / "other")).place)
    add_sensitivity(folder)
    with pytest.raises(
        BadInput, match=rf"{place} is a copy of this profile without sensitivity/forward\.parquet as it is"
    ):
        push(str(folder), url)
    again = url + "/again"
    push(str(folder), again)
    with pytest.raises(BadInput, match=rf"{pulled} is a copy of this profile without sensitivity/forward\.parquet"):
        pull(again, str(tmp_path / "other"))
    assert push(str(pulled), url).already_there, "what only the store has takes nothing away"
    table, footer = read_measurements(folder / "sensitivity" / "forward.parquet", with_header=True)
    write_table(table.slice(1), folder / "sensitivity" / "forward.parquet", footer)
    with pytest.raises(BadInput, match="without sensitivity"):
        push(str(folder), again)


def test_a_rejection_told_here_since_is_not_taken_for_copied(tmp_path: Path, url: str) -> None:
    folder = made(tmp_path)
    push(str(folder), url)
    (folder / "rejected.json").write_text('{"reason": "worse"}')
    with pytest.raises(BadInput, match=r"without rejected\.json"):
        push(str(folder), url)
    MEMORY.pipe_file(stored(url, f"{PAIR}/v0001/rejected.json"), b"{}")
    assert push(str(folder), url).already_there
    (folder / "accepted").touch()
    with pytest.raises(BadInput, match="without accepted"):
        push(str(folder), url)


def test_a_changed_version_is_not_pushed(tmp_path: Path, url: str) -> None:
    folder = made(tmp_path)
    (folder / "recipe.yaml").write_text("seed: 1\n")
    with pytest.raises(
        BadInput, match=r"recipe\.yaml: its content is not the one that was published, so it is not pushed"
    ):
        push(str(folder), url)
    assert Remote(url).files() == {}


def test_a_broken_file_beside_a_version_is_not_pushed(tmp_path: Path, url: str) -> None:
    folder = made(tmp_path)
    (folder / "validations").mkdir()
    (folder / "validations" / "x-0001.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInput, match=r"x-0001\.parquet: is truncated .* so nothing is pushed"):
        push(str(folder), url)
    (folder / "validations" / "x-0001.parquet").unlink()
    add_sensitivity(folder)
    (folder / "sensitivity" / "forward.parquet").rename(folder / "sensitivity" / "my map.parquet")
    with pytest.raises(BadInput, match=r"'sensitivity/my map\.parquet' is no name"):
        push(str(folder), url)
    assert Remote(url).files() == {}


@pytest.mark.parametrize("error", [FileExistsError("there"), OSError(errno.EINVAL, "precondition failed")])
def test_services_refuse_a_second_creation_in_their_own_ways(
    url: str, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    remote = Remote(url)
    assert remote.create("x", b"one")

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(type(MEMORY), "pipe_file", refuse)
    assert not remote.create("x", b"two")
    assert remote.create("x", b"one"), "an answer that got lost is asked for again"
    with pytest.raises(BadInput, match="can be neither created nor read"):
        remote.create("y", b"two")


def test_two_claims_on_one_number_get_two(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other publisher comes between the look at the numbers and the claim."""
    first, second = made(tmp_path), made(tmp_path, 2)
    original = transfer._create

    def late(*arguments: object) -> bool:
        monkeypatch.setattr(transfer, "_create", original)
        push(str(first), url)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "_create", late)
    assert push(str(second), url).place.endswith("v0002")
    assert [entry.profile_id for entry in ls(url)] == ["profile-1", "profile-2"]


def test_a_publisher_whose_claim_was_taken_away_publishes_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Remote.upload

    def slow(self: Remote, local: Path, name: str) -> None:
        original(self, local, name)
        if name.endswith("samples.parquet"):
            prune(url, 1, really=True, now=datetime.now(UTC) + timedelta(days=2))

    monkeypatch.setattr(Remote, "upload", slow)
    with pytest.raises(Interrupted, match="push again"):
        push(str(made(tmp_path)), url)
    assert ls(url) == []


def test_prune_removes_old_claims_and_old_versions(tmp_path: Path, url: str) -> None:
    for number in range(1, 5):
        push(str(made(tmp_path, number)), url)
    MEMORY.rm_file(stored(url, f"{PAIR}/v0003/manifest.json"))
    places = [f"{url}/{PAIR}/v{number:04d}" for number in range(1, 5)]
    now = datetime.now(UTC)
    assert [gone.path for gone in prune(url, 1, really=False, now=now).removals] == places[:2]
    tomorrow = now + timedelta(days=1, hours=1)
    gone = prune(url, 1, really=True, now=tomorrow).removals
    assert sorted(one.path for one in gone) == places[:3]
    assert [entry.path for entry in ls(url)] == places[3:]
    assert set(Remote(url).files()) == {
        f"{PAIR}/v0004/{name}" for name in ("claim.json", "manifest.json", *(read_manifest(resolve(url)) or ()))
    }
    assert prune(url, 1, really=True, now=tomorrow).removals == []


def test_prune_that_stops_leaves_whole_versions_or_none(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 4):
        push(str(made(tmp_path, number)), url)
    original = Remote.remove
    for limit in range(1, 12):
        left = limit

        def few(self: Remote, name: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            original(self, name)

        monkeypatch.setattr(Remote, "remove", few)
        try:
            prune(url, 1, really=True, now=datetime.now(UTC) + timedelta(days=2))
        except KeyboardInterrupt:
            verdict = verify(url)
            assert verdict.sound, verdict.findings
            assert verdict.checked == len(ls(url)) >= 1
    monkeypatch.setattr(Remote, "remove", original)
    prune(url, 1, really=True, now=datetime.now(UTC) + timedelta(days=2))
    assert {name.split("/")[1] for name in Remote(url).files()} == {"v0003"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_publisher_that_only_seemed_dead(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its manifest comes just before or just after its claim is taken away."""
    folder, later = made(tmp_path), datetime.now(UTC) + timedelta(days=2)
    remove, create, holds = Remote.remove, Remote.create, transfer._holds
    removed: list[str] = []

    def taken(self: Remote, name: str) -> None:
        removed.append(name)
        remove(self, name)

    def told(self: Remote, name: str, content: bytes) -> bool:
        if not name.endswith("manifest.json"):
            return create(self, name, content)
        monkeypatch.setattr(Remote, "create", create)
        with pytest.MonkeyPatch.context() as during:
            if when == "before":
                # The claim was in force when the publisher looked, and is taken away as the manifest is written.
                def late(remote: Remote, gone: str) -> None:
                    taken(remote, gone)
                    if len(removed) == 1:
                        create(remote, name, content)

                during.setattr(Remote, "remove", late)
            else:
                during.setattr(Remote, "remove", taken)
            gone = prune(url, 1, really=True, now=later).removals
        assert len(gone) == (when == "after")
        return create(self, name, content) if when == "before" else holds(self, PAIR, 1, b"")

    monkeypatch.setattr(Remote, "create", told)
    if when == "before":
        push(str(folder), url)
        assert verify(url) == (1, [])
        assert push(str(folder), url).already_there, "the claim, which names the profile, is there again"
    else:
        with pytest.raises(Interrupted, match="push again"):
            push(str(folder), url)
        assert Remote(url).files() == {}
    assert removed[0] == f"{PAIR}/v0001/claim.json"


def test_files_with_names_that_no_reader_takes_stop_no_check(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service of keys has `validations` beside `validations/x`; a file system, and fsspec's in memory, cannot."""
    place = push(str(made(tmp_path)), url).place
    hostile = ["validations/x-0001.parquet", "n" * 300, "validations/" + "n" * 300, "a b"]
    for name in hostile:
        MEMORY.pipe_file(stored(url, f"{PAIR}/v0001/{name}"), b"x")
    files, key = Remote(url).files(), f"{PAIR}/v0001/validations"
    monkeypatch.setattr(Remote, "files", lambda self: {key: 1, **files})
    hostile.append("validations")
    verdict = verify(url)
    assert {one.path: one.severity for one in verdict.findings} == {
        f"{place}/{name}": "fault" if name.endswith(".parquet") else "remark" for name in hostile
    }
    assert verdict.checked == 1


def test_strangers_are_told_and_never_read(tmp_path: Path, url: str) -> None:
    place = push(str(made(tmp_path)), url).place
    for name in ("README", "../escape/v0001/manifest.json", f"{PAIR}/v0001/sub/x", f"{PAIR}/v001/manifest.json"):
        MEMORY.pipe_file(stored(url, name), b"{}")
    verdict = verify(url)
    assert verdict.sound
    assert verdict.checked == 1
    assert {f"{url}/README", f"{place}/sub/x", f"{url}/{PAIR}/v001/manifest.json"} <= {o.path for o in verdict.findings}
    assert len(ls(url)) == 1


@pytest.mark.parametrize("name", ["../../x", "/x", "a/../../x"])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path, url: str, name: str) -> None:
    push(str(made(tmp_path)), url)
    path = stored(url, f"{PAIR}/v0001/manifest.json")
    document = json.loads(MEMORY.cat_file(path))
    document["files"][name] = document["files"]["recipe.yaml"]
    MEMORY.pipe_file(path, json.dumps(document).encode())
    with pytest.raises(BadInput, match="names files or hashes as kvprofile does not"):
        load(url)
    assert not verify(url).sound


def test_several_pairs_are_named(tmp_path: Path, url: str) -> None:
    push(str(made(tmp_path)), url)
    push(str(made(tmp_path, 2, sender={**header()["sender"], "name": "other"})), url)
    with pytest.raises(BadInput, match=f"2 pairs; give one of {url}/receiver__from__other, {url}/{PAIR}"):
        load(url)
    assert load(f"{url}/{PAIR}").header["profile_id"] == "profile-1"
    assert verify(f"{url}/{PAIR}") == (1, [])


def test_bad_addresses_say_what_is_wrong(tmp_path: Path, url: str) -> None:
    folder = str(made(tmp_path))
    push(folder, url)
    for wrong, said in {
        f"{url}/nothing": "there is no profile at",
        f"{url}/{PAIR}/v0009": "there is no profile at",
        "nosuchprotocol://x/y": "cannot be used",
        f"file://{tmp_path}": "give its path instead",
    }.items():
        with pytest.raises(BadInput, match=said):
            load(wrong)
    with pytest.raises(BadInput, match=f"is not a store; push to {url}"):
        push(folder, f"{url}/{PAIR}")
    with pytest.raises(BadInput, match="give the profile's folder first"):
        push(url, url)
    with pytest.raises(BadInput, match="give the URL first"):
        pull(folder, str(tmp_path))
    with pytest.raises(BadInput, match="store pull"):
        pin(url, True)
    assert ls("memory://never/made") == []
    MEMORY.pipe_file(f"/{tmp_path.name}/notes/README", b"x")
    for nothing in ("memory://never/made", f"memory://{tmp_path.name}/notes"):
        for look in (verify, verify_named, lambda wrong: prune(wrong, 1, really=True)):
            with pytest.raises(BadInput, match=f"there is no profile at {nothing}"):
                look(nothing)
    for inside in (f"{url}/{PAIR}", f"{url}/{PAIR}/v0001"):
        for look in (ls, lambda wrong: prune(wrong, 1, really=True)):
            with pytest.raises(BadInput, match=f"is not a store but in one; give {url}"):
                look(inside)
    assert len(ls(url)) == 1


def test_a_profile_without_a_manifest_can_be_pushed(tmp_path: Path, url: str) -> None:
    shutil.copytree(Path(__file__).parent / "format_1", tmp_path / "old")
    push(str(tmp_path / "old"), url)
    assert load(url).header["sender"]["config_sha256"] is None
    assert ls(url)[0].format == 1
    assert verify(url).sound
    MEMORY.pipe_file(stored(url, f"second/{PAIR}/v0001/claim.json"), b"{}")
    second = push(str(tmp_path / "old"), f"{url}/second").place
    copy = load(second)
    assert second.endswith("v0002")
    assert format_version(copy.folder) == 1, "a copy under another number stays what it was"
    assert copy.header == {**load(tmp_path / "old").header, "version": 2}
    for name in ("profile.parquet", "measurements.parquet"):
        old, new = (pq.read_table(folder / name) for folder in (tmp_path / "old", copy.folder))
        assert new.equals(old)
        raw = [json.loads(table.schema.metadata[b"kvprofile"]) for table in (old, new)]
        assert raw[1] == {**raw[0], "version": 2}
    assert verify(f"{url}/second").sound
