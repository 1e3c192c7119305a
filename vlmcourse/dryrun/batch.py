"""What goes through a step: numbers of samples, positions and tiles, and micro-batches of fake tensors of that size.

Enters: a configuration and a model's shape. Leaves: a `BatchSize`, by default the largest micro-batch that the
configuration allows, and batches for the step. Values do not exist here, so that a batch's content cannot matter: no
position is padding and every label counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlmcourse.config import TrainConfig
from vlmcourse.data.samples import Batch
from vlmcourse.layout import ParallelConfig, sequence_multiple
from vlmcourse.presets import VLMShape
from vlmcourse.values import check_counts


@dataclass(frozen=True)
class BatchSize:
    """One micro-batch of one rank."""

    num_samples: int
    seq_len: int
    """Positions of each sample, image tokens and padding included."""
    num_tiles: int
    """Of all its samples together; 0 runs one blank tile, as a real step does."""

    def __post_init__(self) -> None:
        check_counts(1, num_samples=self.num_samples, seq_len=self.seq_len)
        check_counts(0, num_tiles=self.num_tiles)


def largest_batch(config: TrainConfig, parallel: ParallelConfig, shape: VLMShape) -> BatchSize:
    """Return the largest micro-batch that a configuration allows: every sample as long and with as many tiles.

    Args:
        config: `data.max_seq_len`, `data.max_tiles_per_image` and `train.micro_batch_size` count. One image a sample is
            assumed; an image cut into several tiles has a thumbnail on top.
        parallel: which sequences can be split.
        shape: of the model.

    Raises:
        ValueError: if the tiles of one image need more positions than a sample may have.
    """
    data, num_samples, multiple = config.data, config.train.micro_batch_size, sequence_multiple(parallel)
    num_tiles = data.max_tiles_per_image + (data.max_tiles_per_image > 1)
    seq_len = -(-data.max_seq_len // multiple) * multiple
    return _checked(BatchSize(num_samples, seq_len, num_samples * num_tiles), shape)


def _checked(size: BatchSize, shape: VLMShape) -> BatchSize:
    needed = size.num_tiles * shape.num_visual_tokens_per_tile
    if needed > size.num_samples * size.seq_len:
        raise ValueError(
            f"{size.num_tiles} tiles in a micro-batch of {size.num_samples} x {size.seq_len} positions: they take "
            f"{shape.num_visual_tokens_per_tile} positions each, {needed} together; raise data.max_seq_len, "
            "or lower data.max_tiles_per_image"
        )
    return size


def build_batches(size: BatchSize, shape: VLMShape, number: int) -> list[Batch]:
    """Return `number` micro-batches; call it inside `fake_tensors`, and their tensors are fake.

    Raises:
        ValueError: if the tiles need more positions than there are.
    """
    _checked(size, shape)
    side_px, num_samples = shape.vision.image_size_px, size.num_samples
    tiles = [size.num_tiles // num_samples + (i < size.num_tiles % num_samples) for i in range(num_samples)]

    def ids() -> torch.Tensor:
        return torch.zeros(num_samples, size.seq_len, dtype=torch.int64)

    return [
        Batch(
            ids(),
            ids(),
            torch.ones(num_samples, size.seq_len, dtype=torch.bool),
            torch.zeros(size.num_tiles, 3, side_px, side_px),
            tuple(tiles),
            tuple(f"sample {i}" for i in range(num_samples)),
            shape.num_visual_tokens_per_tile,
        )
        for _ in range(number)
    ]
