"""The number format of a forward pass: fp32, or bf16 by autocast.

Under bf16, weights, gradients, optimizer state and what ranks exchange stay fp32; autocast only runs matrix products
and attention in bf16. That holds for every strategy, so that all of them give the same numbers (FSDP2's own
mixed-precision policy would also reduce in another type). bf16 has fp32's range of exponents: it needs no loss scaler,
which is for fp16.

fp32 is fp32 on every device. Left alone, PyTorch runs the convolution of the patch embedding in TF32 on GPUs since
Ampere (compute capability 8.0): fp32's range with 10 bits of fraction instead of 23. `forbid_tf32` switches that off.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def forbid_tf32() -> None:
    """Compute fp32 convolutions and matrix products of this process in fp32, not in TF32 or bf16; a `Trainer` calls it.

    It holds for the whole process, and also for what autocast leaves in fp32.
    """
    # The two older switches first, so that they agree with the newer one, which covers all back ends.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "ieee"  # type: ignore[reportAttributeAccessIssue]


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
