"""Unequal ranks where the step log counts waits as computing (FSDP on a GPU): what a profile of a few steps tells.

Enters: `RunFacts` with a profile of all ranks. Leaves: candidates for findings, a slow rank and unequal work. Only
what others wait for counts: its time of its own, without waits for others and for data, beyond that of the others.
What a rank does between two recorded steps may hold waits that the profile counts as such already; so it is taken off
the rank that is judged and left on the others, which blames too little rather than the wrong one. Chapter 6.
"""

from __future__ import annotations

from statistics import median

from vlmcourse.monitor.diagnosis.facts import RunFacts
from vlmcourse.monitor.diagnosis.findings import Finding, build_finding, build_fix
from vlmcourse.monitor.diagnosis.pipeline import pipeline_degree
from vlmcourse.monitor.profile_summary import RankTime, name_steps


def find_unequal_ranks(facts: RunFacts) -> tuple[Finding | None, Finding | None]:
    """Look in the recorded steps for a rank that the others wait for, as it is slower, or as it has more work.

    Returns:
        A slow rank, and unequal work, of one and the same rank; None twice where there is no profile of several ranks,
        or in a pipeline, whose stages have different work.
    """
    profile, profiled = facts.profile, facts.profiled
    if profile is None or profiled is None or len(profile.ranks) == 1 or pipeline_degree(facts) > 1:
        return None, None
    bounds = {of_rank.rank: _own_s(facts, of_rank) for of_rank in profile.ranks}
    longest = max(bounds, key=lambda rank: bounds[rank][0])
    usual_s = median(most_s for rank, (_, most_s) in bounds.items() if rank != longest)
    lead_s = max(0.0, bounds[longest][0] - usual_s)
    work = _recorded_work(facts)
    ratio = 1.0
    if work:
        ratio = work[longest] / median(flops for rank, flops in work.items() if rank != longest)
    unequal_s = min(lead_s, usual_s * max(0.0, ratio - 1))
    seconds, num_steps, num_ranks = profile.ranks[0].seconds, len(profile.steps), len(profile.ranks)
    more = (
        f"The step log cannot tell it here; in the profile of {name_steps(profile)} rank {longest} has "
        f"{1e3 * bounds[longest][0] / num_steps:.1f} ms a step of its own, without waits, the others "
        f"{1e3 * usual_s / num_steps:.1f} ms: they wait for the rest. A few steps are little; profile later ones to be "
        "sure."
    )
    has_work = (
        f"Its work is {ratio:.2f} x that of the others (FLOPs of tiles and positions in these steps), which is worth "
        f"{1e3 * unequal_s / num_steps:.1f} ms."
        if work
        else "FLOPs are not known here, so all ranks are taken to have the same work."
    )
    slow_share = (lead_s - unequal_s) / seconds
    machine = build_fix(
        f"take the machine of rank {longest} out, or find what else runs there", facts.tokens_per_s, slow_share
    )
    unequal_share = unequal_s / seconds * (num_ranks - 1) / num_ranks
    deal = build_fix(
        "deal samples out by tiles and tokens, so that each rank has as many", facts.tokens_per_s, unequal_share
    )
    detail = f"rank {longest}"
    return (
        build_finding("slow_rank", slow_share, [more, has_work], [machine], detail=detail, rank=longest),
        build_finding("imbalance", unequal_share, [more, has_work], [deal], detail=detail, rank=longest),
    )


def _own_s(facts: RunFacts, of_rank: RankTime) -> tuple[float, float]:
    """Return what a rank needed for its steps at least and at most, over all recorded steps."""
    assert facts.profiled is not None
    records = [ranks[of_rank.rank] for ranks in facts.profiled.steps.values() if of_rank.rank in ranks]
    between_s = of_rank.seconds - sum(record.step_s for record in records) if records else 0.0
    loading_s = max(of_rank.stall_s, sum(record.data_wait_s or 0.0 for record in records))
    least_s = of_rank.own_s - max(0.0, between_s) - loading_s
    return max(0.0, least_s), max(0.0, of_rank.own_s - of_rank.stall_s)


def _recorded_work(facts: RunFacts) -> dict[int, float]:
    """Return the FLOPs of each rank in the recorded steps; nothing where they are not known."""
    assert facts.profile is not None and facts.profiled is not None
    found = {of_rank.rank: 0.0 for of_rank in facts.profile.ranks}
    for ranks in facts.profiled.steps.values():
        for rank in found:
            count = facts.count_flops(ranks[rank]) if rank in ranks else None
            if count is None:
                return {}
            found[rank] += count.hardware
    return found
