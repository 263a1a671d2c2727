"""The Pareto frontier of recompute against quality."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def frontier(recompute: NDArray[np.float64], quality: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns which plans no other plan beats, where less recompute and more quality are better.

    Of plans with equal recompute the better stays, of plans equal in both the first; a plan without quality (NaN) is
    never on the frontier.
    """
    on_frontier = np.zeros(len(recompute), dtype=bool)
    best = -np.inf
    for i in np.lexsort((-quality, recompute)):
        if quality[i] > best:
            best = quality[i]
            on_frontier[i] = True
    return on_frontier
