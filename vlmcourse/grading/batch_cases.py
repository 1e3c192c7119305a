"""Cases of exercise 4.2's parts a and b: clusters, how a model is split over them, and batches.

Enters: a seed. Leaves: cases; the right answers are `vlmcourse.batch`'s.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchCase:
    """A cluster, how a model is split over it, and a batch."""

    micro_batch: int
    accumulation: int
    num_gpus: int
    tp: int
    pp: int
    cp: int
    target: int

    @property
    def dp_degree(self) -> int:
        """GPUs with samples of their own."""
        return self.num_gpus // (self.tp * self.pp * self.cp)

    @property
    def cluster(self) -> tuple[int, int, int, int]:
        """The last arguments of both functions."""
        return self.num_gpus, self.tp, self.pp, self.cp

    def describe(self) -> str:
        """Name the cluster and the degrees above 1."""
        degrees = zip(("tp", "pp", "cp"), self.cluster[1:], strict=True)
        shown = "".join(f", {name}={value}" for name, value in degrees if value > 1)
        return f"micro-batch {self.micro_batch} on {self.num_gpus} GPUs{shown}"


def make_batch_cases(seed: int, num_cases: int) -> list[BatchCase]:
    """Draw clusters and targets: of five clusters, three have all degrees above 1, one has one and one has none.

    A function that forgets a single degree is then wrong in more than half of the cases, and so is one that gives a
    single choice: of four targets one is met exactly; of eight, one lies below a round of micro-batches.
    """
    rng = random.Random(f"batch:{seed}")
    cases = [V100] if seed % 2 else []
    while len(cases) < num_cases:
        number = len(cases)
        degrees = rng.sample((2, 4, 8), k=3)
        if number % 5 == 0:
            degrees = [1, 1, 1]
        elif number % 5 == 4:  # cp first, then tp, then pp
            degrees = [degree if axis == (number // 5 + 2) % 3 else 1 for axis, degree in enumerate(degrees)]
        dp = rng.choice((1, 2, 3, 4, 8, 16) if number % 5 else (2, 4, 8))
        micro, accumulation = rng.randint(1 if dp > 1 else 3, 6), rng.randint(2, 24)
        one_round = micro * dp
        target = one_round * rng.randint(2, 40)
        if number % 4:
            target += rng.choice([o for o in range(1, one_round) if 2 * o != one_round] or [1])
        if number % 8 == 6:
            target = one_round - rng.randint(1, one_round - 1)
        tp, pp, cp = degrees
        num_gpus = dp * tp * pp * cp
        cases.append(
            BatchCase(
                micro_batch=micro, accumulation=accumulation, num_gpus=num_gpus, tp=tp, pp=pp, cp=cp, target=target
            )
        )
    return cases


V100 = BatchCase(micro_batch=2, accumulation=8, num_gpus=8, tp=1, pp=1, cp=1, target=256)
"""The exercise's own cluster: 8 x V100-32GB."""
