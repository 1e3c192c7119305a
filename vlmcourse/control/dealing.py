"""How the samples of a step are dealt out to ranks and micro-batches, as they come or by their work.

Enters: the work of each sample, ranks, micro-batches. Leaves: for each rank its micro-batches, lists of places. Each
sample is dealt once, whatever the balance: the gradient of a step does not change, as its loss is summed over all
tokens of all ranks. The simulated cluster and a real run deal with the same function. Chapter 7.

By work: the largest sample first, each to the rank that is least loaded for its share, then the same within a rank. At
most 4/3 of the best possible maximum for equal shares (Graham 1969, "Bounds on multiprocessing timing anomalies").
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Dealt = list[list[list[int]]]
"""By rank and micro-batch, the places of its samples."""


def deal_in_order(num_samples: int, num_ranks: int, micro_batch_size: int, num_micro_batches: int) -> Dealt:
    """Deal as `GlobalBatchSampler` does: micro-batch by micro-batch, rank by rank.

    Raises:
        ValueError: if the micro-batches do not hold all samples.
    """
    if num_ranks * micro_batch_size * num_micro_batches != num_samples:
        raise ValueError(
            f"{num_samples} samples are not {num_ranks} ranks x {num_micro_batches} micro-batches x {micro_batch_size}"
        )
    size = micro_batch_size

    def part(rank: int, number: int) -> list[int]:
        start = (number * num_ranks + rank) * size
        return list(range(start, start + size))

    return [[part(rank, number) for number in range(num_micro_batches)] for rank in range(num_ranks)]


def deal_by_work(work: Sequence[float], shares: Sequence[float], num_micro_batches: int) -> Dealt:
    """Deal samples so that ranks have work in proportion to their shares, and a rank's micro-batches equal work.

    Args:
        work: of each sample, in any unit.
        shares: by rank, above 0; they need not add up to 1.
        num_micro_batches: of each rank; where a rank has fewer samples some are empty.

    Raises:
        ValueError: if there is no rank, a share is not above 0, or there is no micro-batch.
    """
    if not shares or min(shares) <= 0 or num_micro_batches < 1:
        raise ValueError(
            f"shares = {list(shares)}, num_micro_batches = {num_micro_batches}: need a share above 0 for each rank, "
            "and 1 micro-batch or more"
        )
    order = sorted(range(len(work)), key=lambda place: -work[place])
    of_ranks = _spread(order, work, [1 / share for share in shares])
    equal = [1.0] * num_micro_batches
    return [_spread(places, work, equal) for places in of_ranks]


def _spread(order: Sequence[int], work: Sequence[float], costs: Sequence[float]) -> list[list[int]]:
    """Put each sample in order where one of typical work would end first; a unit of work costs what `costs` says."""
    found: list[list[int]] = [[] for _ in costs]
    typical = sum(work[place] for place in order) / max(1, len(order))
    heap = [(typical * cost, number) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    for place in order:
        ends, number = heap[0]
        found[number].append(place)
        heapq.heapreplace(heap, (ends + work[place] * costs[number], number))
    return found
