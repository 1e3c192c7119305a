"""The micro-batches of one optimizer step, made equal in shape for a pipeline, whose buffers hold one shape.

Enters: batches of any sizes. Leaves: one `StepBatch` with all of them stacked: shorter rows are padded, missing tiles
are blank ones whose features go nowhere, so losses and gradients stay the same. Every check that can fail is made here,
before any rank waits for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from vlmcourse.data.samples import IGNORE_LABEL, Batch
from vlmcourse.models.vlm import VLM, check_image_tokens
from vlmcourse.presets import VLMShape


@dataclass(frozen=True)
class StepBatch:
    """All micro-batches of a step, stacked along the first dimension of every tensor."""

    num_microbatches: int
    batch_size: int
    """Samples of each micro-batch, padding rows included."""
    seq_len: int
    num_tiles: int
    """Tiles of each micro-batch, blank ones included; at least 1."""
    tiles: Tensor
    """[micro-batches x tiles, 3, height, width]."""
    num_patches: int
    fields: dict[str, Any]
    """What every stage's forward takes besides its input."""

    @property
    def microbatch_sizes(self) -> tuple[int, int, int, int]:
        """Samples, positions, tiles, and patches of a tile of one micro-batch."""
        return self.batch_size, self.seq_len, self.num_tiles, self.num_patches

    @property
    def sizes(self) -> tuple[int, ...]:
        """All that the shapes of messages depend on."""
        return self.num_microbatches, *self.microbatch_sizes, *self.tiles.shape[2:]

    @property
    def tiles_per_microbatch(self) -> Tensor:
        """The tiles of the first micro-batch."""
        return self.tiles[: self.num_tiles]


def check_batches(batches: Sequence[Batch], model: VLM) -> None:
    """Check that micro-batches fit the model and each other.

    Raises:
        ValueError: if image tokens and tiles differ in number, naming the sample; if a sequence is longer than
            `max_seq_len`; if tiles of two micro-batches differ in size.
    """
    sides = {tuple(batch.pixel_values_ICHW.shape[2:]) for batch in batches if batch.pixel_values_ICHW.shape[0]}
    if len(sides) > 1:
        raise ValueError(f"the tiles of a step have sizes {sorted(sides)}: a pipeline needs tiles of one size")
    for batch in batches:
        seq_len, longest = batch.input_ids_BS.shape[1], model.shape.language.max_seq_len
        if seq_len > longest:
            raise ValueError(
                f"a sequence of {seq_len} tokens is longer than the {longest} that this model's positions reach: "
                "shorten it, or raise language.max_seq_len"
            )
        tiles = batch.pixel_values_ICHW
        per_tile = model.projector.tokens_per_tile(*model.vision.patch_grid(tiles)) if tiles.shape[0] else 0
        is_image_BS = batch.input_ids_BS == model.shape.image_token_id
        check_image_tokens(is_image_BS, tiles.shape[0], per_tile, batch.tiles_per_sample, batch.sample_ids)


def check_same_batches(
    batches: Sequence[Batch], problem: str | None, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise on all ranks of a pipeline if one has a problem with its batches, or has others than the first.

    Args:
        batches: this rank's micro-batches of a step.
        problem: what this rank found wrong with them.
        group: the ranks of the pipeline.
        device: of this rank.

    Raises:
        ValueError: with the problem, where there is one; elsewhere naming the rank.
    Communicates: one all-gather of 32 bytes a rank.
    """
    text = hashlib.blake2b(digest_size=8)
    sizes = []
    for batch in batches:
        sizes += [*batch.input_ids_BS.shape, *batch.pixel_values_ICHW.shape]
        for tensor in (batch.input_ids_BS, batch.labels_BS, batch.attention_mask_BS):
            text.update(tensor.cpu().contiguous().numpy().tobytes())
    hashes = [text.digest(), hashlib.blake2b(str(sizes).encode(), digest_size=8).digest()]
    mine = [int(problem is not None), len(batches), *(int.from_bytes(h, "big") >> 1 for h in hashes)]
    here = torch.tensor(mine, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, here, group=group)
    if problem is not None:
        raise ValueError(f"rank {dist.get_rank()}: {problem}")
    for pp_rank, theirs in enumerate(everyone):
        if theirs[0] or not torch.equal(theirs, everyone[0]):
            what = "refuses its micro-batches" if theirs[0] else "has other micro-batches than rank 0"
            raise ValueError(
                f"rank {dist.get_rank()}: rank {pp_rank} of this pipeline {what}: all ranks of a pipeline must load "
                "the same samples, so draw them by the data-parallel rank"
            )


def stack_batches(batches: Sequence[Batch], shape: VLMShape, device: torch.device) -> StepBatch:
    """Pad the micro-batches of a step to one shape and stack them on a device.

    Args:
        batches: as `check_batches` accepts them.
        shape: the model's.
        device: where the tensors go.
    """
    batch_size = max(batch.input_ids_BS.shape[0] for batch in batches)
    seq_len = max(batch.input_ids_BS.shape[1] for batch in batches)
    # A stage cannot leave out its layers for text: one blank tile keeps the messages and the gradients defined.
    num_tiles = max(1, *(batch.pixel_values_ICHW.shape[0] for batch in batches))
    side_px = shape.vision.image_size_px
    height, width = next(
        (b.pixel_values_ICHW.shape[2:] for b in batches if b.pixel_values_ICHW.shape[0]), (side_px,) * 2
    )
    pad_id = 0 if shape.image_token_id else 1  # any token but the one that stands for an image

    def pad(tensor: Tensor, value: Any) -> Tensor:
        rows, columns = batch_size - tensor.shape[0], seq_len - tensor.shape[1]
        return F.pad(tensor, (0, columns, 0, rows), value=value)

    tiles = torch.zeros(len(batches), num_tiles, 3, height, width)
    for of_batch, batch in zip(tiles, batches, strict=True):
        of_batch[: batch.pixel_values_ICHW.shape[0]] = batch.pixel_values_ICHW
    patch = shape.vision.patch_size_px
    fields: dict[str, Any] = {
        "input_ids_BS": torch.cat([pad(batch.input_ids_BS, pad_id) for batch in batches]).to(device),
        "attention_mask_BS": torch.cat([pad(batch.attention_mask_BS, False) for batch in batches]).to(device),
        "labels_BS": torch.cat([pad(batch.labels_BS, IGNORE_LABEL) for batch in batches]).to(device),
        "num_tiles": torch.tensor([batch.pixel_values_ICHW.shape[0] for batch in batches]),
        "rows": height // patch,
        "columns": width // patch,
    }
    return StepBatch(
        num_microbatches=len(batches),
        batch_size=batch_size,
        seq_len=seq_len,
        num_tiles=num_tiles,
        tiles=tiles.flatten(0, 1).to(device),
        num_patches=(height // patch) * (width // patch),
        fields=fields,
    )
