"""Chapter 5's glue: a real run on ranks, under a budget for what each may hold on its "device".

Enters: a budget in bytes and this rank. Leaves: what the offload tree chose for it, and whether the ledger of a real
step kept within it. On a CPU the device is an account, not a place: main memory holds everything, and what offloading
would move is only told apart by its owner. Seen there: that state is sharded, gathered unit by unit and freed, and that
losses stay the same. Not seen: a copy over a link, its time, its staging buffers. On a GPU nothing is accounted: the
ledger counts what really lies there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.monitor.ledger import Sample, StepLedger, measure_ledger
from vlmcourse.parallel.comm import max_over_ranks
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner import RESERVED_BYTES, Decision, Machine, Plan, Workload, decide_offload
from vlmcourse.planner.offload_cost import show_bytes
from vlmcourse.presets import get_model
from vlmcourse.state_offload import OffloadConfig
from vlmcourse.train.trainer import Trainer

HEADROOM_FRACTION = 0.1
"""Of a budget that is kept from the tree: activations are an estimate, and a ledger also counts the batch, the gradient
on its way and what an operation needs for a moment."""
STATE = ("weights", "gradients", "optimizer")
"""Owners of a ledger whose home offloading changes; all others are on the device."""
MAIN_MEMORY = OffloadConfig(optimizer="cpu", parameters="cpu")


@dataclass(frozen=True)
class BudgetRun:
    """What was chosen for a budget, and what a step then held; bytes of the fullest rank."""

    decision: Decision
    offload: OffloadConfig
    """What was run: FSDP2 moves weights, gradients and optimizer together, so it also stands for level optimizer."""
    budget_bytes: int
    held_bytes: int
    """At the fullest moment of a step, in the device's account."""
    moved_bytes: int
    """Of state in main memory: at the fullest moment of the account on a CPU, between steps where there is a GPU."""
    owners: dict[str, int]
    """This rank's bytes in the device's account at its own fullest moment, by owner of the ledger."""
    losses: tuple[float, ...]

    @property
    def kept_within(self) -> bool:
        """Whether the run kept within its budget."""
        return self.held_bytes <= self.budget_bytes

    def __str__(self) -> str:
        """Show budget, choice and measurement in a line."""
        verdict = "kept within it" if self.kept_within else "did NOT keep within it"
        return (
            f"budget {show_bytes(self.budget_bytes)}: the tree says {self.decision.answer} "
            f"({show_bytes(needed_bytes(self.decision)[self.decision.answer])}), run with {self.offload}; the account "
            f"held {show_bytes(self.held_bytes)} on the device and {show_bytes(self.moved_bytes)} of state off it: "
            f"{verdict}"
        )


def budget_config(offload: OffloadConfig, micro_batch_size: int = 4) -> TrainConfig:
    """Return a short run of the tiny model on the digits, under FSDP (ZeRO-3) in fp32."""
    config = parse_config(
        {
            "data": {"num_train_samples": 256, "num_eval_samples": 8},
            "train": {"precision": "fp32", "num_steps": 8, "micro_batch_size": micro_batch_size},
            "parallel": {"strategy": "fsdp"},
        }
    )
    return dataclasses.replace(config, offload=offload)


def decide_for_budget(budget_bytes: int, num_ranks: int, micro_batch_size: int, seq_len: int) -> Decision:
    """Ask the offload tree about the tiny model on a device of `budget_bytes`.

    The planner's allowance for a CUDA context and its like is added to the budget: no ledger counts it. Speeds are of
    no consequence here: they make costs, and the answer is made of bytes.

    Args:
        budget_bytes: for all that a ledger counts on one device, 1 or more.
        num_ranks: over which FSDP splits, 2 or more.
        micro_batch_size: samples of a rank's forward pass.
        seq_len: tokens of the longest of them.
    """
    config = budget_config(OffloadConfig(), micro_batch_size)
    plan = Plan(
        dp_shard=num_ranks,
        zero_stage=3,
        precision="fp32",
        micro_batch_size=micro_batch_size,
        recompute_vision=config.activations.vision,
        recompute_language=config.activations.language,
    )
    machine = Machine(
        name="an accounted device",
        device_bytes=budget_bytes + RESERVED_BYTES,
        devices_per_node=num_ranks,
        host_bytes=10**12,
        host_bytes_per_s=1e10,
        link_bytes_per_s=1e9,
    )
    return decide_offload(plan, get_model(config.model.preset), machine, Workload(seq_len=seq_len))


def needed_bytes(decision: Decision) -> dict[str, int]:
    """Return what each level needs of a budget: the planner's bytes on the device without its allowance."""
    return {level.name: (level.device_bytes or 0) - RESERVED_BYTES for level in decision.levels}


def run_within_budget(
    budget_bytes: int, ranks: Ranks, micro_batch_size: int = 4, headroom_fraction: float = HEADROOM_FRACTION
) -> BudgetRun:
    """Let the tree choose, train two steps so, and account for everything alive in the second; all ranks together.

    Args:
        budget_bytes: of each rank's device account.
        ranks: this process's place, of 2 or more.
        micro_batch_size: samples of a rank's forward pass.
        headroom_fraction: of the budget, which the tree is not told of; at 0 the run may exceed it by a little.

    Raises:
        ValueError: if there is one rank, the headroom is no fraction, or nothing that can be run here fits the budget.
    Communicates: what two steps under FSDP do, and two all-reduces of a few numbers.
    """
    if ranks.world_size < 2:
        raise ValueError(f"world_size = {ranks.world_size}: ZeRO-3 splits over 2 ranks or more; start more")
    if not 0 <= headroom_fraction < 1:
        raise ValueError(f"headroom_fraction = {headroom_fraction}: must be 0 or greater, and below 1")
    trainer = Trainer(budget_config(OffloadConfig(), micro_batch_size), ranks, show_progress=False)
    longest = max(batch.input_ids_BS.shape[1] for step in range(2) for batch in trainer.load_step(step))
    seq_len = int(max_over_ranks([longest], ranks)[0])
    told_bytes = round(budget_bytes * (1 - headroom_fraction))
    decision = decide_for_budget(told_bytes, ranks.world_size, micro_batch_size, seq_len)
    if decision.answer not in ("none", "optimizer", "optimizer+parameters"):
        needs = ", ".join(f"{name} {show_bytes(size)}" for name, size in needed_bytes(decision).items())
        why = "FSDP2 always fetches ahead" if decision.fits else "activations and one layer are more than that"
        raise ValueError(
            f"budget_bytes = {budget_bytes:,}, of which {told_bytes:,} without headroom: the tree says "
            f"{decision.answer}, and {why}; levels need {needs}: raise the budget or lower micro_batch_size"
        )
    offload = OffloadConfig() if decision.answer == "none" else MAIN_MEMORY
    if not offload.is_plain:
        trainer = Trainer(budget_config(offload, micro_batch_size), ranks, show_progress=False)
    losses = [trainer.train_step().loss]  # Adam's moments exist from here on
    with StepLedger(trainer.model, trainer.optimizer, device_type=ranks.device.type) as ledger:
        losses.append(trainer.train_step().loss)
    is_account = ranks.device.type == "cpu"
    moved_away = offload if is_account else OffloadConfig()  # a GPU's ledger sees none of what is in main memory
    fullest = max(ledger.samples, key=lambda sample: on_device(sample, moved_away))
    held = on_device(fullest, moved_away)
    moved = max(sample.total_bytes - on_device(sample, moved_away) for sample in ledger.samples)
    if not is_account and not offload.is_plain:
        moved = measure_ledger(trainer.model, trainer.optimizer).total_bytes
    held, moved = (int(value) for value in max_over_ranks([held, moved], ranks))
    owners = {owner: size for owner, size in fullest.by_owner().items() if moved_away.is_plain or owner not in STATE}
    return BudgetRun(decision, offload, budget_bytes, held, moved, owners, tuple(losses))


def on_device(sample: Sample, offload: OffloadConfig) -> int:
    """Return which of the bytes alive at a moment are in the device's account; none of the update if that is off it."""
    if offload.is_plain:
        return sample.total_bytes
    if sample.phase == "update":
        return 0
    return sum(size for owner, size in sample.by_owner().items() if owner not in STATE)
