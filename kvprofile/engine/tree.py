"""Rows as a tree over layers: as long as two plans read the same contexts, what follows them has the same states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvprofile.engine.cache import KV, ContextKV


class Tree(NamedTuple):
    """How B rows fan out from one. A node of a layer stands for all rows that read the same contexts up to that layer.

    Attributes:
        parents: For every layer, each node's node of the layer before; for the first layer, the row of the input.
        contexts: For every layer, the context each node reads.
        nodes: For every layer, each row's node.
    """

    parents: tuple[tuple[int, ...], ...]
    contexts: tuple[tuple[KV, ...], ...]
    nodes: tuple[tuple[int, ...], ...]


def apart(rows: Sequence[ContextKV]) -> Tree:
    """Returns the tree of rows that share nothing: for models whose layers get more by row than hidden states (ALiBi)."""
    numbers = tuple(range(len(rows)))
    return Tree((numbers,) * len(rows[0]), tuple(zip(*rows, strict=True)), (numbers,) * len(rows[0]))


def fan_out(rows: Sequence[ContextKV]) -> Tree:
    """Returns the tree of rows, by the identity of the K/V they read at each layer."""
    parents, contexts, nodes = [], [], []
    at = [0] * len(rows)
    for held in zip(*rows, strict=True):
        found: dict[tuple[int, int], tuple[int, KV]] = {}
        at = [found.setdefault((node, id(kv)), (len(found), kv))[0] for node, kv in zip(at, held, strict=True)]
        parents.append(tuple(node for node, _ in found))
        contexts.append(tuple(kv for _, kv in found.values()))
        nodes.append(tuple(at))
    return Tree(tuple(parents), tuple(contexts), tuple(nodes))
