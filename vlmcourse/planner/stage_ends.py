"""What stands around the layers of a stage keeps for backward: patches, projector, fusion, final norm, loss.

Enters: a `Job` and what stands on a stage. Leaves: bytes of one micro-batch on one rank, tensor by tensor as this
package's model computes them. Chapter 7.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from vlmcourse.planner.job import Job
from vlmcourse.planner.layer_activations import count_norm_bytes

INDEX_BYTES = 8
"""Of a token id, a label, or a position that an image feature goes to."""
PIXEL_BYTES = 4


class Ends(NamedTuple):
    """Bytes of one micro-batch on one rank."""

    kept: float
    """Until backward, the loss's apart."""
    loss_kept: float
    """The logarithms of the probabilities, in fp32; 0 on a stage without the output matrix."""
    logits: float
    """Most that exists of logits beside these: in fp32 the logits and their gradient, in 16 bits an fp32 gradient, its
    cast and the logits."""


def count_ends(job: Job, kinds: Set[str], num_tiles: int) -> Ends:
    """Count what a stage keeps outside of its layers.

    Args:
        job: the run.
        kinds: tower and kind of the `Unit`s that stand on the stage.
        num_tiles: that this rank encodes of a micro-batch.
    """
    kept = loss_kept = logits = 0.0
    rows = job.micro_batch_size * -(-job.workload.seq_len // job.layout.cp)
    language, element = job.shape.language, job.recipe.compute_bytes
    if "vision patches" in kinds and job.layout.pp == 1 and "vision" not in job.frozen:
        kept += pixel_bytes(job, num_tiles)  # a pipeline has those of all micro-batches all the time
    if "projector projector" in kinds:
        kept += _count_fusion(job, num_tiles)
    if "language layer" in kinds:
        # Tables of rotations, one pair for all decoder layers of the stage.
        kept += 2 * rows / job.micro_batch_size * (language.hidden_size // language.num_heads) * 4
    if "language norm" in kinds:
        parts = job.layout.tp if job.sequence_parallel else 1
        stream = 4 if job.autocast else element
        norm = count_norm_bytes("rmsnorm", "norm", rows, language.hidden_size, stream, job.fused_norms)
        trained = "language" not in job.frozen
        kept += sum(size for name, size in norm.items() if trained or "before its weight" not in name) / parts
        kept += rows * language.hidden_size * element if trained else 0
        words = rows * -(-language.vocab_size // job.layout.tp)
        loss_kept = 4.0 * words + rows * INDEX_BYTES
        logits = 8.0 * words
    return Ends(kept, loss_kept, logits)


def pixel_bytes(job: Job, num_tiles: int) -> float:
    """Return the bytes of a micro-batch's tiles, which the patch embedding keeps where it is trained."""
    return num_tiles * 3.0 * job.shape.vision.image_size_px**2 * PIXEL_BYTES


def _count_fusion(job: Job, num_tiles: int) -> float:
    """Count what the projector keeps, and the placing of its features among the text's embeddings."""
    shape, element = job.shape, job.recipe.compute_bytes
    tokens = num_tiles * shape.num_visual_tokens_per_tile
    folded = round(shape.vision.hidden_size / shape.pixel_shuffle_fraction**2)
    width = shape.language.hidden_size
    text_rows = job.micro_batch_size * job.workload.seq_len
    placed = tokens * job.layout.cp * width * element  # all ranks' features, where they share tiles
    kept = placed + tokens * job.layout.cp * INDEX_BYTES
    kept += text_rows * INDEX_BYTES if "language" not in job.frozen else 0
    if {"vision", "projector"} <= set(job.frozen):
        return kept
    stream = 4 if job.autocast else element
    hidden = tokens * width * element / job.layout.tp
    kept += sum(count_norm_bytes("layernorm", "norm", tokens, folded, stream, job.fused_norms).values()) + hidden
    return kept + (tokens * folded * element + hidden if "projector" not in job.frozen else 0)
