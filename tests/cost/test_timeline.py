"""The timeline of link and compute against the toy example of arXiv 2411.02820."""

import pytest

from kvprofile.cost.timeline import LayerCost, Link, Request, first_tokens_ms
from kvprofile.layers import LayerRange


@pytest.mark.parametrize(("mode", "expected"), [("load_all", 47), ("load_reused", 30), ("overlapped", 17)])
def test_the_papers_toy_example(mode, expected):
    layers = [LayerCost(kv_bytes=1, recompute_ms=1, read_ms=0)] * 10
    one_to_three = Request(LayerRange(0, 3), layers, e_bytes=1, arrives_ms=2)
    four_to_ten = Request(LayerRange(3, 10), layers, e_bytes=1)
    assert sum(first_tokens_ms([four_to_ten, one_to_three], Link(1), mode)) == expected
