"""Causes on the host: waiting for samples, and work between steps: saves, evaluations, log rows, callbacks.

Enters: `RunFacts`. Leaves: candidates for findings, whatever their share. What one rank alone does between two steps
holds up all others, so the rank with the most seconds counts; what the others wait meanwhile is its symptom. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from vlmcourse.monitor.diagnosis import thresholds as limit
from vlmcourse.monitor.diagnosis.facts import RunFacts, compute_s
from vlmcourse.monitor.diagnosis.findings import Finding, Fix, build_finding, build_fix

EVENT_CAUSES = {"checkpoint": "checkpoints", "evaluation": "evaluations", "log": "logging"}
"""What an event in the step log is -> the cause that it is when there is much of it."""
WORTH_SAYING = 0.01
"""Of the time."""
EVENT_SETTINGS = {
    "checkpoint": "train.checkpoint_every",
    "evaluation": "train.eval_every",
    "log": "train.log_every",
}


def find_data_loading(facts: RunFacts) -> Finding | None:
    """Look at the time in which ranks waited for samples, decoding in this process included."""
    waits = {rank: [record.data_wait_s or 0.0 for _, record in facts.records(rank)] for rank in facts.ranks}
    seconds = {rank: _sum_without_worst(values) for rank, values in waits.items()}
    slowest = max(seconds, key=lambda rank: seconds[rank])
    share = seconds[slowest] / facts.wall_s
    per_step = {step: ranks[slowest].data_wait_s or 0.0 for step, ranks in facts.steps.items()}
    usual_s = median(per_step.values())
    evidence = [
        f"Rank {slowest} waited for data {share:.0%} of the time: {1e3 * usual_s:.1f} ms in the median step, "
        f"{1e3 * max(per_step.values()):.1f} ms in the worst, of {1e3 * facts.cycle_s:.1f} ms from step to step."
    ]
    others = [value for rank, value in seconds.items() if rank != slowest]
    is_alone = bool(others) and seconds[slowest] > 2 * max(others)
    if is_alone:
        evidence.append(
            f"No other rank waited for more than {max(others) / facts.wall_s:.0%}: the disk or worker is its."
        )
    elif others:
        evidence.append(
            f"All ranks waited alike, the least for {min(others) / facts.wall_s:.0%}: they share the cause."
        )
    spikes = find_spikes(per_step, facts.cycle_s)
    if spikes:
        evidence.append(describe_spikes(spikes, "waits"))
    kind, why = _tell_loading(facts, slowest)
    evidence += [why] if why else []
    detail = "queue" if spikes else kind
    return build_finding(
        "data_loading",
        share,
        evidence,
        _loading_fixes(facts, share, detail),
        detail=detail,
        rank=slowest if is_alone else None,
    )


def _sum_without_worst(waits_s: list[float]) -> float:
    """Return the sum with the longest wait cut to the second longest: what happened once is no cause."""
    *_, second, longest = sorted(waits_s)
    return sum(waits_s) - (longest - second)


def _loading_fixes(facts: RunFacts, share: float, detail: str) -> list[Fix]:
    fixes = [
        (
            "load the next step's samples in worker processes while this one computes (prefetch; needs free cores)",
            share,
        ),
        ("halve what a sample costs: smaller images, a faster decoder, a local copy of the data", share / 2),
    ]
    if detail == "decode":
        fixes.insert(0, ("decode once and keep tensors or resized images on disk", 0.9 * share))
    if detail == "storage":
        fixes.insert(
            0, ("keep the data on a local disk, in few large files (tar files of many samples each)", 0.9 * share)
        )
    if detail == "queue":
        fixes.insert(
            0, ("more workers: the queue empties because they make samples slower than steps take them", share)
        )
    return [build_fix(what, facts.tokens_per_s, removed) for what, removed in fixes]


def _tell_loading(facts: RunFacts, rank: int) -> tuple[str, str]:
    """Tell decoding from waiting by the CPU seconds of this process: decoding uses them, waiting does not."""
    records = [r for _, r in facts.records(rank) if r.cpu_percent is not None and r.data_cpu_s is not None]
    loading_s = sum(record.data_wait_s or 0.0 for record in records)
    computing_s = sum(compute_s(record) for record in records)
    loading_cpu_s = sum(record.data_cpu_s or 0.0 for record in records)
    computing_cpu_s = sum((r.cpu_percent or 0.0) / 100 * r.step_s for r in records) - loading_cpu_s
    if facts.device != "cpu" or loading_s <= 0 or computing_s <= 0 or computing_cpu_s <= 0:
        return "", ""  # on a GPU the host does not compute, and there is nothing to compare with
    threads = int(facts.hardware.get("threads", 1))
    busy, busy_computing = loading_cpu_s / loading_s, computing_cpu_s / computing_s / threads
    used = f"The process used {busy:.0%} of a core while it loaded, and {busy_computing:.0%} while it computed"
    if busy > limit.DECODE_FRACTION * busy_computing:
        return "decode", f"{used}: it decodes."
    if busy < limit.STORAGE_FRACTION * busy_computing:
        return "storage", f"{used}: it waits for storage, or for workers."
    return "", f"{used}: partly decoding, partly waiting."


def find_spikes(seconds: dict[int, float], cycle_s: float) -> list[int]:
    """Return the steps whose wait is far above what is usual, if there are two or more and they come regularly.

    Args:
        seconds: by step.
        cycle_s: the median time from step to step.
    """
    usual_s = median(seconds.values())
    least_s = max(limit.SPIKE_FACTOR * usual_s, limit.SPIKE_SHARE * cycle_s)
    steps = [step for step, value in seconds.items() if value > least_s]
    distances = [after - before for before, after in pairwise(steps)]
    if not distances:
        return []
    usual = median(distances)
    is_regular = all(abs(distance - usual) <= limit.PERIODIC_TOLERANCE * usual for distance in distances)
    return steps if is_regular and usual > 1 else []


def describe_spikes(steps: Sequence[int], what: str) -> str:
    """Say in which steps spikes come, and how often."""
    period = median(after - before for before, after in pairwise(steps))
    return f"The {what} come every {period:g} steps (steps {', '.join(map(str, steps[:6]))}): the mean hides it."


def find_events(facts: RunFacts) -> list[Finding]:
    """Look at saves, evaluations and log rows; what comes once, at the end of a run, is not among them."""
    return [found for kind in EVENT_CAUSES if (found := _find_event(facts, kind)) is not None]


def _find_event(facts: RunFacts, kind: str) -> Finding | None:
    seconds = facts.event_seconds(kind)
    slowest = max(seconds, key=lambda rank: seconds[rank])
    steps = sorted({event.step for event in facts.events[slowest] if event.event == kind})
    if not steps:
        return None
    share, num_steps = seconds[slowest] / facts.wall_s, len(facts.steps)
    each_s = seconds[slowest] / len(steps)
    every = median(after - before for before, after in pairwise(steps)) if len(steps) > 1 else num_steps
    evidence = [
        f"{len(steps)} times in {num_steps} steps rank {slowest} spent {1e3 * each_s:.1f} ms on {_name(kind)}, "
        f"{share:.0%} of the time; a step alone takes {1e3 * _step_s(facts):.1f} ms."
    ]
    if (waited_s := max(facts.event_waits().values())) > WORTH_SAYING * facts.wall_s:
        evidence.append(
            f"Waits in events for ranks that came late to them, {waited_s / facts.wall_s:.0%} of the time, are "
            "left out."
        )
    others = [value for rank, value in seconds.items() if rank != slowest]
    is_alone = bool(others) and seconds[slowest] > 2 * max(others)
    if is_alone:
        evidence.append("The other ranks spent less than half of that, and waited in the next step's first exchange.")
    fixes = [_less_often(facts, kind, every, share)]
    if kind == "checkpoint":
        fixes.append(
            build_fix("save to a local disk, and copy from there in the background", facts.tokens_per_s, share / 2)
        )
    elif kind == "evaluation":
        fixes.append(build_fix("halve data.num_eval_samples", facts.tokens_per_s, share / 2))
    else:
        fixes.append(
            build_fix(
                "keep only loggers that write to a file here; send rows when the run is done", facts.tokens_per_s, share
            )
        )
    return build_finding(EVENT_CAUSES[kind], share, evidence, fixes, rank=slowest if is_alone else None)


def _less_often(facts: RunFacts, kind: str, every: float, share: float) -> Fix:
    """Return the fix that brings an event down to 2 % of the time, or to a tenth where that is more."""
    rest = 1 - share
    factor = max(10.0, share / rest / 0.02)
    kept = share / factor
    new_share = kept / (rest + kept)
    what = f"{EVENT_SETTINGS[kind]} = {round(every * factor)} instead of every {every:.3g} steps"
    return build_fix(what, facts.tokens_per_s, (share - new_share) / (1 - new_share))


def _name(kind: str) -> str:
    return {"checkpoint": "a checkpoint", "evaluation": "an evaluation", "log": "a row of the log"}[kind]


def _step_s(facts: RunFacts) -> float:
    return median(record.step_s for _, record in facts.records())


def find_callbacks(facts: RunFacts) -> Finding | None:
    """Look at the time between steps that no event explains."""
    seconds = facts.gap_seconds()
    slowest = max(seconds, key=lambda rank: seconds[rank])
    share = seconds[slowest] / facts.wall_s
    evidence = [
        f"Between its steps rank {slowest} spent {1e3 * seconds[slowest] / len(facts.steps):.1f} ms a step "
        f"({share:.0%} of the time) on nothing that the step log names: callbacks in after_step, or code "
        "around the loop."
    ]
    others = [value for rank, value in seconds.items() if rank != slowest]
    is_alone = bool(others) and seconds[slowest] > 2 * max(others)
    if is_alone:
        evidence.append(
            f"No other rank spent more than {max(others) / facts.wall_s:.0%} of the time so: they waited for it."
        )
    fixes = [
        build_fix("call it every tenth step", facts.tokens_per_s, 0.9 * share),
        build_fix("move it out of the loop, or into a thread that does not need the GIL", facts.tokens_per_s, share),
    ]
    return build_finding("callbacks", share, evidence, fixes, rank=slowest if is_alone else None)
