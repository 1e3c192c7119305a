"""How many tiles the fullest data-parallel rank has to encode, where samples have different numbers of them.

Enters: tiles of typical samples, how many samples a rank takes before it waits for the others, ranks. Leaves: the
expected maximum over the ranks, exactly. Imports no torch. Chapter 7.

Ranks draw their samples independently. The number of tiles of m samples is distributed as the m-fold convolution of one
sample's; that the fullest of n ranks has at most x is the n-th power of the probability that one has. So
E[max] = sum over x >= 0 of 1 - P(one rank has at most x)^n.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache


@lru_cache(maxsize=4096)
def expect_fullest(tile_counts: tuple[int, ...], num_samples: int, num_ranks: int) -> float:
    """Return the expected tiles of the rank that has most.

    Args:
        tile_counts: tiles of typical samples, each as likely as any other.
        num_samples: that each rank takes between two moments at which ranks wait for each other.
        num_ranks: data-parallel ranks.

    Raises:
        ValueError: if a number is below 1, there are no samples, or one has fewer than 0 tiles.
    """
    if num_samples < 1 or num_ranks < 1 or not tile_counts or min(tile_counts) < 0:
        raise ValueError(
            f"num_samples = {num_samples}, num_ranks = {num_ranks}, {len(tile_counts)} tile_counts: need 1 or more of "
            "each, and no count below 0"
        )
    at_most, expected = 0.0, 0.0
    for probability in _distribute(tile_counts, num_samples):
        expected += 1 - at_most**num_ranks  # at_most: of fewer tiles than this
        at_most = min(1.0, at_most + probability)
    return expected - 1  # the sum above counts x = -1 too, which no rank has


@lru_cache(maxsize=512)
def _distribute(tile_counts: tuple[int, ...], num_samples: int) -> tuple[float, ...]:
    """Return the probability of 0, 1, 2, ... tiles in so many samples."""
    if num_samples == 1:
        counted = Counter(tile_counts)
        return tuple(counted[tiles] / len(tile_counts) for tiles in range(max(tile_counts) + 1))
    half = _distribute(tile_counts, num_samples // 2)
    whole = _convolve(half, half)
    return _convolve(whole, _distribute(tile_counts, 1)) if num_samples % 2 else whole


def _convolve(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    result = [0.0] * (len(one) + len(other) - 1)
    for i, p in enumerate(one):
        if p:
            for j, q in enumerate(other):
                result[i + j] += p * q
    return tuple(result)
