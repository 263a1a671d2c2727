from __future__ import annotations

import numpy as np

from kvprofile.analysis.frontier import frontier


def brute_force(recompute: np.ndarray, quality: np.ndarray) -> list[bool]:
    def beaten(i: int) -> bool:
        for j in range(len(recompute)):
            if np.isnan(quality[j]) or recompute[j] > recompute[i] or quality[j] < quality[i]:
                continue
            if recompute[j] < recompute[i] or quality[j] > quality[i] or j < i:
                return True
        return False

    return [not np.isnan(q) and not beaten(i) for i, q in enumerate(quality)]


def test_equals_brute_force_with_ties_and_missing_values() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(1, 25))
        recompute = rng.integers(0, 6, n) / 5
        quality = rng.integers(0, 6, n) / 5
        quality[rng.random(n) < 0.1] = np.nan
        assert frontier(recompute, quality).tolist() == brute_force(recompute, quality)


def test_nothing_gives_nothing() -> None:
    assert frontier(np.array([]), np.array([])).tolist() == []
