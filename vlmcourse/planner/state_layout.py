"""Why a rank's training state is not what the formula says: padding, uneven shares, copies, what is freed early.

Enters: shapes of the trained parameters by optimizer group, a strategy and a number of ranks. Leaves: bytes that an
implementation adds to `estimate_state_bytes` or takes from it, each with its reason, computed from how it cuts tensors
up and from nothing that was measured. fp32 training with AdamW, at the moment between backward and update. Chapter 5.

Source: documentation and code of torch 2.13 (ZeroRedundancyOptimizer, fully_shard) and DeepSpeed 0.19.8
(runtime/zero/stage_1_and_2.py and stage3.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlmcourse.planner.memory import StateBytes, estimate_state_bytes
from vlmcourse.strategies import DEEPSPEED

ZERO_STAGES = {"single": 0, "ddp": 0, "accelerate-ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, **DEEPSPEED}
"""Strategy -> the stage of ZeRO that it carries out."""
FP32_BYTES = 4
MOMENTS = 2
ALIGNMENT = 2
"""DeepSpeed's stages 1 and 2 fill a group up to a multiple of this x the ranks."""
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's `reduce_bucket_size` by default."""
Shape = tuple[int, ...]
Groups = Sequence[Sequence[Shape]]
"""Shapes of the trained parameters in the order of the optimizer, group by group."""


@dataclass(frozen=True)
class Difference:
    """Bytes that one rank has more than the formula says, or fewer, and why."""

    owner: str
    """weights, gradients, optimizer; buffers, which the formula does not count."""
    num_bytes: int
    reason: str


def count_params(groups: Groups) -> int:
    """Return the elements of all parameters."""
    return sum(math.prod(shape) for group in groups for shape in group)


def estimate_fp32_state(groups: Groups, strategy: str, num_ranks: int) -> StateBytes:
    """Return what the formula says of fp32 training with AdamW: 16 bytes a parameter, split as the stage splits.

    Raises:
        ValueError: if the strategy is not in `ZERO_STAGES`, or a number is out of range.
    """
    if strategy not in ZERO_STAGES:
        raise ValueError(f"strategy = {strategy!r}: the formula knows {', '.join(ZERO_STAGES)}; choose one of them")
    return estimate_state_bytes(
        count_params(groups), precision="fp32", zero_stage=ZERO_STAGES[strategy], shard_degree=num_ranks
    )


def explain_state(
    groups: Groups, strategy: str, num_ranks: int, rank: int, *, offloads: bool = False
) -> list[Difference]:
    """Say where one rank's state differs from `estimate_fp32_state`, in bytes.

    Args:
        groups: of the whole model.
        strategy: a key of `ZERO_STAGES`; DeepSpeed's with the settings that this package makes.
        num_ranks: of the run.
        rank: from 0.
        offloads: whether the optimizer's state lies in main memory (offload.optimizer = 'cpu'). Bytes there count too:
            on CPU ranks main memory is the device's memory.

    Returns:
        What is not 0.

    Raises:
        ValueError: for another strategy, or a rank out of range.
    """
    formula = estimate_fp32_state(groups, strategy, num_ranks)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank = {rank} with num_ranks = {num_ranks}: must be from 0 to {num_ranks - 1}")
    stage = DEEPSPEED.get(strategy, 0)
    if stage == 3:
        found = _of_deepspeed_3(groups, num_ranks, formula, offloads)
    elif stage:
        found = _of_deepspeed_1_and_2(groups, num_ranks, rank, formula, offloads)
    elif strategy == "zero1":
        found = _of_torch_zero_1(groups, num_ranks, rank, formula)
    elif strategy in ("zero2", "fsdp"):
        found = _of_fsdp(groups, num_ranks, rank, formula)
    else:
        found = iter([_counters(sum(map(len, groups)), "a parameter")])
    return [difference for difference in found if difference.num_bytes]


def _counters(number: int, of_what: str) -> Difference:
    return Difference("optimizer", FP32_BYTES * number, f"{number} step counters of Adam, one {of_what}")


def _of_torch_zero_1(groups: Groups, num_ranks: int, rank: int, formula: StateBytes) -> Iterator[Difference]:
    sizes, counts = [0] * num_ranks, [0] * num_ranks
    for group in groups:
        for num_elements in sorted(map(math.prod, group), reverse=True):
            least = sizes.index(min(sizes))
            sizes[least] += num_elements
            counts[least] += 1
    reason = "parameters are dealt out whole, the largest first: shares are uneven"
    yield Difference("optimizer", MOMENTS * FP32_BYTES * sizes[rank] - formula.optimizer, reason)
    yield _counters(counts[rank], "a parameter of this rank")


def _of_fsdp(groups: Groups, num_ranks: int, rank: int, formula: StateBytes) -> Iterator[Difference]:
    shapes = [shape for group in groups for shape in group]
    mine = sum(_rows_of(shape[0], num_ranks, rank) * math.prod(shape[1:]) for shape in shapes)
    shard = formula.optimizer // (MOMENTS * FP32_BYTES)
    early = formula.weights - FP32_BYTES * shard  # zero2: the formula has whole weights
    yield Difference("weights", -early, "FSDP2 keeps shards between steps, and whole weights from forward to backward")
    reason = "every parameter's rows are cut alike: the last ranks have fewer"
    yield Difference("weights", FP32_BYTES * (mine - shard), reason)
    yield Difference("gradients", FP32_BYTES * (mine - shard), reason)
    yield Difference("optimizer", MOMENTS * FP32_BYTES * (mine - shard), reason)
    yield _counters(len(shapes), "a parameter")


def _rows_of(num_rows: int, num_ranks: int, rank: int) -> int:
    """Return the rows that a rank has where each but the last ones gets as many, rounded up."""
    each = -(-num_rows // num_ranks)
    return max(0, min(each, num_rows - rank * each))


def _of_deepspeed_1_and_2(
    groups: Groups, num_ranks: int, rank: int, formula: StateBytes, offloads: bool
) -> Iterator[Difference]:
    num_params = count_params(groups)
    shard = formula.optimizer // (MOMENTS * FP32_BYTES)
    whole = part = reduced = 0
    for group in groups:
        sizes = [math.prod(shape) for shape in group]
        filled = sum(sizes) + fill_group(group, num_ranks)
        whole, part = whole + filled, part + filled // num_ranks
        reduced += _kept_gradients(sizes, filled // num_ranks, rank)
    filling = "each group is filled up to a multiple of 2 x the ranks"
    yield Difference("weights", FP32_BYTES * (whole - num_params), filling)
    reason = "its whole gradients are freed as soon as they are reduced"
    yield Difference("gradients", FP32_BYTES * shard - formula.gradients, reason)
    if offloads:
        yield Difference("gradients", FP32_BYTES * (part - shard), filling)
        largest = max(math.prod(shape) for group in groups for shape in group)
        reason = "its part of the weights on the way to the device, and two buffers for the largest gradient"
        yield Difference("buffers", FP32_BYTES * (part + 2 * largest), reason)
    else:
        reason = "a gradient that the border of its part cuts is kept whole; ends of parts are filled up"
        yield Difference("gradients", FP32_BYTES * (reduced - shard), reason)
    yield Difference("optimizer", FP32_BYTES * part, "an fp32 copy of its part of the weights, although these are fp32")
    yield Difference("optimizer", MOMENTS * FP32_BYTES * (part - shard), filling)
    yield _counters(len(groups), "a group")


def fill_group(group: Sequence[Shape], num_ranks: int) -> int:
    """Return the elements that DeepSpeed's stages 1 and 2 add to an optimizer group, so that its parts are equal."""
    return -sum(map(math.prod, group)) % (ALIGNMENT * num_ranks)


def _kept_gradients(sizes: Sequence[int], part: int, rank: int) -> int:
    """Return the elements of the gradients that one group's part touches: those that it cuts are whole."""
    first, last, start, kept = rank * part, (rank + 1) * part, 0, 0
    for size in sizes:
        if start < last and start + size > first:
            kept += size
        start += size
    return kept + max(0, last - max(start, first))  # and zeros at the end of the last part


def _of_deepspeed_3(groups: Groups, num_ranks: int, formula: StateBytes, offloads: bool) -> Iterator[Difference]:
    shard = formula.weights // FP32_BYTES
    part = sum(-(-math.prod(shape) // num_ranks) for group in groups for shape in group)
    filling = "each parameter is filled up until the ranks divide it"
    yield Difference("weights", FP32_BYTES * (part - shard), filling)
    yield Difference("gradients", FP32_BYTES * (part - shard), filling)
    if offloads:
        yield Difference("gradients", FP32_BYTES * part, "a copy of them in main memory, for the update there")
    yield Difference("optimizer", FP32_BYTES * part, "an fp32 copy of its part of the weights, although these are fp32")
    yield Difference("optimizer", MOMENTS * FP32_BYTES * (part - shard), filling)
    yield _counters(len(groups), "a group")
    reason = f"a bucket of {BUCKET_ELEMENTS:,} elements (reduce_bucket_size), however small the model"
    yield Difference("buffers", FP32_BYTES * BUCKET_ELEMENTS, reason)
