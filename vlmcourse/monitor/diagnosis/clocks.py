"""Causes that only a GPU's own counters show: a clock that is held down, and data between host and device.

Enters: `RunFacts` with rows that have `hardware/…` of rank 0's GPU, or with a profile of GPUs. Leaves: candidates for
findings. Chapter 6.
"""

from __future__ import annotations

from statistics import median, quantiles
from typing import Any

from vlmcourse.monitor.diagnosis import thresholds as limit
from vlmcourse.monitor.diagnosis.facts import RunFacts, compute_s
from vlmcourse.monitor.diagnosis.findings import Finding, build_finding, build_fix
from vlmcourse.monitor.profile_summary import CopyTime, RankTime, TraceSummary, name_steps

THROTTLED = "hardware/gpu_is_throttled"
WATCHED_RANK = 0
"""The rank whose hardware the rows describe."""


def find_throttling(facts: RunFacts) -> Finding | None:
    """Compare the speed of steps in which the GPU was throttled with the others.

    A GPU under full load is at its power cap all the time, as it is meant to be: where there is no other step, only
    heat is a fault, and what it takes is counted from the fast steps (lower quartile), so that jitter is no loss.
    """
    throttled, free = _split_steps(facts)
    if not throttled:
        return None
    is_thermal = any("thermal" in reason for reason in _reasons(facts))
    if not free and not is_thermal:
        facts.notes.append(
            f"the GPU of rank {WATCHED_RANK} was held back in all steps "
            f"({', '.join(_reasons(facts)) or 'reason not told'}): a power cap is no fault by itself, as full load "
            "brings it about, and there are no other steps to compare with"
        )
        return None
    reference_s = median(free) if free else quantiles(throttled, n=4, method="inclusive")[0]
    lost_s = sum(max(0.0, seconds - reference_s) for seconds in throttled)
    share = lost_s / facts.wall_s
    rows = _throttled_rows(facts)
    celsius = [float(row["hardware/gpu_celsius"]) for row in rows if "hardware/gpu_celsius" in row]
    why = ", ".join(_reasons(facts)) or "reason not told"
    compared = f"{1e3 * reference_s:.1f} ms in the {'others' if free else 'fast ones (lower quartile)'}"
    evidence = [
        f"The GPU of rank {WATCHED_RANK} was throttled in {len(throttled)} of {len(facts.steps)} steps "
        f"({why}): {1e3 * median(throttled):.1f} ms of computing a step, {compared}; {share:.0%} of the time is lost."
    ]
    if celsius:
        evidence.append(f"It had {max(celsius):.0f} °C then.")
    fixes = [
        build_fix(
            "cool it: fans, the air in front of the machine, a free slot beside the card"
            if is_thermal
            else "raise the power limit, if the machine allows it",
            facts.tokens_per_s,
            share,
        )
    ]
    return build_finding(
        "throttling", share, evidence, fixes, detail="thermal" if is_thermal else "power", rank=WATCHED_RANK
    )


def _throttled_rows(facts: RunFacts) -> list[dict[str, Any]]:
    return [row for row in facts.rows if row.get(THROTTLED, 0.0) >= limit.THROTTLED_FRACTION]


def _reasons(facts: RunFacts) -> list[str]:
    """Return why the GPU was throttled, as its driver calls it."""
    rows = _throttled_rows(facts)
    reasons = {reason for row in rows for reason in str(row.get("hardware/throttle_reasons", "")).split(", ")}
    return sorted(reasons - {""})


def _split_steps(facts: RunFacts) -> tuple[list[float], list[float]]:
    """Return seconds of computing in throttled steps, and in the others; a row is about the steps up to its own."""
    rows = sorted((row["step"], row[THROTTLED]) for row in facts.rows if THROTTLED in row)
    throttled: list[float] = []
    free: list[float] = []
    for step, ranks in facts.steps.items():
        later = [value for row_step, value in rows if row_step >= step]
        if later and WATCHED_RANK in ranks:
            (throttled if later[0] >= limit.THROTTLED_FRACTION else free).append(compute_s(ranks[WATCHED_RANK]))
    return throttled, free


def _read_copies(profile: TraceSummary) -> tuple[float, str]:
    """Return the largest share of a rank's time in which it only copied between host and device, and a sentence."""

    def crossing(of_rank: RankTime) -> list[CopyTime]:
        return [copy for copy in of_rank.copies if copy.direction in ("HtoD", "DtoH")]

    def exposed(of_rank: RankTime) -> float:
        return sum(copy.exposed_s for copy in crossing(of_rank)) / of_rank.seconds

    most, num_steps = max(profile.ranks, key=exposed), len(profile.steps)
    parts = [
        f"{copy.direction} {copy.num_bytes / num_steps / 1e6:.1f} MB in {copy.calls / num_steps:.0f} copies, "
        f"{1e3 * copy.seconds / num_steps:.1f} ms, of which {1e3 * copy.exposed_s / num_steps:.1f} ms hide behind "
        "nothing"
        for copy in crossing(most)
    ]
    if not parts:
        return 0.0, ""
    return exposed(most), (
        f"In the profile of {name_steps(profile)} rank {most.rank} only copies for {exposed(most):.0%} of the time; a "
        f"step has {'; '.join(parts)}."
    )


def find_copies(facts: RunFacts) -> Finding | None:
    """Look at copies between host and device: in a profile those that nothing hides, else PCIe traffic at most."""
    shares: list[float] = []
    evidence: list[str] = []
    if facts.profile is not None and facts.profile.on_gpu:
        share, said = _read_copies(facts.profile)
        shares.append(share)
        evidence += [said] if said else []
    first, last = min(facts.steps), max(facts.steps)
    rows = [row for row in facts.rows if first <= row.get("step", -1) <= last + 1]
    directions = ("hardware/pcie_rx_bytes_per_s", "hardware/pcie_tx_bytes_per_s")
    rates = [max(row[name] for name in directions if name in row) for row in rows if any(n in row for n in directions)]
    if rates:
        rate = sum(rates) / len(rates)
        shares.append(min(1.0, rate / limit.PCIE_BYTES_PER_S))
        evidence.append(
            f"{rate / 1e9:.1f} GB/s cross PCIe on rank {WATCHED_RANK}, {shares[-1]:.0%} of what a link of "
            f"{limit.PCIE_BYTES_PER_S / 1e9:.0f} GB/s moves: at most so much of the time, less where copies "
            "run beside computing."
        )
    if not shares:
        return None
    share = shares[0]
    if len(shares) == 2 and share > shares[1] + limit.PROFILE_TOLERANCE:
        evidence.append(
            "The profile shows more than a busy link could take: they disagree; pageable memory is copied slower than "
            "the link moves, or the recorded steps are not like the others."
        )
    fixes = []
    config = facts.config
    if config is not None and (config.offload.optimizer != "none" or config.offload.parameters != "none"):
        evidence.append(
            f"offload.optimizer = {config.offload.optimizer!r}, offload.parameters = "
            f"{config.offload.parameters!r}: state crosses in every step."
        )
        fixes.append(build_fix("no offload: shard over more ranks instead (zero2, fsdp)", facts.tokens_per_s, share))
        fixes.append(
            build_fix("twice the train.accumulation_steps: state crosses half as often", facts.tokens_per_s, share / 2)
        )
    if config is not None and config.activations.offload:
        evidence.append("activations.offload = true: activations cross twice a micro-batch.")
        fixes.append(build_fix("activations 'full' instead of activations.offload", facts.tokens_per_s, share / 2))
    if not fixes:
        fixes.append(build_fix("pinned memory and copies that do not wait, a step ahead", facts.tokens_per_s, share))
    return build_finding("copies", share, evidence, fixes)
