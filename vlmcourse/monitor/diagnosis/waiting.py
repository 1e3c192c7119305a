"""Causes of which ranks waiting for each other are the symptom: a slow rank, unequal work, the network.

Enters: `RunFacts`. Leaves: candidates for findings, whatever their share. A rank that waits in a collective may wait
for the network or for a rank that is late. So the rank that waits *least* in an exchange tells what the network takes,
and the rank with the longest work of its own why the others wait; only then is anything blamed on communication. In a
pipeline only ranks of one stage have the same work: `pipeline` tells what its stages wait for. Chapter 6.
"""

from __future__ import annotations

from statistics import mean, median, median_low, quantiles

from vlmcourse.monitor.diagnosis import thresholds as limit
from vlmcourse.monitor.diagnosis.exchanges import shared_waits
from vlmcourse.monitor.diagnosis.facts import RunFacts, compute_s
from vlmcourse.monitor.diagnosis.findings import Finding, Fix, build_finding, build_fix
from vlmcourse.monitor.diagnosis.pipeline import communication_beyond_bubble, pipeline_degree, stage_of_ranks
from vlmcourse.monitor.diagnosis.profile_ranks import find_unequal_ranks
from vlmcourse.monitor.profile_summary import TraceSummary, name_steps
from vlmcourse.strategies import DEEPSPEED, SHARDED


def find_slow_rank(facts: RunFacts) -> Finding | None:
    """Look for a rank that takes longer than the others for the same work.

    Its fast steps (lower quartile) are held against what is usual for the others (median), in seconds by FLOPs, and of
    both halves of the run the one counts in which the difference is smaller: what disturbs now one rank and now another
    does not count, and neither does more work. A slow rank is slow in its best steps too, and all the time. In a
    pipeline it is held against the other ranks of its stage; a stage that one rank alone has cannot be judged. A rank
    that has less work and is done as early as the others keeps nobody waiting, however slow it is. Where waits count
    as computing, the one that seems to compute longest waits longest: then a profile tells, if there is one.
    """
    if not facts.tells_communication:
        return find_unequal_ranks(facts)[0]
    stages = stage_of_ranks(facts)
    groups = [ranks for stage in set(stages.values()) if len(ranks := [r for r in stages if stages[r] == stage]) > 1]
    if not groups:
        return None
    work = _work_by_step(facts)
    pace_of_all = {rank: [compute_s(r) / work[r.step][rank] for _, r in facts.records(rank)] for rank in facts.ranks}
    usual = {rank: median(values) for rank, values in pace_of_all.items()}
    taken_s = {rank: median(compute_s(r) for _, r in facts.records(rank)) for rank in facts.ranks}
    works = {rank: median(work[step][rank] for step in work) for rank in facts.ranks}
    blamed_s = [{rank: _blame_s(rank, ranks, usual, works, taken_s) for rank in ranks} for ranks in groups]
    most = [max(of_group, key=lambda rank, of_group=of_group: of_group[rank]) for of_group in blamed_s]
    which = max(range(len(groups)), key=lambda number: max(blamed_s[number].values()))
    slowest, pace = most[which], {rank: pace_of_all[rank] for rank in groups[which]}
    half = len(work) // 2
    halves = [_compare_pace({r: values[part] for r, values in pace.items()}, slowest) for part in _halves(half)]
    slow_s, others_s = (works[slowest] * value for value in min(halves, key=lambda pair: pair[0] - pair[1]))
    later_s = taken_s[slowest] - median(taken_s[rank] for rank in pace if rank != slowest)
    more_s = max(0.0, min(slow_s - others_s, later_s))
    share = more_s / facts.cycle_s
    waited = "the rest" if later_s >= slow_s - others_s else f"the {1e3 * more_s:.1f} ms that it takes longer than they"
    evidence = [
        f"Even in its fast steps (lower quartile) rank {slowest} computes for {1e3 * slow_s:.1f} ms, the others "
        f"usually (median) for {1e3 * others_s:.1f} ms at the same work: they wait for {waited}, {share:.0%} of the "
        "time.",
        *_describe_waits(facts, slowest),
    ]
    if _knows_work(facts):
        total = {rank: sum(of_rank[rank] for of_rank in work.values()) for rank in pace}
        ratio = total[slowest] / median(value for rank, value in total.items() if rank != slowest)
        evidence.append(
            f"Its work is {ratio:.2f} x that of the others (FLOPs of tiles and positions), already allowed for."
        )
    else:
        evidence.append("FLOPs are not known here, so all ranks are taken to have the same work.")
    fixes = [
        build_fix(f"take the machine of rank {slowest} out, or find what else runs there", facts.tokens_per_s, share),
        build_fix(
            f"give rank {slowest} fewer samples, in proportion to its speed",
            facts.tokens_per_s,
            share * (len(facts.ranks) - 1) / len(facts.ranks),
        ),
    ]
    return build_finding("slow_rank", share, evidence, fixes, detail=f"rank {slowest}", rank=slowest)


def _blame_s(
    rank: int, ranks: list[int], pace: dict[int, float], work: dict[int, float], taken_s: dict[int, float]
) -> float:
    """Return by how much a rank is slower than the others at its work, as far as it is later than they are too."""
    others = [r for r in ranks if r != rank]
    slower_s = (pace[rank] - median_low(pace[r] for r in others)) * work[rank]
    return min(slower_s, taken_s[rank] - median(taken_s[r] for r in others))


def _halves(half: int) -> tuple[slice, slice]:
    return slice(None, half), slice(half, None)


def _compare_pace(pace: dict[int, list[float]], slowest: int) -> tuple[float, float]:
    """Return the lower quartile of the slowest rank, and the median of the others' medians."""
    others = median_low(median(values) for rank, values in pace.items() if rank != slowest)
    return quantiles(pace[slowest], n=4)[0], others


def find_imbalance(facts: RunFacts) -> Finding | None:
    """Look for steps in which one rank has more FLOPs than the mean rank, whichever it is; balance would save the rest.

    What it costs is the smaller of two numbers: what the FLOPs predict at the pace of the ranks that have fewer, and by
    how much longer the rank with the most really computed. At its own pace a slow machine would count as work.
    """
    if len(facts.ranks) == 1 or pipeline_degree(facts) > 1 or not _knows_work(facts):
        return None
    if not facts.tells_communication:
        return find_unequal_ranks(facts)[1]
    work = _work_by_step(facts)
    heaviest = {step: max(of_rank, key=lambda rank, w=of_rank: w[rank]) for step, of_rank in work.items()}
    pace = median(compute_s(r) / work[r.step][rank] for rank, r in facts.records() if rank != heaviest[r.step])
    predicted_s = pace * sum(max(of_rank.values()) - mean(of_rank.values()) for of_rank in work.values())
    own_s = {step: {rank: compute_s(record) for rank, record in ranks.items()} for step, ranks in facts.steps.items()}
    measured_s = sum(own_s[step][heaviest[step]] - mean(own_s[step].values()) for step in work)
    share = max(0.0, min(predicted_s, measured_s)) / facts.wall_s
    counts = {rank: list(heaviest.values()).count(rank) for rank in facts.ranks}
    most = max(counts, key=lambda rank: counts[rank])
    is_one = counts[most] >= limit.SAME_RANK_FRACTION * len(work)
    ratio = mean(max(of_rank.values()) / mean(of_rank.values()) for of_rank in work.values())
    evidence = [
        f"The rank with the most work has {ratio:.2f} x the mean rank's FLOPs in a step, and computes "
        f"{1e3 * measured_s / len(work):.1f} ms longer than the mean rank.",
        f"It is rank {most} in {counts[most]} of {len(work)} steps"
        + (", always the same." if is_one else "; it changes."),
        _compare_work(facts, most),
        *_describe_waits(facts, most),
    ]
    fixes = [
        build_fix("deal samples out by tiles and tokens, so that each rank has as many", facts.tokens_per_s, share),
        build_fix("lower data.max_tiles_per_image (changes what is learned)", facts.tokens_per_s, share),
    ]
    rank = most if is_one else None
    detail = f"rank {most}" if is_one else "changing ranks"
    return build_finding("imbalance", share, evidence, fixes, detail=detail, rank=rank)


def _knows_work(facts: RunFacts) -> bool:
    return all(facts.count_flops(record) is not None for _, record in facts.records())


def _work_by_step(facts: RunFacts) -> dict[int, dict[int, float]]:
    """Return FLOPs by step and rank; 1 for all where they are not known."""
    if not _knows_work(facts):
        return {step: dict.fromkeys(ranks, 1.0) for step, ranks in facts.steps.items()}
    counted = {
        step: {rank: count.hardware for rank, r in ranks.items() if (count := facts.count_flops(r)) is not None}
        for step, ranks in facts.steps.items()
    }
    return counted


def _describe_waits(facts: RunFacts, slowest: int) -> list[str]:
    if not facts.tells_communication:
        return []
    waits_s = facts.sums(lambda record: record.communication_s)
    others = [value for rank, value in waits_s.items() if rank != slowest]
    return [
        f"Rank {slowest} waits for others {waits_s[slowest] / facts.wall_s:.0%} of the time, the others "
        f"{mean(others) / facts.wall_s:.0%}: waiting is a symptom, not the cause."
    ]


def _compare_work(facts: RunFacts, heavy: int) -> str:
    tiles = facts.sums(lambda record: record.tiles)
    positions = facts.sums(lambda r: (r.text_tokens or 0) + (r.image_tokens or 0) + (r.padding_tokens or 0))

    def compare(values: dict[int, float]) -> str:
        others = mean(value for rank, value in values.items() if rank != heavy)
        return f"{values[heavy] / len(facts.steps):.0f} a step against {others / len(facts.steps):.0f}"

    return f"Tiles of rank {heavy}: {compare(tiles)} of the others; positions: {compare(positions)}."


def find_communication(facts: RunFacts) -> Finding | None:
    """Look at the time in which even the rank that waits least waits: data are on their way."""
    if len(facts.ranks) == 1:
        return None
    if not facts.tells_communication and facts.profile is None:
        facts.notes.append(
            "communication cannot be told from computing in this strategy's step log on a GPU, so neither it nor a "
            "slow rank nor unequal work was looked for: record a profile (profile.active = 3): its summary in the "
            "run's folder is read here"
        )
        return None
    if pipeline_degree(facts) > 1:
        return communication_beyond_bubble(facts)
    share, evidence = _look_at_waits(facts)
    strategy = facts.config.parallel.strategy if facts.config is not None else ""
    fixes = [_fewer_exchanges(facts, share)]
    if strategy == "ddp" and facts.config is not None and facts.config.parallel.compression == "none":
        fixes.append(
            build_fix(
                "parallel.compression = 'bf16': half the bytes, if bandwidth is what lacks",
                facts.tokens_per_s,
                share / 2,
            )
        )
    if strategy in ("fsdp", "hsdp", "zero2", "deepspeed-zero3"):
        fixes.append(
            build_fix(
                "ddp or zero1, if the state fits: a third fewer bytes, fewer exchanges", facts.tokens_per_s, share / 3
            )
        )
    fixes.append(
        build_fix(
            "a faster link between the ranks, twice as fast in latency and bandwidth", facts.tokens_per_s, share / 2
        )
    )
    return build_finding("communication", share, evidence, fixes, detail=strategy)


def _fewer_exchanges(facts: RunFacts, share: float) -> Fix:
    """Return the fix that lets an exchange serve twice the samples: it depends on how often the strategy exchanges."""
    config = facts.config
    if config is None:
        return build_fix("fewer exchanges: more samples for each", facts.tokens_per_s, share / 2)
    parallel, train = config.parallel, config.train
    if parallel.tp > 1 or parallel.cp > 1:
        # Activations are exchanged in every layer: their bytes grow with the samples, only the number does not.
        what = "as many exchanges in the layers for twice the samples (latency is saved, bytes are not; more memory)"
        return build_fix(
            f"train.micro_batch_size = {2 * train.micro_batch_size}: {what}", facts.tokens_per_s, share / 2
        )
    if parallel.strategy in SHARDED or DEEPSPEED.get(parallel.strategy, 0) >= 2:  # ZeRO stage 2: gradients as they come
        what = "exchanges come with every micro-batch, so as many for twice the samples (a larger batch, more memory)"
        return build_fix(
            f"train.micro_batch_size = {2 * train.micro_batch_size}: {what}", facts.tokens_per_s, share / 2
        )
    what = "as many exchanges for twice the samples (a larger batch)"
    return build_fix(
        f"train.accumulation_steps = {2 * train.accumulation_steps}: {what}", facts.tokens_per_s, share / 2
    )


def _look_at_waits(facts: RunFacts) -> tuple[float, list[str]]:
    """Return the share of waits of the rank that waits least, and what shows it: the log, or only a profile can."""
    if not facts.tells_communication and facts.profile is not None:
        return _look_at_profile(facts.profile)
    shared_s, knows_each = shared_waits(facts.steps.values())
    share = shared_s / facts.wall_s
    own_s = median(compute_s(record) for _, record in facts.records())
    each_s = 1e3 * shared_s / len(facts.steps)
    waited = (
        f"In each step even the rank that waits least waits {each_s:.1f} ms on the mean, {share:.0%} of the time. That "
        "is an upper bound of what data take on their way: its waits are not known one by one, and ranks that are late "
        "at different exchanges of a step count as well."
        if not knows_each
        else f"Even the rank that waits least in an exchange waits {each_s:.1f} ms a step on the mean, {share:.0%} of "
        "the time: no rank is late then, data are on their way."
    )
    return share, [
        waited,
        f"Computing takes {1e3 * own_s:.1f} ms in the median step.",
    ]


def _look_at_profile(profile: TraceSummary) -> tuple[float, list[str]]:
    """Return the share of exposed communication of the rank that has least, by collective where these match."""
    num_steps = len(profile.steps)
    head = f"The step log cannot tell it here; by the profile of {name_steps(profile)} "
    of_rank = min(profile.ranks, key=lambda of_rank: of_rank.exposed_s / of_rank.seconds)
    hidden_ms = 1e3 * (of_rank.communication_s - of_rank.exposed_s) / num_steps
    if profile.shared_exposed_s is not None:
        share = profile.shared_exposed_share
        return share, [
            f"{head}even the rank that waits least in a collective has exposed communication for {share:.0%} of the "
            f"time, {1e3 * profile.shared_exposed_s / num_steps:.1f} ms a step: no rank is late then, data are on "
            f"their way; on rank {of_rank.rank} {hidden_ms:.1f} ms more hide behind computing."
        ]
    share = of_rank.exposed_s / of_rank.seconds
    return share, [
        f"{head}even rank {of_rank.rank}, which has least, has exposed communication for {share:.0%} of the time, "
        f"{1e3 * of_rank.exposed_s / num_steps:.1f} ms a step; {hidden_ms:.1f} ms more hide behind computing. That is "
        "an upper bound of what data take on their way: ranks that are late at different exchanges of a step count as "
        "well. The profile does not compare the ranks by collective: they made different numbers of them, or an older "
        "version wrote its summary."
    ]
