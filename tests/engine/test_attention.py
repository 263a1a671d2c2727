"""Attention over shared contexts against plain attention over everything in one tensor."""

from __future__ import annotations

from contextvars import copy_context
from types import SimpleNamespace

import pytest
import torch

from kvprofile.engine import attention
from kvprofile.engine.attention import NotShareable
from kvprofile.engine.cache import KV, RowsCache
from kvprofile.engine.tree import fan_out
from kvprofile.layers import LayerRange, groups
from tests.engine.architectures import CONFIGS, tiny_decoder

ROWS, HEADS, GROUPS, TOKENS, CONTEXT, WIDTH = 5, 4, 2, 3, 11, 8
MODULE = SimpleNamespace(layer_idx=0)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _setting() -> tuple[RowsCache, torch.Tensor, torch.Tensor, torch.Tensor, list[KV]]:
    pool = [
        KV(_random(1, GROUPS, CONTEXT, WIDTH, seed=s), _random(1, GROUPS, CONTEXT, WIDTH, seed=s + 9)) for s in (1, 2)
    ]
    rows = [pool[row // 3] for row in range(ROWS)]
    query, key, value = (
        _random(ROWS, heads, TOKENS, WIDTH, seed=seed) for heads, seed in ((HEADS, 3), (GROUPS, 4), (GROUPS, 5))
    )
    return RowsCache([rows], TOKENS, joined=False), query, key, value, rows


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: list[KV], mask: torch.Tensor, **options: object
) -> torch.Tensor:
    keys, values = (
        torch.cat([torch.cat(context), own], dim=-2).repeat_interleave(HEADS // GROUPS, dim=1)
        for context, own in (([kv.keys for kv in rows], key), ([kv.values for kv in rows], value))
    )
    scores = query @ keys.transpose(-1, -2) * options.get("scaling", WIDTH**-0.5)
    if cap := options.get("softcap"):
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~mask, -torch.inf)
    sinks = options.get("s_aux")
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, HEADS, 1, 1).expand(ROWS, -1, TOKENS, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : CONTEXT + TOKENS]
    return (weights @ values).transpose(1, 2)


def _causal(window: int = 99) -> torch.Tensor:
    distance = torch.arange(CONTEXT, CONTEXT + TOKENS)[:, None] - torch.arange(CONTEXT + TOKENS)
    return ((distance >= 0) & (distance < window))[None, None]


@pytest.mark.parametrize("scores_at_a_time", [1, 1 << 22])
@pytest.mark.parametrize(
    ("window", "options"),
    [
        (99, {}),
        (5, {}),
        (1, {}),  # hides all of the context
        (99, {"softcap": 0.7}),
        (99, {"scaling": 0.11}),
        (99, {"s_aux": _random(HEADS, seed=7)}),
        (2, {"s_aux": 3 + _random(HEADS, seed=7), "softcap": 2.0}),
    ],
)
def test_equals_plain_attention(
    window: int, options: dict[str, object], scores_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SCORES", scores_at_a_time)
    cache, query, key, value, rows = _setting()
    attention._reading.set(attention._Reading(cache, "eager"))
    mask = _causal(window)
    ours, _ = attention._attention(MODULE, query, key, value, mask, **options)
    torch.testing.assert_close(ours, _plain(query, key, value, rows, mask, **options), rtol=1e-5, atol=1e-5)


def test_an_unknown_argument_is_not_ignored() -> None:
    cache, query, key, value, _ = _setting()
    attention._reading.set(attention._Reading(cache, "eager"))
    with pytest.raises(NotShareable, match="position_bias"):
        attention._attention(MODULE, query, key, value, _causal(), position_bias=torch.ones(1))
    with pytest.raises(NotShareable, match="mask"):
        attention._attention(MODULE, query, key, value, None)


def test_a_soft_cap_that_the_models_own_kernel_leaves_out_is_not_put_in() -> None:
    def attend(kernel: str) -> None:
        attention._reading.set(attention._Reading(cache, kernel))
        attention._attention(MODULE, query, key, value, _causal(), softcap=2.0)

    cache, query, key, value, _ = _setting()
    copy_context().run(attend, "eager")
    with pytest.raises(NotShareable, match="soft cap"):
        copy_context().run(attend, "sdpa")


@pytest.mark.parametrize("architecture", CONFIGS)
def test_contexts_are_shared_wherever_the_model_allows(architecture: str) -> None:
    """The attention of the others does not go through Transformers' interface."""
    own_attention = architecture.startswith(("falcon", "bloom", "mpt"))
    assert tiny_decoder(architecture).shares_contexts is not own_attention


def test_plans_with_the_same_past_are_one_node() -> None:
    layers = 5
    sender = [KV(torch.empty(0), torch.empty(0)) for _ in range(layers)]
    passes = {s: [KV(torch.empty(0), torch.empty(0)) for _ in range(layers)] for s in range(layers)}

    def context(group: LayerRange) -> tuple[KV, ...]:
        return tuple(passes[group.start][at] if group.start <= at < group.stop else sender[at] for at in range(layers))

    rows = [tuple(sender), *map(context, groups(layers))]
    tree = fan_out(rows)
    assert [len(nodes) for nodes in tree.contexts] == [(at + 1) * (at + 2) // 2 + 1 for at in range(layers)]
    for row, read in enumerate(rows):  # every row finds its own contexts on the way up from its leaf
        node = tree.nodes[-1][row]
        for at in reversed(range(layers)):
            assert tree.contexts[at][node] is read[at]
            assert tree.nodes[at][row] == node
            node = tree.parents[at][node]
