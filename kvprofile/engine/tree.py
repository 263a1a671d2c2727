"""Rows as a tree over layers: as long as two plans read the same contexts, what follows them has the same states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvprofile.engine.cache import KV, ContextKV


class Tree(NamedTuple):
    """How B rows fan out from their inputs. A node stands for all rows with the same input and contexts up to its layer.

    Nodes of a layer that read one context lie side by side.

    Attributes:
        parents: For every layer, each node's node of the layer before; for the first layer, the number of its input.
        contexts: For every layer, the context each node reads.
        nodes: For every layer, each row's node.
    """

    parents: tuple[tuple[int, ...], ...]
    contexts: tuple[tuple[KV, ...], ...]
    nodes: tuple[tuple[int, ...], ...]

    def leaders(self, layer: int) -> list[int]:
        """Returns the first row of each node of a layer."""
        return [int(row) for row in np.unique(self.nodes[layer], return_index=True)[1]]


def apart(rows: Sequence[ContextKV]) -> Tree:
    """Returns the tree of rows that share nothing: for models whose layers get more by row than hidden states (ALiBi)."""
    numbers = tuple(range(len(rows)))
    return Tree((numbers,) * len(rows[0]), tuple(zip(*rows, strict=True)), (numbers,) * len(rows[0]))


def fan_out(rows: Sequence[ContextKV], inputs: Sequence[int] = ()) -> Tree:
    """Returns the tree of rows, by the identity of the K/V they read at each layer.

    Args:
        rows: Each row's contexts.
        inputs: Number of each row's input, 0 upwards; empty if all rows have the same.
    """
    parents, contexts, nodes = [], [], []
    at = np.array(inputs or [0] * len(rows))
    for held in zip(*rows, strict=True):
        distinct = {id(kv): kv for kv in held}
        number = {key: i for i, key in enumerate(distinct)}
        read, before = np.array([number[id(kv)] for kv in held]), int(at.max()) + 1
        keys, at = np.unique(read * before + at, return_inverse=True)
        pool = list(distinct.values())
        parents.append(tuple((keys % before).tolist()))
        contexts.append(tuple(pool[key // before] for key in keys.tolist()))
        nodes.append(tuple(at.tolist()))
    return Tree(tuple(parents), tuple(contexts), tuple(nodes))
