"""Keys of kept K/V: whatever differs gives another key, and no text of a tenant can imitate another content."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import struct
from typing import Any

import pytest

from kvprofile.errors import BadInput
from kvprofile.runtime import ChosenPlan, Fingerprint, Pair, cache_key, exact_cache_key

SENDER = Fingerprint("a" * 64, "b" * 64, "c" * 64, "d" * 64)
RECEIVER = Fingerprint("e" * 64, "b" * 64, "c" * 64, "f" * 64)


def plan(pair: Pair | None = None, **changes: Any) -> ChosenPlan:
    held: dict[str, Any] = {
        "strategy": "layer_group",
        "start_layer": 2,
        "stop_layer": 4,
        "params": None,
        "recompute_fraction": 1 / 3,
        "quality": 0.5,
        "loss_rel": 0.01,
        "loss_rel_upper": None,
        "loss_points": 1.0,
        "loss_points_upper": None,
        "n_scored": 8,
        "task": "qa",
        "dataset": "hotpotqa",
        "metric": "f1",
        "pair": pair or Pair(SENDER, RECEIVER, "bfloat16", "bfloat16"),
    }
    return ChosenPlan(**{**held, **changes})


def test_golden_keys() -> None:
    """A change here is a new `KEY_VERSION`: servers would find nothing, or what others made."""
    assert cache_key(plan(), [1, 2, 3], "tenant") == (
        "kvprofile-approximate-v1-01624a64a2e49b6edc6f2eab0bede0e824bcf8049885c4b19b0fa913ec89c6ec"
    )
    assert exact_cache_key(RECEIVER, "bfloat16", [1, 2, 3], "tenant") == (
        "kvprofile-exact-v1-981d75ea2bfcd951c6aa8b97807a3d18cf6710f53d2633570b8806d19c1eb744"
    )
    reuse = plan(strategy="full_reuse", start_layer=None, stop_layer=None)
    assert cache_key(reuse, range(2**40, 2**40 + 2), "ténant\x00", dtype="float32") == (
        "kvprofile-approximate-v1-0d2523e1f85161180a1e93dd90508536fb17a21c13778ab56900014e512a84cd"
    )


def test_the_key_is_what_the_module_says() -> None:
    """Written out once more, as another language would."""
    listed = ["tenant", *SENDER, *RECEIVER, "bfloat16", "bfloat16", "layer_group", 2, 4, None]
    held = json.dumps(listed, separators=(",", ":")).encode()
    tokens = struct.pack("<3q", 1, 2, 3)
    content = (
        b"kvprofile approximate KV, key 1\n" + struct.pack("<q", len(held)) + held + struct.pack("<q", 24) + tokens
    )
    expected = f"kvprofile-approximate-v1-{hashlib.sha256(content).hexdigest()}"
    assert cache_key(plan(), [1, 2, 3], "tenant") == expected


def pairs() -> list[Pair]:
    found = [Pair(SENDER, RECEIVER, "bfloat16", "bfloat16"), Pair(RECEIVER, SENDER, "bfloat16", "bfloat16")]
    found += [Pair(SENDER, SENDER, "bfloat16", "bfloat16"), Pair(SENDER, RECEIVER, "float32", "bfloat16")]
    for name in Fingerprint._fields:
        found.append(found[0]._replace(sender=SENDER._replace(**{name: "0" * 64})))
        found.append(found[0]._replace(receiver=RECEIVER._replace(**{name: "0" * 64})))
    return found


PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"start_layer": 2, "stop_layer": 41},
    {"start_layer": 24, "stop_layer": 1},
    {"start_layer": None, "stop_layer": None},
    {"strategy": "full_reuse", "start_layer": None, "stop_layer": None},
    {"strategy": "full_reuse", "start_layer": None, "stop_layer": None, "params": "null"},
    {"params": "null"},
    {"params": ""},
    {"params": '{"ranges":[[1,2]]}'},
    {"params": '{"ranges":[[1,2]]}"'},
)
HOSTILE = (
    *("a", "b", "a ", "A", "a\n", "a\x00", "a\x00b", "\x00", "a,b", 'a","b', 'a"', "a\\", 'a\\"', "[]", '["a"]', "null"),
    *("é", "e\u0301", "kvprofile exact KV, key 1\n", "kvprofile-exact-v1-", "a" * 64, "\ue000", "a/../b", "a:b", "1", "2"),
)  # fmt: skip
CONTEXTS: tuple[list[int], ...] = (
    *([1], [2], [1, 2], [2, 1], [12], [1, 2, 3], [12, 3], [1, 23], [123], [0], [0, 0], [0, 0, 0], [1, 0], [0, 1]),
    *([256], [255, 1], [2**32], [2**63 - 1], [1, 2**32 + 2], list(range(100)), list(range(1, 101))),
)


def test_whatever_differs_gives_another_key() -> None:
    keys = [
        cache_key(plan(pair, **changes), context, name)
        for pair, changes, name, context in itertools.product(pairs(), PLANS, HOSTILE[:9], CONTEXTS[:5])
    ]
    keys += [cache_key(plan(), context, name) for name in HOSTILE[9:] for context in CONTEXTS[5:]]
    keys += [cache_key(plan(), [1], "a", dtype=dtype) for dtype in ("float16", "float32", "b")]
    models = {model for pair in pairs() for model in (pair.sender, pair.receiver)}
    keys += [
        exact_cache_key(model, dtype, context, name)
        for model in models
        for dtype in ("bfloat16", "float32")
        for name in HOSTILE
        for context in CONTEXTS
    ]
    assert len(keys) > 10_000
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert re.fullmatch(r"kvprofile-(approximate|exact)-v1-[0-9a-f]{64}", key)


def test_random_cuts_of_one_text_into_tenant_params_and_context_differ() -> None:
    """Moving the border between neighbouring fields must not keep the key."""
    draw, text, seen = random.Random(0), '","x\\"],[1,2\x00', {}
    for _ in range(3000):
        cut = draw.randrange(1, len(text))
        shift = draw.randrange(1, 8)
        content = (text[:cut], text[cut:], tuple(range(shift)))
        key = cache_key(plan(params=content[1]), list(content[2]), content[0])
        assert seen.setdefault(key, content) == content
    assert len(seen) == (len(text) - 1) * 7


def test_what_was_measured_of_a_plan_is_not_part_of_its_key() -> None:
    assert cache_key(plan(), [1], "a") == cache_key(plan(quality=0.9, task="code", n_scored=3), (1,), "a")
    assert cache_key(plan(), [1], "a") == cache_key(plan(), [1], "a", dtype="bfloat16")


@pytest.mark.parametrize("name", ["", " ", "\n", None, 3, b"a"])
def test_a_namespace_is_needed(name: Any) -> None:
    with pytest.raises(BadInput, match="namespace"):
        cache_key(plan(), [1], name)
    with pytest.raises(BadInput, match="namespace"):
        exact_cache_key(RECEIVER, "float32", [1], name)
    with pytest.raises(TypeError):
        cache_key(plan(), [1])  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["\ud83d\ude00", "a\udfff", "\ud800"])
def test_lone_surrogates_are_refused(name: str) -> None:
    """JSON cannot tell two of them in a row from the character that a pair of them stands for."""
    for make in (
        lambda: cache_key(plan(), [1], name),
        lambda: cache_key(plan(), [1], "a", dtype=name),
        lambda: cache_key(plan(params=name), [1], "a"),
        lambda: cache_key(plan(Pair(SENDER, RECEIVER, name, "x")), [1], "a"),
        lambda: exact_cache_key(RECEIVER, "float32", [1], name),
        lambda: exact_cache_key(RECEIVER, name, [1], "a"),
    ):
        with pytest.raises(BadInput, match="lone surrogate"):
            make()
    assert cache_key(plan(), [1], "\U0001f600\ue000") != cache_key(plan(), [1], "\U0001f600\ud7ff")


@pytest.mark.parametrize("context", [[], [-1], [1.0], "12", ["1"], [2**63], None, 3, [None]])
def test_a_context_is_token_ids(context: Any) -> None:
    with pytest.raises(BadInput, match="whole numbers from 0"):
        cache_key(plan(), context, "a")


def test_bytes_are_their_values_and_not_packed_numbers() -> None:
    assert cache_key(plan(), b"\x01\x02\x03\x04\x05\x06\x07\x08", "a") == cache_key(plan(), range(1, 9), "a")


@pytest.mark.parametrize("unknown", [None, "", "A" * 64, "a" * 63])
def test_a_model_that_is_not_known_has_no_key(unknown: str | None) -> None:
    for name in Fingerprint._fields:
        one = SENDER._replace(**{name: unknown})
        with pytest.raises(BadInput, match=f"{name} is not known"):
            exact_cache_key(one, "float32", [1], "a")
        for pair in (Pair(one, RECEIVER, "x", "x"), Pair(SENDER, one, "x", "x")):
            with pytest.raises(BadInput, match=f"{name} is not known"):
                cache_key(plan(pair), [1], "a")
    with pytest.raises(BadInput, match="dtype"):
        exact_cache_key(SENDER, "", [1], "a")
