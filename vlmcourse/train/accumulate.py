"""Gradients of one optimizer step from several micro-batches on several ranks, equal to those of one big batch.

Enters: this rank's micro-batches, all of them, so that the step's supervised tokens can be counted before the first
backward. Leaves: `.grad` on every trainable parameter and the step's loss, the same number on every rank and under
every strategy. Chapter 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from vlmcourse.data.samples import Batch
from vlmcourse.layout import Layout
from vlmcourse.monitor.metrics import TokenCount
from vlmcourse.monitor.step_clock import StepClock, mark_tail
from vlmcourse.parallel.apply import unwrap
from vlmcourse.parallel.comm import sum_over_ranks
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.sync import gradient_sync, refuse_exchange, run_backward
from vlmcourse.train.loss import LossRows, TokenLoss, weight_sum
from vlmcourse.train.precision import autocast


@dataclass(frozen=True)
class Accumulated:
    """What a step's forward and backward passes measured, over all ranks."""

    loss: float
    """Mean loss of all supervised tokens of the step (weighted where they have weights), before the update."""
    tokens: TokenCount


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """How a step is put together, besides its batches."""

    weighting: str = "tokens"
    """What tokens weigh in the loss: tokens or sqrt, see `TokenLoss`."""
    every: bool = False
    """Whether ranks that hold shards exchange gradients with every micro-batch, see `gradient_sync`."""
    grad_scale: float = 1.0
    """What gradients are multiplied by, but not the loss that is returned: the scale of a `LossScaler`."""
    check_silence: bool = False
    """Whether to count the collectives of the first of several micro-batches, and refuse an exchange of gradients."""
    rows: LossRows | None = None
    """Where the losses of single tokens go; a pipeline's loss was given its own when it was built."""
    clock: StepClock = field(default_factory=StepClock)
    """Is told when forward and backward run; outside of a step it does not listen."""


def accumulate_gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    ranks: Ranks,
    precision: str,
    layout: Layout | None = None,
    how: Accumulation | None = None,
) -> Accumulated:
    """Run forward and backward on every micro-batch; exchange gradients once, with the last.

    Args:
        model: under any strategy, or a DeepSpeed engine; gradients are added to what `.grad` holds.
        batches: this rank's micro-batches of one optimizer step, on CPU; every rank has the same number of them. A rank
            or micro-batch without any supervised token is fine.
        ranks: this process's place.
        precision: one of `precision_rules.PRECISIONS`.
        layout: which ranks share samples; by default each rank has its own.
        how: what else a step may do; by default all tokens weigh the same. A pipeline's loss, made when it was built,
            must have the same weighting.

    Returns:
        Loss and token counts of the whole step.

    Raises:
        ValueError: if there is no micro-batch, or none of any rank has a supervised token.
        RuntimeError: if the loss is not finite, or gradients were exchanged where they should not be.
    Communicates: an all-reduce of 24 bytes before (of 8 more where tokens have weights), the strategy's gradient
        exchange, and one all-reduce after, of 8 bytes a micro-batch.
    """
    if not batches:
        raise ValueError(f"rank {ranks.rank}: 0 micro-batches: a step needs 1 or more, as many on every rank")
    layout, how = layout or Layout(dp_replicate=ranks.world_size), how or Accumulation()
    tokens = count_tokens(batches, ranks, layout)
    if not tokens.supervised:
        ids = ", ".join(batches[0].sample_ids[:3])
        raise ValueError(
            f"rank {ranks.rank}: no sample of this step has a supervised token (this rank's first are {ids}): there is "
            "nothing to learn from; give samples an answer, or raise data.max_seq_len"
        )
    weights = tokens.supervised if how.weighting == "tokens" else sum_weights(batches, ranks, layout, how.weighting)
    # DDP and FSDP average gradients over the ranks with samples or positions of their own, but this loss is a sum over
    # all of them divided once, by the tokens of the step: x their number turns the average back into a sum.
    loss_scale = how.grad_scale * layout.summed_degree / weights
    if isinstance(model, PipelinedModel):
        _check_pipeline_loss(model, how)
        context = partial(autocast, precision, ranks.device)
        with _timed_actions(model, how.clock):
            loss_sums = model.pipeline.forward_backward(batches, loss_scale, context)
        model.pipeline.reduce_tied_gradients()
    else:
        loss_sums = run_one_by_one(model, batches, ranks, precision, loss_scale, how)
    loss = sum(sum_over_ranks(loss_sums, ranks)) / layout.tp / weights  # ranks of one tp group have the same
    if not math.isfinite(loss):
        raise RuntimeError(explain_nonfinite(f"the loss of this step is {loss}", ranks, precision))
    return Accumulated(loss, tokens)


def explain_nonfinite(found: str, ranks: Ranks, precision: str) -> str:
    """Say what to do about a loss or a gradient that is no number; `found` says which."""
    narrow = ", choose bf16 or fp32 for train.precision (fp16 ends at 65504)" if precision == "fp16" else ""
    return (
        f"rank {ranks.rank}: {found}: it must be finite; call train.nan_finder.find_in_step(trainer) on all ranks: it "
        f"names the first operation and the samples. Then mend the samples{narrow}, lower the learning rates, or "
        "lengthen optimizer.warmup_steps. If its list is empty, no micro-batch alone did it, but their sum, the norm "
        "or a hook"
    )


def _check_pipeline_loss(model: PipelinedModel, how: Accumulation) -> None:
    """Refuse a pipeline that was built with a loss of another weighting: the last stage computes with that one."""
    loss_sum = model.pipeline.loss_sum
    built = getattr(getattr(loss_sum, "func", loss_sum), "weighting", "tokens")
    if built != how.weighting:
        raise ValueError(
            f"train.loss_weighting = {how.weighting!r}, but the last stage of this pipeline weighs by {built!r}: hand "
            f"apply_strategy the loss TokenLoss({how.weighting!r})"
        )


def run_one_by_one(
    model: nn.Module,
    batches: Sequence[Batch],
    ranks: Ranks,
    precision: str,
    loss_scale: float,
    how: Accumulation,
) -> list[Tensor]:
    """Run each micro-batch forward and backward through the whole model (no pipeline); return their loss sums.

    Args:
        model: as in `accumulate_gradients`.
        batches: as there.
        ranks: as there.
        precision: as there.
        loss_scale: what each loss sum is multiplied by before backward.
        how: as there.
    """
    loss_sums: list[Tensor] = []
    weighting: tuple[Any, ...] = () if how.weighting == "tokens" else (how.weighting,)
    if how.rows is not None and how.rows.is_open:
        weighting = (how.weighting, how.rows)
    every = (True,) if how.every else ()
    for i, batch in enumerate(batches):
        is_last = i == len(batches) - 1
        is_watched = how.check_silence and i == 0 and not is_last and not how.every and ranks.world_size > 1
        watch = refuse_exchange(model, f"rank {ranks.rank}: micro-batch 1 of {len(batches)}")
        with watch if is_watched else nullcontext(), gradient_sync(model, is_last, *every):
            with how.clock.phase("data_wait"):
                batch = batch.to(ranks.device)
            with how.clock.phase("forward"):
                loss_sum = micro_batch_loss_sum(model, batch, precision, *weighting)
            with how.clock.phase("backward"):
                loss = loss_sum * loss_scale
                mark_tail(how.clock, model, loss)
                run_backward(model, loss)
        loss_sums.append(loss_sum.detach())
    return loss_sums


@contextmanager
def _timed_actions(model: PipelinedModel, clock: StepClock) -> Iterator[None]:
    """Tell the clock when a stage runs forward and when backward, whatever else looks at the actions."""
    pipeline = model.pipeline
    inner = pipeline.on_action

    def on_action(kind: str, microbatch: int, stage: int, run: Callable[[], Any]) -> Any:
        with clock.phase("forward" if kind == "F" else "backward"):
            return run() if inner is None else inner(kind, microbatch, stage, run)

    pipeline.on_action = on_action if clock.is_running else inner
    try:
        yield
    finally:
        pipeline.on_action = inner


def micro_batch_loss_sum(
    model: nn.Module, batch: Batch, precision: str, weighting: str = "tokens", rows: LossRows | None = None
) -> Tensor:
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
    return TokenLoss(weighting, rows)(
        logits_BSV, batch.labels_BS, None if take_part is None else partial(take_part, dim=1)
    )


def sum_weights(batches: Sequence[Batch], ranks: Ranks, layout: Layout, weighting: str) -> float:
    """Add up what the tokens of one optimizer step weigh, over all micro-batches and ranks, shared samples once.

    Communicates: one all-reduce of 8 bytes.
    """
    mine = sum(weight_sum(batch.labels_BS, weighting) for batch in batches)
    return sum_over_ranks([mine], ranks)[0] * layout.dp_degree / layout.world_size


def count_tokens(batches: Sequence[Batch], ranks: Ranks, layout: Layout) -> TokenCount:
    """Count the tokens of one optimizer step over all micro-batches and ranks, those of shared samples once.

    Mute micro-batches do not count: another rank has their sample.

    Communicates: one all-reduce of 24 bytes.
    """
    num_sharing = layout.world_size // layout.dp_degree
    batches = [batch for batch in batches if not batch.is_mute]
    visual = sum(batch.num_visual_tokens for batch in batches)
    text = sum(batch.num_tokens for batch in batches) - visual
    supervised = sum(batch.num_supervised_tokens for batch in batches)
    return TokenCount(*(total / num_sharing for total in sum_over_ranks([text, visual, supervised], ranks)))
