"""Greedy generation by a pipeline: every stage runs where it stands, and no rank ever has all layers.

Enters: a `PipelinedModel` and left-padded prompts. Leaves: the new tokens, on every rank of the pipeline. There is no
cache of keys: each new token runs the whole sequence through all stages, one after the other. That is slow, and takes
no memory but the activations of one batch and the logits of one position a prompt; an evaluation's answers are short.
Chapter 1.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from vlmcourse.data.samples import Batch
from vlmcourse.parallel.microbatches import StepBatch, check_batches, stack_batches
from vlmcourse.parallel.padding import round_up
from vlmcourse.parallel.pipeline import Pipeline
from vlmcourse.parallel.pipelined import PipelinedModel


@torch.no_grad()
def generate_in_pipeline(
    model: PipelinedModel, batch: Batch, *, max_new_tokens: int, eos_token_id: int, stop_early: bool = True
) -> Tensor:
    """Continue each prompt with its most likely next token until it ends.

    Args:
        model: in evaluation mode, outside of context parallelism (`without_context`).
        batch: prompts padded on the left, on the device; the same on every rank of the pipeline.
        max_new_tokens: tokens to add at most.
        eos_token_id: the token that ends an answer.
        stop_early: return as soon as every answer has ended; False always takes `max_new_tokens` passes.

    Returns:
        New tokens int64 [batch, at most max_new_tokens], equal on all ranks; after an answer's end `eos_token_id`.

    Raises:
        ValueError: if `max_new_tokens` is below 1, or the batch does not fit the model (see `check_batches`).
    Communicates: for each new token what crosses the boundaries between ranks, [batch, seq, width] or tiles, and a
        broadcast of 8 bytes a prompt.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: must be 1 or greater")
    pipeline = model.pipeline
    check_batches([batch], pipeline.stages[0])
    multiple = max(stage.sequence_parts for stage in pipeline.stages)
    lengths_B = batch.attention_mask_BS.sum(dim=1)
    step = _stack_prompts(batch, lengths_B, max_new_tokens - 1, multiple, pipeline)
    ids_BS = step.fields["input_ids_BS"]
    # Asked now, while there are prompts alone: an answer's own image tokens must not take features from later rows.
    step.fields["is_feature_BS"] = ids_BS == pipeline.stages[0].shape.image_token_id
    rows_B = torch.arange(ids_BS.shape[0], device=ids_BS.device)
    ended_B = torch.zeros_like(rows_B, dtype=torch.bool)
    written: list[Tensor] = []
    while True:
        step.fields["position_B"] = lengths_B + len(written) - 1
        next_B = _run_stages(pipeline, step).masked_fill(ended_B, eos_token_id)
        written.append(next_B)
        ended_B |= next_B == eos_token_id
        if len(written) == max_new_tokens or (stop_early and bool(ended_B.all())):
            return torch.stack(written, dim=1)
        ids_BS[rows_B, lengths_B + len(written) - 1] = next_B


def _stack_prompts(batch: Batch, lengths_B: Tensor, num_more: int, multiple: int, pipeline: Pipeline) -> StepBatch:
    """Return the prompts with their padding on the right, room for the answers in it.

    Without padding before them, all real tokens are seen by causal attention alone, and what stands behind a position
    never matters to it: no mask is needed.
    """
    num_positions = round_up(int(lengths_B.max()) + num_more, multiple)
    ids_BS = batch.input_ids_BS.new_zeros(len(lengths_B), num_positions)
    ids_BS += 0 if pipeline.stages[0].shape.image_token_id else 1  # any token but the one that stands for an image
    for row, length in enumerate(lengths_B.tolist()):
        ids_BS[row, :length] = batch.input_ids_BS[row, -length:]
    moved = dataclasses.replace(
        batch, input_ids_BS=ids_BS, labels_BS=ids_BS, attention_mask_BS=torch.ones_like(ids_BS, dtype=torch.bool)
    )
    return stack_batches([moved], pipeline.stages[0].shape, pipeline.device)


def _run_stages(pipeline: Pipeline, step: StepBatch) -> Tensor:
    """Run all stages once; return the most likely next token of each row, int64 [batch], on every rank."""
    here = {stage.stage: module for stage, module in zip(pipeline.stages, pipeline.modules, strict=True)}
    any_stage, x = pipeline.stages[0], step.tiles
    for number in range(pipeline.num_stages):
        before, owner = pipeline.owner.get(number - 1), pipeline.owner[number]
        if before is not None and before != owner:
            if before == pipeline.pp_rank:
                dist.send(x.contiguous(), group=pipeline.group, group_dst=owner)
            elif owner == pipeline.pp_rank:
                shape = any_stage.boundary_shape(number - 1, *step.microbatch_sizes)
                x = torch.empty(shape, dtype=any_stage.dtype, device=pipeline.device)
                dist.recv(x, group=pipeline.group, group_src=before)
        if owner == pipeline.pp_rank:
            x = here[number](x, **step.fields)
    last = pipeline.owner[pipeline.num_stages - 1]
    if last == pipeline.pp_rank:
        next_B = x[:, -1].argmax(dim=-1)
    else:
        next_B = torch.empty(step.batch_size, dtype=torch.int64, device=pipeline.device)
    dist.broadcast(next_B, group=pipeline.group, group_src=last)
    return next_B
