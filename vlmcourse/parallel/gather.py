"""A whole, plain model again from whatever the ranks hold of it: to evaluate with, to export, to compare.

Enters: a model under any strategy. Leaves: a plain `VLM` on every rank, in the memory of a whole copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.parallel.apply import unwrap
from vlmcourse.parallel.comm import gather_full
from vlmcourse.presets import VLMShape


def gather_plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return every whole weight by its name in the plain model, on the CPU of every rank; all ranks must call this.

    Communicates: an all-gather of each sharded weight.
    """
    return {name: gather_full(parameter) for name, parameter in unwrap(model).named_parameters()}


def gather_plain_model(model: nn.Module, shape: VLMShape, device: torch.device) -> VLM:
    """Return a plain copy of a distributed model on every rank; all ranks must call this.

    Args:
        model: under any strategy.
        shape: of the plain model.
        device: where the copy goes; it takes the memory of all weights.
    Communicates: see `gather_plain_state`.
    """
    plain = build_model(shape, device="meta")
    weights = {name: weight.to(device) for name, weight in gather_plain_state(model).items()}
    plain.load_state_dict(weights, assign=True)
    return plain.requires_grad_(False)
