"""What a diagnosis says: findings with evidence and fixes, in order, or that the run is healthy.

Enters: numbers and sentences of the other modules here. Leaves: `Diagnosis`; `vlmcourse diagnose` prints it. What a
fix gains is an estimate: the run of now without the part that the fix removes, as far as the other ranks have that time
to spare (`hiding`). Chapter 6.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

CAUSES: dict[str, str] = {
    "data_loading": "the ranks wait for data: decoding, too few workers, a slow or shared disk",
    "slow_rank": "one rank takes longer for the same work: its machine",
    "imbalance": "one rank has more work: larger images, longer texts",
    "communication": "ranks that are all ready wait for data on their way",
    "pipeline_bubble": "stages of a pipeline wait for each other: too few micro-batches, unequal stages",
    "small_kernels": "micro-batches so small that starting operations takes longer than computing",
    "recomputation": "activations are computed again although they would fit into memory",
    "checkpoints": "saving takes a large part of the time",
    "evaluations": "evaluating takes a large part of the time",
    "logging": "rows of the log take a large part of the time",
    "callbacks": "work between steps that is none of the package's: callbacks, code of a notebook",
    "copies": "data move between host and device",
    "memory_thrash": "memory runs out: the allocator starts over, or the machine swaps",
    "throttling": "the GPU lowers its clock",
}
"""Names of causes -> what they are."""
HEALTHY = "healthy"
NEARLY_ALL = 0.9
"""Of the time of a token: saving more makes a run above ten times as fast, and an error of 0.01 is a tenth of that."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """Something to change."""

    what: str
    tokens_per_s: float
    """Estimate of the run with the change, over all ranks."""
    gain_fraction: float
    """How much more that is: 0.5 is half as much again."""
    saved_share: float
    """Part of the time of a token that this is, 0 to 1."""
    uncertainty_share: float = 0.0
    """How far off `saved_share` may be: what the run's steps differ by, and what the cause's estimate leaves open."""

    @property
    def gain_range(self) -> tuple[float, float]:
        """The least and the most that `gain_fraction` may come to; the least may be a loss.

        The most is `math.inf` where the share that may be saved comes to `NEARLY_ALL`: what is left is then less than
        the estimate is good for, so that no upper end can be told.
        """
        low, high = self.saved_share - self.uncertainty_share, self.saved_share + self.uncertainty_share
        return 1 / (1 - low) - 1, math.inf if high >= NEARLY_ALL else 1 / (1 - high) - 1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause with what speaks for it."""

    cause: str
    """One of `CAUSES`."""
    share: float
    """Part of the run's time that it explains, 0 to 1."""
    detail: str = ""
    """A kind of the cause, where that can be told: such as "decode", "storage", "rank 1"."""
    rank: int | None = None
    """The rank that causes it, where it is one."""
    evidence: tuple[str, ...]
    """Sentences with numbers of this run."""
    fixes: tuple[Fix, ...]
    """The largest gain first."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found in a run."""

    run: str
    """Its folder."""
    findings: tuple[Finding, ...]
    """Those above the thresholds, the largest share first; empty if the run is healthy."""
    below: tuple[Finding, ...]
    """What was seen too, but is below its threshold."""
    shares: dict[str, float]
    """Where the time went, by part; the mean of the ranks, adding up to 1."""
    first_step: int
    last_step: int
    """Steps that were looked at: those without warm-up, each with what followed it up to the next one."""
    step_s: float
    """From the beginning of a step to that of the next, on the mean."""
    tokens_per_s: float
    """Text and image tokens of all ranks, over all the time that passed."""
    world_size: int
    notes: tuple[str, ...]
    """What could not be told, and why."""
    profile: tuple[str, ...] = ()
    """What a profile of the run shows: a sentence about its steps, one a rank, and one about operators; or nothing."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing explains more than its threshold."""
        return not self.findings

    @property
    def cause(self) -> str:
        """The first finding's cause, or "healthy"."""
        return self.findings[0].cause if self.findings else HEALTHY

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON takes it, with `cause`."""
        return {"cause": self.cause, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        """Return the causes with their shares in one line."""
        causes = ", ".join(f"{finding.cause} {finding.share:.0%}" for finding in self.findings)
        return f"{self.run}: {causes or HEALTHY}"


def build_fix(what: str, tokens_per_s: float, removed_share: float) -> Fix:
    """Return a fix that removes a share of the run's time and leaves the rest as it is.

    Args:
        what: to change.
        tokens_per_s: of the run now.
        removed_share: 0 to below 1; what is above is cut to 0.99, what is below to 0.
    """
    removed = min(0.99, max(0.0, removed_share))
    kept = 1 - removed
    return Fix(what=what, tokens_per_s=tokens_per_s / kept, gain_fraction=1 / kept - 1, saved_share=removed)


def uncertainty_of(fix: Fix, noise: float, model_error: float) -> float:
    """Return how far off what a fix saves may be, as a share of the time; the arguments are those below."""
    return noise * (1 - fix.saved_share) + model_error * fix.saved_share


def with_uncertainty(finding: Finding, noise: float, model_error: float) -> Finding:
    """Return a finding whose fixes say how far off they may be.

    Args:
        finding: any.
        noise: what steps of equal work differ by, as a part of them; what a fix leaves may do so as well.
        model_error: how far off what is removed may be, as a part of it; 0 where it was measured.
    """
    fixes = tuple(
        dataclasses.replace(fix, uncertainty_share=uncertainty_of(fix, noise, model_error)) for fix in finding.fixes
    )
    return dataclasses.replace(finding, fixes=fixes)


def build_finding(
    cause: str,
    share: float,
    evidence: list[str],
    fixes: list[Fix],
    *,
    detail: str = "",
    rank: int | None = None,
) -> Finding:
    """Return a finding with its fixes in order of their gain."""
    ordered = sorted(fixes, key=lambda fix: -fix.gain_fraction)
    return Finding(
        cause=cause,
        share=min(1.0, max(0.0, share)),
        detail=detail,
        rank=rank,
        evidence=tuple(evidence),
        fixes=tuple(ordered),
    )
