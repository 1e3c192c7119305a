"""The order of reasoning: what is looked at first, what is a symptom of it, and what is left to say.

Enters: the folder of a finished or live run. Leaves: a `Diagnosis`. First all causes are looked for, each by itself;
those of the host and of computing explain time of a rank's own, and ranks that wait for it show a symptom:

1. Work between steps and waits for samples are a rank's own time. They are measured, not concluded.
2. A rank that computes longer than the others makes them wait. It is judged by its own computing, in which none of 1
   and no wait is counted, and by its work: a throttled GPU or larger images explain it, or else the machine does.
3. What even the rank that waits least waits for is communication; in a pipeline, what its stages do not explain.
4. Small operations and recomputation are parts of computing that all ranks have.

Then what each fix gains is held against what other ranks need meanwhile (`hiding`), each share against its threshold,
and the largest comes first; a profile, where the run has one, is heard to each of them. Chapter 6.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

from vlmcourse.monitor.diagnosis.clocks import find_copies, find_throttling
from vlmcourse.monitor.diagnosis.device import find_memory_thrash, find_recomputation, find_small_kernels
from vlmcourse.monitor.diagnosis.facts import RunFacts, read_run
from vlmcourse.monitor.diagnosis.findings import Diagnosis, Finding, with_uncertainty
from vlmcourse.monitor.diagnosis.hiding import promise_what_is_left
from vlmcourse.monitor.diagnosis.host import find_callbacks, find_data_loading, find_events
from vlmcourse.monitor.diagnosis.operators import slowdown
from vlmcourse.monitor.diagnosis.pipeline import find_bubble
from vlmcourse.monitor.diagnosis.profile import describe_profile, with_profile
from vlmcourse.monitor.diagnosis.thresholds import MODEL_ERRORS, SHARED_CORE_NOISE, SHARED_CORE_SLOWDOWN, min_share
from vlmcourse.monitor.diagnosis.waiting import find_communication, find_imbalance, find_slow_rank

PARTS = ("data_wait", "forward", "backward", "communication", "optimizer", "other")
SEEN_SHARE = 0.01
"""What explains less is not mentioned at all."""


def diagnose(run_folder: str | Path, *, last_steps: int | None = None) -> Diagnosis:
    """Say what a run spends its time on, why it is slow, and what to change.

    Args:
        run_folder: `output_dir/name` of a finished or live run.
        last_steps: how many steps to look at, the last ones; by default all. In a long run what began late shows only
            in the last ones.

    Returns:
        Findings above their thresholds, the one that explains most first, or none: healthy.

    Raises:
        FileNotFoundError: if it is no run's folder.
        ValueError: if there or in `last_steps` are too few steps, or a file holds something else than it should.
    """
    return diagnose_facts(read_run(run_folder, last_steps))


def diagnose_facts(facts: RunFacts) -> Diagnosis:
    """As `diagnose`, of what was read."""
    candidates = [found for found in _look(facts) if found is not None and found.share >= SEEN_SHARE]
    is_shared = slowdown(facts) > SHARED_CORE_SLOWDOWN
    noise = max(facts.noise, SHARED_CORE_NOISE) if is_shared else facts.noise
    candidates = [with_uncertainty(found, noise, MODEL_ERRORS.get(found.cause, 0.0)) for found in candidates]
    candidates, hidden = promise_what_is_left(facts, candidates, noise)
    candidates = with_profile(facts, candidates)
    candidates.sort(key=lambda found: -found.share)
    findings = tuple(found for found in candidates if found.share >= min_share(found.cause))
    return Diagnosis(
        run=str(facts.folder),
        findings=findings,
        below=tuple(found for found in candidates if found.share < min_share(found.cause)),
        shares=_shares(facts),
        first_step=min(facts.steps),
        last_step=max(facts.steps),
        step_s=facts.wall_s / len(facts.steps),
        tokens_per_s=facts.tokens_per_s,
        world_size=len(facts.ranks),
        notes=(*facts.notes, *hidden),
        profile=describe_profile(facts),
    )


def _look(facts: RunFacts) -> list[Finding | None]:
    """Return what each look found; a slow rank that something else explains is left out."""
    throttling, thrash = find_throttling(facts), find_memory_thrash(facts)
    straggler = find_slow_rank(facts)
    imbalance = find_imbalance(facts)
    if straggler is not None and imbalance is not None and imbalance.rank == straggler.rank and imbalance.share > 0:
        # FLOPs are no exact measure of time: as far as they may be off, it is not the machine that is slow.
        explained_share = imbalance.share * len(facts.ranks) / (len(facts.ranks) - 1)
        doubtful_share = MODEL_ERRORS["imbalance"] * explained_share
        doubt = (
            f"Its larger work explains {explained_share:.0%} of the time, which may be off by {doubtful_share:.0%}: "
            f"so much of the {straggler.share:.0%} is not counted."
        )
        least = SEEN_SHARE if straggler.share >= min_share("slow_rank") else 0.0  # doubted, but not left unsaid
        left_share = max(least, straggler.share - doubtful_share)
        straggler = replace(straggler, share=left_share, evidence=(*straggler.evidence, doubt))
    explained = {found.rank for found in (throttling, thrash) if found and found.share >= min_share(found.cause)}
    if straggler is not None and straggler.rank in explained:
        straggler = None
    return [
        find_data_loading(facts),
        *find_events(facts),
        find_callbacks(facts),
        straggler,
        imbalance,
        find_communication(facts),
        find_bubble(facts),
        find_small_kernels(facts),
        find_recomputation(facts),
        thrash,
        throttling,
        find_copies(facts),
    ]


def _shares(facts: RunFacts) -> dict[str, float]:
    """Return where the time went, on the mean of the ranks; where waits are not known they are in the other parts."""
    parts = {name: mean(facts.sums(lambda r, n=name: getattr(r, f"{n}_s")).values()) for name in PARTS}
    events = {kind: mean(facts.event_seconds(kind).values()) for kind in ("checkpoint", "evaluation", "log")}
    gaps = mean(facts.gap_seconds().values())
    untold = mean(facts.sums(lambda record: record.step_s).values()) - sum(parts.values())
    parts["communication"] += mean(facts.event_waits().values())
    seconds = {**parts, **events, "between steps": gaps}
    if untold > SEEN_SHARE * facts.wall_s:  # an older version's log, or another's
        seconds["not told"] = untold
    total_s = sum(seconds.values())
    return {name: value / total_s for name, value in seconds.items()}
