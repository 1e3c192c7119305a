"""The samples of a step dealt out by their work instead of by their number: the same samples, other ranks.

Enters: a run's sampler, what each sample's work is, shares of the ranks. Leaves: a sampler of the same steps. The sum
of token losses over all ranks, divided by all tokens, does not care which rank had which sample, so neither does the
gradient. Dealing is that of `control/dealing.py`, as on the simulated cluster. Chapter 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vlmcourse.control.dealing import deal_by_work
from vlmcourse.data.sampler import GlobalBatchSampler


@dataclass(frozen=True, kw_only=True)
class BalancedSampler(GlobalBatchSampler):
    """Deals each step's samples so that data-parallel ranks have work in proportion to their shares."""

    work_of: Callable[[int], float]
    """Work of the sample at a position of the dataset, in any unit; the same on every rank."""
    shares: tuple[float, ...] = ()
    """By data-parallel rank; empty: equal."""

    @classmethod
    def of(
        cls, sampler: GlobalBatchSampler, work_of: Callable[[int], float], shares: tuple[float, ...] = ()
    ) -> BalancedSampler:
        """Return a sampler of the same steps as another one."""
        return cls(
            num_samples=sampler.num_samples,
            global_batch_size=sampler.global_batch_size,
            seed=sampler.seed,
            last_group=sampler.last_group,
            work_of=work_of,
            shares=shares,
        )

    def micro_batch(self, step: int, m: int, accumulation_steps: int, dp_rank: int, dp_degree: int) -> list[int]:
        """Return the positions that one rank takes in one micro-batch: any number of them, also none.

        Args:
            step: optimizer step, from 0.
            m: micro-batch of that step.
            accumulation_steps: micro-batches of a whole step.
            dp_rank: position of this rank among the data-parallel ranks.
            dp_degree: number of data-parallel ranks.

        Raises:
            ValueError: if there are shares, and not one a rank; or a position is out of range.
        """
        if self.shares and len(self.shares) != dp_degree:
            raise ValueError(f"{len(self.shares)} shares for {dp_degree} data-parallel ranks: give one each")
        count = self.num_micro_batches(step, accumulation_steps)
        if not 0 <= m < count or not 0 <= dp_rank < dp_degree:
            raise ValueError(
                f"micro-batch {m} of {count} on data-parallel rank {dp_rank} of {dp_degree}: both must be at least 0 "
                "and below the number that there are"
            )
        indices = self.indices(step)
        dealt = deal_by_work([self.work_of(i) for i in indices], self.shares or (1.0,) * dp_degree, count)
        return [indices[place] for place in dealt[dp_rank][m]]
