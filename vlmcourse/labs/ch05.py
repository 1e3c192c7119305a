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
from vlmcourse.planner import ALLOWANCE_BYTES, Decision, Machine, Plan, Workload, decide_offload
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
ONE_LAYER = dataclasses.replace(MAIN_MEMORY, layered=True)


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


def budget_config(
    offload: OffloadConfig,
    micro_batch_size: int = 4,
    *,
    strategy: str = "fsdp",
    recompute: str = "none",
    deepspeed_config: str = "",
) -> TrainConfig:
    """Return a short run of the tiny model on the digits in fp32, by default under FSDP (ZeRO-3)."""
    config = parse_config(
        {
            "data": {"num_train_samples": 256, "num_eval_samples": 8},
            "train": {"precision": "fp32", "num_steps": 100, "micro_batch_size": micro_batch_size},
            "parallel": {"strategy": strategy, "deepspeed_config": deepspeed_config},
            "activations": {"vision": recompute, "language": recompute},
        }
    )
    return dataclasses.replace(config, offload=offload)


def budget_plan(num_ranks: int, micro_batch_size: int, recompute: str = "none") -> Plan:
    """Return the plan of such a run, for the tree; arguments are those of `decide_for_budget`."""
    return Plan(
        dp_shard=num_ranks,
        zero_stage=3,
        precision="fp32",
        micro_batch_size=micro_batch_size,
        recompute_vision=recompute,
        recompute_language=recompute,
    )


def decide_for_budget(
    budget_bytes: int, num_ranks: int, micro_batch_size: int, seq_len: int, recompute: str = "none"
) -> Decision:
    """Ask the offload tree about the tiny model on a device of `budget_bytes`.

    The planner's allowance for a CUDA context and its like is added to the budget: no ledger counts it. Speeds are of
    no consequence here: they make costs, and the answer is made of bytes.

    Args:
        budget_bytes: for all that a ledger counts on one device, 1 or more.
        num_ranks: over which FSDP splits, 2 or more.
        micro_batch_size: samples of a rank's forward pass.
        seq_len: tokens of the longest of them.
        recompute: activations of both towers, a policy of the section [activations].
    """
    plan = budget_plan(num_ranks, micro_batch_size, recompute)
    machine = Machine(
        name="an accounted device",
        device_bytes=budget_bytes + ALLOWANCE_BYTES,
        devices_per_node=num_ranks,
        host_bytes=10**12,
        host_bytes_per_s=1e10,
        link_bytes_per_s=1e9,
    )
    return decide_offload(
        plan, get_model(budget_config(OffloadConfig()).model.preset), machine, Workload(seq_len=seq_len)
    )


def needed_bytes(decision: Decision) -> dict[str, int]:
    """Return what each level needs of a budget: the planner's bytes on the device without its allowance."""
    return {level.name: (level.device_bytes or 0) - ALLOWANCE_BYTES for level in decision.levels}


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
        ValueError: if there is one rank, the headroom is no fraction, or not even one layer at a time fits the budget.
    Communicates: what two steps under FSDP do, and two all-reduces of a few numbers.
    """
    if ranks.world_size < 2:
        raise ValueError(f"world_size = {ranks.world_size}: ZeRO-3 splits over 2 ranks or more; start more")
    if not 0 <= headroom_fraction < 1:
        raise ValueError(f"headroom_fraction = {headroom_fraction}: must be 0 or greater, and below 1")
    trainer = Trainer(budget_config(OffloadConfig(), micro_batch_size), ranks, show_progress=False)
    seq_len = longest_sequence(trainer, ranks)
    told_bytes = round(budget_bytes * (1 - headroom_fraction))
    decision = decide_for_budget(told_bytes, ranks.world_size, micro_batch_size, seq_len)
    if not decision.fits:
        needs = ", ".join(f"{name} {show_bytes(size)}" for name, size in needed_bytes(decision).items())
        raise ValueError(
            f"budget_bytes = {budget_bytes:,}, of which {told_bytes:,} without headroom: the tree says "
            f"{decision.answer}, and activations and one layer are more than that; levels need {needs}: raise the "
            "budget or lower micro_batch_size"
        )
    offload = {"none": OffloadConfig(), "layered": ONE_LAYER}.get(decision.answer, MAIN_MEMORY)
    if not offload.is_plain:
        trainer = Trainer(budget_config(offload, micro_batch_size), ranks, show_progress=False)
    account = measure_account(trainer, offload, ranks)
    return BudgetRun(
        decision, offload, budget_bytes, account.held_bytes, account.moved_bytes, account.owners, account.losses
    )


def longest_sequence(trainer: Trainer, ranks: Ranks) -> int:
    """Return the tokens of the longest sequence in the first two steps of any rank; all ranks together."""
    longest = max(batch.input_ids_BS.shape[1] for step in range(2) for batch in trainer.load_step(step))
    return int(max_over_ranks([longest], ranks)[0])


@dataclass(frozen=True)
class Account:
    """What a step held in the device's account; bytes of the fullest rank where nothing else is said."""

    held_bytes: int
    """At the fullest moment of a step."""
    moved_bytes: int
    """As `BudgetRun.moved_bytes`."""
    gathered_bytes: int
    """Of whole weights of a rank that keeps shards, at most at any moment."""
    owners: dict[str, int]
    """This rank's at its own fullest moment, by owner of the ledger."""
    losses: tuple[float, ...]


def measure_account(trainer: Trainer, offload: OffloadConfig, ranks: Ranks) -> Account:
    """Train two steps and account for everything alive in the second; all ranks together.

    Args:
        trainer: of a run under FSDP or a DeepSpeed engine, which has made no step.
        offload: what its run moves off the device.
        ranks: this process's place.
    Communicates: what two steps do, and an all-reduce of a few numbers.
    """
    losses = [trainer.train_step().loss]  # Adam's moments exist from here on
    between = measure_ledger(trainer.model, trainer.optimizer)
    with StepLedger(trainer.model, trainer.optimizer, device_type=ranks.device.type) as ledger:
        losses.append(trainer.train_step().loss)
    is_account = ranks.device.type == "cpu"
    moved_away = offload if is_account else OffloadConfig()  # a GPU's ledger sees none of what is in main memory

    def count(sample: Sample) -> int:
        return on_device(sample, moved_away, between.gradients_bytes)

    fullest = max(ledger.samples, key=count)
    held = count(fullest)
    moved = max(sample.total_bytes - count(sample) for sample in ledger.samples)
    if not is_account and not offload.is_plain:
        moved = between.total_bytes - (between.weights_bytes if offload.parameters == "none" else 0)
    gathered = max(sample.by_owner().get("gathered", 0) for sample in ledger.samples)
    held, moved, gathered = (int(value) for value in max_over_ranks([held, moved, gathered], ranks))
    gone = moved_owners(moved_away)
    owners = {owner: size for owner, size in fullest.by_owner().items() if owner not in gone}
    return Account(held, moved, gathered, owners, tuple(losses))


def moved_owners(offload: OffloadConfig) -> tuple[str, ...]:
    """Return the owners of a ledger whose home is main memory."""
    if offload.is_plain:
        return ()
    return STATE if offload.parameters != "none" else tuple(owner for owner in STATE if owner != "weights")


def on_device(sample: Sample, offload: OffloadConfig, host_gradients_bytes: int = 10**18) -> int:
    """Return which of the bytes alive at a moment are in the device's account; of the update, weights that stay there.

    Args:
        sample: all that is alive.
        offload: what has its home in main memory.
        host_gradients_bytes: room for gradients there; a gradient beyond it is whole still, and on the device.
    """
    gone, found = moved_owners(offload), sample.by_owner()
    if not gone:
        return sample.total_bytes
    if sample.phase == "update":
        return 0 if "weights" in gone else found.get("weights", 0)
    on_its_way = max(0, found.get("gradients", 0) - host_gradients_bytes)
    return sum(size for owner, size in found.items() if owner not in gone) + on_its_way
