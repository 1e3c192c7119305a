"""A controller that steers a real run: the same `observe(metrics) -> actions` as on the simulated cluster.

Enters: a `Trainer` and a controller. Leaves: the run, changed between its steps; what was measured, done and refused.
Put it into the trainer's `after_step`. What really happens here: samples dealt out by work, micro-batches of another
size at the same global batch, recomputation switched on and off tower by tower, checkpoints. What a running process
cannot do (other sharding, another machine, compression, which is fixed when DDP is built) is refused by name.
Chapter 7.

All ranks must do the same, so rank 0 alone decides, from the measurements of all.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vlmcourse.control.actions import ACTIONS, Change, Place, Settings, read_actions
from vlmcourse.data.sampler import GlobalBatchSampler
from vlmcourse.monitor.ledger import measure_ledger
from vlmcourse.parallel.apply import unwrap
from vlmcourse.parallel.comm import gather_numbers
from vlmcourse.planner.flops import Work, count_step_flops
from vlmcourse.recompute import RECOMPUTING_TOWERS, plan_segments
from vlmcourse.train.activations import cover_blocks, uncover_blocks
from vlmcourse.train.balanced_sampler import BalancedSampler
from vlmcourse.train.report import StepReport
from vlmcourse.train.trainer import Trainer

STRATEGIES = ("single", "ddp", "zero1")
"""Under which every rank has whole weights in one plain model, so that its blocks can be covered between steps."""
RESTART = "needs a restart: change the configuration and resume from a checkpoint"
REFUSED = {
    "compress": "compression is fixed when DDP is built: set parallel.compression and resume from a checkpoint",
    "shard": RESTART,
    "replace": "no other machine is known to this run: resume on other ranks from a checkpoint",
    "move_layers": "this run has no pipeline: every rank holds all layers; parallel.adaptive moves those of one",
}
TIMES = ("data_wait_s", "forward_s", "backward_s", "communication_s", "optimizer_s")
CONTENTS = ("samples", "tiles", "image_tokens", "text_tokens")
Observe = Callable[[dict[str, Any]], Any]


class ControlledRun:
    """Steers one run; `trainer.after_step.append(ControlledRun(trainer, controller.observe))` on every rank."""

    def __init__(
        self,
        trainer: Trainer,
        observe: Observe,
        *,
        memory_budget_bytes: int | None = None,
        notice_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Check that the run can be steered.

        Args:
            trainer: of this rank.
            observe: asked on rank 0 alone, after every step whose times are known.
            memory_budget_bytes: of a rank; None is the GPU's memory, and on a CPU, where nothing says what a process
                may have, no budget.
            notice_s: returns the seconds until a machine is taken away, where that is announced; asked on rank 0.

        Raises:
            ValueError: if the strategy is not one of `STRATEGIES`, or ranks share samples.
        """
        layout, parallel = trainer.place.layout, trainer.parallel
        if parallel.strategy not in STRATEGIES or layout.dp_degree != layout.world_size:
            raise ValueError(
                f"parallel.strategy = {parallel.strategy!r} on {layout.world_size} ranks with {layout.dp_degree} "
                f"data-parallel ones: a controller steers {', '.join(STRATEGIES)}, where every rank has samples of its "
                "own; choose one of these, without tp, cp and pp"
            )
        self.trainer, self.observe, self.notice_s = trainer, observe, notice_s
        self.memory_budget_bytes = memory_budget_bytes
        if memory_budget_bytes is None and trainer.ranks.device.type == "cuda":
            self.memory_budget_bytes = torch.cuda.get_device_properties(trainer.ranks.device).total_memory
        self.settings = _first_settings(trainer)
        self.place = Place(
            global_batch_size=trainer.global_batch_size,
            dp_degree=layout.dp_degree,
            num_ranks=layout.world_size,
            allowed={name: REFUSED.get(name, "") for name in ACTIONS} | _find_refused(trainer),
        )
        self.done: list[tuple[int, str]] = []
        """Step after which something was changed, and what; the same on all ranks."""
        self.refused: list[str] = []
        self._plain_sampler: GlobalBatchSampler = trainer.sampler
        self._work: dict[int, float] = {}
        self._saved_step, self._elapsed_s = trainer.step, 0.0
        self._events: list[dict[str, Any]] = []
        self._state_bytes = 0.0

    def __call__(self, trainer: Trainer, report: StepReport) -> None:
        """Measure the step that has just ended, ask the controller, and do what it says; all ranks call this.

        Communicates: one all-gather of `TIMES`, `CONTENTS` and memory; one broadcast of the answer; with the action
            save, or when a checkpoint is due, what `Trainer.save` does.
        """
        self._elapsed_s += report.seconds
        if not self._state_bytes:  # gradients and moments are there since the first step
            self._state_bytes = float(measure_ledger(trainer.model, trainer.optimizer).total_bytes)
        metrics = self._measure(report)
        found: list[Any] = [None]
        if trainer.ranks.is_main and metrics is not None:
            found = [read_actions(self.observe(metrics), self.settings, self.place)]
        if trainer.ranks.world_size > 1:
            dist.broadcast_object_list(found, src=0, device=trainer.ranks.device)
        if found[0] is not None:
            self._change(found[0])
        every = self.settings.save_every if trainer.config.train.checkpoint_every == 0 else 0
        if every and trainer.step - self._saved_step >= every and trainer.step < trainer.config.train.num_steps:
            self._save()

    def _measure(self, report: StepReport) -> dict[str, Any] | None:
        """Return what the monitor measured on all ranks; None while a rank's times are not known."""
        trainer, times, contents = self.trainer, self.trainer.monitor.last_times, self.trainer.monitor.last_contents
        seconds = [float("nan")] * len(TIMES)
        if times is not None and times.communication_s is not None:
            seconds = [getattr(times, name) for name in TIMES]
        mine = [*seconds, *(float(contents[name]) for name in CONTENTS), self._peak_bytes(), self._state_bytes]
        by_rank = gather_numbers(mine, trainer.ranks)
        names = (*TIMES, *CONTENTS, "peak_bytes", "state_bytes")
        columns = dict(zip(names, map(list, zip(*by_rank, strict=True)), strict=True))
        if any(seconds != seconds for seconds in columns["communication_s"]):
            return None
        events, self._events = self._events, []
        return columns | {
            "step": trainer.step,
            "step_s": report.seconds,
            "steps_since_save": trainer.step - self._saved_step,
            "elapsed_s": self._elapsed_s,
            "events": events,
            "notice_s": self.notice_s() if trainer.ranks.is_main else None,
            "device_bytes": self.memory_budget_bytes,
            "global_batch_size": trainer.global_batch_size,
            "dp_degree": self.place.dp_degree,
            "num_stages": 1,
            "settings": dict(vars(self.settings)),
        }

    def _peak_bytes(self) -> float:
        """Return the most in tensors on a GPU since the run began; on a CPU the process's resident set now."""
        device = self.trainer.ranks.device
        if device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(device))
        return float(self.trainer.monitor.last_contents["rss_bytes"])

    # --- Doing it ---------------------------------------------------------------------------------------------------

    def _change(self, change: Change) -> None:
        """Carry out what was read from an answer, on every rank alike."""
        old, new = self.settings, change.settings
        self.refused += change.refused
        for tower in RECOMPUTING_TOWERS:
            policy = getattr(new, f"recompute_{tower}")
            if policy != getattr(old, f"recompute_{tower}"):
                self._recompute(tower, policy)
        if new.micro_batch_size != old.micro_batch_size:
            sizes = {"micro_batch_size": new.micro_batch_size, "accumulation_steps": new.accumulation_steps}
            config = self.trainer.config
            self.trainer.config = dataclasses.replace(config, train=dataclasses.replace(config.train, **sizes))
        if (new.balance, new.shares) != (old.balance, old.shares):
            plain = self._plain_sampler
            by_work = new.balance == "tokens"
            self.trainer.sampler = BalancedSampler.of(plain, self._work_of, new.shares) if by_work else plain
        changed = [f"{name} = {value}" for name, value in vars(new).items() if value != getattr(old, name)]
        self.settings = new
        if changed:
            self.done.append((self.trainer.step, ", ".join(changed)))
        if change.save:
            self.done.append((self.trainer.step, "save"))
            self._save()

    def _recompute(self, tower: str, policy: str) -> None:
        module = getattr(unwrap(self.trainer.model), tower)
        uncover_blocks(module)
        if policy != "none":
            cover_blocks(module, plan_segments(policy, len(module.blocks)))

    def _save(self) -> None:
        trainer, began_s = self.trainer, time.perf_counter()
        with trainer.monitor.event("checkpoint", trainer.step):
            trainer.save()
        self._saved_step = trainer.step
        self._events.append({"event": "checkpoint", "seconds": time.perf_counter() - began_s})

    def _work_of(self, index: int) -> float:
        """Return the FLOPs of one sample, counted once."""
        if index not in self._work:
            num_tiles, num_tokens = self.trainer.collator.measure(self.trainer.train_data[index])
            work = Work.of_sequences([num_tokens], num_tiles)
            self._work[index] = count_step_flops(self.trainer.shape, work).model
        return self._work[index]


def _first_settings(trainer: Trainer) -> Settings:
    """Return what the configuration says."""
    train, activations = trainer.config.train, trainer.config.activations
    return Settings(
        micro_batch_size=train.micro_batch_size,
        accumulation_steps=train.accumulation_steps,
        recompute_vision=activations.vision,
        recompute_language=activations.language,
        compress=trainer.parallel.compression != "none",
        zero_stage=1 if trainer.parallel.strategy == "zero1" else 0,
        save_every=train.checkpoint_every,
    )


def _find_refused(trainer: Trainer) -> dict[str, str]:
    """Return which actions this run cannot do, with the reason."""
    config, found = trainer.config, dict[str, str]()
    if config.activations.offload:
        found["recompute"] = "activations.offload = true has its own hooks on the blocks: leave it out"
    elif "vision" in config.model.freeze or "language" in config.model.freeze:
        found["recompute"] = f"model.freeze = {list(config.model.freeze)}: a frozen tower may keep nothing to recompute"
    if config.train.checkpoint_every:
        found["save_every"] = f"train.checkpoint_every = {config.train.checkpoint_every} saves already: set it to 0"
    return found
