"""The number formats of a training step, by the name that `train.precision` gives them.

=============  ==================  =========================  ===================================================
name           weights, gradients  matrix products            besides
=============  ==================  =========================  ===================================================
fp32           fp32, fp32          fp32
bf16           fp32, fp32          bf16, by autocast          no scaler: bf16 has the exponents of fp32
fp16           fp32, fp32          fp16, by autocast          a loss scaler (`train/scaler.py`)
bf16_master    bf16, bf16          bf16                       fp32 copy of the weights (`train/low_precision.py`)
bf16_pure      bf16, bf16          bf16                       updates are rounded at random (`train/rounding.py`)
fp8            fp32, fp32          8 bits; the rest bf16      a scale a tensor (`train/fp8.py`)
=============  ==================  =========================  ===================================================

Under autocast, weights, gradients, optimizer state and what ranks exchange stay fp32. That holds for every strategy, so
that all of them give the same numbers (FSDP2's own mixed-precision policy would also reduce in another type).

fp32 is fp32 on every device. Left alone, PyTorch runs the convolution of the patch embedding in TF32 on GPUs since
Ampere (compute capability 8.0): fp32's range with 10 bits of fraction instead of 23. `forbid_tf32` switches that off.
Chapter 3.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from vlmcourse.config import TrainConfig
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.precision_rules import PRECISIONS
from vlmcourse.train.fp8 import convert_to_fp8
from vlmcourse.train.scaler import LossScaler

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What autocast computes matrix products in; no autocast for the other names."""
BF16_WEIGHTS = ("bf16_pure", "bf16_master")


def forbid_tf32() -> None:
    """Compute fp32 convolutions and matrix products of this process in fp32, not in TF32 or bf16; a `Trainer` calls it.

    It holds for the whole process, and also for what autocast leaves in fp32.
    """
    # The two older switches first, so that they agree with the newer one, which covers all back ends.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "ieee"  # type: ignore[reportAttributeAccessIssue]


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that is unknown, or that this device does not compute in.

    Raises:
        ValueError: saying which one to choose instead.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"train.precision = {precision!r}: choose one of {', '.join(PRECISIONS)}")
    needs_bf16 = precision in BF16_WEIGHTS or AUTOCAST.get(precision) == torch.bfloat16
    if needs_bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"train.precision = {precision!r} on {torch.cuda.get_device_name(device)}: it has no native bf16 (it came "
            "with compute capability 8.0); choose fp16, which brings its loss scaler, or fp32"
        )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context that a forward pass runs in.

    Args:
        precision: one of `precision_rules.PRECISIONS`.
        device: where it runs.

    Raises:
        ValueError: if the precision is unknown, or the device does not compute in it.
    """
    check_precision(precision, device)
    if precision not in AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST[precision])


def prepare_weights(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Give a plain model the weights and layers of a precision; call it before any strategy is applied.

    Args:
        model: plain, on any device or on "meta"; changed in place.
        config: its `train.precision` counts.
        device: where the model will run.

    Raises:
        ValueError: if the device does not compute in it.
    """
    precision = config.train.precision
    check_precision(precision, device)
    if precision in BF16_WEIGHTS:
        model.to(torch.bfloat16)
    elif precision == "fp8":
        convert_to_fp8(model, device)


def build_scaler(precision: str, ranks: Ranks, num_averaged: int = 1) -> LossScaler:
    """Return the loss scaler of a run: one that works for fp16, and one that leaves everything as it is for others."""
    return LossScaler(ranks, num_averaged=num_averaged, enabled=precision == "fp16")
