"""Zeros that make a number divide: heads of zeros in the vision tower, rows of zeros in the vocabulary.

Enters: a plain model. Leaves: the same model, some tensors longer at the end. InternViT-6B has 25 heads and the
InternVL2 vocabulary 92,553 rows, which no power of two divides. A head whose weights are all zero adds zero to the
output, gets a gradient of exactly zero and stays zero under AdamW with weight decay; a vocabulary row that no token
names and whose logit is minus infinity does too. Chapter 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlmcourse.models.vit import VisionAttention
from vlmcourse.models.vlm import VLM
from vlmcourse.presets import VLMShape


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def pad_vision_heads(model: VLM, tp_degree: int) -> None:
    """Append heads of zeros to every vision attention until `tp_degree` divides their number.

    The heads of the plain model keep their places, so the last rank holds the zeros. Memory and arithmetic of the
    attention grow by heads added / heads: 1 / 25 for InternViT-6B on 2 ranks.

    Args:
        model: plain; a pipeline stage without blocks of the vision tower stays as it is.
        tp_degree: ranks that share the heads.
    """
    num_heads = model.shape.vision.num_heads
    for module in model.modules():
        if isinstance(module, VisionAttention):
            width = round_up(num_heads, tp_degree) * module.head_width
            for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
                _lengthen(module.get_submodule(name), 0, width)
            _lengthen(module.out_proj, 1, width)


def pad_vocabulary(model: VLM, tp_degree: int) -> None:
    """Append rows of zeros to the embedding and the output matrix until `tp_degree` divides their number.

    Args:
        model: plain; what a pipeline stage lacks is passed over.
        tp_degree: ranks that share the vocabulary.
    """
    num_rows = round_up(model.shape.language.vocab_size, tp_degree)
    for name, module in model.named_modules():
        if name in ("language.embedding", "language.lm_head"):
            _lengthen(module, 0, num_rows)


def _lengthen(module: nn.Module, dim: int, length: int) -> None:
    """Append zeros along `dim` to every parameter of a module that has this dimension."""
    for name, weight in list(module.named_parameters(recurse=False)):
        missing = length - weight.shape[dim] if dim < weight.ndim else 0
        if missing:
            size = [*weight.shape]
            size[dim] = missing
            longer = torch.cat((weight.detach(), weight.new_zeros(size)), dim=dim)
            module.register_parameter(name, nn.Parameter(longer, requires_grad=weight.requires_grad))


def plain_sizes(shape: VLMShape) -> dict[str, torch.Size]:
    """Return the size of every parameter of the plain model by name; takes no memory."""
    with torch.device("meta"):
        return {name: weight.shape for name, weight in VLM(shape).named_parameters()}


def cut_to(tensor: Tensor, size: torch.Size) -> Tensor:
    """Return the beginning of `tensor` along every dimension; undoes the padding of this module."""
    for dim, length in enumerate(size):
        tensor = tensor.narrow(dim, 0, length)
    return tensor.contiguous()
