"""An estimate of the activations that a rank keeps for the backward pass.

Enters: a plan, a model shape, a workload, a pipeline stage. Leaves: bytes. Deliberately simple; the assumptions are
those of the paper below and are written where they enter. Deriving the same count for this model's own layers, and
measuring it, is chapter 4.

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", equations 1-2: a
layer of s tokens, b samples and width h keeps s b h (10 + 24/t) bytes in 16-bit training over t tensor-parallel ranks,
without the attention matrix, which flash attention does not keep. Stated for a two-matrix GELU MLP with dropout masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.plan import Plan
from vlmcourse.planner.stages import find_split
from vlmcourse.presets import VLMShape

REPLICATED_BYTES = 10
"""Of the 34 bytes of a layer per token and unit of width, those that every rank of a tp group keeps."""
SPLIT_BYTES = 24
"""Those that tensor parallelism divides."""
BOUNDARY_BYTES = 2
"""A layer's input in a 16-bit format, all that checkpointing keeps of it."""


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

    With checkpointing: the input of every layer and one whole layer being recomputed. Without: every layer whole.
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
    layer = text_size * _layer_bytes(plan.tp)
    stored = in_flight * num_layers * (text_size * BOUNDARY_BYTES if plan.activation_checkpointing else layer)
    live = layer if plan.activation_checkpointing and num_layers else 0
    if num_vision_layers:
        image_size = plan.micro_batch_size * workload.tiles_per_sample * (vision.num_patches + 1) * vision.hidden_size
        vision_layer = image_size * _layer_bytes(plan.vision_tp)
        if "vision" in plan.frozen:
            live = max(live, vision_layer)
        else:
            kept = image_size * BOUNDARY_BYTES if plan.activation_checkpointing else vision_layer
            stored += in_flight * num_vision_layers * kept
            live = max(live, vision_layer if plan.activation_checkpointing else 0)
    logits = 0
    if stage == split.num_stages - 1:
        # In the compute dtype, then an fp32 copy for the loss and that copy's gradient.
        element_bytes = plan.recipe.compute_bytes + 4 + 4
        logits = plan.micro_batch_size * workload.seq_len * language.vocab_size * element_bytes
    return round(scale * (stored + live)) + logits


def _layer_bytes(tp_degree: int) -> float:
    """Bytes that one layer keeps for each token and each unit of its width."""
    return REPLICATED_BYTES + SPLIT_BYTES / tp_degree
