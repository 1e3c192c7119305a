"""An estimate of the activations that a rank keeps for the backward pass.

Enters: a plan, a model shape, a workload, a pipeline stage. Leaves: bytes. Deliberately simple; the assumptions are
those of the paper below and are written where they enter. Chapter 4 derives the same count for this model's own
layers, and measures it.

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", equations 1-2: a
layer of s tokens, b samples and width h keeps s b h (10 + 24/t) bytes in 16-bit training over t tensor-parallel ranks,
without the attention matrix, which flash attention does not keep. Stated for a two-matrix GELU MLP with dropout masks.
`planner.layer_activations` has the same count derived for this model's layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.plan import Plan
from vlmcourse.planner.stages import find_split
from vlmcourse.presets import VLMShape
from vlmcourse.recompute import plan_segments

REPLICATED_BYTES = 10
"""Of the 34 bytes of a layer per token and unit of width, those that every rank of a tp group keeps."""
SPLIT_BYTES = 24
"""Those that tensor parallelism divides."""
BOUNDARY_BYTES = 2
"""A layer's input in a 16-bit format, all that checkpointing keeps of it."""
SELECTIVE_REPLICATED_BYTES, SELECTIVE_SPLIT_BYTES = 6, 16
"""What a selective segment keeps: its input and the results of the two matrices that end a branch; queries, keys,
values, the result of attention, and the wide hidden layer of the MLP, which tensor parallelism divides."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one sample looks like to the model."""

    seq_len: int = 2048
    """Tokens of one sample in the language tower, image tokens included."""
    tiles_per_sample: int = 1
    """Tiles of one sample in the vision tower."""

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.tiles_per_sample < 0:
            raise ValueError(
                f"seq_len = {self.seq_len}, tiles_per_sample = {self.tiles_per_sample}: "
                "a sample needs 1 token or more and no negative number of tiles"
            )


def estimate_activation_bytes(plan: Plan, model: VLMShape, workload: Workload, stage: int) -> int:
    """Estimate the activation bytes of one rank at its fullest moment, logits included.

    Of layers that are recomputed, the input of each segment and one whole segment being recomputed; of others all.
    A frozen vision tower keeps nothing but the layer at work, as no gradient passes through it. A pipeline is assumed
    to run 1F1B with enough micro-batches, so stage i of n holds those of n - i micro-batches. The projector's
    activations are left out: they are less than those of one decoder layer.

    Args:
        plan: how the ranks share the work.
        model: the model's shape.
        workload: tokens and tiles of a sample.
        stage: pipeline stage, from 0.

    Returns:
        Bytes.
    """
    scale = plan.recipe.compute_bytes / 2  # the paper counts 16-bit elements
    split = find_split(plan, model)
    in_flight = split.num_stages - stage
    language, vision = model.language, model.vision
    num_vision_layers, num_layers = len(split.vision_blocks(stage)), len(split.language_blocks(stage))
    text_size = plan.micro_batch_size * workload.seq_len * language.hidden_size
    stored, live = _tower_bytes(plan.recompute("language"), num_layers, text_size, plan.tp)
    if num_vision_layers:
        image_size = plan.micro_batch_size * workload.tiles_per_sample * (vision.num_patches + 1) * vision.hidden_size
        if "vision" in plan.frozen:
            of_vision = 0.0, image_size * _layer_bytes(plan.vision_tp)
        else:
            of_vision = _tower_bytes(plan.recompute("vision"), num_vision_layers, image_size, plan.vision_tp)
        stored, live = stored + of_vision[0], max(live, of_vision[1])
    stored *= in_flight
    logits = 0
    if stage == split.num_stages - 1:
        # In the compute dtype, then an fp32 copy for the loss and that copy's gradient.
        element_bytes = plan.recipe.compute_bytes + 4 + 4
        logits = plan.micro_batch_size * workload.seq_len * language.vocab_size * element_bytes
    return round(scale * (stored + live)) + logits


def _layer_bytes(tp_degree: int) -> float:
    """Bytes that one layer keeps for each token and each unit of its width."""
    return REPLICATED_BYTES + SPLIT_BYTES / tp_degree


def _tower_bytes(policy: str, num_layers: int, size: int, tp_degree: int) -> tuple[float, float]:
    """Return what the layers of one tower keep of one micro-batch, and what the largest segment needs besides.

    Args:
        policy: of the section [activations].
        num_layers: of the tower on this stage.
        size: elements of a layer's input.
        tp_degree: of the tower.
    """
    layer, segments = size * _layer_bytes(tp_degree), plan_segments(policy, num_layers)
    num_covered = sum(segment.num_blocks for segment in segments)
    kept = size * BOUNDARY_BYTES
    if policy == "selective":
        kept = size * (SELECTIVE_REPLICATED_BYTES + SELECTIVE_SPLIT_BYTES / tp_degree)
    live = max((layer * segment.num_blocks for segment in segments), default=0.0)
    if policy == "selective":
        live = max(0.0, live - kept)  # the rest of it is there already
    return (num_layers - num_covered) * layer + len(segments) * kept, live
