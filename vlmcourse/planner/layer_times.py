"""Seconds of one block of a model on one rank, forward and backward, with what tensor and context ranks exchange.

Enters: a tower's shape, how many positions go through, degrees, a device with its speeds. Leaves: `LayerTime`s by kind
of layer. Products are counted one by one with their sizes on the rank, attention by FLOPs that a causal mask leaves,
norms, activations, rotations and residuals by the bytes they move. Imports no torch. Chapter 7.

The backward of a product is two of the same FLOPs, one for its input and one for its weights; attention's backward
computes scores again, 5 products for 2. Bytes are those of a kernel for each norm, activation and residual, forward
2 reads and a write or the like, and about as many for each gradient.

Source: Dao et al. 2022 (arXiv:2205.14135) for attention; Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for
    what tensor ranks exchange with and without sequence parallelism: the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from vlmcourse.planner.efficiency import Speeds, attention_s, move_s, product_s
from vlmcourse.planner.hardware import DeviceSpec
from vlmcourse.presets import LanguageShape, VisionShape, VLMShape

ATTENTION_BACKWARD = 2.5
"""Products of attention's backward for each of its forward."""
CAUSAL_FRACTION = 0.5
"""Of all pairs of positions, those that a causal mask leaves."""
FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 20, 35
"""Operations of a block that Python launches one by one."""
LOSS_BYTES_FORWARD, LOSS_BYTES_BACKWARD = 16, 12
"""For each logit: written, read and copied to fp32, read for the maximum and the sum; gradient written and cast."""


class LayerTime(NamedTuple):
    """Seconds of one layer and one micro-batch on one rank, without other ranks."""

    forward_s: float = 0.0
    input_s: float = 0.0
    """Of the backward's part for activations."""
    weight_s: float = 0.0
    moved_s: float = 0.0
    """What of the forward is no product and no attention: all that selective recomputation repeats."""
    attention_s: float = 0.0
    """What of the forward is attention, beside which a ring of context ranks passes on keys and values."""


@dataclass(frozen=True)
class Compute:
    """What a rank computes with."""

    device: DeviceSpec
    speeds: Speeds
    dtype: str
    element_bytes: int


@lru_cache(maxsize=4096)
def language_layer_time(
    shape: LanguageShape,
    compute: Compute,
    num_tokens: float,
    num_pairs: float,
    tp: int,
    sequence_parallel: bool,
    *,
    fused_attention: bool = True,
) -> LayerTime:
    """Estimate one block of the language tower.

    Args:
        shape: of the tower.
        compute: device, speeds, type.
        num_tokens: positions that the rank's products see: those of its context rank, not divided by `tp`.
        num_pairs: pairs of positions of all sequences, those under the mask too, divided by context ranks.
        tp: ranks that split each matrix.
        sequence_parallel: whether they split norms and residuals too.
        fused_attention: whether scores stay on the chip; else they are written and read, those under the mask too.
    """
    width, mlp = shape.hidden_size, shape.mlp_size
    kv_width = width // shape.num_heads * shape.num_kv_heads
    products = (
        (width, (width + 2 * kv_width) / tp),
        (width / tp, width),
        (width, 2 * mlp / tp),
        (mlp / tp, width),
    )
    # Two norms read and write the width, two residuals read it twice and write it; rotation reads and writes queries
    # and keys; the gate reads two hidden layers and writes one.
    whole = 10 * width / (tp if sequence_parallel else 1)
    split = (2 * width + 2 * kv_width + 3 * mlp) / tp
    if fused_attention:
        attention = _fused_attention_s(compute, 4 * CAUSAL_FRACTION * num_pairs * width / tp)
    else:
        attention = _written_attention_s(compute, shape, num_tokens, num_pairs, tp)
    return _block_time(compute, num_tokens, products, whole + split, whole + split + 2 * mlp / tp, attention)


@lru_cache(maxsize=4096)
def vision_layer_time(shape: VisionShape, compute: Compute, num_tiles: float, tp: int) -> LayerTime:
    """Estimate one block of the vision tower; arguments as of `language_layer_time`, tiles in place of tokens."""
    width, mlp = shape.hidden_size, shape.mlp_size
    products = ((width, 3 * width / tp), (width / tp, width), (width, mlp / tp), (mlp / tp, width))
    # Norms, biases and scales with their residuals; queries and keys once more where they are normalised.
    moved = 14 * width + (4 * width / tp if shape.qk_norm else 0) + 2 * mlp / tp
    positions = 1 + shape.num_patches
    attention = _fused_attention_s(compute, 4 * num_tiles * positions**2 * width / tp)
    return _block_time(compute, num_tiles * positions, products, moved, moved + mlp / tp, attention)


@lru_cache(maxsize=4096)
def patch_time(shape: VisionShape, compute: Compute, num_tiles: float) -> LayerTime:
    """Estimate the patch embedding; pixels get no gradient."""
    rows, inner = num_tiles * shape.num_patches, 3 * shape.patch_size_px**2
    forward_s = _product(compute, rows, inner, shape.hidden_size)
    return LayerTime(forward_s, 0.0, _product(compute, inner, rows, shape.hidden_size))


@lru_cache(maxsize=4096)
def projector_time(shape: VLMShape, compute: Compute, num_tiles: float) -> LayerTime:
    """Estimate the projector, which is never split: pixel shuffle, norm, two products."""
    wide, width = round(shape.vision.hidden_size / shape.pixel_shuffle_fraction**2), shape.language.hidden_size
    rows = num_tiles * shape.num_visual_tokens_per_tile
    return _block_time(compute, rows, ((wide, width), (width, width)), 4 * wide + 4 * width, 4 * wide + 4 * width)


@lru_cache(maxsize=4096)
def head_time(shape: LanguageShape, compute: Compute, num_tokens: float, tp: int) -> LayerTime:
    """Estimate the final norm, the output matrix and the loss over all positions."""
    words = shape.vocab_size / tp
    time = _block_time(compute, num_tokens, ((shape.hidden_size, words),), 2 * shape.hidden_size, 3 * shape.hidden_size)
    logits = num_tokens * words
    return time._replace(
        forward_s=time.forward_s + move_s(compute.device, compute.speeds, LOSS_BYTES_FORWARD * logits),
        input_s=time.input_s + move_s(compute.device, compute.speeds, LOSS_BYTES_BACKWARD * logits),
    )


def _block_time(
    compute: Compute,
    rows: float,
    products: Iterable[tuple[float, float]],
    moved_forward: float,
    moved_backward: float,
    of_attention_s: tuple[float, float] = (0.0, 0.0),
) -> LayerTime:
    """Add up products of [rows, inner] with [inner, columns], attention, and elements moved for each row.

    A device that has to wait for Python to launch its next operation takes as long as the launches; where launching and
    computing take turns, both together.
    """
    device, speeds = compute.device, compute.speeds
    forward_s = input_s = weight_s = 0.0
    for inner, columns in products:
        forward_s += _product(compute, rows, inner, columns)
        input_s += _product(compute, rows, columns, inner)
        weight_s += _product(compute, inner, rows, columns)
    moved_s = move_s(device, speeds, rows * moved_forward * compute.element_bytes)
    forward_s += of_attention_s[0] + moved_s
    input_s += of_attention_s[1]
    input_s += move_s(device, speeds, rows * moved_backward * compute.element_bytes)
    if rows > 0 and speeds.launches_add:
        forward_s += FORWARD_LAUNCHES * speeds.launch_s
        input_s += BACKWARD_LAUNCHES * speeds.launch_s
    elif rows > 0:
        forward_s = max(forward_s, FORWARD_LAUNCHES * speeds.launch_s)
        input_s = max(input_s, BACKWARD_LAUNCHES * speeds.launch_s - weight_s)
    return LayerTime(forward_s, input_s, weight_s, moved_s, of_attention_s[0])


def _fused_attention_s(compute: Compute, flops: float) -> tuple[float, float]:
    """Forward and backward of attention that keeps scores on the chip."""
    forward_s = attention_s(compute.device, compute.speeds, compute.dtype, flops)
    return forward_s, ATTENTION_BACKWARD * forward_s


def _written_attention_s(
    compute: Compute, shape: LanguageShape, num_tokens: float, num_pairs: float, tp: int
) -> tuple[float, float]:
    """Forward and backward of attention as products and a softmax that write and read scores of all pairs.

    Forward is two products, the softmax reads and writes; backward is four products, the softmax reads two, writes one.
    """
    positions, width = num_pairs / num_tokens, shape.hidden_size / shape.num_heads
    rows = num_tokens * shape.num_heads / tp
    scores = _product(compute, rows, width, positions)
    values = _product(compute, rows, positions, width)
    pass_s = move_s(compute.device, compute.speeds, rows * positions * compute.element_bytes)
    return scores + values + 2 * pass_s, scores + 3 * values + 3 * pass_s


def _product(compute: Compute, rows: float, inner: float, columns: float) -> float:
    return product_s(compute.device, compute.speeds, compute.dtype, rows, inner, columns, compute.element_bytes)
