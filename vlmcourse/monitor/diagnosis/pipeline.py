"""What the stages of a pipeline wait for: the schedule and unequal stages, or messages that are slow.

Enters: `RunFacts` of a run with `parallel.pp` above 1. Leaves: candidates for findings. A step is held against the one
that its stages would make if messages took no time: the longest stage's work, and of the others' the part of one
micro-batch, which nothing hides. Waits up to that are the bubble. What even the rank that waits least waits beyond it
is communication, and more micro-batches, each with its messages, would add to it. Chapter 6.

Source: for equal stages this is the bubble of Narayanan et al. 2021, section 2.2, as `planner.schedules` has it.
"""

from __future__ import annotations

from statistics import mean, median

from vlmcourse.layout import find_layout
from vlmcourse.monitor.diagnosis.facts import RunFacts, compute_s
from vlmcourse.monitor.diagnosis.findings import Finding, Fix, build_finding, build_fix
from vlmcourse.monitor.diagnosis.operators import estimate_start_s
from vlmcourse.planner.schedules import ideal_bubble_fraction


def pipeline_degree(facts: RunFacts) -> int:
    """Return the stages of the run's pipeline; 1 where there is none or nothing is known."""
    return 1 if facts.config is None else facts.config.parallel.pp


def stage_of_ranks(facts: RunFacts) -> dict[int, int]:
    """Return each rank's stage; 0 for all where there is no pipeline."""
    if facts.config is None or pipeline_degree(facts) == 1:
        return dict.fromkeys(facts.ranks, 0)
    layout = find_layout(facts.config.parallel, len(facts.ranks))
    return {rank: layout.coordinates(rank)["pp"] for rank in facts.ranks}


def count_microbatches(facts: RunFacts) -> int:
    """Return the micro-batches of a step."""
    usual = 1 if facts.config is None else facts.config.train.accumulation_steps
    return max(record.micro_batches or usual for _, record in facts.records())


def _step_without_messages_s(facts: RunFacts, work_s: dict[int, float], num_microbatches: int) -> float:
    """Return what a step takes whose stages compute so long, by stage, and whose messages take no time."""
    assert facts.config is not None
    pp = pipeline_degree(facts)
    ideal = ideal_bubble_fraction(facts.config.parallel.pp_schedule, pp, num_microbatches)
    longest_s = max(work_s.values())
    return longest_s + ideal / (1 - ideal) * (sum(work_s.values()) - longest_s) / (pp - 1)


def _split_waits(facts: RunFacts) -> tuple[float, float]:
    """Return seconds that ranks waited on the mean: for the schedule and unequal stages, and for messages.

    A rank that is slower than others of its stage makes all wait, which is neither.
    """
    stages, num = stage_of_ranks(facts), count_microbatches(facts)
    bubble_s = messages_s = 0.0
    for ranks in facts.steps.values():
        work_s = {rank: compute_s(record) for rank, record in ranks.items()}
        own_s = {rank: work_s[rank] + (record.data_wait_s or 0.0) for rank, record in ranks.items()}
        of_stage = {stage: [work_s[rank] for rank in ranks if stages[rank] == stage] for stage in set(stages.values())}
        slow_s = _step_without_messages_s(facts, {stage: max(of_ranks) for stage, of_ranks in of_stage.items()}, num)
        even_s = _step_without_messages_s(facts, {stage: min(of_ranks) for stage, of_ranks in of_stage.items()}, num)
        slow_s += max(record.data_wait_s or 0.0 for record in ranks.values())
        waits_s = {rank: record.communication_s or 0.0 for rank, record in ranks.items()}
        bubble_s += mean(min(waits_s[rank], max(0.0, even_s - work_s[rank])) for rank in ranks)
        messages_s += max(0.0, min(waits_s[rank] - max(0.0, slow_s - own_s[rank]) for rank in ranks))
    return bubble_s, messages_s


def _work_of_stages(facts: RunFacts) -> dict[int, float]:
    """Return what a stage computes in a step, by stage: the median step of its fastest rank."""
    stages = stage_of_ranks(facts)
    of_rank = {rank: median(compute_s(record) for _, record in facts.records(rank)) for rank in facts.ranks}
    return {stage: min(of_rank[r] for r in stages if stages[r] == stage) for stage in range(pipeline_degree(facts))}


def find_bubble(facts: RunFacts) -> Finding | None:
    """Look at the time in which the stages of a pipeline wait for each other, as schedule and unequal stages ask."""
    pp = pipeline_degree(facts)
    if pp == 1 or facts.config is None or not facts.tells_communication:
        return None
    num = count_microbatches(facts)
    waits_s = facts.sums(lambda record: record.communication_s)
    waited = mean(waits_s.values()) / facts.wall_s
    bubble_s, _ = _split_waits(facts)
    share = bubble_s / facts.wall_s
    work_s = _work_of_stages(facts)
    longest = max(work_s, key=lambda stage: work_s[stage])
    schedule = facts.config.parallel.pp_schedule
    ideal = ideal_bubble_fraction(schedule, pp, num)
    evidence = [
        f"The ranks wait {waited:.0%} of the time on the mean, {share:.0%} for schedule and unequal stages. {schedule} "
        f"with {pp} stages and {num} micro-batch(es) has a bubble of {ideal:.0%} even with equal stages.",
        f"Stage {longest} computes {1e3 * work_s[longest]:.1f} ms a step, the mean stage "
        f"{1e3 * mean(work_s.values()):.1f} ms.",
    ]
    fixes = _bubble_fixes(facts, work_s)
    apart = "parallel.pp = 1 with these ranks data-parallel, if one holds a whole model"
    fixes.append(build_fix(apart, facts.tokens_per_s, share))
    return build_finding("pipeline_bubble", share, evidence, fixes, detail=f"{num} micro-batches")


def _best_count(facts: RunFacts, work_s: dict[int, float], counts: list[int]) -> tuple[int, float] | None:
    """Return the number of micro-batches with the shortest step, and the share of the time that it saves.

    A step holds as many samples whatever their number; messages and starting operations come once for each of them.
    """
    if not counts:
        return None
    now, start_s = count_microbatches(facts), (estimate_start_s(facts) or 0.0) / pipeline_degree(facts)
    _, messages_s = _split_waits(facts)
    message_s = messages_s / len(facts.steps) / now

    def step_s(work_s: dict[int, float], count: int) -> float:
        more_s = (count - now) * start_s
        return _step_without_messages_s(facts, {s: w + more_s for s, w in work_s.items()}, count) + message_s * count

    seconds = {count: step_s(work_s, count) for count in counts}
    best = min(seconds, key=lambda count: seconds[count])
    return best, (step_s(_work_of_stages(facts), now) - seconds[best]) / facts.cycle_s


def _samples(facts: RunFacts) -> int:
    assert facts.config is not None
    return facts.config.train.micro_batch_size * facts.config.train.accumulation_steps


def _name_count(facts: RunFacts, count: int) -> str:
    each = _samples(facts) // count
    return f"train.accumulation_steps = {count}, train.micro_batch_size = {each} (as many samples a step)"


def _bubble_fixes(facts: RunFacts, work_s: dict[int, float]) -> list[Fix]:
    """Return what more micro-batches of as many samples would save, as far as messages and starting operations allow.

    Args:
        facts: of a pipeline's run.
        work_s: what each stage computes in a step.
    """
    now, pp = count_microbatches(facts), pipeline_degree(facts)
    counts = [n for n in range(now + 1, max(2 * now, 4 * pp) + 1) if _samples(facts) % n == 0]
    equal_s = dict.fromkeys(work_s, mean(work_s.values()))
    fixes = []
    for stages_s, also in ((work_s, ""), (equal_s, ", and equal stages (parallel.adaptive = true moves layers)")):
        best = _best_count(facts, stages_s, counts)
        if best is not None and best[1] > 0:
            what = _name_count(facts, best[0])
            what = f"{what[:-1]}{also})" if also else what
            fixes.append(build_fix(what, facts.tokens_per_s, best[1]))
    return fixes


def _fewer_counts(facts: RunFacts) -> list[int]:
    """Return fewer micro-batches, down to half: what a step exchanges once is in the messages too, and stays."""
    now = count_microbatches(facts)
    return [n for n in range(max(1, now // 2), now) if _samples(facts) % n == 0]


def communication_beyond_bubble(facts: RunFacts) -> Finding:
    """Look at what even the rank with the fewest waits waits beyond the bubble: messages between stages are slow."""
    _, messages_s = _split_waits(facts)
    share, now = messages_s / facts.wall_s, count_microbatches(facts)
    waits_s = facts.sums(lambda record: record.communication_s)
    evidence = [
        f"The ranks wait {mean(waits_s.values()) / facts.wall_s:.0%} of the time on the mean; schedule, unequal stages "
        f"and ranks that are late do not explain {share:.0%}: messages between stages are on their way, "
        f"{1e3 * messages_s / len(facts.steps) / now:.1f} ms for each of {now} micro-batch(es)."
    ]
    fixes = []
    best = _best_count(facts, _work_of_stages(facts), _fewer_counts(facts))
    if best is not None and best[1] > 0:
        what = f"{_name_count(facts, best[0])}: fewer messages (more memory)"
        fixes.append(build_fix(what, facts.tokens_per_s, best[1]))
    faster = "a faster link between the stages, twice as fast in latency and bandwidth"
    fixes.append(build_fix(faster, facts.tokens_per_s, share / 2))
    return build_finding("communication", share, evidence, fixes, detail="pipeline")
