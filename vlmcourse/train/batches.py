"""The micro-batches of one optimizer step on one rank, the last step of an epoch included.

Enters: a sampler, a dataset and a step. Leaves: batches on CPU, equally many on every rank. Where a short step leaves a
rank nothing for a micro-batch that others still have, it gets a *mute* one: a sample of the step whose labels are all
ignored. It then takes part in every collective and adds nothing to loss, gradients and token counts. Chapter 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlmcourse.config import TrainConfig
from vlmcourse.data.collate import Collator
from vlmcourse.data.sampler import GlobalBatchSampler
from vlmcourse.data.samples import IGNORE_LABEL, Batch, Sample
from vlmcourse.layout import ParallelConfig
from vlmcourse.planner.degrees import check_step


def load_micro_batches(
    sampler: GlobalBatchSampler,
    collator: Collator,
    data: Sequence[Sample],
    step: int,
    *,
    accumulation_steps: int,
    dp_rank: int,
    dp_degree: int,
) -> list[Batch]:
    """Return this rank's micro-batches of optimizer step `step`.

    Args:
        sampler: which samples the step takes.
        collator: makes a batch of them.
        data: where they are.
        step: from 0.
        accumulation_steps: micro-batches of a whole step.
        dp_rank: position among the ranks with samples of their own.
        dp_degree: number of those.

    Returns:
        `accumulation_steps` batches on CPU; fewer in a short step, as many as on every other rank.
    """
    batches = []
    for m in range(sampler.num_micro_batches(step, accumulation_steps)):
        indices = sampler.micro_batch(step, m, accumulation_steps, dp_rank=dp_rank, dp_degree=dp_degree)
        batch = collator([data[i] for i in indices or sampler.indices(step)[:1]])
        if not indices:
            batch.labels_BS.fill_(IGNORE_LABEL)
            batch.is_mute = True
        batches.append(batch)
    return batches


def build_sampler(
    config: TrainConfig, parallel: ParallelConfig, num_samples: int, global_batch_size: int
) -> GlobalBatchSampler:
    """Return what deals out the samples of a run.

    Args:
        config: the run.
        parallel: how its ranks share the work, settled.
        num_samples: of the dataset.
        global_batch_size: samples of one optimizer step.

    Raises:
        ValueError: if a step takes more samples than there are, or the short step at the end of an epoch has fewer
            micro-batches than the pipeline can run.
    """
    sampler = GlobalBatchSampler(num_samples, global_batch_size, config.run.seed, config.train.last_group)
    accumulation_steps = config.train.accumulation_steps
    num_short = -(-sampler.fewest_samples * accumulation_steps // global_batch_size)
    if num_short < accumulation_steps:
        try:
            check_step(parallel, num_short)
        except ValueError as error:
            raise ValueError(
                f"train.last_group = 'short': the last step of an epoch has {num_short} instead of "
                f"{accumulation_steps} micro-batches. {error} Or choose last_group = 'fill' or 'drop'"
            ) from error
    return sampler
