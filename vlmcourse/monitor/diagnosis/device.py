"""Causes in computing itself: operations too small, needless recomputation, memory, clocks, copies.

Enters: `RunFacts`. Leaves: candidates for findings, whatever their share. What needs a GPU's numbers (`gpu_util`,
throttling, PCIe, the allocator) looks for them in the rows and in the step log, and finds nothing where they are
absent. Chapter 6.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median
from typing import Any

from vlmcourse.monitor.diagnosis import thresholds as limit
from vlmcourse.monitor.diagnosis.facts import RunFacts, compute_s
from vlmcourse.monitor.diagnosis.findings import Finding, build_finding, build_fix
from vlmcourse.monitor.diagnosis.operators import count_operations, estimate_start_s, slowdown
from vlmcourse.monitor.diagnosis.waiting import pipeline_degree
from vlmcourse.monitor.profile_summary import TraceSummary, describe_operators, name_steps
from vlmcourse.planner.layer_activations import count_language_layer_bytes, count_vision_layer_bytes

GIB = 2**30


def find_small_kernels(facts: RunFacts) -> Finding | None:
    """Look at what starting operations takes: on a CPU by their number, on a GPU by its use."""
    return _find_idle_gpu(facts) if facts.device == "cuda" else _find_started_operations(facts)


def _find_started_operations(facts: RunFacts) -> Finding | None:
    """Count the micro-batches that could be one; one alone cannot be merged without a change of the batch."""
    start_s, num_operations = estimate_start_s(facts), count_operations(facts)
    if facts.config is None or start_s is None or num_operations is None or pipeline_degree(facts) > 1:
        return None
    num_micro_batches = facts.config.train.accumulation_steps
    computing_s = median(compute_s(record) for _, record in facts.records())
    removed_s = min((num_micro_batches - 1) * start_s, 0.95 * computing_s)
    share = removed_s / facts.cycle_s
    size = facts.config.train.micro_batch_size
    evidence = [
        f"A step starts about {num_operations:,} operations for each of {num_micro_batches} "
        f"micro-batches of {size} sample(s): {1e3 * start_s:.1f} ms each (estimate) of {1e3 * computing_s:.1f} ms of "
        f"computing a step; one micro-batch would start them once.",
        f"A core worked for this process 1 s in {slowdown(facts):.1f} s of computing.",
    ]
    if facts.profile is not None:
        evidence.append(_describe_started(facts, facts.profile, share))
    fixes = [
        build_fix(
            f"train.micro_batch_size = {size * num_micro_batches}, train.accumulation_steps = 1 (the same batch; more "
            "memory for activations)",
            facts.tokens_per_s,
            share,
        )
    ]
    if num_micro_batches > 2:
        half = (num_micro_batches - 2) * start_s / facts.cycle_s
        merged = size * -(-num_micro_batches // 2)
        fixes.append(
            build_fix(
                f"train.micro_batch_size = {merged}, train.accumulation_steps = 2",
                facts.tokens_per_s,
                min(half, share),
            )
        )
    return build_finding("small_kernels", share, evidence, fixes, detail="micro-batches")


def _describe_started(facts: RunFacts, profile: TraceSummary, share: float) -> str:
    """Say how many operators a profile shows and how short they are; and what merging would save by its times.

    What a rank spends between operators is the time of starting them, in Python; merged, they are started once.
    """
    assert facts.config is not None
    least = min(profile.ranks, key=lambda of_rank: of_rank.idle_s / of_rank.seconds)
    num = facts.config.train.accumulation_steps
    between = (num - 1) / num * least.idle_s / least.seconds
    said = (
        f"The profile of {name_steps(profile)} shows {describe_operators(least, profile)}, on rank {least.rank}; "
        "between "
        f"operators {least.idle_s / least.seconds:.0%} of the time pass, of which one micro-batch would save "
        f"{between:.0%}"
    )
    if between > share + limit.PROFILE_TOLERANCE:
        return (
            f"{said}: more than the estimate of {share:.0%}. They disagree; what the profiler itself takes is "
            "part of it."
        )
    return f"{said} at least; short operators are the rest of the estimate."


def _find_idle_gpu(facts: RunFacts) -> Finding | None:
    """Look at the time in which a GPU runs nothing: in a profile, or by its use where there is none."""
    used = _row_values(facts, "performance/gpu_util")
    if facts.config is None or not (used or facts.profile is not None):
        return None
    evidence: list[str] = []
    guess = 0.0
    if used:
        percent = mean(used)
        elsewhere = sum(max(seconds.values()) for seconds in _known_waits(facts)) / facts.wall_s
        guess = max(0.0, 1 - percent / 100 - elsewhere) if percent < limit.LOW_GPU_PERCENT else 0.0
        evidence.append(
            f"A kernel ran on rank 0's GPU {percent:.0f} % of the time, though loading, exchanges and work "
            "between steps "
            f"take {elsewhere:.0%}: the rest, {guess:.0%}, waits for the host to start kernels."
        )
    share = guess
    if facts.profile is not None:
        share, said = _read_idle(facts, facts.profile)
        evidence.insert(0, said)
        if used and abs(share - guess) > limit.PROFILE_TOLERANCE:
            evidence.append(
                f"By the profile it is {share:.0%} and by the GPU's use {guess:.0%}: they disagree. A GPU counts "
                "as used "
                "while any kernel runs, a copy or NCCL's too; the profile, which tells them apart, is believed."
            )
    train = facts.config.train
    evidence.append(
        f"A micro-batch has {train.micro_batch_size} sample(s); a step has {train.accumulation_steps} of them."
    )
    fixes = [
        build_fix("larger and fewer micro-batches: as many kernels do more each", facts.tokens_per_s, 0.5 * share),
        build_fix("all that: kernels that keep the GPU busy (fused ones, CUDA graphs)", facts.tokens_per_s, share),
    ]
    return build_finding("small_kernels", share, evidence, fixes, detail="low GPU use")


def _read_idle(facts: RunFacts, profile: TraceSummary) -> tuple[float, str]:
    """Return the share of a profile in which GPUs did nothing within steps, and the sentence that says so."""
    idle = mean(of_rank.idle_s / of_rank.seconds for of_rank in profile.ranks)
    waits = [facts.gap_seconds(), *(facts.event_seconds(kind) for kind in ("checkpoint", "evaluation", "log"))]
    between = sum(max(seconds.values()) for seconds in waits) / facts.wall_s
    share = max(0.0, idle - between)
    most = max(profile.ranks, key=lambda of_rank: of_rank.num_operators)
    return share, (
        f"In the profile of {name_steps(profile)} the GPUs run nothing for {idle:.0%} of the time, exchanges and "
        "loading "
        f"not counted; {between:.0%} are work between steps. Rank {most.rank} runs {describe_operators(most, profile)}."
    )


def _known_waits(facts: RunFacts) -> list[dict[int, float]]:
    events = [facts.event_seconds(kind) for kind in ("checkpoint", "evaluation", "log")]
    waits = [facts.sums(lambda record: record.data_wait_s), facts.sums(lambda record: record.communication_s)]
    return [*events, *waits, facts.gap_seconds()]


def _row_values(facts: RunFacts, name: str) -> list[float]:
    """Return the values of a name in the rows about steps that are looked at."""
    first, last = min(facts.steps), max(facts.steps)
    rows = [row for row in facts.rows if first <= row.get("step", -1) <= last + 1]
    return [float(row[name]) for row in rows if isinstance(row.get(name), (int, float))]


def find_recomputation(facts: RunFacts) -> Finding | None:
    """Look at what is computed again in backward, if what is saved by it would fit."""
    if facts.config is None or facts.shape is None or facts.config.activations.is_plain:
        return None
    counts = [count for _, record in facts.records() if (count := facts.count_flops(record)) is not None]
    again, all_flops = sum(c.recomputed for c in counts), sum(c.hardware for c in counts)
    if not again:
        return None
    passes_s = median((r.forward_s or 0.0) + (r.backward_s or 0.0) for _, r in facts.records())
    share = again / all_flops * passes_s / facts.cycle_s
    memory = _find_free_memory(facts)
    if memory is None:
        facts.notes.append("whether recomputation is needed cannot be told: the memory of the device is not known")
        return None
    used_bytes, kept_bytes, device_bytes = memory
    if used_bytes + kept_bytes > limit.FREE_MEMORY_FRACTION * device_bytes:
        return None
    ratio = median((r.backward_s or 0.0) / r.forward_s for _, r in facts.records() if r.forward_s)
    policies = facts.config.activations
    evidence = [
        f"activations.vision = {policies.vision!r} and activations.language = {policies.language!r} run "
        f"{again / all_flops:.0%} of all FLOPs again; backward takes {ratio:.1f} x forward (about 2 x without).",
        f"{used_bytes / GIB:.2f} GiB of {device_bytes / GIB:.1f} GiB are in use; keeping all activations takes about "
        f"{kept_bytes / GIB:.2f} GiB more (estimate): it fits.",
    ]
    fixes = [
        build_fix("activations.vision = activations.language = 'none'", facts.tokens_per_s, share),
        build_fix("every second block only: 'every:2' in both", facts.tokens_per_s, share / 2),
    ]
    return build_finding("recomputation", share, evidence, fixes)


def _find_free_memory(facts: RunFacts) -> tuple[int, int, int] | None:
    """Return bytes in use, what kept activations would add (estimate, an upper bound), and those of the device."""
    config, shape = facts.config, facts.shape
    on_gpu = facts.device == "cuda"
    device = facts.hardware.get("gpu_memory_bytes" if on_gpu else "memory_bytes")
    if config is None or shape is None or device is None:
        return None
    if on_gpu:
        peak_gib = max(_row_values(facts, "memory/peak_reserved_gib"), default=0.0)
        used = max(round(peak_gib * GIB), *(record.reserved_bytes or 0 for _, record in facts.records()))
    else:  # the ranks share the machine
        used = sum(max(record.rss_bytes or 0 for _, record in facts.records(rank)) for rank in facts.ranks)
    if not used:
        return None
    in_flight = max(1, pipeline_degree(facts))
    kept = max(_kept_bytes(facts, record) for _, record in facts.records()) * in_flight
    return used, kept if on_gpu else kept * len(facts.ranks), int(device)


def _kept_bytes(facts: RunFacts, record: Any) -> int:
    """Estimate what all blocks keep of a step's micro-batch on one rank, however they are shared out."""
    assert facts.config is not None and facts.shape is not None
    precision, num = facts.config.train.precision, max(1, record.micro_batches or 1)
    element_bytes, autocast = (4 if precision == "fp32" else 2), precision in ("bf16", "fp16", "fp8")
    samples = -(-(record.samples or 1) // num)
    positions = (record.text_tokens or 0) + (record.image_tokens or 0) + (record.padding_tokens or 0)
    seq_len = max(1, -(-positions // (samples * num)))
    vision, language = facts.shape.vision, facts.shape.language
    tiles = max(1, -(-(record.tiles or 0) // num))
    of_language = count_language_layer_bytes(language, samples, seq_len, element_bytes, autocast=autocast)
    of_vision = count_vision_layer_bytes(vision, tiles, 1 + vision.num_patches, element_bytes, autocast=autocast)
    return sum(of_language.values()) * language.num_layers + sum(of_vision.values()) * vision.num_layers


def find_memory_thrash(facts: RunFacts) -> Finding | None:
    """Look for steps that were slow because memory ran out: the allocator started over, or pages came from disk."""
    worst: tuple[float, int, list[int], str] | None = None
    limit_bytes = facts.hardware.get("gpu_memory_bytes")
    for rank in facts.ranks:
        records = [record for _, record in facts.records(rank)]
        for hit, what in (
            (_steps_of_retries(records, limit_bytes), "retries"),
            (_steps_of_faults(records), "swapping"),
        ):
            calm = [record.step_s for record in records if record.step not in hit]
            usual_s = median(calm) if calm else min(record.step_s for record in records)
            lost_s = sum(max(0.0, record.step_s - usual_s) for record in records if record.step in hit)
            if hit and (worst is None or lost_s > worst[0]):
                worst = lost_s, rank, hit, what
    if worst is None:
        return None
    lost_s, rank, steps, what = worst
    share = lost_s / facts.wall_s
    peak = max(record.reserved_bytes or 0 for _, record in facts.records(rank))
    reason = (
        f"the allocator of rank {rank} found no room and started over"
        if what == "retries"
        else f"rank {rank} read pages from disk, {limit.MANY_FAULTS} or more a step"
    )
    evidence = [
        f"In {len(steps)} of {len(facts.steps)} steps {reason}; they lost {lost_s:.2f} s, {share:.0%} of the time."
    ]
    if peak and limit_bytes:
        evidence.append(f"At most {peak / GIB:.1f} of {limit_bytes / GIB:.1f} GiB were reserved at the end of a step.")
    fixes = [
        build_fix("a smaller train.micro_batch_size with more train.accumulation_steps", facts.tokens_per_s, share)
    ]
    if what == "retries":
        fixes.append(
            build_fix("PYTORCH_ALLOC_CONF=expandable_segments:True, against fragments", facts.tokens_per_s, 0.5 * share)
        )
    return build_finding("memory_thrash", share, evidence, fixes, detail=what, rank=rank)


def _steps_of_retries(records: list[Any], device_bytes: int | None) -> list[int]:
    """Return steps in which the allocator's count of retries rose, or reserved memory near its limit fell."""
    found = []
    for before, after in pairwise(records):
        if before.alloc_retries is not None and after.alloc_retries is not None:
            retried = after.alloc_retries > before.alloc_retries
        elif device_bytes and before.reserved_bytes and after.reserved_bytes:
            near = before.reserved_bytes > limit.NEAR_LIMIT_FRACTION * device_bytes
            dropped = before.reserved_bytes - after.reserved_bytes > limit.RESERVED_DROP_FRACTION * device_bytes
            retried = near and dropped
        else:
            retried = False
        found += [after.step] if retried else []
    return found


def _steps_of_faults(records: list[Any]) -> list[int]:
    pairs = pairwise(records)
    return [
        b.step
        for a, b in pairs
        if (b.major_faults or 0) - (a.major_faults or 0) >= limit.MANY_FAULTS and a.major_faults is not None
    ]
