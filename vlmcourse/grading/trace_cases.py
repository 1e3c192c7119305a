"""Traces of exercise 4.5: what a run's ranks did step by step on GPUs, with one cause of slowness or none.

Enters: a seed. Leaves: traces of plain lists and dicts, each with the right answer. Whole steps of recorded real runs
are drawn anew for more steps and ranks; a fault's seconds vary as they did in its recording, and take another part of
the time, at other steps, on other ranks. What a CPU run cannot record follows from the phases: a GPU is busy while it
computes. Memory that runs out is made up, on a healthy recording.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vlmcourse.grading.trace_faults import CAUSES, HEALTHY, ONE_RANK, SECONDS, Plan, plant
from vlmcourse.grading.trace_sources import HEALTHY as HEALTHY_RUNS
from vlmcourse.grading.trace_sources import OWN_PHASES, WARMUP_STEPS, read_source

ONE_OF_RANKS = 0.4
"""How often a loader is slow on one rank alone, where it can be."""
PERIODIC = ("queue_runs_empty", "frequent_saves", "frequent_evaluation", "memory_thrash")
Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TraceCase:
    """A trace, and what is to be said of it."""

    number: int
    trace: Trace
    cause: str
    quantities: tuple[str, ...]
    """Keys in which the cause shows; any of them is right. None for a healthy run."""
    rank: int | None
    period: int | None

    def __str__(self) -> str:
        num_steps = len(self.trace["ranks"][0]["forward_s"])
        return f"trace {self.number} ({len(self.trace['ranks'])} ranks, {num_steps} steps)"


def make_cases(seed: int, num_cases: int) -> list[TraceCase]:
    """Return traces, each cause as often as the others, up to one."""
    rng = random.Random(f"traces:{seed}")
    causes: list[str] = []
    while len(causes) < num_cases:
        causes += rng.sample(CAUSES, k=len(CAUSES))
    return [make_case(rng, cause, number) for number, cause in enumerate(causes[:num_cases])]


def make_case(rng: random.Random, cause: str, number: int = 0, period: int | None = None) -> TraceCase:
    """Return a trace of one cause.

    Args:
        rng: what is drawn from.
        cause: one of `CAUSES`.
        number: that its name shows.
        period: steps between two times that a periodic cause takes time; drawn where it is None.
    """
    num_ranks = rng.choice((2, 3, 4, 6, 8))
    period = (period or rng.randint(4, 11)) if cause in PERIODIC else None
    num_steps = WARMUP_STEPS + max(rng.randint(40, 70), 6 * (period or 0))
    is_one = cause in ("slow_rank", "imbalance") or (cause in ONE_RANK and rng.random() < ONE_OF_RANKS)
    rank = 0 if cause == "logging_every_step" else rng.randrange(num_ranks) if is_one else None
    plan = Plan(
        rng=rng,
        cause=cause,
        rank=rank,
        period=period,
        share=rng.uniform(0.27, 0.5),
        ranks=_draw_background(rng, cause, num_ranks, num_steps),
    )
    quantities = plant(plan)
    return TraceCase(
        number=number,
        trace=_finish(plan),
        cause=cause,
        quantities=quantities,
        rank=rank,
        period=period,
    )


def make_first() -> Trace:
    """Return the trace that the exercise draws: the use of all GPUs swings, with regular spikes of the step time."""
    return make_case(random.Random("first:687"), "queue_runs_empty").trace  # four ranks, all alike, every 6 steps


# --- Steps ----------------------------------------------------------------------------------------------------------


def _draw_background(rng: random.Random, cause: str, num_ranks: int, num_steps: int) -> list[dict[str, list[float]]]:
    """Draw whole steps of a recorded run, in units of computing; the first ones are warm-up."""
    name = "tiny micro-batches" if cause == "tiny_micro_batches" else rng.choice(HEALTHY_RUNS)
    source = read_source(name)
    weights = {key: rng.uniform(0.85, 1.15) for key in OWN_PHASES}
    unhidden = rng.uniform(0.2, 1.0)  # what a GPU run does not hide of these, behind computing
    weights["data_wait_s"], weights["other_s"] = unhidden, unhidden
    ranks: list[dict[str, list[float]]] = [{key: [] for key in (*SECONDS, "tokens", "tiles")} for _ in range(num_ranks)]
    rare = rng.randint(18, 24)
    for step in range(num_steps):
        piece, exposed = rng.choice(source.pieces), unhidden * min(0.08, rng.choice(source.exposed))
        slow = 2.5 if step == 0 else 1.3 if step < WARMUP_STEPS else 1.0
        is_save = step % rare == rare - 1 and cause not in ("frequent_saves", "frequent_evaluation")
        for number, rank in enumerate(ranks):
            own = piece[number % len(piece)]
            for key in OWN_PHASES:
                rank[key].append(own[key] * weights[key] * slow * rng.uniform(0.98, 1.02))
            rank["data_wait_s"][-1] += 2.0 * (step == 0)
            rank["communication_s"].append(exposed)
            rank["between_s"].append(rng.uniform(0.2, 0.35) if is_save else rng.uniform(0.002, 0.012))
            for key in ("tokens", "tiles"):
                rank[key].append(own[key] * rng.uniform(0.99, 1.01))
        if is_save:
            ranks[0].setdefault("saved", []).append(step)
    return ranks


def _finish(plan: Plan) -> Trace:
    """Let ranks wait for the slowest, and say what the GPUs and the loaders did; units become seconds."""
    rng, ranks = plan.rng, plan.ranks
    num_steps = len(ranks[0]["forward_s"])
    unit_s = rng.choice((0.15, 0.4, 0.9, 2.2)) * rng.uniform(0.8, 1.3)
    work = [
        [sum(rank[key][i] for key in SECONDS if key != "communication_s") for i in range(num_steps)] for rank in ranks
    ]
    for rank, own in zip(ranks, work, strict=True):
        late = [max(each[i] for each in work) - own[i] for i in range(num_steps)]
        rank["communication_s"] = [a + b for a, b in zip(rank["communication_s"], late, strict=True)]
    saved = {*ranks[0].pop("saved", []), *(plan.spikes if plan.cause == "frequent_saves" else ())}
    num_tokens, num_tiles, save_mb = rng.randint(2000, 9000), rng.randint(8, 64), rng.uniform(400, 9000)
    micro_batches = rng.choice((8, 16, 32) if plan.cause == "tiny_micro_batches" else (1, 2, 4, 8, 16))
    limit_gb = rng.choice((24.0, 40.0, 80.0))
    level = rng.uniform(0.5, 0.94)
    efficiency = rng.uniform(0.2, 0.42) if plan.cause == "tiny_micro_batches" else rng.uniform(0.93, 0.99)
    for number, rank in enumerate(ranks):
        rank["gpu_percent"] = [_gpu_percent(plan, number, i, efficiency) for i in range(num_steps)]
        rank["loader_cpu_percent"] = [_loader_percent(plan, number) for _ in range(num_steps)]
        memory = plan.memory or [level] * num_steps
        rank["memory_gb"] = [round(limit_gb * part * rng.uniform(0.997, 1.003), 2) for part in memory]
        rank["disk_write_mb"] = [round(save_mb * rng.uniform(0.98, 1.02) * (i in saved), 1) for i in range(num_steps)]
        rank["tokens"] = [round(num_tokens * value) for value in rank["tokens"]]
        rank["tiles"] = [round(num_tiles * value) for value in rank["tiles"]]
        rank["micro_batches"] = [micro_batches] * num_steps
        for key in SECONDS:
            rank[key] = [float(f"{unit_s * value:.4g}") for value in rank[key]]
    return {"memory_limit_gb": limit_gb, "ranks": ranks}


def _gpu_percent(plan: Plan, number: int, step: int, efficiency: float) -> float:
    """Return the percent of the time from this step to the next in which a GPU computes."""
    rank = plan.ranks[number]
    busy = efficiency * (rank["forward_s"][step] + rank["backward_s"][step] + rank["optimizer_s"][step])
    busy -= plan.idle.get((number, step), 0.0)
    busy += 0.9 * rank["between_s"][step] * (plan.cause == "frequent_evaluation" and step in plan.spikes)
    percent = 100 * busy / sum(rank[key][step] for key in SECONDS) + plan.rng.gauss(0, 1.5)
    return round(min(100.0, max(0.0, percent)), 1)


def _loader_percent(plan: Plan, number: int) -> float:
    """Return how much of a rank's loader processes' cores is used: all by decoding that does not keep up."""
    is_it = plan.rank in (None, number)
    if is_it and plan.cause in ("slow_decoder", "queue_runs_empty"):
        return round(plan.rng.uniform(93, 100), 1)
    low, high = (4, 14) if is_it and plan.cause == "slow_storage" else (30, 60)
    return round(plan.rng.uniform(low, high), 1)


# --- Seconds with spikes and without --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PeriodCase:
    """Seconds of one key of one rank by step, without warm-up, and the distance of their spikes."""

    seconds: tuple[float, ...]
    period: int | None

    def __str__(self) -> str:
        return f"{len(self.seconds)} steps, {fmean(self.seconds):.3g} s on the mean, {max(self.seconds):.3g} s at most"


def make_period_cases(seed: int, num_cases: int) -> list[PeriodCase]:
    """Return series of which every fourth has no regular spikes: steady, high but steady, or with one spike."""
    rng = random.Random(f"periods:{seed}")
    found: list[PeriodCase] = []
    periods: list[int] = []
    while len(found) < num_cases:
        is_regular = len(found) % 4 != 3
        cause = rng.choice(("queue_runs_empty", "frequent_saves", "frequent_evaluation") if is_regular else STEADY)
        periods = periods or rng.sample(PERIODS, k=len(PERIODS))
        case = make_case(rng, cause, period=periods.pop() if is_regular else None)
        key = case.quantities[0] if case.quantities else "data_wait_s"
        rank = case.trace["ranks"][case.rank or 0]
        seconds = list(rank[key][WARMUP_STEPS:])
        if not is_regular and rng.random() < 0.5:
            seconds[rng.randrange(len(seconds))] += 6 * fmean(seconds)
        found.append(PeriodCase(seconds=tuple(seconds), period=case.period))
    return found


PERIODS = range(4, 14)
"""Those that `make_period_cases` draws from, each as often as the others."""
STEADY = (HEALTHY, "slow_decoder", "slow_storage")
"""Causes of which the wait for data has no spikes."""
