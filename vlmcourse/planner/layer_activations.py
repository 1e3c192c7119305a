"""What one layer of this model keeps for its backward pass, term by term and exactly: F10.

Enters: a tower's shape, how many positions go through, bytes of an element. Leaves: bytes by the name of the tensor.
It holds for a layer trained whole in one type (fp32, or weights and activations in a 16-bit one), or in fp32 under
16-bit autocast on a CPU; attention by a fused kernel that keeps no scores (flash attention), no tensor parallelism.
Tests compare each layer's sum with what autograd keeps, to the byte.

Source: derived from the layers in `models/`; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, derive the same
for a layer with GELU and dropout, `korthikanti_layer_bytes`.
"""

from __future__ import annotations

from vlmcourse.presets import LanguageShape, VisionShape
from vlmcourse.values import check_counts

STATISTIC_BYTES = 4
"""Inverse deviations and log-sum-exps are fp32 whatever the type of the rest."""
Kept = dict[str, int]


def _check_autocast(element_bytes: int, fused_norms: bool) -> None:
    """Raise a ValueError where autocast is not counted."""
    if element_bytes != 2 or fused_norms:
        raise ValueError(
            f"autocast = True with element_bytes = {element_bytes}, fused_norms = {fused_norms}: autocast computes in "
            "16 bits and is counted as on a CPU, so set element_bytes = 2, fused_norms = False (a GPU's autocast casts "
            "other operations: measure there, with monitor.activations.ActivationMeter)"
        )


def count_norm_bytes(kind: str, name: str, rows: int, width: int, element_bytes: int, fused: bool) -> Kept:
    """Count what a norm of kind layernorm or rmsnorm keeps, by name; its output is kept by what uses it."""
    if kind == "layernorm":
        # The CPU's kernel keeps mean and inverse deviation in the type of the input, the GPU's in fp32.
        of_statistic = STATISTIC_BYTES if fused else element_bytes
        return {f"{name} input": rows * width * element_bytes, f"{name} statistics": 2 * rows * of_statistic}
    if fused:
        return {f"{name} input": rows * width * element_bytes, f"{name} statistics": rows * STATISTIC_BYTES}
    # RMSNorm in single steps, each in fp32: the input (a 16-bit one is not kept itself), and what the weight scales.
    return {
        f"{name} input, in fp32": rows * width * 4,
        f"{name} statistics": rows * STATISTIC_BYTES,
        f"{name} output before its weight, in fp32": rows * width * 4,
    }


def count_vision_layer_bytes(
    shape: VisionShape,
    num_tiles: int,
    num_positions: int,
    element_bytes: int,
    *,
    fused_norms: bool = False,
    autocast: bool = False,
) -> Kept:
    """Count what a vision block keeps.

    Args:
        shape: of the tower.
        num_tiles: tiles in the micro-batch.
        num_positions: patches of a tile and its class token.
        element_bytes: of one activation, 4 or 2.
        fused_norms: whether norms are the GPU's kernels; PyTorch's CPU computes RMSNorm in single steps.
        autocast: whether weights and the residual stream are fp32 and products in 16 bits. Norms then keep fp32, each
            product casts the norm's output anew, and the 16-bit copies of the matrices are kept too.

    Returns:
        Bytes by name, in the order in which forward makes them; copies of matrices come first.

    Raises:
        ValueError: if a count is not a whole number of 0 or more (of 1 or more for an element's bytes); under autocast,
            if elements do not have 2 bytes, or norms are the GPU's.
    """
    check_counts(0, num_tiles=num_tiles, num_positions=num_positions)
    check_counts(1, element_bytes=element_bytes)
    rows, D, F = num_tiles * num_positions, shape.hidden_size, shape.mlp_size
    width, hidden = rows * D * element_bytes, rows * F * element_bytes
    stream_bytes, kept = element_bytes, Kept()
    if autocast:
        _check_autocast(element_bytes, fused_norms)
        stream_bytes, kept["matrices, in 16 bits"] = 4, (4 * D * D + 2 * D * F) * element_bytes
    kept |= count_norm_bytes(shape.norm, "norm1", rows, D, stream_bytes, fused_norms)
    kept |= {"norm1 output, cast for q, k, v": 3 * width} if autocast else {"norm1 output": width}
    if shape.qk_norm:
        for name in ("q_norm", "k_norm"):
            kept |= count_norm_bytes("rmsnorm", name, rows, D, element_bytes, fused_norms)
    return kept | {
        "queries, keys, values": 3 * width,
        "attention output": width,
        "attention log-sum-exp": rows * shape.num_heads * STATISTIC_BYTES,
        "attention branch before its scale": width,
        **count_norm_bytes(shape.norm, "norm2", rows, D, stream_bytes, fused_norms),
        "norm2 output": width,
        "hidden before GELU": hidden,
        "hidden after GELU": hidden,
        "MLP branch before its scale": width,
    }


def count_language_layer_bytes(
    shape: LanguageShape,
    batch_size: int,
    seq_len: int,
    element_bytes: int,
    *,
    fused_norms: bool = False,
    autocast: bool = False,
    gated: bool = True,
) -> Kept:
    """Count what a decoder block keeps.

    Args:
        shape: of the tower.
        batch_size: samples of the micro-batch.
        seq_len: positions of each, padding (on the right) included.
        element_bytes: of one activation, 4 or 2.
        fused_norms: whether norms are the GPU's kernels; PyTorch's CPU computes RMSNorm in single steps.
        autocast: whether weights and the residual stream are fp32 and products in 16 bits. Norms then keep fp32, each
            product casts the norm's output anew, and the 16-bit copies of the matrices are kept too.
        gated: whether the MLP is a SwiGLU one with three matrices, as in this package's model, or has two and GELU, as
            others have.

    Returns:
        Bytes by name, in the order in which forward makes them. The fp32 tables of rotations are not among them: one
        pair serves all blocks; in 16 bits each block keeps copies of them, for queries and for keys.

    Raises:
        ValueError: if a count is not a whole number of 0 or more (of 1 or more for an element's bytes); under autocast,
            if elements do not have 2 bytes, or norms are the GPU's.
    """
    check_counts(0, batch_size=batch_size, seq_len=seq_len)
    check_counts(1, element_bytes=element_bytes)
    rows, D, F = batch_size * seq_len, shape.hidden_size, shape.mlp_size
    width, hidden = rows * D * element_bytes, rows * F * element_bytes
    head_width = D // shape.num_heads
    kv_width = shape.num_kv_heads * head_width
    stream_bytes, kept = element_bytes, Kept()
    if autocast:
        _check_autocast(element_bytes, fused_norms)
        stream_bytes, kept["matrices, in 16 bits"] = 4, D * (2 * D + 2 * kv_width + 3 * F) * element_bytes
    kept |= count_norm_bytes("rmsnorm", "norm1", rows, D, stream_bytes, fused_norms)
    kept |= {"norm1 output, cast for q, k, v": 3 * width} if autocast else {"norm1 output": width}
    if element_bytes < 4:
        kept["rotations, in 16 bits"] = 4 * seq_len * head_width * element_bytes
    return kept | {
        "queries": width,
        "keys, values": 2 * rows * kv_width * element_bytes,
        "attention output": width,
        "attention log-sum-exp": rows * shape.num_heads * STATISTIC_BYTES,
        **count_norm_bytes("rmsnorm", "norm2", rows, D, stream_bytes, fused_norms),
        **({"norm2 output, cast for gate, value": 2 * width} if autocast else {"norm2 output": width}),
        **_count_mlp(hidden, gated),
    }


def _count_mlp(hidden: int, gated: bool) -> Kept:
    names = ("gate before SiLU", "gate after SiLU", "value", "gate x value")
    return dict.fromkeys(names if gated else ("hidden before GELU", "hidden after GELU"), hidden)


def korthikanti_layer_bytes(
    seq_len: int, batch_size: int, hidden_size: int, num_heads: int, *, keeps_scores: bool = False
) -> int:
    """Bytes of a layer with a GELU MLP four times as wide and three dropouts, in a 16-bit type.

    Args:
        seq_len: tokens of a sample, s.
        batch_size: samples, b.
        hidden_size: width, h.
        num_heads: attention heads, a.
        keeps_scores: whether attention keeps its s x s scores, softmax and dropout mask, as without a fused kernel.

    Returns:
        s b h (34 + 5 a s / h), or its first term.

    Raises:
        ValueError: if an argument is not a whole number of 1 or more.
    Source: Korthikanti et al. 2022, equation 1.
    """
    check_counts(1, seq_len=seq_len, batch_size=batch_size, hidden_size=hidden_size, num_heads=num_heads)
    layer = 34 * seq_len * batch_size * hidden_size
    return layer + 5 * num_heads * seq_len**2 * batch_size if keeps_scores else layer
