"""Gradients of one optimizer step from several micro-batches on several ranks, equal to those of one big batch.

Enters: this rank's micro-batches, all of them, so that the step's supervised tokens can be counted before the first
backward. Leaves: `.grad` on every trainable parameter and the step's loss, the same number on every rank and under
every strategy. Chapter 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from vlmcourse.data.samples import Batch
from vlmcourse.layout import Layout
from vlmcourse.monitor.metrics import TokenCount
from vlmcourse.parallel.apply import gradient_sync, unwrap
from vlmcourse.parallel.comm import sum_over_ranks
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.loss import token_loss_sum
from vlmcourse.train.precision import autocast


@dataclass(frozen=True)
class Accumulated:
    """What a step's forward and backward passes measured, over all ranks."""

    loss: float
    """Mean loss of all supervised tokens of the step, with the weights before the update."""
    tokens: TokenCount


def accumulate_gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    ranks: Ranks,
    precision: str,
    layout: Layout | None = None,
    *,
    grad_scale: float = 1.0,
) -> Accumulated:
    """Run forward and backward on every micro-batch; exchange gradients once, with the last.

    Args:
        model: under any strategy; gradients are added to what `.grad` holds.
        batches: this rank's micro-batches of one optimizer step, on CPU; every rank has the same number of them. A rank
            or micro-batch without any supervised token is fine.
        ranks: this process's place.
        precision: one of `config.PRECISIONS`.
        layout: which ranks share samples; by default each rank has its own.
        grad_scale: what gradients are multiplied by: the scale of a `LossScaler`. The loss returned is not.

    Returns:
        Loss and token counts of the whole step.

    Raises:
        ValueError: if no micro-batch of any rank has a supervised token.
        RuntimeError: if the loss is not finite.
    Communicates: an all-reduce of 24 bytes before, the strategy's gradient exchange, and one all-reduce after, of 8
        bytes a micro-batch.
    """
    layout = layout or Layout(dp_replicate=ranks.world_size)
    tokens = count_tokens(batches, ranks, layout)
    if not tokens.supervised:
        ids = ", ".join(batches[0].sample_ids[:3])
        raise ValueError(
            f"rank {ranks.rank}: no sample of this step has a supervised token (this rank's first are {ids}): there is "
            "nothing to learn from; give samples an answer, or raise data.max_seq_len"
        )
    # DDP and FSDP average gradients over the ranks with samples or positions of their own, but this loss is a sum over
    # all of them divided once, by the tokens of the step: x their number turns the average back into a sum.
    loss_scale = grad_scale * layout.summed_degree / tokens.supervised
    if isinstance(model, PipelinedModel):
        context = partial(autocast, precision, ranks.device)
        loss_sums = model.pipeline.forward_backward(batches, loss_scale, context)
        model.pipeline.reduce_tied_gradients()
    else:
        loss_sums = _run_one_by_one(model, batches, ranks, precision, loss_scale)
    loss = sum(sum_over_ranks(loss_sums, ranks)) / layout.tp / tokens.supervised  # ranks of one tp group have the same
    if not math.isfinite(loss):
        raise RuntimeError(
            f"rank {ranks.rank}: the loss of this step is {loss}: it must be finite; lower the learning rates, "
            "lengthen optimizer.warmup_steps, or look for broken pictures in the data"
        )
    return Accumulated(loss, tokens)


def _run_one_by_one(
    model: nn.Module, batches: Sequence[Batch], ranks: Ranks, precision: str, loss_scale: float
) -> list[Tensor]:
    """Run each micro-batch through the whole model; return their loss sums."""
    loss_sums: list[Tensor] = []
    for i, batch in enumerate(batches):
        with gradient_sync(model, enabled=i == len(batches) - 1):
            loss_sum = micro_batch_loss_sum(model, batch.to(ranks.device), precision)
            (loss_sum * loss_scale).backward()
        loss_sums.append(loss_sum.detach())
    return loss_sums


def micro_batch_loss_sum(model: nn.Module, batch: Batch, precision: str) -> Tensor:
    """Return the sum of token losses of one micro-batch, a scalar in fp32; `batch` is on the model's device."""
    with autocast(precision, batch.input_ids_BS.device):
        logits_BSV = model(
            batch.input_ids_BS,
            batch.pixel_values_ICHW,
            batch.attention_mask_BS,
            tiles_per_sample=batch.tiles_per_sample,
            sample_ids=batch.sample_ids,
        )
    take_part = getattr(unwrap(model).get_submodule("language"), "take_part", None)
    labels_BS = batch.labels_BS if take_part is None else take_part(batch.labels_BS, 1)
    return token_loss_sum(logits_BSV, labels_BS)


def count_tokens(batches: Sequence[Batch], ranks: Ranks, layout: Layout) -> TokenCount:
    """Count the tokens of one optimizer step over all micro-batches and ranks, those of shared samples once.

    Communicates: one all-reduce of 24 bytes.
    """
    num_sharing = layout.world_size // layout.dp_degree
    visual = sum(batch.num_visual_tokens for batch in batches)
    text = sum(batch.num_tokens for batch in batches) - visual
    supervised = sum(batch.num_supervised_tokens for batch in batches)
    return TokenCount(*(total / num_sharing for total in sum_over_ranks([text, visual, supervised], ranks)))
