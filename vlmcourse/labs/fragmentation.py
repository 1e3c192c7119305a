"""Chapter 5's traces: real training steps on batches of pictures of different resolutions.

Enters: how many samples and which grids of tiles. Leaves: batches as they come or in a few shapes, and the
`AllocTrace` of training steps on them, recorded on this machine. The pictures are the course's digits, enlarged: a
picture of a higher resolution is cut into more tiles, as InternVL does it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch
from PIL import Image

from vlmcourse.config import OptimizerConfig
from vlmcourse.data.collate import PAD_MULTIPLE, Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import Batch, Sample
from vlmcourse.data.tiling import count_tiles
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.alloc_trace import AllocRecorder
from vlmcourse.planner.alloc_trace import AllocTrace
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.train.accumulate import micro_batch_loss_sum
from vlmcourse.train.optimizer import build_optimizer
from vlmcourse.values import check_counts

GRIDS = ((1, 1), (2, 1), (2, 2), (3, 2))
"""Columns and rows of tiles that pictures are enlarged to."""
MAX_TILES = 6
MAX_SEQ_LEN = 512


def fragmentation_shape(num_layers: int = 6) -> VLMShape:
    """Return the tiny preset with `num_layers` blocks in each tower: enough activations for holes to show."""
    check_counts(1, num_layers=num_layers)
    tiny = get_model("tiny")
    vision = dataclasses.replace(tiny.vision, num_layers=num_layers)
    language = dataclasses.replace(tiny.language, num_layers=num_layers)
    return dataclasses.replace(tiny, name="fragmentation", vision=vision, language=language)


def mixed_resolutions(num_samples: int, seed: int = 0) -> list[Sample]:
    """Return conversations about pictures of 1 to 6 tiles, and the thumbnail where there is more than one.

    Args:
        num_samples: how many.
        seed: of pictures, questions and resolutions.

    Raises:
        ValueError: if `num_samples` is below 1.
    """
    check_counts(1, num_samples=num_samples)
    draws, side_px = random.Random(seed), get_model("tiny").vision.image_size_px
    found = []
    for sample in DigitsDataset(num_samples, seed, "train", num_turns=2)[:]:
        columns, rows = draws.choice(GRIDS)
        size = (side_px * columns, side_px * rows)
        images = tuple(image.resize(size, Image.Resampling.BICUBIC) for image in sample.images)
        found.append(dataclasses.replace(sample, images=images))
    return found


def tiles_of(sample: Sample) -> int:
    """Return the tiles that a sample's pictures are cut into."""
    side_px = get_model("tiny").vision.image_size_px
    return sum(count_tiles(image.width, image.height, side_px, MAX_TILES) for image in sample.images)


def batches_as_they_come(samples: Sequence[Sample], micro_batch_size: int) -> list[Batch]:
    """Return batches of `micro_batch_size` samples in their order; nearly every one has another shape."""
    groups = [samples[i : i + micro_batch_size] for i in range(0, len(samples), micro_batch_size)]
    return _collate(groups, PAD_MULTIPLE)


def batches_of_few_shapes(
    samples: Sequence[Sample], micro_batch_size: int, pad_multiple: int = 32, seed: int = 0
) -> list[Batch]:
    """Return batches of the same samples, each of samples with equally many tiles: grouping by length.

    Rows are padded to a larger multiple, so that text changes their length less often. All batches of a bucket have
    one shape, but for its last, which may be smaller. The price: more padding, a largest batch of large pictures only,
    and batches that are less of a mixture.

    Args:
        samples: each is in one batch.
        micro_batch_size: samples of a batch.
        pad_multiple: of tokens, that rows are padded to.
        seed: of the order of the batches.
    """
    buckets: dict[int, list[Sample]] = {}
    for sample in samples:
        buckets.setdefault(tiles_of(sample), []).append(sample)
    groups = [
        members[i : i + micro_batch_size]
        for members in buckets.values()
        for i in range(0, len(members), micro_batch_size)
    ]
    random.Random(seed).shuffle(groups)
    return _collate(groups, pad_multiple)


def _collate(groups: Sequence[Sequence[Sample]], pad_multiple: int) -> list[Batch]:
    collate = Collator(load_tokenizer("builtin"), get_model("tiny"), MAX_SEQ_LEN, MAX_TILES, pad_multiple)
    return [collate(group) for group in groups]


def record_steps(batches: Sequence[Batch], num_layers: int = 6) -> AllocTrace:
    """Train a fresh model on each batch in turn, on the CPU, and return what was allocated.

    Args:
        batches: one optimizer step each.
        num_layers: blocks in each tower, see `fragmentation_shape`.

    Returns:
        The trace from the weights on; a step's mark names its samples, tiles and tokens. A batch counts from its
        first use to the end of its step, as on a GPU.

    Raises:
        ValueError: if there is no batch.
    """
    check_counts(1, num_batches=len(batches))
    model = build_model(fragmentation_shape(num_layers), seed=0)
    optimizer = build_optimizer(model, OptimizerConfig())
    # Copies, made before anything is recorded: the recorder must not see the batches that the caller keeps alive.
    waiting = [_copy(batch) for batch in batches]
    with AllocRecorder(model, optimizer) as recorder:
        for i in range(len(batches)):
            batch = waiting.pop(0)
            recorder.mark(
                f"step {i}: {len(batch.sample_ids)} samples, {sum(batch.tiles_per_sample)} tiles, "
                f"{batch.input_ids_BS.shape[1]} tokens"
            )
            num_supervised = batch.num_supervised_tokens
            loss = micro_batch_loss_sum(model, batch, "fp32") / num_supervised
            del batch
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return recorder.trace


def _copy(batch: Batch) -> Batch:
    """Return the batch in memory of its own, which is what moving it to a GPU makes."""
    moved = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(batch, **moved)
