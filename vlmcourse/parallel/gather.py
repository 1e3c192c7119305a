"""Whole weights again from whatever the ranks hold of them: to export, to compare.

Enters: a model under any strategy. Leaves: whole weights or gradients on every rank, in the memory of a whole copy.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from vlmcourse.parallel.apply import named_plain_parameters
from vlmcourse.parallel.comm import gather_full
from vlmcourse.parallel.engines import gather_engine_state
from vlmcourse.parallel.padding import cut_to, plain_sizes
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.sync import is_engine
from vlmcourse.presets import VLMShape


def gather_plain_state(model: nn.Module, shape: VLMShape, *, gradients: bool = False) -> dict[str, Tensor]:
    """Return every whole weight by its name in the plain model, on the CPU of every rank; all ranks must call this.

    Args:
        model: under any strategy.
        shape: of the plain model; zeros that were added to make a number divide are cut off.
        gradients: return the `.grad` of the parameters that have one instead.
    Communicates: an all-gather of each sharded weight; in a pipeline also one of each stage's weights.
    """
    if is_engine(model):
        return gather_engine_state(model, gradients=gradients)
    sizes, state = plain_sizes(shape), {}
    for name, parameter in named_plain_parameters(model):
        tensor = parameter.grad if gradients else parameter
        if tensor is not None:
            state[name] = cut_to(gather_full(tensor), sizes[name])
    if isinstance(model, PipelinedModel):
        of_stages: list[Any] = [None] * model.pipeline.pp
        dist.all_gather_object(of_stages, state, group=model.pipeline.group)
        state = {name: tensor for of_stage in of_stages for name, tensor in of_stage.items()}
    return state
