"""What offloading costs in a step: bytes over the link to main memory, the update there, and files.

Enters: the memory of a rank at a level of offloading (`offload_memory.py`), a plan, a machine. Leaves: an
`OffloadCost`. All is arithmetic over datasheets: a prediction to set against a measurement. Chapter 5.

Of one rank in one optimizer step of A micro-batches, with S the parameters that it updates and G and W the bytes of a
gradient and of a weight as the plan's precision keeps them:

- down, gradients: S G at the step; under ZeRO-2 and 3, which keep no gradient on the device, S G after every
  micro-batch, added up in main memory.
- up, level optimizer: the updated weights, S W.
- up, levels with parameters: the rank's shards of all weights, frozen ones too, for the forward pass and again for the
  backward pass of each micro-batch: 2 A times. What other ranks hold of a unit comes from them, not over this link.
- update in main memory: it reads and writes fp32 weights and moments and reads gradients, and where weights are kept in
  16 bits it writes them: with AdamW and bf16_mixed S (2 x 12 + 2 + 2) = 28 S bytes. A CPU is taken to be limited by its
  memory, which gives the least possible time.
- files: optimizer state and fp32 weights are read and written once; shards of weights are read as often as they go up
  and written once.

Overlap is assumed as follows. Level optimizer: gradients go down behind the backward pass, taken as two thirds of
compute; update and weights wait for the last of them. Optimizer+parameters: both directions of the link run beside
both passes, the update does not. Layered: nothing is fetched ahead, so nothing overlaps. Files never overlap, which is
an upper bound.

Source: Ren et al. 2021 (ZeRO-Offload), sections 3 and 4; Rajbhandari et al. 2021 (ZeRO-Infinity), sections 5 and 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmcourse.planner.hardware import get_device
from vlmcourse.planner.memory import RankMemory
from vlmcourse.planner.offload_memory import ZERO_3_LEVELS
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import OPTIMIZERS
from vlmcourse.presets import Cluster

FP32_BYTES = 4
BACKWARD_SHARE = 2 / 3
"""Of compute: backward multiplies twice for each product of forward."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device and the node around it, as far as offloading asks."""

    name: str
    device_bytes: int
    """Memory of one device."""
    devices_per_node: int
    host_bytes: int
    """Main memory of one node. None is kept back for the system and the data loaders: give less if they need much."""
    host_bytes_per_s: float
    """Of that memory, reads and writes together."""
    link_bytes_per_s: float
    """Between one device and main memory, one direction; where devices share a slot, the part of one."""
    nvme_bytes: int = 0
    """For files on fast disks of one node; 0 where there are none."""
    nvme_bytes_per_s: float = 0.0
    """Of those disks together, as measured on them."""

    def __post_init__(self) -> None:
        positive = ("device_bytes", "devices_per_node", "host_bytes_per_s", "link_bytes_per_s")
        found = [f"{name} = {getattr(self, name)}: must be above 0" for name in positive if not getattr(self, name) > 0]
        found += [
            f"{name} = {getattr(self, name)}: must be 0 or greater"
            for name in ("host_bytes", "nvme_bytes", "nvme_bytes_per_s")
            if not getattr(self, name) >= 0
        ]
        if (self.nvme_bytes > 0) != (self.nvme_bytes_per_s > 0):
            found.append(
                f"nvme_bytes = {self.nvme_bytes}, nvme_bytes_per_s = {self.nvme_bytes_per_s}: give both, or neither"
            )
        if found:
            raise ValueError(f"{self.name} is not a machine:\n" + "\n".join(f"  - {problem}" for problem in found))


def machine_of(
    cluster: Cluster, *, host_bytes_per_s: float = 0.0, nvme_bytes: int = 0, nvme_bytes_per_s: float = 0.0
) -> Machine:
    """Return the device and the node of a cluster.

    Args:
        cluster: its device must be a name in `DEVICES`.
        host_bytes_per_s: of a node's main memory; 0 takes what the cluster's datasheets say.
        nvme_bytes: room for files on a node; 0 for none. No datasheet is asked: disks differ from node to node.
        nvme_bytes_per_s: of those disks together.

    Raises:
        ValueError: if the device is not known, or nobody says how fast main memory is.
    """
    device = get_device(cluster.device)
    speed = host_bytes_per_s or cluster.host_memory_bytes_per_s
    if not speed:
        raise ValueError(
            f"{cluster.name} does not say how fast its main memory is, which limits an update there: give "
            "host_bytes_per_s (sockets x channels x 8 bytes x transfers a second)"
        )
    return Machine(
        name=cluster.name,
        device_bytes=device.memory_bytes,
        devices_per_node=cluster.devices_per_node,
        host_bytes=cluster.host_memory_bytes,
        host_bytes_per_s=speed,
        link_bytes_per_s=device.host_link_bytes_per_s,
        nvme_bytes=nvme_bytes,
        nvme_bytes_per_s=nvme_bytes_per_s,
    )


@dataclass(frozen=True, kw_only=True)
class OffloadCost:
    """What one optimizer step of one rank costs more than with everything on the device; bytes and seconds."""

    level: str
    down_bytes: int = 0
    """From the device to main memory."""
    up_bytes: int = 0
    update_bytes: int = 0
    """Read and written in main memory by the update."""
    nvme_bytes: int = 0
    """Read from files and written to them."""
    down_s: float = 0.0
    up_s: float = 0.0
    update_s: float = 0.0
    """While all ranks of the node update."""
    nvme_s: float = 0.0

    def added_s(self, compute_s: float = 0.0) -> float:
        """Return the seconds by which a step gets longer, by the overlap that the module's docstring assumes.

        Args:
            compute_s: of forward and backward passes of one step without offloading, behind which copies can hide;
                0 gives the most, infinity the least.

        Raises:
            ValueError: if `compute_s` is below 0 or no number.
        """
        if not compute_s >= 0:
            raise ValueError(f"compute_s = {compute_s}: must be 0 or greater")
        if self.level == "optimizer":
            copies_s = max(0.0, self.down_s - BACKWARD_SHARE * compute_s) + self.up_s
        elif self.level == "optimizer+parameters":
            copies_s = max(0.0, max(self.down_s, self.up_s) - compute_s)
        else:
            copies_s = self.down_s + self.up_s
        return copies_s + self.update_s + self.nvme_s

    def __str__(self) -> str:
        """Show bytes and seconds in a line, and what of it compute can hide."""
        parts = [
            f"gradients down {show_bytes(self.down_bytes)} in {self.down_s:.3g} s",
            f"weights up {show_bytes(self.up_bytes)} in {self.up_s:.3g} s",
            f"update {self.update_s:.3g} s",
        ]
        parts += [f"files {show_bytes(self.nvme_bytes)} in {self.nvme_s:.3g} s"] if self.nvme_bytes else []
        least, most = self.added_s(math.inf), self.added_s(0.0)
        hidden = f"{least:.3g} to {most:.3g} s" if f"{least:.3g}" != f"{most:.3g}" else f"{most:.3g} s"
        return f"{', '.join(parts)}; a step gets {hidden} longer"


def estimate_offload_cost(
    memory: RankMemory,
    plan: Plan,
    machine: Machine,
    *,
    level: str,
    grad_accum_steps: int = 1,
    in_files: bool = False,
) -> OffloadCost:
    """Predict what a step of one rank costs more; the module's docstring derives every term.

    Args:
        memory: of the rank at this level, from `estimate_offloaded_memory`.
        plan: of that memory.
        machine: the device and its node.
        level: a name in `OFFLOAD_LEVELS`.
        grad_accum_steps: micro-batches that a rank adds up before a step.
        in_files: whether the state that leaves the device lies in files rather than in main memory.

    Raises:
        ValueError: if `grad_accum_steps` is below 1, or files are asked for on a machine without disks.
    """
    if grad_accum_steps < 1:
        raise ValueError(f"grad_accum_steps = {grad_accum_steps}: must be 1 or greater")
    if in_files and not machine.nvme_bytes:
        raise ValueError(f"{machine.name} has nvme_bytes = 0: say how many bytes its disks hold, and how fast they are")
    if level == "none":
        return OffloadCost(level=level)
    recipe = plan.recipe
    num_updated = memory.host_gradients // recipe.gradient_bytes
    num_up = 2 * grad_accum_steps
    streams = level in ZERO_3_LEVELS
    up_bytes = num_up * memory.host_weights if streams else num_updated * recipe.weight_bytes
    down_bytes = memory.host_gradients * (grad_accum_steps if plan.zero_stage >= 2 else 1)
    cast_bytes = recipe.weight_bytes if recipe.master_bytes else 0
    state_bytes = FP32_BYTES + OPTIMIZERS[plan.optimizer]
    update_bytes = num_updated * (2 * state_bytes + recipe.gradient_bytes + cast_bytes)
    nvme_bytes = 0
    if in_files:
        nvme_bytes = 2 * memory.host_optimizer
        nvme_bytes += num_up * memory.host_weights + num_updated * recipe.weight_bytes if streams else 0
    num_ranks = ranks_per_node(plan, machine)
    link_bytes_per_s = min(machine.link_bytes_per_s, machine.host_bytes_per_s / num_ranks)
    return OffloadCost(
        level=level,
        down_bytes=down_bytes,
        up_bytes=up_bytes,
        update_bytes=update_bytes,
        nvme_bytes=nvme_bytes,
        down_s=down_bytes / link_bytes_per_s,
        up_s=up_bytes / link_bytes_per_s,
        update_s=update_bytes * num_ranks / machine.host_bytes_per_s,
        nvme_s=nvme_bytes * num_ranks / machine.nvme_bytes_per_s if in_files else 0.0,
    )


def ranks_per_node(plan: Plan, machine: Machine) -> int:
    """Return how many ranks of a plan share the main memory of one node."""
    return min(plan.num_ranks, machine.devices_per_node)


def show_bytes(size: float) -> str:
    """Write a number of bytes for a reader: in GB from 0.1 GB on, else in MB; GB is 10^9 and MB 10^6."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:.3f} MB"
