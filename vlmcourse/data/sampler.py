"""Which samples each optimizer step takes, and which of them each rank and micro-batch takes.

Enters: the step. Leaves: positions in the dataset. Everything here is a function of the step, so a resumed run goes on
with exactly the samples that the interrupted one would have taken, and the samples of a step are the same however many
ranks and micro-batches share them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@functools.lru_cache(maxsize=4)
def _epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of one pass over the dataset, int64 [num_samples]."""
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class GlobalBatchSampler:
    """The samples of every optimizer step: epochs in random order, one after the other.

    `last_group` says what becomes of the samples at the end of an epoch that are fewer than a step takes:

    - fill: the step is filled up from the start of the next epoch, so no sample is left out (and such a step may,
      rarely, hold a sample twice).
    - short: they make a step of their own, with fewer micro-batches, of which the last may be smaller or, on some
      ranks, empty. Every rank has the same number of micro-batches, or some would wait for others for ever.
    - drop: they are left out of this epoch.
    """

    num_samples: int
    """Samples in the dataset; at least `global_batch_size`."""
    global_batch_size: int
    """Samples of one optimizer step over all data-parallel ranks and micro-batches."""
    seed: int
    last_group: str = "fill"

    def __post_init__(self) -> None:
        if self.last_group not in ("fill", "short", "drop"):
            raise ValueError(f"last_group = {self.last_group!r}: must be fill, short or drop")
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size = {self.global_batch_size}: must be 1 or greater")
        if self.num_samples < self.global_batch_size:
            raise ValueError(
                f"The dataset has {self.num_samples} samples and one optimizer step takes {self.global_batch_size} "
                "(micro_batch_size x accumulation_steps x data-parallel ranks): it must have at least that many; lower "
                "train.micro_batch_size or train.accumulation_steps, or use more data"
            )

    def indices(self, step: int) -> list[int]:
        """Return the positions of all samples of optimizer step `step` (0 is the first).

        There are `global_batch_size` of them, or fewer in the last step of an epoch where `last_group` is short.

        Raises:
            ValueError: if `step` is negative.
        """
        if step < 0:
            raise ValueError(f"step = {step}: must be 0 or greater")
        if self.last_group != "fill":
            epoch, at = divmod(step, self._steps_per_epoch)
            start = at * self.global_batch_size
            return _epoch_order(self.num_samples, self.seed, epoch)[start : start + self.global_batch_size].tolist()
        found: list[int] = []
        start = step * self.global_batch_size
        while len(found) < self.global_batch_size:
            epoch, offset = divmod(start + len(found), self.num_samples)
            missing = self.global_batch_size - len(found)
            found += _epoch_order(self.num_samples, self.seed, epoch)[offset : offset + missing].tolist()
        return found

    @property
    def _steps_per_epoch(self) -> int:
        """Steps of an epoch that begins with a step of its own."""
        whole, left = divmod(self.num_samples, self.global_batch_size)
        return whole + (self.last_group == "short" and left > 0)

    def num_micro_batches(self, step: int, accumulation_steps: int) -> int:
        """Return the micro-batches of one step, the same on every rank: fewer than usual in a short step.

        Args:
            step: optimizer step, from 0.
            accumulation_steps: micro-batches of a whole step.
        """
        return -(-len(self.indices(step)) * accumulation_steps // self.global_batch_size)

    @property
    def fewest_samples(self) -> int:
        """Samples of the smallest step."""
        return (self.last_group == "short" and self.num_samples % self.global_batch_size) or self.global_batch_size

    def micro_batch(self, step: int, m: int, accumulation_steps: int, dp_rank: int, dp_degree: int) -> list[int]:
        """Return the positions that one rank takes in one micro-batch.

        Args:
            step: optimizer step, from 0.
            m: micro-batch of that step, from 0 to `accumulation_steps` - 1.
            accumulation_steps: micro-batches a rank adds up before the optimizer steps.
            dp_rank: position of this rank among the data-parallel ranks.
            dp_degree: number of data-parallel ranks.

        Returns:
            `global_batch_size / (accumulation_steps * dp_degree)` positions, in a short step also fewer or none. Over
            all ranks and micro-batches they make up `indices(step)`, each once.

        Raises:
            ValueError: if the global batch does not divide, or a position is out of range.
        """
        parts = accumulation_steps * dp_degree
        if parts < 1 or self.global_batch_size % parts:
            raise ValueError(
                f"A global batch of {self.global_batch_size} samples does not divide into {accumulation_steps} "
                f"micro-batches on {dp_degree} data-parallel ranks: it must be a multiple of {parts}"
            )
        if not 0 <= m < accumulation_steps or not 0 <= dp_rank < dp_degree:
            raise ValueError(
                f"micro-batch {m} of {accumulation_steps} on data-parallel rank {dp_rank} of {dp_degree}: "
                "both must be at least 0 and below the number that there are"
            )
        size = self.global_batch_size // parts
        start = (m * dp_degree + dp_rank) * size
        return self.indices(step)[start : start + size]
