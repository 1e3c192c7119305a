"""The number format of a forward pass: fp32, or bf16 by autocast.

Under bf16, weights, gradients, optimizer state and what ranks exchange stay fp32; autocast only runs matrix products
and attention in bf16. That holds for every strategy, so that all of them give the same numbers (FSDP2's own
mixed-precision policy would also reduce in another type). bf16 has fp32's range of exponents: it needs no loss scaler,
which is for fp16.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context that a forward pass runs in.

    Args:
        precision: fp32 or bf16.
        device: where it runs.

    Raises:
        ValueError: if the precision is unknown, or the device computes no bf16.
    """
    if precision == "fp32":
        return nullcontext()
    if precision != "bf16":
        raise ValueError(f"train.precision = {precision!r}: choose fp32 or bf16")
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"train.precision = 'bf16' on {torch.cuda.get_device_name(device)}: it has no native bf16 (it came with "
            "compute capability 8.0); choose fp32"
        )
    return torch.autocast(device.type, dtype=torch.bfloat16)
