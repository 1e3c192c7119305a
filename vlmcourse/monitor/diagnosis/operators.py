"""What starting operations costs a rank on a CPU: the part of a micro-batch's time that does not grow with its samples.

Enters: `RunFacts`. Leaves: seconds, an estimate by the number of transformer blocks. Chapter 6.
"""

from __future__ import annotations

from vlmcourse.monitor.diagnosis import thresholds as limit
from vlmcourse.monitor.diagnosis.facts import RunFacts, compute_s


def count_operations(facts: RunFacts) -> int | None:
    """Return the operations that forward and backward start for one micro-batch of the whole model; None: not known."""
    if facts.shape is None:
        return None
    return limit.OPERATORS_PER_BLOCK * (facts.shape.vision.num_layers + facts.shape.language.num_layers)


def estimate_start_s(facts: RunFacts) -> float | None:
    """Estimate what starting the operations of one micro-batch of the whole model takes, by the clock of these ranks.

    Returns:
        Seconds; None on a GPU, where the host starts them while others run, and where the model is not known.
    """
    count = count_operations(facts)
    if count is None or facts.device != "cpu":
        return None
    return count * limit.CPU_OPERATOR_S * slowdown(facts)


def slowdown(facts: RunFacts) -> float:
    """Return by how much a process that shares its core takes longer: clock over CPU seconds of computing.

    Of all ranks the one that shares least.
    """
    return min(_slowdown_of(facts, rank) for rank in facts.ranks)


def _slowdown_of(facts: RunFacts, rank: int) -> float:
    records = [record for _, record in facts.records(rank) if record.cpu_percent]
    cpu_s = sum((record.cpu_percent or 0.0) / 100 * record.step_s for record in records)
    if cpu_s <= 0:
        return 1.0
    return min(limit.MAX_SLOWDOWN, max(1.0, sum(compute_s(record) for record in records) / cpu_s))
