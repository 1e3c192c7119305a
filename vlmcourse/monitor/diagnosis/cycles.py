"""Which steps a diagnosis looks at, and how long each is: from its beginning to that of the next one.

Enters: steps and events of the step logs. Leaves: the latest steps of the same ranks under the same settings, and their
cycles, without warm-up, pauses, resumes, and the steps in which a profiler was on. Chapter 6.
"""

from __future__ import annotations

from statistics import median

from vlmcourse.monitor.diagnosis.thresholds import MIN_STEPS, PAUSE_FACTOR, WARMUP_STEPS
from vlmcourse.monitor.step_log import RESUME, EventRecord, StepRecord, steps_after_resume


def latest_steps(
    steps: dict[int, dict[int, StepRecord]], events: dict[int, list[EventRecord]], notes: list[str]
) -> dict[int, dict[int, StepRecord]]:
    """Return the last steps that the same ranks made under the same settings, warm-up included.

    Args:
        steps: that all ranks have written.
        events: by rank.
        notes: gets a sentence where earlier steps are left out.
    """
    if not steps:
        return {}
    newest_rank = min(steps[max(steps)])  # marks of a rank that a later run has lost are an older run's
    marks = {event.step: event.changed or "" for event in events[newest_rank] if event.event == RESUME}
    kept: dict[int, dict[int, StepRecord]] = {}
    reason, last = "", 0
    for step, ranks in steps.items():
        before = kept.get(last, ranks)
        changes = [] if ranks.keys() == before.keys() else [f"{len(before)} -> {len(ranks)} rank(s)"]
        changes += [marks[number] for number in range(last, step) if marks.get(number)]
        if kept and changes:
            how = f"then the run was resumed with other settings ({', '.join(changes)})"
            kept, reason = {}, f"steps up to {last} are left out: {how}"
        kept[step], last = ranks, step
    notes += [reason] if reason else []
    return kept


def find_cycles(
    steps: dict[int, dict[int, StepRecord]], events: dict[int, list[EventRecord]], notes: list[str]
) -> dict[int, dict[int, float]]:
    """Return the time from each step to the next; a pause and the warm-up after it are left out, a pause is noted."""
    cycles = {
        step: {rank: steps[step + 1][rank].start_s - record.start_s for rank, record in ranks.items()}
        for step, ranks in steps.items()
        if step + 1 in steps
    }
    if not cycles:
        return cycles
    usual_s = median(seconds for of_rank in cycles.values() for seconds in of_rank.values())
    for step, of_rank in list(cycles.items()):
        rank = min(of_rank)
        explained_s = steps[step][rank].step_s + sum(e.seconds for e in events[rank] if e.step == step)
        gap_s = of_rank[rank] - explained_s
        if step in steps_after_resume(events[rank], WARMUP_STEPS):
            del cycles[step]
            if step in steps_after_resume(events[rank], 0):
                notes.append(f"{gap_s:.1f} s after step {step} are left out, and warm-up then: the run was resumed")
        elif gap_s > PAUSE_FACTOR * usual_s:
            del cycles[step]
            notes.append(f"{gap_s:.1f} s after step {step} are left out: the machine slept, or the run was resumed")
    return cycles


def without_profiler(
    cycles_s: dict[int, dict[int, float]], disturbed: range, notes: list[str]
) -> dict[int, dict[int, float]]:
    """Leave out the steps in which a profiler was on and what it wrote after them, if enough others are there."""
    hit = [step for step in cycles_s if step in disturbed]
    if not hit:
        return cycles_s
    kept = {step: cycles for step, cycles in cycles_s.items() if step not in hit}
    which = f"{len(hit)} steps ({hit[0]} to {hit[-1]})"
    if len(kept) < MIN_STEPS:
        notes.append(
            f"the profiler was on in {which} of the {len(cycles_s)} that are looked at: they took longer for it, "
            "and what "
            "it wrote after them counts as callbacks; make more steps"
        )
        return cycles_s
    notes.append(f"{which} are left out of the step log's numbers: the profiler was on, which takes time")
    return kept
