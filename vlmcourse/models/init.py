"""Fresh weights, the same for the same seed.

Matrices start with a standard deviation of 1 / sqrt(inputs), which keeps the size of activations at any width; those
that write to the residual stream are smaller by sqrt(2 x layers), so that the stream does not grow with depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vlmcourse.models.vlm import VLM

POSITION_STD = 0.02
Whole = Callable[[list[nn.Parameter]], AbstractContextManager[None]]
"""Makes some weights whole for as long as they are being filled."""


@torch.no_grad()
def init_weights(
    model: VLM, seed: int | None = None, *, device: torch.device | None = None, whole: Whole = nullcontext
) -> None:
    """Fill every weight in place.

    Args:
        model: a model whose weights are real tensors (not meta).
        seed: of a generator used for this alone; None draws from torch's global one.
        device: of that generator, by default the weights'. A generator of another device gives other numbers.
        whole: entered with the weights that are filled next, of one module at a time, where each process has a part of
            each weight only.
    """
    generator = None
    if seed is not None:
        generator = torch.Generator(device or next(model.parameters()).device).manual_seed(seed)
    vision, language = model.vision, model.language
    for tower, depth in ((vision, len(vision.blocks)), (model.projector, 0), (language, len(language.blocks))):
        for name, module in tower.named_modules():
            writes_residual = depth > 0 and name.endswith((".out_proj", ".down_proj"))
            with whole(list(module.parameters(recurse=False))):
                _init_module(module, 1 / math.sqrt(2 * depth) if writes_residual else 1.0, generator)
    with whole([vision.class_token, vision.position_embedding]):
        _normal(vision.class_token, POSITION_STD, generator)
        _normal(vision.position_embedding, POSITION_STD, generator)
    for name, weight in vision.named_parameters():
        if name.endswith(("layer_scale1", "layer_scale2")):
            with whole([weight]):
                nn.init.constant_(weight, vision.shape.layer_scale_init)


def _init_module(module: nn.Module, scale: float, generator: torch.Generator | None) -> None:
    """Fill the weights that a module itself holds; `scale` multiplies a linear layer's standard deviation."""
    if isinstance(module, nn.Linear):
        _normal(module.weight, scale / math.sqrt(module.in_features), generator)
    elif isinstance(module, nn.Conv2d):
        _normal(module.weight, 1 / math.sqrt(module.weight[0].numel()), generator)
    elif isinstance(module, nn.Embedding):
        _normal(module.weight, 1 / math.sqrt(module.embedding_dim), generator)
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        nn.init.ones_(module.weight)
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.LayerNorm)) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _normal(weight: Tensor, std: float, generator: torch.Generator | None) -> None:
    if generator is None or generator.device == weight.device:
        nn.init.normal_(weight, std=std, generator=generator)
    else:
        weight.copy_(
            torch.empty(weight.shape, dtype=weight.dtype, device=generator.device).normal_(0, std, generator=generator)
        )
