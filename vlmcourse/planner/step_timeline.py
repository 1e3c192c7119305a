"""The timeline of one data-parallel step as arithmetic predicts it: forward, backward, and all-reduces beside backward.

Enters: FLOPs of a rank's step, the speed at which it computes, a `Link`, bytes of gradients. Leaves: `spans.Span`s,
which the drawing of measured timelines draws too. Loading of samples, the optimizer and Python between operators are
left out: what a measured step takes longer than this is theirs, and that of every assumption. Chapter 6. Of any plan
`step_time.py` says what a step takes; this is one bucket after the other, to be set beside a trace.

Gradients are taken to become ready at an even pace during backward, and to be sent in buckets as DDP does: a small
first one, so that sending begins early, then large ones, one after the other, each when its last gradient is ready.

Source: Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704), section 3.2; defaults of DistributedDataParallel.
"""

from __future__ import annotations

import math

from vlmcourse.planner.flops import StepFlops
from vlmcourse.planner.network import Link
from vlmcourse.spans import BACKWARD, COMMUNICATION, COMPUTE, FORWARD, Span

MIB = 2**20
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
"""DDP's defaults."""


def estimate_ddp_timeline(
    flops: StepFlops, flop_per_s: float, link: Link, gradient_bytes: int, num_ranks: int
) -> list[Span]:
    """Estimate what every rank does when in a step of one micro-batch under DDP, all ranks alike.

    Args:
        flops: of one rank's micro-batch; what is recomputed runs in backward.
        flop_per_s: that the rank computes with.
        link: between the ranks.
        gradient_bytes: of all gradients of a rank.
        num_ranks: of the run; one alone sends nothing.

    Returns:
        Spans in seconds since the step began.

    Raises:
        ValueError: if a number is out of range.
    """
    if not (math.isfinite(flop_per_s) and flop_per_s > 0 and gradient_bytes > 0 and num_ranks >= 1):
        raise ValueError(
            f"flop_per_s = {flop_per_s}, gradient_bytes = {gradient_bytes}, num_ranks = {num_ranks}: need "
            "numbers above 0"
        )
    forward_s = flops.forward / flop_per_s
    backward_s = (flops.hardware - flops.forward) / flop_per_s
    spans = [
        (COMPUTE, FORWARD, 0.0, forward_s),
        (COMPUTE, BACKWARD, forward_s, forward_s + backward_s),
    ]
    ready_bytes, free_s = 0, 0.0
    while num_ranks > 1 and ready_bytes < gradient_bytes:
        size = min(FIRST_BUCKET_BYTES if ready_bytes == 0 else BUCKET_BYTES, gradient_bytes - ready_bytes)
        ready_bytes += size
        begin_s = max(free_s, forward_s + backward_s * ready_bytes / gradient_bytes)
        free_s = begin_s + link.estimate_s("all-reduce", size, num_ranks)
        spans.append((COMMUNICATION, "all_reduce", begin_s, free_s))
    return [Span(rank, lane, name, begin_s, end_s) for rank in range(num_ranks) for lane, name, begin_s, end_s in spans]
