"""A store answers for exactly the models that were measured: every near miss gets no profile, and is told why."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvprofile.cli import main
from kvprofile.errors import BadInput
from kvprofile.models.loading import load_model
from kvprofile.runtime import Fingerprint, Found, ProfileStore, fingerprints, load_profile
from kvprofile.store.writer import write_table
from tests.models.test_gguf import write_gguf
from tests.profile_factory import header, publish_profile
from tests.tiny import tiny_tokenizer
from tests.tiny_models import CPU, save_adapter, save_model

FORMAT_1 = Path(__file__).parents[1] / "store" / "format_1"


def measured(reference: object) -> Fingerprint:
    """Returns what kvprofile measures of a model that lies on disk."""
    return Fingerprint.of(load_model(str(reference), CPU).fingerprint._asdict())


class Models(NamedTuple):
    """A pair on disk, both adapters on one base."""

    folder: Path
    base: Path
    sender: Fingerprint
    receiver: Fingerprint


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    base = save_model(folder / "base")
    one, two = save_adapter(folder / "one", 1), save_adapter(folder / "two", 2)
    return Models(folder, base, measured(f"{base}+{one}"), measured(f"{base}+{two}"))


def publish(out: Path, writes: Fingerprint, reads: Fingerprint, **changes: Any) -> Path:
    roles = {role: {**header()[role], **model._asdict()} for role, model in (("sender", writes), ("receiver", reads))}
    return publish_profile(out, samples=2, granularity=(3,), **{**roles, **changes})


@pytest.fixture(name="store", scope="module")
def _store(models: Models, tmp_path_factory: pytest.TempPathFactory) -> ProfileStore:
    out = tmp_path_factory.mktemp("store")
    publish(out, models.sender, models.receiver)
    return ProfileStore(out)


def no_plan(found: Found) -> str:
    """Returns why nothing was found."""
    assert found.profile is None
    assert all(near.differences for near in found.nearest)
    return found.why


def test_the_very_pair_is_found(store: ProfileStore, models: Models) -> None:
    found = store.find(sender=models.sender, receiver=models.receiver, task="qa", dataset="hotpotqa", metric="f1")
    assert found.profile is not None
    assert (found.nearest, found.why) == ((), "")
    assert found.profile.is_for(models.sender, models.receiver)
    assert not found.profile.is_for(models.receiver, models.sender)
    plan = found.profile.choose("45%")
    assert plan is not None
    assert plan.pair == (models.sender, models.receiver, "float32", "float32")


def one_weight_changed(models: Models, folder: Path) -> object:
    base = shutil.copytree(models.base, folder / "m")
    tensors = load_file(base / "model.safetensors")
    norm = tensors["model.norm.weight"].clone()
    norm[3] = torch.nextafter(norm[3], torch.tensor(9.0))
    save_file(tensors | {"model.norm.weight": norm}, base / "model.safetensors", metadata={"format": "pt"})
    return f"{base}+{models.folder / 'two'}"


def stronger_adapter(models: Models, folder: Path) -> object:
    return f"{models.base}+{save_adapter(folder / 'two', 2, alpha=16)}"


def one_token_more(models: Models, folder: Path) -> object:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["brand-new"])
    return f"{save_model(folder / 'm', tokenizer=tokenizer)}+{models.folder / 'two'}"


def template_edited(models: Models, folder: Path) -> object:
    edited = tiny_tokenizer(f"{tiny_tokenizer().chat_template} ")
    return f"{save_model(folder / 'm', tokenizer=edited)}+{models.folder / 'two'}"


def rope_base_changed(models: Models, folder: Path) -> object:
    base = save_model(folder / "m", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    return f"{base}+{models.folder / 'two'}"


def other_weights_of_the_same_name(models: Models, folder: Path) -> object:
    return f"{save_model(folder / 'base', seed=7)}+{models.folder / 'two'}"


def in_another_dtype(models: Models, folder: Path) -> object:
    base = shutil.copytree(models.base, folder / "base")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return f"{base}+{models.folder / 'two'}"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (one_weight_changed, "weights_sha256"),
        (stronger_adapter, "weights_sha256"),
        (other_weights_of_the_same_name, "weights_sha256"),
        (in_another_dtype, "weights_sha256"),
        (lambda models, folder: f"{models.base}+{save_adapter(folder / 'two', 3)}", "weights_sha256"),
        (lambda models, _: models.base, "weights_sha256"),
        (one_token_more, "tokenizer_sha256"),
        (template_edited, "template_sha256"),
        (rope_base_changed, "config_sha256"),
    ],
    ids=[
        *("one weight", "adapter's alpha", "same name", "another dtype", "adapter swapped", "without adapter"),
        *("one token more", "template", "rope base"),
    ],
)
def test_a_changed_receiver_gets_no_plan(
    change: Callable[[Models, Path], object], what: str, store: ProfileStore, models: Models, tmp_path: Path
) -> None:
    receiver = measured(change(models, tmp_path))
    found = store.find(sender=models.sender, receiver=receiver)
    noun = {"template_sha256": "chat template"}.get(what, what.removesuffix("_sha256"))
    assert no_plan(found).endswith(f"v0001: the receiver's {noun} changed since v0001")
    assert [one.what for one in found.nearest[0].differences] == [f"receiver.{what}"]
    as_sender = store.find(sender=receiver, receiver=models.receiver)
    assert as_sender.profile is None
    assert f"sender.{what}" in [one.what for one in as_sender.nearest[0].differences]


@pytest.mark.parametrize("name", Fingerprint._fields)
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda known: None, "is not known"),
        (lambda known: "", "no SHA-256"),
        (lambda known: known[:-1], "no SHA-256"),
        (lambda known: known[:12], "no SHA-256"),
        (lambda known: known + "0", "no SHA-256"),
        (lambda known: known + "\n", "no SHA-256"),
        (lambda known: known.upper(), "no SHA-256"),
        (lambda known: f"sha256:{known}", "no SHA-256"),
        (lambda known: "0" * 64, "changed since v0001"),
    ],
    ids=["none", "empty", "truncated", "prefix", "longer", "line end", "upper case", "named", "zeros"],
)
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_digest_that_is_not_the_very_one_matches_nothing(
    role: str, name: str, made: Callable[[str], Any], words: str, store: ProfileStore, models: Models
) -> None:
    pair = {"sender": models.sender, "receiver": models.receiver}
    pair[role] = pair[role]._replace(**{name: made(getattr(pair[role], name))})
    assert words in no_plan(store.find(sender=pair["sender"], receiver=pair["receiver"]))


def test_the_same_numbers_in_a_gguf_file_are_another_model(models: Models, tmp_path: Path) -> None:
    safe = measured(models.base)
    write_gguf(tmp_path / "m.gguf")
    publish(tmp_path / "store", models.sender, safe)
    found = ProfileStore(tmp_path / "store").find(sender=models.sender, receiver=measured(tmp_path / "m.gguf"))
    assert "the receiver's weights changed since v0001" in no_plan(found)


def test_roles_are_not_interchangeable(store: ProfileStore, models: Models) -> None:
    sender, receiver = models.sender, models.receiver
    assert "direction is reversed" in no_plan(store.find(sender=receiver, receiver=sender))
    for model in (sender, receiver):
        assert "changed since" in no_plan(store.find(sender=model, receiver=model))
    for one, other in ((None, receiver), (sender, None), (None, None)):
        assert "is not known" in no_plan(store.find(sender=one, receiver=other))


def test_swapped_tokenizers_match_nothing(models: Models, tmp_path: Path) -> None:
    sender = models.sender._replace(tokenizer_sha256="5" * 64)
    publish(tmp_path, sender, models.receiver)
    swapped = models.receiver._replace(tokenizer_sha256="5" * 64)
    found = ProfileStore(tmp_path).find(sender=models.sender, receiver=swapped)
    assert no_plan(found).count("tokenizer changed") == 2
    assert ProfileStore(tmp_path).find(sender=sender, receiver=models.receiver).profile is not None


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"task": "code"}, "no such task: it has qa"),
        ({"task": "QA"}, "no such task: it has qa"),
        ({"task": ""}, "no such task: it has qa"),
        ({"task": "qa", "dataset": "musique"}, "no such dataset: it has hotpotqa"),
        ({"metric": "rouge_l"}, "no such metric: it has f1, exact_match"),
        ({"dtype": "bfloat16"}, "measured in float32 and float32, not in bfloat16"),
    ],
)
def test_what_was_not_measured_is_not_found(
    question: dict[str, str], words: str, store: ProfileStore, models: Models
) -> None:
    assert words in no_plan(store.find(sender=models.sender, receiver=models.receiver, **question))


def test_a_dataset_of_another_task_does_not_do(models: Models, tmp_path: Path) -> None:
    pair = {role: {**header()[role], **getattr(models, role)._asdict()} for role in ("sender", "receiver")}
    publish_profile(tmp_path, samples=2, granularity=(3,), sources=[("qa", "a"), ("code", "b")], **pair)
    store = ProfileStore(tmp_path)
    found = store.find(sender=models.sender, receiver=models.receiver, task="qa", dataset="b")
    assert "no such dataset: it has a" in no_plan(found)
    assert store.find(sender=models.sender, receiver=models.receiver, task="code", dataset="b").profile is not None


def test_the_newest_version_that_has_the_task_and_is_not_rejected(models: Models, tmp_path: Path) -> None:
    pair = {role: {**header()[role], **getattr(models, role)._asdict()} for role in ("sender", "receiver")}
    both = publish_profile(tmp_path, samples=2, granularity=(3,), sources=[("qa", "a"), ("code", "b")], **pair)
    newer = publish(tmp_path, models.sender, models.receiver)
    newest = publish(tmp_path, models.sender, models.receiver)
    store = ProfileStore(tmp_path)

    def found(**question: str) -> Found:
        return store.find(sender=models.sender, receiver=models.receiver, **question)

    def folder(**question: str) -> Path:
        profile = found(**question).profile
        assert profile is not None
        return profile.folder

    assert (folder(), folder(task="code")) == (newest, both)
    (newest / "rejected.json").write_text("{}")
    assert folder() == newer
    for version in (both, newer):
        (version / "rejected.json").write_text("{}")
    assert no_plan(found()).endswith("v0003: v0003 was rejected")


def test_of_two_pair_folders_the_one_published_last(models: Models, tmp_path: Path) -> None:
    for name, month in (("b", 3), ("a", 5), ("c", 4)):
        role = {"sender": {**header()["sender"], **models.sender._asdict(), "name": name}}
        publish(tmp_path, models.sender, models.receiver, created_at=f"2026-0{month}-01T00:00:00Z", **role)
    profile = ProfileStore(tmp_path).find(sender=models.sender, receiver=models.receiver).profile
    assert profile is not None
    assert profile.header["sender"]["name"] == "a"


def test_a_name_or_a_revision_is_no_identity(store: ProfileStore, models: Models) -> None:
    named = Fingerprint.of({"name": "receiver", "revision": None})
    assert "is not known" in no_plan(store.find(sender=models.sender, receiver=named))
    by_name = Fingerprint("receiver", "receiver", "receiver", "receiver")
    assert "no SHA-256" in no_plan(store.find(sender=Fingerprint("sender", *by_name[1:]), receiver=by_name))


def test_a_format_that_recorded_less_matches_nothing(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_1, tmp_path / "pair" / "v0001")
    held = json.loads(pq.read_schema(FORMAT_1 / "profile.parquet").metadata[b"kvprofile"])
    sender, receiver = (Fingerprint.of(held[role]) for role in ("sender", "receiver"))
    store = ProfileStore(tmp_path)
    complete = [model._replace(template_sha256="1" * 64, config_sha256="2" * 64) for model in (sender, receiver)]
    words = no_plan(store.find(sender=complete[0], receiver=complete[1]))
    assert "v0001 was made by format 1, which recorded no config: sweep again" in words
    assert "is not known" in no_plan(store.find(sender=sender, receiver=receiver)), "two unknown digests are not equal"
    profile = load_profile(FORMAT_1)
    assert profile.pair[:2] == (sender, receiver)
    assert not profile.is_for(sender, receiver)


def test_a_header_edited_after_publication_is_not_believed(models: Models, tmp_path: Path) -> None:
    other = models.receiver._replace(weights_sha256="9" * 64)
    folder = publish(tmp_path, models.sender, other)
    file = folder / "profile.parquet"
    footer = json.loads(pq.read_schema(file).metadata[b"kvprofile"])
    footer["receiver"].update(models.receiver._asdict())
    write_table(pq.read_table(file), file, footer)
    assert "one was changed" in no_plan(ProfileStore(tmp_path).find(sender=models.sender, receiver=models.receiver))
    with pytest.raises(BadInput, match="one was changed"):
        load_profile(folder)


def test_damaged_and_foreign_files_are_passed_over(models: Models, tmp_path: Path) -> None:
    good, damaged, empty = (publish(tmp_path, models.sender, models.receiver) for _ in range(3))
    content = bytearray((damaged / "profile.parquet").read_bytes())
    content[40:60] = b"x" * 20
    (damaged / "profile.parquet").write_bytes(content)
    (empty / "profile.parquet").unlink()
    found = ProfileStore(tmp_path).find(sender=models.sender, receiver=models.receiver)
    assert found.profile is not None
    assert found.profile.folder == good
    shutil.rmtree(good)
    found = ProfileStore(tmp_path).find(sender=models.sender, receiver=models.receiver)
    assert no_plan(found)
    assert [one.what for one in found.nearest[0].differences] == ["file"]


def test_an_empty_store_and_none(models: Models, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        found = ProfileStore(path).find(sender=models.sender, receiver=models.receiver)
        assert no_plan(found) == "the store has no profile"


def test_the_closest_come_first_and_a_pair_once(models: Models, tmp_path: Path) -> None:
    far = Fingerprint("7" * 64, "7" * 64, "7" * 64, "7" * 64)
    for name, sender in (("far", far), ("near", models.sender)):
        changes = {"sender": {**header()["sender"], **sender._asdict(), "name": name}}
        for _ in range(2):
            publish(tmp_path, sender, models.receiver, **changes)
    asked = models.receiver._replace(config_sha256="8" * 64)
    nearest = ProfileStore(tmp_path).find(sender=models.sender, receiver=asked).nearest
    assert [tuple(near.place.split("/")[-2:]) for near in nearest] == [
        ("receiver__from__near", "v0002"),
        ("receiver__from__far", "v0002"),
    ]
    assert [one.what for one in nearest[0].differences] == ["receiver.config_sha256"]


def test_fingerprints_of_what_check_prints(
    models: Models, store: ProfileStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{models.base}+{models.folder / name}" for name in ("one", "two")]
    monkeypatch.setattr(sys, "argv", ["kvprofile", "check", "--device", "cpu", "--json", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main()
    text = capsys.readouterr().out
    sender, receiver = fingerprints(text)
    assert (sender, receiver) == fingerprints(json.loads(text)) == (models.sender, models.receiver)
    assert store.find(sender=sender, receiver=receiver).profile is not None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sender": {}}', '{"sender": 1, "receiver": 2}', "[" * 10**5])
def test_what_check_does_not_print(text: str) -> None:
    with pytest.raises(BadInput, match="run it again"):
        fingerprints(text)
