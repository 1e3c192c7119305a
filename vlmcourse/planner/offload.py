"""How much of the training state has to leave the device: the decision tree of offloading.

Enters: a `Plan`, a model shape, a workload, a machine. Leaves: a `Decision`: none, optimizer, optimizer+parameters,
layered or does not fit, with the numbers on both sides of the link and the predicted cost. The tree asks of one level
after the other, least first because each costs more time: does a rank fit its device, and does what it moves off fit
the node's main memory (or, under ZeRO-3, its disks, where the machine has them)? Bytes are in `offload_memory.py`, time
in `offload_cost.py`. Activations stay: the section [activations] moves or recomputes those. Chapter 5.

Source: Ren et al. 2021 (ZeRO-Offload); Rajbhandari et al. 2021 (ZeRO-Infinity), figure 1 and section 5.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from vlmcourse.planner.activations import Workload
from vlmcourse.planner.memory import RankMemory
from vlmcourse.planner.offload_cost import (
    Machine,
    OffloadCost,
    estimate_offload_cost,
    machine_of,
    ranks_per_node,
    show_bytes,
)
from vlmcourse.planner.offload_memory import OFFLOAD_LEVELS, ZERO_3_LEVELS, estimate_offloaded_memory
from vlmcourse.planner.offload_runs import describe_runs
from vlmcourse.planner.plan import Plan
from vlmcourse.presets import Cluster, VLMShape

DOES_NOT_FIT = "does not fit"
QUESTIONS = {
    "none": "everything on the device?",
    "optimizer": "optimizer state off it?",
    "optimizer+parameters": "parameters off it too?",
    "layered": "one layer at a time?",
}
"""What the tree asks at each level."""
BEFORE = {
    "none": "Everything on the device",
    "optimizer": "All but the optimizer's state on the device",
    "optimizer+parameters": "Units of weights with one fetched ahead",
}
STAGES_OF = {"optimizer": "1 to 3", "optimizer+parameters": "3", "layered": "3"}
"""ZeRO stages under which a level can be run here: below, an engine would not read the setting."""
HOMES = ("device", "main memory", "files")


@dataclass(frozen=True, kw_only=True)
class Level:
    """One question of the tree and its numbers."""

    name: str
    """A name in `OFFLOAD_LEVELS`."""
    memory: RankMemory | None
    """Of the rank that needs most on its device; None where the plan's stage does not allow this level."""
    device_limit_bytes: int
    node_bytes: int = 0
    """Main memory that one node needs for what its ranks have off their devices."""
    node_limit_bytes: int = 0
    home: str = ""
    """Where the state that left lies, one of `HOMES`; "" where the node has no room for it."""
    nvme_bytes: int = 0
    """Of files on one node, where that is its home."""

    @property
    def device_bytes(self) -> int | None:
        """What the fullest rank needs on its device; None where this level is not possible."""
        return None if self.memory is None else self.memory.device_total

    @property
    def fits_device(self) -> bool:
        """Whether that fits."""
        return self.device_bytes is not None and self.device_bytes <= self.device_limit_bytes

    @property
    def fits(self) -> bool:
        """Whether both sides of the link fit."""
        return self.fits_device and self.home != ""

    def __str__(self) -> str:
        """Show question, numbers and answer in a line."""
        question = f"{QUESTIONS[self.name]:27}"
        if self.device_bytes is None:
            return f"{question}only with zero_stage={STAGES_OF[self.name]}: no"
        device = f"{show_bytes(self.device_bytes)} of {show_bytes(self.device_limit_bytes)} a device"
        if self.name == "none" or not self.fits_device:
            return f"{question}{device}: {'yes' if self.fits else 'no'}"
        node = f"{show_bytes(self.node_bytes)} of {show_bytes(self.node_limit_bytes)} a node"
        files = f" and {show_bytes(self.nvme_bytes)} in files" if self.home == "files" else ""
        return f"{question}{device}, {node}{files}: {'yes' if self.fits else 'no'}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The answer of the tree."""

    answer: str
    """A name in `OFFLOAD_LEVELS`, or `DOES_NOT_FIT`."""
    reason: str
    """In one sentence."""
    levels: tuple[Level, ...]
    """All levels in order, those after the answer too."""
    cost: OffloadCost
    """Of the answer; nothing where nothing leaves the device, or nothing fits."""
    machine: Machine
    here: str = ""
    """Where no strategy of this package runs what is recommended: which would, with what changed; else ""."""

    @property
    def fits(self) -> bool:
        """Whether there is a level that fits."""
        return self.answer != DOES_NOT_FIT

    @property
    def level(self) -> Level | None:
        """The level of the answer; None where nothing fits."""
        return next((level for level in self.levels if level.name == self.answer), None)

    @property
    def path(self) -> tuple[Level, ...]:
        """The questions that were asked: up to the answer."""
        asked = OFFLOAD_LEVELS.index(self.answer) + 1 if self.fits else len(self.levels)
        return self.levels[:asked]

    def __str__(self) -> str:
        """Show the path through the tree, question by question, and what the answer costs."""
        level = self.level
        where = f" (in {level.home})" if level is not None and level.home != "device" else ""
        lines = [f"offload on {self.machine.name}: {self.answer}{where}", *(f"  {level}" for level in self.path)]
        lines += [f"  {said}" for said in (self.reason, self.here) if said]
        lines += [f"  each step of a rank: {self.cost}"] if self.cost.update_bytes else []
        return "\n".join(lines)


def decide_offload(
    plan: Plan,
    model: VLMShape,
    machine: Machine | Cluster,
    workload: Workload | None = None,
    *,
    grad_accum_steps: int = 1,
) -> Decision:
    """Decide how much of the training state has to leave the device: the least that fits.

    Args:
        plan: how the ranks share the work; `offload_optimizer` is what is decided here, and is not read.
        model: the model's shape.
        machine: the device and its node, or a cluster whose datasheets say it all.
        workload: tokens and tiles of a sample; the default is 2048 tokens and one tile.
        grad_accum_steps: micro-batches that a rank adds up before a step.

    Returns:
        The answer, its reason, the numbers of every level and the predicted cost of a step. Where the stages of a
        pipeline differ, the numbers are those of the stage that needs most, on each side of the link.

    Raises:
        ValueError: if a cluster does not say enough (see `machine_of`), or `grad_accum_steps` is below 1.
    """
    if isinstance(machine, Cluster):
        machine = machine_of(machine)
    if grad_accum_steps < 1:
        raise ValueError(f"grad_accum_steps = {grad_accum_steps}: must be 1 or greater")
    levels = tuple(_ask(name, plan, model, machine, workload) for name in OFFLOAD_LEVELS)
    chosen = next((level for level in levels if level.fits), None)
    if chosen is None:
        cost = OffloadCost(level="none")
        reason, here = _why_nothing_fits(levels, plan, model, machine, workload)
        return Decision(answer=DOES_NOT_FIT, reason=reason, levels=levels, cost=cost, machine=machine, here=here)
    costs = [
        estimate_offload_cost(
            memory,
            plan,
            machine,
            level=chosen.name,
            grad_accum_steps=grad_accum_steps,
            in_files=chosen.home == "files",
        )
        for memory in estimate_offloaded_memory(plan, model, workload, level=chosen.name)
    ]
    return Decision(
        answer=chosen.name,
        reason=_why_this(levels, chosen),
        levels=levels,
        cost=max(costs, key=lambda cost: cost.added_s()),
        machine=machine,
        here=describe_runs(plan, chosen.name, in_files=chosen.home == "files"),
    )


def _ask(name: str, plan: Plan, model: VLMShape, machine: Machine, workload: Workload | None) -> Level:
    """Return the numbers of one level."""
    level = partial(Level, name=name, device_limit_bytes=machine.device_bytes, node_limit_bytes=machine.host_bytes)
    if name != "none" and plan.zero_stage < (3 if name in ZERO_3_LEVELS else 1):
        return level(memory=None)
    stages = estimate_offloaded_memory(plan, model, workload, level=name)
    memory = max(stages, key=lambda stage: stage.device_total)
    if name == "none":
        return level(memory=memory, home="device")
    num_ranks = ranks_per_node(plan, machine)
    node_bytes = num_ranks * max(stage.host_total for stage in stages)
    if node_bytes <= machine.host_bytes:
        return level(memory=memory, node_bytes=node_bytes, home="main memory")
    gradient_bytes = num_ranks * max(stage.host_gradients for stage in stages)  # on their way to the update
    file_bytes = num_ranks * max(stage.host_total - stage.host_gradients for stage in stages)
    has_room = file_bytes <= machine.nvme_bytes and gradient_bytes <= machine.host_bytes
    if has_room and plan.zero_stage == 3:  # ZeRO-Infinity; DeepSpeed's lower stages take the setting and write no file
        return level(memory=memory, node_bytes=gradient_bytes, home="files", nvme_bytes=file_bytes)
    return level(memory=memory, node_bytes=node_bytes)


def _why_this(levels: tuple[Level, ...], chosen: Level) -> str:
    """Say in a sentence why a level is the answer."""
    need = (
        f"a rank needs {show_bytes(chosen.device_bytes or 0)} of its device's {show_bytes(chosen.device_limit_bytes)}"
    )
    if chosen.name == "none":
        return f"Nothing has to leave the device: {need}."
    before = next(level for level in reversed(levels[: levels.index(chosen)]) if level.device_bytes is not None)
    moved = {
        "optimizer": "with the optimizer's state off it",
        "optimizer+parameters": "with weights and gradients off it too, whole units of them passing through,",
        "layered": "with a layer at a time passing through",
    }[chosen.name]
    files = f", and {show_bytes(chosen.nvme_bytes)} of files" if chosen.home == "files" else ""
    return (
        f"{BEFORE[before.name]} would take {show_bytes(before.device_bytes or 0)}; {moved} {need}, and a node "
        f"{show_bytes(chosen.node_bytes)} of its {show_bytes(chosen.node_limit_bytes)} of main memory{files}."
    )


def _why_nothing_fits(
    levels: tuple[Level, ...], plan: Plan, model: VLMShape, machine: Machine, workload: Workload | None
) -> tuple[str, str]:
    """Say which limit stands in the way of every level and what to change, and who runs here what that leads to."""
    homeless = next((level for level in levels if level.fits_device), None)
    if homeless is not None:
        disks = f" and its disks have {show_bytes(machine.nvme_bytes)}" if machine.nvme_bytes else ""
        reason = (
            f"Devices have room from level {homeless.name} on, but a node needs {show_bytes(homeless.node_bytes)} for "
            f"what leaves them and has {show_bytes(homeless.node_limit_bytes)} of main memory{disks}: split the state "
            "over more nodes, make the optimizer's state smaller, or give disks (nvme_bytes, nvme_bytes_per_s; ZeRO-3)."
        )
        return reason, ""
    last = next(level for level in reversed(levels) if level.memory is not None)
    assert last.memory is not None  # level none always has one
    need = f"a rank needs {show_bytes(last.memory.device_total)} of its device's {show_bytes(last.device_limit_bytes)}"
    if plan.zero_stage < 3:
        split = dataclasses.replace(plan, zero_stage=3, dp_shard=plan.dp_degree, dp_replicate=1)
        found = decide_offload(split, model, machine, workload)
        stays = "weights cannot leave it" if plan.zero_stage else "nothing can leave it (that takes 1 to 3)"
        reason = (
            f"At level {last.name} {need}, and under zero_stage={plan.zero_stage} {stays}: with "
            f"zero_stage=3 over dp_shard={split.dp_shard} the answer is "
            f"{found.answer!r}."
        )
        return reason, found.here
    owners = {owner: size for owner, size in last.memory.by_owner().items() if owner != "allowance"}
    largest = max(owners, key=lambda owner: owners[owner])
    ways = {
        "activations": "lower micro_batch_size, recompute more of the activations or shorten the sequence",
        "gathered": "split layers by tp, or choose a device that holds the largest layer",
    }.get(largest, "choose a device with more memory")
    return f"Even one layer at a time {need}, most of it {largest} ({show_bytes(owners[largest])}): {ways}.", ""
