from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvprofile.errors import BadInput
from kvprofile.models.compatibility import Compatibility, Reason, compare
from kvprofile.models.loading import LoadedModel, load_model
from tests.tiny import tiny_tokenizer
from tests.tiny_models import CPU, LAYERS, save_adapter, save_model


def load(folder: Path, **changes: Any) -> LoadedModel:
    return load_model(str(save_model(folder, **changes)), CPU)


def reason(found: Compatibility, name: str) -> Reason:
    return next(r for r in found.reasons if r.name == name)


def swapped(tokenizer: Any, one: str, other: str) -> Any:
    """Returns the tokenizer with the ids of two tokens exchanged."""
    text = tokenizer.backend_tokenizer.to_str()
    ids = tokenizer.get_vocab()
    for token, number in ((one, ids[other]), (other, ids[one])):
        text = text.replace(f'"{token}": {ids[token]},', f'"{token}": {number},')
        text = text.replace(f'"{token}":{ids[token]},', f'"{token}":{number},')
    result = tiny_tokenizer()
    result._tokenizer = Tokenizer.from_str(text)
    return result


def test_two_fine_tunes_are_a_pair(tmp_path: Path) -> None:
    base = save_model(tmp_path / "m")
    sender = load_model(f"{base}+{save_adapter(tmp_path / 'lora')}", CPU)
    found = compare(sender, load_model(str(base), CPU))
    assert found.ok
    assert all(r.ok for r in found.reasons)
    assert [d.layer for d in found.distances] == list(range(LAYERS))
    assert all(d.key and d.value for d in found.distances)
    found.require("s", "r")
    assert compare(sender, sender, distances=False).distances == []


@pytest.mark.parametrize(
    ("changes", "name", "detail"),
    [
        ({"num_hidden_layers": 2}, "layers", "sender 3, receiver 2"),
        ({"num_key_value_heads": 4}, "key-value heads", "sender 2, receiver 4"),
        ({"num_attention_heads": 8, "head_dim": 8}, "attention heads", "sender 4, receiver 8"),
        ({"head_dim": 16}, "head width", "sender 8, receiver 16"),
        ({"hidden_size": 64, "head_dim": 8}, "hidden width", "sender 32, receiver 64"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rotary embedding",
            "sender rope_theta 10000.0, receiver rope_theta 500000.0",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 4},
            "attention kinds",
            "layers of sliding_attention [0]",
        ),
    ],
)
def test_each_shape_that_differs_is_named(tmp_path: Path, changes: dict[str, Any], name: str, detail: str) -> None:
    found = compare(load(tmp_path / "a"), load(tmp_path / "b", **changes))
    assert [r.name for r in found.obstacles] == [name]
    assert detail in reason(found, name).detail
    assert found.distances == []
    with pytest.raises(BadInput, match=f'"b" cannot read the cache of "a": {name} differs'):
        found.require("a", "b")


def test_more_embedding_rows_are_a_remark(tmp_path: Path) -> None:
    found = compare(load(tmp_path / "a"), load(tmp_path / "b", vocab_size=400))
    assert found.ok
    assert not reason(found, "embedding rows").ok


def test_differing_ids_are_named_with_their_place(tmp_path: Path) -> None:
    plain = tiny_tokenizer()
    ids = plain.get_vocab()
    found = compare(load(tmp_path / "a", tokenizer=swapped(plain, "q", "z")), load(tmp_path / "b"))
    detail = reason(found, "tokenizer").detail
    assert not found.ok
    assert f'the sender has id {ids["z"]} ("q"), the receiver id {ids["q"]} ("q")' in detail
    place = int(detail.split("at token ")[1].split()[0])
    assert plain(["The quick brown fox"][0])["input_ids"][place] == ids["q"]
    assert "2 tokens have other ids" in reason(found, "vocabulary").detail


def test_ids_that_only_the_users_texts_show(tmp_path: Path) -> None:
    sender = load(tmp_path / "a")
    backend = sender.tokenizer.backend_tokenizer
    backend.add_tokens(["xyzzy"])
    receiver = load(tmp_path / "b")
    assert reason(compare(sender, receiver), "tokenizer").ok
    found = compare(sender, receiver, ["say xyzzy"])
    assert not reason(found, "tokenizer").ok


def test_a_token_that_one_side_lacks_is_a_remark(tmp_path: Path) -> None:
    more = tiny_tokenizer()
    more.add_tokens(["brand-new"])
    found = compare(load(tmp_path / "a"), load(tmp_path / "b", tokenizer=more))
    assert found.ok
    assert reason(found, "vocabulary").detail == '1 only in the receiver, such as "brand-new"'
    assert "not identical" in reason(found, "tokenizer").detail


def test_special_tokens_of_the_template_must_be_known(tmp_path: Path) -> None:
    more = tiny_tokenizer("<|user|>{{ messages[0]['content'] }}")
    more.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    sender, receiver = load(tmp_path / "a"), load(tmp_path / "b", tokenizer=more)
    assert [r.name for r in compare(sender, receiver).obstacles] == ["tokenizer"]
    assert compare(sender, receiver, chat_template=False).ok


def test_another_template_is_a_remark(tmp_path: Path) -> None:
    found = compare(load(tmp_path / "a", tokenizer=tiny_tokenizer(None)), load(tmp_path / "b"))
    assert found.ok
    assert not reason(found, "chat template").ok
