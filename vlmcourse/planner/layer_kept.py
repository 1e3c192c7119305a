"""What layers keep for backward on one rank: under tensor, sequence and context parallelism, and under recomputation.

Enters: a tower's shape, the positions that a rank works on, degrees. Leaves: `LayerBytes` of one layer and one
micro-batch, and with a policy of the section [activations] what a tower of them keeps. The tensors are those of
`layer_activations.py`, the only place where they are counted; here each is divided as it lies on a rank. Chapter 7.

Source: Korthikanti et al. 2022 (arXiv:2205.05198), sections 4 and 5, for what each kind of parallelism divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from vlmcourse.planner.layer_activations import count_language_layer_bytes, count_vision_layer_bytes
from vlmcourse.presets import LanguageShape, VisionShape
from vlmcourse.recompute import plan_segments

OF_HEADS = ("queries", "keys, values", "queries, keys, values", "attention output", "attention log-sum-exp")
OF_MLP = ("hidden before GELU", "hidden after GELU", "gate before SiLU", "gate after SiLU", "value", "gate x value")
PRODUCT_INPUTS = ("norm1 output", "norm2 output")
"""What products split by columns read: whole on each rank, gathered under sequence parallelism."""
FOR_WEIGHTS = ("attention output", "gate x value", "hidden after GELU", *PRODUCT_INPUTS)
"""Kept for the gradient of the weight that it is multiplied by; attention keeps its output for itself too."""
SELECTIVE = ("queries, keys, values", "queries", "keys, values", "attention output", "attention log-sum-exp")
SELECTIVE_MLP = ("hidden before GELU", "gate before SiLU", "value")
"""What the policy selective keeps beside the layer's input and the results of the products that end a branch."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer and one micro-batch on one rank."""

    whole: float
    """Kept without recomputation."""
    input: float
    """Kept under the policies full, every:k and sqrt, by a segment."""
    selective: float
    """Kept under the policy selective."""
    backward: float
    """Gradients of activations that exist only while the layer goes backward."""


@dataclass(frozen=True, kw_only=True)
class Lying:
    """How a layer's tensors lie on the ranks of a tensor-parallel group."""

    attention_tp: int = 1
    mlp_tp: int = 1
    sequence_parallel: bool = False
    """Whether norms and residuals are split along the sequence."""
    keeps_gathered: bool = True
    """Whether inputs of products that were gathered along the sequence are kept whole, as this package does, or each
    rank keeps its own part and gathers it again in backward, as Megatron does."""

    def divisor(self, name: str) -> float:
        """Return over how many ranks a tensor is split, by its name in `layer_activations`."""
        if name in OF_HEADS or name.startswith(("q_norm", "k_norm")):
            return self.attention_tp
        if name in OF_MLP or name.startswith("matrices"):
            return self.mlp_tp
        if name.startswith(PRODUCT_INPUTS) and self.keeps_gathered and "before" not in name:
            return 1
        if name.startswith("rotations"):
            return 1
        return self.mlp_tp if self.sequence_parallel else 1


@lru_cache(maxsize=4096)
def language_layer(
    shape: LanguageShape,
    batch_size: int,
    seq_len: int,
    element_bytes: int,
    lying: Lying,
    *,
    fused_norms: bool = True,
    autocast: bool = False,
    trained: bool = True,
    gated: bool = True,
    cp: int = 1,
    cp_method: str = "ring",
    rotations: bool = True,
) -> LayerBytes:
    """Return what a decoder layer keeps.

    Args:
        shape: of the tower.
        batch_size: samples of the micro-batch.
        seq_len: positions of each on this rank.
        element_bytes: of one activation.
        lying: on the tensor-parallel ranks.
        fused_norms: as in `count_language_layer_bytes`, and so is autocast.
        autocast: see there.
        trained: whether the weights are; of frozen ones their products' inputs are not kept.
        gated: as there.
        cp: ranks that split the sequence.
        cp_method: how they see each other's keys; ring and ulysses keep attention's output in two orders, allgather
            also all ranks' keys and values, and the masks of its chunks (for those in zigzag order).
        rotations: whether each layer keeps 16-bit copies of the tables of rotations, as this package's does.
    """
    kept = count_language_layer_bytes(
        shape, batch_size, seq_len, element_bytes, fused_norms=fused_norms, autocast=autocast, gated=gated
    )
    if not rotations:
        kept.pop("rotations, in 16 bits", None)
    width = batch_size * seq_len * shape.hidden_size * element_bytes
    more = 0.0
    if cp > 1:
        more += width / lying.attention_tp
    if cp > 1 and cp_method == "allgather":
        masks = element_bytes * (seq_len // 2) ** 2 * (2 * cp + 1)
        more += (cp - 1) * kept["keys, values"] / lying.attention_tp + masks
    hidden = batch_size * seq_len * shape.mlp_size * element_bytes / lying.mlp_tp
    # Of the product, the gate and the value; or of the hidden layer before and after its activation.
    backward = (3 if gated else 2) * hidden + width
    return _lie(kept, lying, width, more, backward, trained)


@lru_cache(maxsize=4096)
def vision_layer(
    shape: VisionShape,
    num_tiles: int,
    element_bytes: int,
    lying: Lying,
    *,
    fused_norms: bool = True,
    autocast: bool = False,
    trained: bool = True,
) -> LayerBytes:
    """Return what a vision layer keeps of `num_tiles` tiles; the other arguments are those of `language_layer`."""
    positions = 1 + shape.num_patches
    kept = count_vision_layer_bytes(
        shape, num_tiles, positions, element_bytes, fused_norms=fused_norms, autocast=autocast
    )
    width = num_tiles * positions * shape.hidden_size * element_bytes
    hidden = num_tiles * positions * shape.mlp_size * element_bytes / lying.mlp_tp
    return _lie(kept, lying, width, 0.0, 2 * hidden + width, trained)


def _lie(
    kept: Mapping[str, int], lying: Lying, width: float, more: float, backward: float, trained: bool
) -> LayerBytes:
    """Divide what a layer keeps; `more` is kept by attention and divided already."""
    stream = width / (lying.mlp_tp if lying.sequence_parallel else 1)
    whole = more
    for name, size in kept.items():
        # A norm's output before its weight is kept for the gradient of that weight alone.
        for_weights = (name in FOR_WEIGHTS and name != "attention output") or "before its weight" in name
        if trained or not for_weights:
            whole += size / lying.divisor(name)
    selective = stream + 2 * width  # the results of the two products that end a branch are sums still to be shared
    selective += sum(size / lying.divisor(name) for name, size in kept.items() if name in SELECTIVE + SELECTIVE_MLP)
    return LayerBytes(whole=whole, input=stream, selective=selective, backward=backward)


@dataclass(frozen=True)
class TowerKept:
    """What the layers of a tower that stand on a stage keep of one micro-batch, in bytes."""

    stored: float
    again: float
    """Of the largest segment while backward makes it again, beside what is stored of it."""
    longest: int
    """Layers of that segment; 1 where nothing is made again."""


def keep_tower(policy: str, num_layers: int, layer: LayerBytes, first_number: int = 0) -> TowerKept:
    """Return what a tower keeps under a policy.

    Args:
        policy: of the section [activations], for this tower.
        num_layers: on the stage.
        layer: bytes of one.
        first_number: number of the first of them in the whole tower, from which every:k counts.

    Raises:
        ValueError: if there is no such policy.
    """
    num_covered, num_segments, longest = _segments(policy, num_layers, first_number)
    of_segment = layer.selective if policy == "selective" else layer.input
    again = layer.whole * longest - of_segment if longest else 0.0
    stored = (num_layers - num_covered) * layer.whole + num_segments * of_segment
    return TowerKept(stored, max(0.0, again), max(1, longest))


@lru_cache(maxsize=4096)
def _segments(policy: str, num_layers: int, first_number: int) -> tuple[int, int, int]:
    """Return covered layers, segments, and the layers of the longest one."""
    segments = plan_segments(policy, num_layers, first_number)
    lengths = [segment.num_blocks for segment in segments]
    return sum(lengths), len(lengths), max(lengths, default=0)
