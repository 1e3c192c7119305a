"""Training state of one rank: weights, gradients, optimizer, by precision recipe and stage of ZeRO.

Enters: a number of parameters. Leaves: `StateBytes`. Chapter 1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from vlmcourse.planner.recipes import OPTIMIZERS, PRECISIONS, Precision


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Training state that a rank keeps between steps, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    """Moments and, in mixed precision, the fp32 master copy of the weights."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


def estimate_state_bytes(
    num_params: int,
    *,
    precision: str = "bf16_mixed",
    optimizer: str = "adamw",
    zero_stage: int = 0,
    shard_degree: int = 1,
    trainable: bool = True,
) -> StateBytes:
    """Count the training state of one rank.

    Args:
        num_params: parameters of the model, or of the part of it that this rank's group holds.
        precision: a name in `PRECISIONS`.
        optimizer: a name in `OPTIMIZERS`.
        zero_stage: 0 splits nothing, 1 the optimizer state, 2 gradients too, 3 weights too.
        shard_degree: ranks that split it.
        trainable: False for frozen parameters, which have weights only.

    Returns:
        Bytes on the fullest rank (uneven splits round up).

    Raises:
        ValueError: for an unknown name or a number out of range.

    Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", figure 1:
    7.5e9 parameters on 64 ranks need 120, 31.4, 16.6 and 1.9 GB in stages 0 to 3.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer = {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
    recipe = dataclasses.replace(PRECISIONS[precision], moment_bytes=OPTIMIZERS[optimizer])
    return estimate_recipe_bytes(
        num_params, recipe, zero_stage=zero_stage, shard_degree=shard_degree, trainable=trainable
    )


def estimate_recipe_bytes(
    num_params: int, recipe: Precision, *, zero_stage: int = 0, shard_degree: int = 1, trainable: bool = True
) -> StateBytes:
    """Count the training state of one rank as `estimate_state_bytes` does, with a recipe's own bytes of moments."""
    if num_params < 0 or shard_degree < 1:
        raise ValueError(f"num_params = {num_params}, shard_degree = {shard_degree}: need 0 or more, and 1 or more")
    if zero_stage not in range(4):
        raise ValueError(f"zero_stage = {zero_stage!r}: must be 0, 1, 2 or 3")
    shard = -(-num_params // shard_degree)
    weights = (shard if zero_stage >= 3 else num_params) * recipe.weight_bytes
    if not trainable:
        return StateBytes(weights=weights, gradients=0, optimizer=0)
    return StateBytes(
        weights=weights,
        gradients=(shard if zero_stage >= 2 else num_params) * recipe.gradient_bytes,
        optimizer=(shard if zero_stage >= 1 else num_params) * (recipe.master_bytes + recipe.moment_bytes),
    )
