"""What one choice costs, seconds and bytes, and bounds that it cannot be better than.

Enters: a `Task`, a `Choice`. Leaves: a `Cost`: step time with the wait for ranks with more tiles, peak by owner; lower
bounds of both for a fraction of the work. Memory is `run_peak.py`'s, time `step_time.py`'s. Imports no torch.
Chapter 7.

Bounds leave terms out, and none that is below zero. A step is no shorter than what the mean rank of a pipeline
computes and sends inside its stages in all micro-batches (`bound_s`), and no shorter than what any rank does, after the
first micro-batch has come to it and before the last has gone back (`bound_stages_s`). The fullest rank holds no less
than the state of the mean one (`bound_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlmcourse.planner.choice import Choice, Task
from vlmcourse.planner.image_imbalance import expect_fullest
from vlmcourse.planner.layer_times import Compute
from vlmcourse.planner.rank_peak import Peak, find_peak
from vlmcourse.planner.run_peak import build_run_load, estimate_run_peak
from vlmcourse.planner.schedules import SCHEDULES, stages_of_rank
from vlmcourse.planner.stage_times import StageCost, stage_costs
from vlmcourse.planner.step_result import StepTime
from vlmcourse.planner.step_settings import Ranks, StepSettings
from vlmcourse.planner.step_time import estimate_step_time, split_whole
from vlmcourse.planner.workload import Workload

ROUNDING = 1e-6
"""By which share a bound is lowered, so that sums in another order cannot lift it over what it bounds."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a choice costs."""

    choice: Choice
    step: StepTime
    """Of a step in which every sample has as many tiles as the task's workload."""
    imbalance_s: float
    """What is waited beside that for the rank whose samples have most tiles."""
    peak: Peak
    """Of the fullest rank; with an offloaded optimizer, of what stays on the device."""
    host_bytes: int
    """Of that rank in main memory."""

    @property
    def seconds(self) -> float:
        """Of one optimizer step."""
        return self.step.seconds + self.imbalance_s

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together."""
        return self.step.num_samples / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Positions of the language tower, of all ranks together."""
        return self.step.num_tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs a second as a share of the devices' dense peak."""
        return self.step.mfu * self.step.seconds / self.seconds

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank, what is kept free for things not counted included."""
        return self.peak.total_bytes

    @property
    def rank_key(self) -> tuple[float, int, int, Choice]:
        """What choices are compared by: seconds a sample, then memory, then how few ranks share a sample."""
        return 1 / self.samples_per_s, self.peak_bytes, self.choice.cp * self.choice.tp * self.choice.pp, self.choice


class Costs:
    """Costs of choices of one task; remembers what several of them share."""

    def __init__(self, task: Task) -> None:
        self.task = task
        device = task.used_device
        self._compute = Compute(device, task.used_speeds, task.recipe.compute_dtype, task.recipe.compute_bytes)
        self._known: dict[tuple[object, ...], list[StageCost]] = {}
        self._peaks: dict[Choice, Peak] = {}
        self.limit_bytes = device.memory_bytes

    def num_samples(self, choice: Choice) -> int:
        """Return the samples of a step."""
        return choice.micro_batch_size * choice.grad_accum_steps * choice.dp_degree

    # --- Bounds -----------------------------------------------------------------------------------------------------

    def bound_s(self, choice: Choice) -> float:
        """Return seconds a sample that a choice cannot be faster than."""
        cost = self._whole(choice)
        seconds = choice.grad_accum_steps * (cost.forward_total_s + cost.input_total_s + cost.weight_s) / choice.pp
        return (1 - ROUNDING) * seconds / self.num_samples(choice)

    def bound_stages_s(self, choice: Choice) -> float:
        """Return seconds a sample as `bound_s` does, nearer and slower: of the rank of a pipeline with most to do."""
        if choice.pp == 1:
            return self.bound_s(choice)
        costs, most = self._stages(choice), 0.0
        # Where backward is in one part, the last thing a rank does is the backward of its first stage.
        goes_back = not SCHEDULES[choice.schedule].splits_backward
        for rank in range(choice.pp):
            stages = stages_of_rank(choice.schedule, choice.pp, rank)
            busy_s = sum(
                costs[stage].forward_total_s + costs[stage].input_total_s + costs[stage].weight_s for stage in stages
            )
            before_s = sum(cost.forward_total_s + goes_back * cost.input_total_s for cost in costs[: stages[0]])
            most = max(most, choice.grad_accum_steps * busy_s + before_s)
        return (1 - ROUNDING) * most / self.num_samples(choice)

    def bound_bytes(self, choice: Choice) -> float:
        """Return bytes that the fullest rank of a choice, whatever it recomputes, needs at least."""
        cost, recipe = (
            self._whole(choice._replace(recompute_vision="none", recompute_language="none")),
            self.task.recipe,
        )
        shards = choice.dp_shard * choice.cp if choice.zero_stage else 1
        of_weights = of_gradients = 1 / shards if choice.zero_stage >= 2 else 1.0
        if choice.zero_stage == 2:
            of_weights += 1  # whole ones within the step
        if choice.zero_stage >= 2 and choice.gradient_sync == "last" and choice.grad_accum_steps > 1:
            of_gradients += 1  # whole ones until the last micro-batch
        kept = 0 if choice.offload_optimizer else recipe.master_bytes + recipe.moment_bytes
        state = cost.all_params * recipe.weight_bytes * of_weights
        state += cost.trained_params * (recipe.gradient_bytes * of_gradients + kept / shards)
        return self.task.fixed_bytes + (1 - ROUNDING) * state / choice.pp

    def _whole(self, choice: Choice, workload: Workload | None = None) -> StageCost:
        """Return the cost of one micro-batch of the whole model on the ranks of one tp and cp group, without ZeRO.

        What every:k recomputes depends on where stages begin, so in a pipeline it is left out.
        """
        vision, language = (
            "none" if choice.pp > 1 and policy.startswith("every") else policy
            for policy in (choice.recompute_vision, choice.recompute_language)
        )
        key = (choice.tp, choice.vision_tp, choice.cp, choice.micro_batch_size, vision, language, workload)
        if key not in self._known:
            alone = choice._replace(recompute_vision=vision, recompute_language=language)
            self._known[key] = stage_costs(self._ranks(alone, workload), split_whole(self.task.model))
        return self._known[key][0]

    def _stages(self, choice: Choice) -> list[StageCost]:
        """Return the cost of one micro-batch on each stage, without ZeRO."""
        policies = choice.recompute_vision, choice.recompute_language
        key = (choice.tp, choice.vision_tp, choice.cp, choice.micro_batch_size, *policies)
        key = (*key, choice.num_stages, choice.vision_stages)
        if key not in self._known:
            self._known[key] = stage_costs(self._ranks(choice, None), self.task.split(choice))
        return self._known[key]

    def _ranks(self, choice: Choice, workload: Workload | None) -> Ranks:
        """Return what the cost of stages depends on, if no rank shares state with others."""
        task, alone = (
            self.task,
            Choice(
                tp=choice.tp,
                vision_tp=choice.vision_tp,
                cp=choice.cp,
                micro_batch_size=choice.micro_batch_size,
                recompute_vision=choice.recompute_vision,
                recompute_language=choice.recompute_language,
            ),
        )
        settings = StepSettings(cp=choice.cp)
        chosen = workload or task.workload
        return Ranks(task.plan(alone), settings, task.model, chosen, task.used_fabric, self._compute)

    # --- Costs ------------------------------------------------------------------------------------------------------

    def find_peak(self, choice: Choice) -> tuple[Peak, int]:
        """Return the fullest rank's peak on its device, and bytes in main memory."""
        on_device = choice._replace(offload_optimizer=False)
        if on_device not in self._peaks:
            self._peaks[on_device] = estimate_run_peak(self.task.job(on_device))
        peak = self._peaks[on_device]
        if not choice.offload_optimizer:
            return peak, 0
        kept = dict(peak.owners, optimizer=0)
        return Peak(stage=peak.stage, moment=peak.moment, owners=kept), peak.owners["optimizer"]

    def find_excess(self, choice: Choice) -> tuple[str, float]:
        """Return which memory is too small for a choice, memory or host_memory, and by how many bytes at least.

        Looks at rank after rank of a pipeline, and no further than the first that does not fit; "" if all fit.
        """
        cluster = self.task.cluster
        if choice.offload_optimizer:
            peak, host_bytes = self.find_peak(choice)
            if peak.total_bytes > self.limit_bytes:
                return "memory", peak.total_bytes - self.limit_bytes
            excess = host_bytes * cluster.devices_per_node - cluster.host_memory_bytes
            return ("host_memory", excess) if excess > 0 else ("", 0.0)
        job, peaks = self.task.job(choice), list[Peak]()
        for rank in range(choice.pp):
            peaks.append(find_peak(build_run_load(job, rank)))
            if peaks[-1].total_bytes > self.limit_bytes:
                return "memory", peaks[-1].total_bytes - self.limit_bytes
        self._peaks[choice] = max(peaks, key=lambda peak: peak.total_bytes)
        return "", 0.0

    def find_cost(self, choice: Choice) -> Cost:
        """Return seconds and bytes of a choice.

        Raises:
            ValueError: if the cluster lacks what it needs, such as a network between nodes.
        """
        task = self.task
        step = estimate_step_time(
            task.plan(choice),
            task.model,
            task.cluster,
            task.workload,
            task.settings(choice),
            split=task.split(choice) if choice.pp > 1 else None,
            device=task.used_device,
            speeds=task.used_speeds,
            fabric=task.used_fabric,
        )
        peak, host_bytes = self.find_peak(choice)
        return Cost(choice=choice, step=step, imbalance_s=self._imbalance_s(choice), peak=peak, host_bytes=host_bytes)

    def _imbalance_s(self, choice: Choice) -> float:
        """Return what a step is longer because samples of one rank have more tiles than those of others.

        Ranks wait for each other with every micro-batch where they gather weights or scatter gradients with each
        (ZeRO-3; ZeRO-2 but for "last"), else once a step. In a pipeline the rank with most vision blocks takes its
        share of them longer, and all others wait: an upper bound, since a bubble may hide some of it.
        """
        task = self.task
        if not task.tile_counts or choice.dp_degree == 1:
            return 0.0
        each = choice.zero_stage == 3 or (choice.zero_stage == 2 and choice.gradient_sync == "every")
        times, samples = choice.grad_accum_steps, choice.micro_batch_size
        if not each:
            times, samples = 1, samples * choice.grad_accum_steps
        expected = expect_fullest(task.tile_counts, samples, choice.dp_degree)
        more = max(0.0, expected - samples * task.workload.tiles_per_sample)
        without = Workload(seq_len=task.workload.seq_len, tiles_per_sample=0)
        of_tiles = [self._whole(choice, workload) for workload in (None, without)]
        busy_s = [cost.forward_total_s + cost.input_total_s + cost.weight_s for cost in of_tiles]
        num_tiles = choice.micro_batch_size * task.workload.tiles_per_sample
        return times * more * (busy_s[0] - busy_s[1]) / num_tiles * _vision_share(task, choice)


def _vision_share(task: Task, choice: Choice) -> float:
    """Return which share of the vision tower stands on the rank that has most of it."""
    if choice.pp == 1:
        return 1.0
    split = task.split(choice)
    most = max(
        sum(len(split.vision_blocks(stage)) for stage in stages_of_rank(choice.schedule, choice.pp, rank))
        for rank in range(choice.pp)
    )
    return most / max(1, task.model.vision.num_layers)


def split_seconds(cost: Cost) -> Mapping[str, float]:
    """Return what the seconds of the rank that waits least are spent on, by what a person could change; they add up.

    computing (forward and backward that the model needs), recomputation, communication (of tensor and context ranks,
    ZeRO's gathering and scattering, gradients), bubble (waiting for other stages), imbalance (waiting for ranks with
    more tiles), optimizer, overhead.
    """
    parts = cost.step.parts
    return {
        "computing": parts["forward"] + parts["backward"],
        "recomputation": parts["recompute"],
        "communication": sum(
            parts[name] for name in ("tensor_parallel", "context_parallel", "sharding", "data_parallel")
        ),
        "bubble": parts["waiting"],
        "imbalance": cost.imbalance_s,
        "optimizer": parts["optimizer"],
        "overhead": parts["overhead"],
    }
