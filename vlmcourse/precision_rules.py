"""Precisions that a run may name, and what each of them cannot be combined with, without torch.

Enters: a precision and a `ParallelConfig`. Leaves: what contradicts, one sentence each. Chapter 3.
"""

from __future__ import annotations

from vlmcourse.layout import ParallelConfig

PRECISIONS = ("fp32", "bf16", "fp16", "bf16_master", "bf16_pure", "fp8")
FP8_CUTS = {
    "tp": "each rank sees a part of the tensor only",
    "cp": "each rank sees its own positions of a sequence only",
    "pp": "a pipeline pads every micro-batch to the longest of its step, and padding is looked at too",
}
"""Degrees under which the scales of fp8 would be others than in one process, and why."""


def precision_problems(precision: str, parallel: ParallelConfig) -> list[str]:
    """Return which options of the ranks a precision does not go with, one sentence each."""
    found = []
    for axis, why in FP8_CUTS.items():
        if precision == "fp8" and (degree := getattr(parallel, axis)) > 1:
            found.append(
                f"train.precision = 'fp8' with {axis} = {degree}: a tensor's scale comes from its largest element, "
                f"and {why}; choose bf16, or {axis} = 1"
            )
    if precision in ("bf16_master", "bf16_pure") and parallel.compression != "none":
        found.append(
            f"train.precision = {precision!r} with parallel.compression = {parallel.compression!r}: gradients are bf16 "
            "already; leave compression out"
        )
    if precision == "fp8" and parallel.strategy == "auto":
        found.append("train.precision = 'fp8' with parallel.strategy = 'auto': it may choose tp, cp or pp; name one")
    return found
