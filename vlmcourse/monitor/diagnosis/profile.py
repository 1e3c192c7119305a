"""What a run's profile says to the findings of its step log: more evidence, and where the two disagree both.

Enters: `RunFacts`, with the profile's summary where the run has one. Leaves: findings with sentences about the recorded
steps, notes about what does not fit, and lines that say what the profile shows. A profile is of few steps, in which the
profiler itself takes time; the step log is of all. So shares stay those of the log, but for what only a profile can
tell: `device.find_small_kernels`, `clocks.find_copies`, `waiting.find_communication`, `profile_ranks`. Chapter 6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from statistics import mean

from vlmcourse.monitor.diagnosis import thresholds as limit
from vlmcourse.monitor.diagnosis.exchanges import shared_waits
from vlmcourse.monitor.diagnosis.facts import RunFacts
from vlmcourse.monitor.diagnosis.findings import Finding
from vlmcourse.monitor.diagnosis.pipeline import pipeline_degree
from vlmcourse.monitor.profile_summary import RankTime, TraceSummary, describe_operators, name_steps
from vlmcourse.monitor.step_log import StepRecord

EVENTS_OF = {"checkpoints": "checkpoint", "evaluations": "evaluation", "logging": "log"}
"""Causes between steps -> their event in the step log."""
STALLS, EXPOSED = "data stalls", "exposed communication"


def describe_profile(facts: RunFacts) -> tuple[str, ...]:
    """Return what the profile shows, a line a rank and one of the operators; nothing where the run has none."""
    profile = facts.profile
    if profile is None:
        return ()
    num_steps, named = len(profile.steps), name_steps(profile)
    lines = [f"Profile of {named}: {1e3 * profile.step_s:.1f} ms a step."]
    for of_rank in profile.ranks:
        parts = (of_rank.compute_s, of_rank.exposed_s, of_rank.stall_s, of_rank.idle_s)
        compute, exposed, stall, idle = (part / of_rank.seconds for part in parts)
        lines.append(
            f"Rank {of_rank.rank}: compute {compute:.0%}, exposed communication {exposed:.0%}, data stalls "
            f"{stall:.0%}, "
            f"idle {idle:.0%}; {describe_operators(of_rank, profile)}."
        )
    if profile.operators:
        top = ", ".join(
            f"{operator.name} {1e3 * operator.self_s / num_steps / len(profile.ranks):.1f} ms"
            for operator in profile.operators[:3]
        )
        lines.append(f"Most time of a rank's step: {top}.")
    return tuple(lines)


def with_profile(facts: RunFacts, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, each with what the profile says to it, and note what it shows that is not among them."""
    profile = facts.profile
    if profile is None:
        return list(findings)
    found = {finding.cause for finding in findings if finding.share >= limit.min_share(finding.cause)}
    if "data_loading" not in found and (said := _compare_stalls(facts, profile, must_differ=True)):
        facts.notes.append(said)
    if not found & {"communication", "slow_rank", "imbalance", "pipeline_bubble"}:
        said = _compare_exposed(facts, profile, must_differ=True)
        facts.notes.extend([said] if said else [])
    return [
        dataclasses.replace(finding, evidence=(*finding.evidence, said))
        if (said := _comment(facts, profile, finding))
        else finding
        for finding in findings
    ]


def _comment(facts: RunFacts, profile: TraceSummary, finding: Finding) -> str:
    """Return what the profile says to one finding; nothing where it has nothing to say."""
    if finding.cause == "data_loading":
        return _compare_stalls(facts, profile)
    if finding.cause in ("communication", "pipeline_bubble"):
        return _compare_exposed(facts, profile) if facts.tells_communication else ""
    if finding.cause in ("slow_rank", "imbalance"):  # where the log cannot tell them, they are the profile's own
        return _compare_ranks(profile, finding) if facts.tells_communication else ""
    if finding.cause in (*EVENTS_OF, "callbacks"):
        return _compare_between(facts, profile, finding)
    return ""


def _compare_stalls(facts: RunFacts, profile: TraceSummary, *, must_differ: bool = False) -> str:
    slowest = max(profile.ranks, key=lambda of_rank: of_rank.stall_s)
    whose = f"of the time of rank {slowest.rank}, the most of all ranks"
    pair = _of_rank(facts, slowest, slowest.stall_s, lambda record: record.data_wait_s)
    return _compare(profile, STALLS, whose, slowest.stall_s, pair, must_differ=must_differ)


def _compare_exposed(facts: RunFacts, profile: TraceSummary, *, must_differ: bool = False) -> str:
    """Compare what even the rank that waits least waits, exchange by exchange in both; else all waits of one rank."""
    if not facts.tells_communication or len(profile.ranks) == 1:
        return ""
    assert facts.profiled is not None
    recorded = facts.profiled.steps.values()
    same_s, knows_same = shared_waits(recorded)
    usual_s, knows_usual = shared_waits(facts.steps.values())
    if pipeline_degree(facts) == 1 and profile.shared_exposed_s is not None and knows_same and knows_usual:
        step_s = sum(mean(record.step_s for record in ranks.values()) for ranks in recorded)
        pair = Shares(profile.shared_exposed_share, same_s / step_s, usual_s / facts.wall_s)
        whose = "of the time, with the rank that waits least in each collective"
        return _compare(profile, EXPOSED, whose, profile.shared_exposed_s, pair, must_differ=must_differ)
    least = min(profile.ranks, key=lambda of_rank: of_rank.exposed_s)
    whose = f"of the time of rank {least.rank}, the least of all ranks, with its waits for late ranks"
    pair = _of_rank(facts, least, least.exposed_s, lambda record: record.communication_s)
    return _compare(profile, EXPOSED, whose, least.exposed_s, pair, must_differ=must_differ)


@dataclasses.dataclass(frozen=True)
class Shares:
    """One part of the time, measured in the same way."""

    profile: float
    same: float
    """By the step log, in the recorded steps."""
    usual: float
    """By the step log, in the steps that are looked at."""


def _of_rank(facts: RunFacts, of_rank: RankTime, seconds: float, value: Callable[[StepRecord], float | None]) -> Shares:
    """Return the shares of one rank's time."""
    assert facts.profiled is not None
    rank = of_rank.rank
    records = [ranks[rank] for ranks in facts.profiled.steps.values() if rank in ranks]
    same = sum(value(r) or 0.0 for r in records) / sum(r.step_s for r in records)
    usual = sum(value(r) or 0.0 for _, r in facts.records(rank)) / facts.wall_s
    return Shares(seconds / of_rank.seconds, same, usual)


def _compare(profile: TraceSummary, what: str, whose: str, seconds: float, shares: Shares, *, must_differ: bool) -> str:
    """Hold a part of the profile's time against the step log's, in the same steps and in those that are looked at."""
    said = (
        f"The profile of {name_steps(profile)} shows {what} for {shares.profile:.0%} {whose} "
        f"({1e3 * seconds / len(profile.steps):.1f} ms a step)"
    )
    same, usual = shares.same, shares.usual
    differs_here, differs = (abs(shares.profile - other) > limit.PROFILE_TOLERANCE for other in (same, usual))
    if not (differs or differs_here):
        return "" if must_differ else f"{said}; the step log agrees ({usual:.0%} in the steps looked at)."
    if differs_here:
        return (
            f"{said}, the step log {same:.0%} in the same steps and {usual:.0%} in those looked at: they "
            "disagree. A trace "
            "counts as waiting only what no operator covers, a log what the training thread waits for; believe the log "
            "for the length of a wait, and look into the trace for what runs beside it."
        )
    return (
        f"{said}. The step log agrees for these steps ({same:.0%}), but has {usual:.0%} in those looked at: the "
        "recorded "
        "steps are not like the others; record later ones with profile.wait."
    )


def _compare_ranks(profile: TraceSummary, finding: Finding) -> str:
    """Say which rank has the most time of its own in the profile, and whether that is the finding's."""
    if len(profile.ranks) == 1:
        return ""
    slowest, num_steps = profile.slowest, len(profile.steps)
    others = [of_rank for of_rank in profile.ranks if of_rank.rank != slowest.rank]
    said = (
        f"In the profile of {name_steps(profile)} rank {slowest.rank} has the most time of its own, "
        f"{1e3 * slowest.own_s / num_steps:.1f} ms a step ({1e3 * slowest.compute_s / num_steps:.1f} of computing, "
        f"{1e3 * slowest.idle_s / num_steps:.1f} idle); the others have "
        f"{1e3 * max(of_rank.own_s for of_rank in others) / num_steps:.1f} ms at most"
    )
    if finding.rank is None or finding.rank == slowest.rank:
        return f"{said}."
    return (
        f"{said}. The step log names rank {finding.rank} over all its steps: they disagree; the recorded steps "
        "may not be "
        "like the others, so record later ones with profile.wait."
    )


def _compare_between(facts: RunFacts, profile: TraceSummary, finding: Finding) -> str:
    """Say whether what happens between steps fell into the recorded ones: it is idle time there, or computing."""
    assert facts.profiled is not None
    inside = profile.steps[:-1]  # what follows the last step is not recorded
    kind = EVENTS_OF.get(finding.cause)
    if kind is not None:
        hit = [step for step in inside if step in facts.profiled.events.get(kind, ())]
        if hit:
            return ""
        return f"The profile of {name_steps(profile)} does not show it: none came between these steps."
    if not inside:
        return (
            f"The profile of {name_steps(profile)} does not show it: what follows the last recorded step is left out."
        )
    idle = max(of_rank.idle_s / of_rank.seconds for of_rank in profile.ranks)
    ending = f"The ranks of the profile ({name_steps(profile)}) are idle for {idle:.0%} of the time at most"
    expected = finding.share * len(inside) / len(profile.steps)
    if idle + limit.PROFILE_TOLERANCE < expected:
        return (
            f"{ending}, though about {expected:.0%} of it would be this: they disagree, unless a callback runs "
            "operators."
        )
    return f"{ending}; between steps it shows as that."
