"""Bytes that training keeps for one parameter, as data: by precision recipe and by optimizer.

Enters: nothing. Leaves: the tables `PRECISIONS` and `OPTIMIZERS` that a `Plan` names. The sums that matter:
fp32 Adam 4 + 4 + 8 = 16 bytes, mixed-precision Adam 2 + 2 + 12 = 16, with fp32 gradients 2 + 4 + 12 = 18.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """fp32, bf16 or fp16: what matrix products and stored activations are in."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self.compute_dtype == "fp32" else 2


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
