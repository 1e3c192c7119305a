"""What a step's time depends on beside a `Plan`, and all of it together for the modules that compute it.

Enters: numbers that a person chose. Leaves: `StepSettings`, checked for being possible at all; `Ranks`, with what goes
through one rank. Imports no torch. Chapter 7.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.activations import Workload
from vlmcourse.planner.fabric import Fabric
from vlmcourse.planner.layer_times import Compute
from vlmcourse.planner.offload_cost import Machine
from vlmcourse.planner.plan import Plan
from vlmcourse.presets import VLMShape


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step depends on beside a `Plan`."""

    grad_accum_steps: int = 1
    """Micro-batches of one optimizer step; those of a pipeline too."""
    schedule: str = "1f1b"
    """Of the pipeline: a name in `schedules.SCHEDULES`."""
    sequence_parallel: bool = True
    """Whether the ranks of a tp group split norms and residuals of the language tower too."""
    cp: int = 1
    """Ranks that share each sequence; they come on top of the plan's ranks."""
    cp_method: str = "ring"
    """ring, allgather or ulysses."""
    gradient_sync: str = "every"
    """With which micro-batches ZeRO-2 and 3 scatter gradients: every (as the plan's memory counts them) or last."""
    micro_batch_overhead_s: float = 0.0
    """Seconds of each micro-batch on each stage beside all else, which nothing hides; measured."""
    host_layer_s: float = 0.0
    """Seconds in which the host gets one block's operations going, forward and backward: it runs ahead of its device,
    so a stage takes the longer of launching and computing. 0 leaves it to `Speeds.launch_s`."""
    host_step_layer_s: float = 0.0
    """Seconds of the host for each block, the embedding and the output once a step, when all backwards are done: norm,
    update, zeroing. A stage takes the longer of these and of the update on its device."""
    shard_copies_per_layer: int = 0
    """Tensors of a block of which ZeRO-1 and 2 copy each rank's part by itself after gathering; 0 gathers in place."""
    fused_attention: bool = True
    """Of the language tower: whether scores of all pairs of positions are never written to memory."""
    blocking_messages: bool = False
    """Whether a message between stages takes the time of both its ranks, rather than travel while they compute."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} = {getattr(self, name)}: must be 1 or more"
            for name in ("grad_accum_steps", "cp")
            if getattr(self, name) < 1
        ]
        wrong += [
            f"{name} = {getattr(self, name)}: must be 0 or more"
            for name in (
                "micro_batch_overhead_s",
                "host_layer_s",
                "host_step_layer_s",
                "shard_copies_per_layer",
            )
            if not getattr(self, name) >= 0
        ]
        if self.gradient_sync not in ("every", "last"):
            wrong.append(f"gradient_sync = {self.gradient_sync!r}: choose every or last")
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass(frozen=True, eq=False)
class Ranks:
    """All that the times of a stage depend on, but for the stage."""

    plan: Plan
    settings: StepSettings
    model: VLMShape
    workload: Workload
    fabric: Fabric
    compute: Compute
    machine: Machine | None = None
    """With an offloaded optimizer."""

    @property
    def num_tokens(self) -> float:
        """Positions of a micro-batch on one context rank."""
        return self.plan.micro_batch_size * self.workload.seq_len / self.settings.cp

    @property
    def num_tiles(self) -> int:
        """Tiles of a micro-batch that one rank encodes; context ranks share them, the last may fill up with blanks."""
        return -(-self.plan.micro_batch_size * self.workload.tiles_per_sample // self.settings.cp)
