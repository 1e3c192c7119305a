"""Activation checkpointing of a plain model: what blocks keep for backward, chosen tower by tower.

Enters: a model, or a stage of one, whose towers keep their blocks in a list called `blocks`; no wrapper around it yet.
Leaves: the same object with the same parameters under the same names; covered blocks keep less and run again in
backward. The order of `apply_strategy` holds: tensor and context parallelism, then this, then DDP or FSDP around it, so
that a recomputed block is gathered once for recomputation and backward together. Chapter 4.

A tower's loop over its blocks stays as it is. A segment of one block replaces that block's `forward`, inside the hooks
that wrappers put around it. A segment of several takes their places in the loop and calls them with their hooks, also
when it runs again; tests count that FSDP gathers no weights more often for either.

Recomputation repeats what a block's forward sends under tensor and context parallelism, on all ranks alike.
Source: torch.utils.checkpoint documentation; torchtitan's order of tensor parallelism, checkpointing and FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vlmcourse.config import TrainConfig
from vlmcourse.layout import ParallelConfig
from vlmcourse.presets import VLMShape
from vlmcourse.recompute import RECOMPUTING_TOWERS, ActivationsConfig, Segment, plan_segments
from vlmcourse.train.offload import Offloading
from vlmcourse.values import ConfigError

KEPT_OPERATIONS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_attention_math", "_flash_attention_forward", "_efficient_attention_forward"),
    }
)
"""Operations of `torch.ops.aten` whose results a selective segment keeps: they take nearly all of a block's time."""


def _keep_or_recompute(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide about one operation of a selective segment."""
    is_kept = operation.namespace == "aten" and operation.overloadpacket.__name__ in KEPT_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class BlockRunner:
    """Runs one block or several in a row, recomputing or offloading what they keep; stands in for a `forward`."""

    def __init__(self, run: Callable[..., Any], segment: Segment | None, offloading: Offloading | None) -> None:
        """Wrap a function.

        Args:
            run: the blocks; a bound method or an object, so that a copied model runs its own blocks.
            segment: how to recompute; None keeps everything.
            offloading: moves what is kept then; None leaves it where it is.
        """
        self.run, self.segment, self.offloading = run, segment, offloading

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks; without gradients just that."""
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        with self.offloading.hooks() if self.offloading is not None else nullcontext():
            if self.segment is None:
                return self.run(*args, **kwargs)
            options: dict[str, Any] = {}
            if self.segment.selective:
                options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_or_recompute)
            # Reentrant checkpointing would drop the gradients of blocks whose input needs none, such as the first.
            return checkpoint(self.run, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs)


class _InARow:
    """Several blocks as one function."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)

    def __call__(self, x: Any, *others: Any) -> Any:
        for block in self.blocks:
            x = block(x, *others)
        return x


class SegmentedBlocks(nn.ModuleList):
    """A tower's blocks under their old names; in training, its iteration yields whole segments to call."""

    def __init__(self, blocks: nn.ModuleList, segments: Sequence[Segment], offloading: Offloading | None) -> None:
        super().__init__()
        for name, block in blocks.named_children():
            self.add_module(name, block)
        plain = self._in_order()
        self.segments = tuple(segments)
        self.runners = [
            BlockRunner(_InARow([plain[i] for i in segment.blocks]), segment, offloading) for segment in segments
        ]

    def _in_order(self) -> list[nn.Module]:
        return [block for _, block in self.named_children()]

    def __iter__(self) -> Iterator[Any]:
        """Yield what a forward pass calls one after the other: segments in training, blocks otherwise."""
        return iter(self.runners if self.training and torch.is_grad_enabled() else self._in_order())

    def __getitem__(self, index: int) -> nn.Module:  # type: ignore[override]
        """Return the block at a place in this list."""
        return self._in_order()[index]


def cover_blocks(
    tower: nn.Module, segments: Sequence[Segment], offload: bool = False, offloading: Offloading | None = None
) -> None:
    """Let some blocks of a tower keep only their segments' inputs.

    Args:
        tower: any module that runs the blocks of its list `blocks` one after the other, each with the same arguments
            but the first; changed in place. What it had before is undone.
        segments: from `plan_segments` or `split_segments`; longer ones than one block must cover all blocks.
        offload: also move what all blocks keep to the host's memory.
        offloading: does it; by default one of this tower's own.

    Raises:
        ValueError: if segments of several blocks leave blocks out, or a segment names a block that is not there; if
            the tower has no list `blocks`, or the segments are none.
    """
    _list_of_blocks(tower)  # refuses what is no tower, such as segments given first
    segments = tuple(segments) if isinstance(segments, Iterable) else (segments,)  # type: ignore[assignment]
    if any(not isinstance(segment, Segment) for segment in segments):
        raise ValueError(
            f"segments = {segments!r:.60}: must be `Segment`s; after the tower, give what "
            "plan_segments(policy, number of blocks) returns"
        )
    uncover_blocks(tower)
    blocks = dict(enumerate(block for _, block in _list_of_blocks(tower).named_children()))
    covered = [i for segment in segments for i in segment.blocks]
    if len(set(covered)) < len(covered) or not set(covered) <= set(blocks):
        raise ValueError(f"segments cover the blocks {covered} of a tower of {len(blocks)}: each at most once, from 0")
    if offload and offloading is None:
        offloading = Offloading()
    if any(segment.num_blocks > 1 for segment in segments):
        if covered != list(blocks):
            raise ValueError(
                f"segments of several blocks cover {covered} of {len(blocks)} blocks: they must cover all, in order"
            )
        tower.blocks = SegmentedBlocks(tower.blocks, segments, offloading)  # type: ignore[arg-type]
        return
    of_block = {segment.first: segment for segment in segments}
    for i, block in blocks.items():
        if i in of_block or offloading is not None:
            block.forward = BlockRunner(block.forward, of_block.get(i), offloading)


def uncover_blocks(tower: nn.Module) -> None:
    """Undo `cover_blocks`: all blocks keep everything again.

    Raises:
        ValueError: if the tower has no list `blocks`.
    """
    blocks = _list_of_blocks(tower)
    if isinstance(blocks, SegmentedBlocks):
        tower.blocks = nn.ModuleList(list(blocks.children()))
    for block in blocks.children():
        if isinstance(block.__dict__.get("forward"), BlockRunner):
            del block.__dict__["forward"]


def _list_of_blocks(tower: nn.Module) -> nn.ModuleList:
    """Return the list that a tower's forward goes through; raises ValueError if there is none."""
    blocks = getattr(tower, "blocks", None)
    if isinstance(blocks, nn.ModuleList):
        return blocks
    found = "it has none" if blocks is None else f"its `blocks` is a {type(blocks).__name__}"
    raise ValueError(
        f"this {type(tower).__name__} needs its layers in an nn.ModuleList called `blocks`, but {found}: give the "
        "tower whose forward runs them one after the other, such as model.vision, or rename your list"
    )


def apply_activations(model: nn.Module, config: ActivationsConfig) -> None:
    """Carry the section [activations] out on a model or a stage of a pipeline, in place.

    Args:
        model: its towers `vision` and `language` have lists called `blocks`.
        config: policies by tower.

    Raises:
        RuntimeError: if not exactly the blocks that the policies name are covered then.
    """
    offloading = Offloading() if config.offload else None
    for name in RECOMPUTING_TOWERS:
        tower = model.get_submodule(name)
        if config.offload and not any(p.requires_grad for p in tower.parameters()) and name == "vision":
            continue  # a frozen vision tower keeps nothing
        names = [int(number) for number, _ in tower.get_submodule("blocks").named_children()]
        segments = plan_segments(getattr(config, name), len(names), names[0] if names else 0)
        cover_blocks(tower, segments, offload=config.offload, offloading=offloading)
        found, expected = covered_blocks(tower), [names[i] for segment in segments for i in segment.blocks]
        if found != expected:
            raise RuntimeError(
                f"activations.{name} = {getattr(config, name)!r}: blocks {found} are covered instead of {expected}; "
                "something else replaced their forward or their list"
            )


def covered_blocks(tower: nn.Module) -> list[int]:
    """Return the numbers in the whole tower of the blocks that run again in backward."""
    blocks = tower.get_submodule("blocks")
    numbers = [int(name) for name, _ in blocks.named_children()]
    if isinstance(blocks, SegmentedBlocks):
        return [numbers[i] for segment in blocks.segments for i in segment.blocks]
    runners = [block.__dict__.get("forward") for _, block in blocks.named_children()]
    return [
        number
        for number, runner in zip(numbers, runners, strict=True)
        if isinstance(runner, BlockRunner) and runner.segment is not None
    ]


def plan_activations(
    config: TrainConfig, parallel: ParallelConfig, shape: VLMShape
) -> Callable[[nn.Module], None] | None:
    """Return what `apply_strategy` calls to carry out the section [activations]; None where it asks for nothing.

    Args:
        config: the run.
        parallel: as settled, no longer auto.
        shape: of the model.

    Raises:
        ConfigError: if the policies do not go with the ranks' work, or would cover no block at all.
    """
    activations = config.activations
    found = activations.contradictions(parallel, config.model.freeze)
    found += activations.uncovered({name: getattr(shape, name).num_layers for name in RECOMPUTING_TOWERS})
    if found:
        raise ConfigError("The training configuration", found)
    return None if activations.is_plain else partial(apply_activations, config=activations)
