"""Bytes that training keeps for one parameter, as data: by precision recipe and by optimizer.

Enters: nothing. Leaves: the tables `PRECISIONS` and `OPTIMIZERS` that a `Plan` names. The sums that matter:
fp32 Adam 4 + 4 + 8 = 16 bytes, mixed-precision Adam 2 + 2 + 12 = 16, with fp32 gradients 2 + 4 + 12 = 18, bf16 alone
2 + 2 + 4 = 8. `TRAINED` says what each `train.precision` keeps and `choose_precision` which of them a device is for.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.hardware import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In what formats weights and gradients are kept between operations."""

    name: str
    weight_bytes: int
    """Of one weight that the forward pass reads (or, under autocast, casts from)."""
    gradient_bytes: int
    """Of one gradient, as it is accumulated."""
    master_bytes: int
    """Of the extra fp32 copy that the optimizer updates; 0 where the weights are fp32 themselves."""
    compute_dtype: str
    """fp32, bf16, fp16 or fp8: what matrix products are in; stored activations too, save that those of fp8 are bf16."""
    moment_bytes: int = 8
    """Of Adam's two moments, where the optimizer's name does not say it."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self.compute_dtype == "fp32" else 2

    @property
    def state_bytes(self) -> int:
        """Bytes that training with Adam keeps for one parameter: weight, gradient, master copy, moments."""
        return self.weight_bytes + self.gradient_bytes + self.master_bytes + self.moment_bytes


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32", weight_bytes=4, gradient_bytes=4, master_bytes=0, compute_dtype="fp32"),
        # Autocast keeps fp32 weights and casts on the way into each matrix product.
        Precision(name="bf16_autocast", weight_bytes=4, gradient_bytes=4, master_bytes=0, compute_dtype="bf16"),
        # Source: Micikevicius et al. 2018; Rajbhandari et al. 2020, section 3.1.
        Precision(name="bf16_mixed", weight_bytes=2, gradient_bytes=2, master_bytes=4, compute_dtype="bf16"),
        Precision(name="bf16_fp32_grads", weight_bytes=2, gradient_bytes=4, master_bytes=4, compute_dtype="bf16"),
        Precision(name="fp16_mixed", weight_bytes=2, gradient_bytes=2, master_bytes=4, compute_dtype="fp16"),
    )
}

TRAINED: dict[str, Precision] = {
    "fp32": PRECISIONS["fp32"],
    "bf16": PRECISIONS["bf16_autocast"],
    "fp16": Precision(name="fp16_autocast", weight_bytes=4, gradient_bytes=4, master_bytes=0, compute_dtype="fp16"),
    "bf16_master": PRECISIONS["bf16_mixed"],
    "bf16_pure": Precision(
        name="bf16_pure", weight_bytes=2, gradient_bytes=2, master_bytes=0, compute_dtype="bf16", moment_bytes=4
    ),
    "fp8": Precision(name="fp8_autocast", weight_bytes=4, gradient_bytes=4, master_bytes=0, compute_dtype="fp8"),
}
"""What each `train.precision` keeps and computes in. A `Plan` names none of those that are here alone: its recipes are
the ones that large models are published with."""


def choose_precision(device: DeviceSpec) -> str:
    """Return the `train.precision` for a device: bf16 where it has it, else fp16 (with a loss scaler), else fp32.

    fp8 is never chosen unasked: it needs a comparison of losses first.
    """
    return next(name for name in ("bf16", "fp16", "fp32") if device.supports(TRAINED[name].compute_dtype))


def precision_problem(precision: str, device: DeviceSpec) -> str:
    """Say why a device cannot train with a `train.precision`, and what to choose; "" where it can.

    Raises:
        ValueError: if there is no such precision.
    """
    if precision not in TRAINED:
        raise ValueError(f"precision = {precision!r}: choose one of {', '.join(TRAINED)}")
    dtype = TRAINED[precision].compute_dtype
    if device.supports(dtype):
        return ""
    instead = choose_precision(device)
    with_scaler = ", which brings its loss scaler," if instead == "fp16" else ""
    return (
        f"train.precision = {precision!r} computes in {dtype}, for which {device.name} has no hardware: choose "
        f"{instead!r}{with_scaler} or 'fp32'"
    )


OPTIMIZERS: dict[str, int] = {
    # Two fp32 moments. Source: Kingma and Ba 2015, algorithm 1.
    "adamw": 8,
    # Two one-byte moments. The fp32 scale of every block of 256 adds 1.6 % of these two bytes and is left out.
    # Source: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization".
    "adamw_8bit": 2,
    # One fp32 momentum.
    "sgd_momentum": 4,
}
"""Bytes of optimizer state for one parameter, without the master copy."""
