"""Matrix products of numbers of 8 bits: e4m3 for weights and activations, e5m2 for gradients, a scale for each tensor.

Enters: a plain model. Leaves: the same model, the linear layers of its blocks and its projector computing with fp8
operands. Weights, their gradients and the optimizer stay fp32; all else runs under bf16 autocast. Here the casts are
real and the product is made in fp32 of what survived them, which costs time instead of saving it: a model of fp8's
numerics for CPU and older GPUs. Where a GPU has fp8 and torchao is installed, torchao's layers with real fp8 products
take their place.

A scale comes from all elements of one tensor of one micro-batch. What shows a rank a part of it, or more padding, would
change scales and so roundings: the configuration refuses fp8 with tp, cp and pp. Chapter 3.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433), sections 3 and 4.1.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, cast

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Of weights and activations: more digits. Of gradients: more range."""
LEFT_OUT = ("lm_head",)
"""Layers that stay in bf16: the output matrix, whose logits decide between neighbors."""
MIN_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with fp8 products (Ada; Hopper is 9.0)."""


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast a tensor to 8 bits after scaling its largest element to the largest number of the format.

    Args:
        x: finite, any shape and float type.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        The numbers in `dtype`, and the scale they were multiplied by, a float32 scalar; 1 for a tensor of zeros.

    Raises:
        ValueError: if `dtype` is another format.
    """
    if dtype not in (FORWARD, BACKWARD):
        raise ValueError(f"dtype = {dtype}: must be a format of 8 bits; choose {FORWARD} or {BACKWARD}")
    largest = torch.finfo(dtype).max
    amax = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    scale = torch.where(amax > 0, largest / amax.clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    # Products may round to just above the largest number, and what a cast makes of that depends on the device.
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale


def from_fp8(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return what an 8-bit tensor stands for, float32."""
    return numbers.float() / scale


class Fp8Product(torch.autograd.Function):
    """x @ weight.T with all three products of a linear layer made of 8-bit operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply `x` [..., in] by `weight` [out, in] after casting both to e4m3; returns fp32 [..., out]."""
        x8, x_scale = to_fp8(x, FORWARD)
        # The weight itself is kept, not a copy: under FSDP its memory is freed and filled again before backward.
        ctx.save_for_backward(x8, x_scale, weight)
        ctx.x_dtype = x.dtype
        with torch.autocast(x.device.type, enabled=False):
            return from_fp8(x8, x_scale) @ from_fp8(*to_fp8(weight, FORWARD)).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of both operands, the incoming one cast to e5m2."""
        x8, x_scale, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        gradient = from_fp8(*to_fp8(grads[0], BACKWARD))
        if ctx.needs_input_grad[0]:
            grad_x = (gradient @ from_fp8(*to_fp8(weight, FORWARD))).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            x = from_fp8(x8, x_scale)
            grad_weight = (gradient.flatten(0, -2).T @ x.flatten(0, -2)).to(weight.dtype)
        return grad_x, grad_weight


class Fp8Linear(nn.Linear):
    """A linear layer whose products are those of `Fp8Product`; parameters and their names are nn.Linear's."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out], in the type that autocast gives a linear layer, else in the input's."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        y = cast(Tensor, Fp8Product.apply(input, self.weight)).to(dtype)
        return y if self.bias is None else y + self.bias.to(dtype)


def convert_to_fp8(model: nn.Module, device: torch.device) -> list[str]:
    """Let the linear layers of a plain model compute in fp8.

    Args:
        model: plain, before any strategy is applied; changed in place.
        device: where it will run.

    Returns:
        The names of the layers.

    Raises:
        ValueError: if there is no layer to convert.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in LEFT_OUT
    }
    if not layers:
        raise ValueError(f"fp8 finds no nn.Linear in this {type(model).__name__}: there is nothing to convert")
    if has_real_fp8(device):
        _convert_by_torchao(model, set(layers))
    else:
        for layer in layers.values():
            layer.__class__ = Fp8Linear  # keeps parameters, names and hooks
    return list(layers)


def has_real_fp8(device: torch.device) -> bool:
    """Tell whether products of 8-bit numbers are made in hardware here: a GPU that has them, and torchao.

    Where the GPU has them and torchao is missing, a warning says so.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return False
    if importlib.util.find_spec("torchao") is None:
        logger.warning("fp8 is simulated, which is slower than bf16: this GPU has it, but torchao is not installed")
        return False
    return True


def _convert_by_torchao(model: nn.Module, names: set[str]) -> None:
    """Put torchao's layers with dynamic per-tensor scales in the place of those named.

    The hardware's products need multiples of 16. Layers of other widths stay in bf16. The number of tokens, over which
    the product for a weight's gradient adds up, is padded with zeros in each product.

    Source: torchao.float8 documentation, `Float8LinearConfig` (dynamic and per tensor are its defaults).
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    def is_converted(module: nn.Module, name: str) -> bool:
        fits = isinstance(module, nn.Linear) and module.in_features % 16 == module.out_features % 16 == 0
        return name in names and fits

    convert_to_float8_training(model, module_filter_fn=is_converted, config=Float8LinearConfig(pad_inner_dim=True))
