"""Which blocks of a tower are recomputed in the backward pass: a policy's name and a depth become segments.

Enters: the section [activations] of a configuration. Leaves: an `ActivationsConfig`, and for a tower of so many blocks
a list of `Segment`. No torch: `train.activations` carries a policy out, the planner counts its bytes. Chapter 4.

A segment keeps its input and nothing of its blocks; backward runs its blocks again when it needs what they made.

- none: every block keeps all that backward needs.
- full: each block is a segment.
- every:k: each k-th block is a segment; the blocks between keep everything.
- sqrt: all blocks, in segments of about sqrt(L) blocks.
- selective: each block is a segment that keeps the results of its matrix products and of attention too.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost" (arXiv:1604.06174), section 4, for sqrt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vlmcourse.layout import ParallelConfig
from vlmcourse.values import suggest_choice

POLICIES = ("none", "full", "every:k", "sqrt", "selective")
RECOMPUTING_TOWERS = ("vision", "language")
"""Towers that consist of blocks. The projector is less than one block."""
SPLIT_BACKWARD = ("zbv", "dualpipev")
"""Schedules that run backward in two parts."""


@dataclass(frozen=True)
class Segment:
    """Neighboring blocks whose input is kept and which run again in backward."""

    first: int
    """Place of its first block among those given, from 0."""
    num_blocks: int
    selective: bool = False
    """Whether results of matrix products and attention are kept too."""

    @property
    def blocks(self) -> range:
        """Places of its blocks."""
        return range(self.first, self.first + self.num_blocks)


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig:
    """What is kept of a forward pass until its backward pass, tower by tower."""

    vision: str = "none"
    """none, full, every:k (such as every:2), sqrt or selective."""
    language: str = "none"
    """As `vision`."""
    offload: bool = False
    """Move what the blocks keep to the host's memory until backward needs it; on a CPU that is a copy and saves
    nothing."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing differs from what PyTorch does by itself."""
        return self.vision == self.language == "none" and not self.offload

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        found = []
        for tower in RECOMPUTING_TOWERS:
            problem = find_policy_problem(getattr(self, tower))
            if problem:
                found.append(f"activations.{tower} = {getattr(self, tower)!r}: {problem}")
            elif self.offload and getattr(self, tower) == "selective":
                found.append(
                    f"activations.offload = true with activations.{tower} = 'selective': the results that it keeps lie "
                    "in a store of their own, which offloading does not see; choose 'full', or leave offload out"
                )
        return found

    def uncovered(self, num_blocks: Mapping[str, int]) -> list[str]:
        """Return which of these policies would cover no block at all, one sentence each.

        Args:
            num_blocks: of each whole tower, by name; a stage of a pipeline may well have none that is covered.
        """
        return [
            f"activations.{tower} = {getattr(self, tower)!r}: the tower has {num} blocks; choose a k of at most that"
            for tower, num in num_blocks.items()
            if getattr(self, tower) != "none" and not plan_segments(getattr(self, tower), num)
        ]

    def contradictions(self, parallel: ParallelConfig, frozen: tuple[str, ...]) -> list[str]:
        """Return which of these values do not go with how ranks share the work or with what is trained.

        Args:
            parallel: strategy, degrees and schedule.
            frozen: towers that are not trained.
        """
        towers = [tower for tower in RECOMPUTING_TOWERS if getattr(self, tower) != "none"]
        found = []
        if "vision" in towers and "vision" in frozen:
            found.append(
                f"activations.vision = {self.vision!r} with model.freeze = {list(frozen)}: nothing before or in a "
                "frozen vision tower is trained, so it keeps no activations and there is nothing to recompute; leave "
                "it out"
            )
        selective = [tower for tower in towers if getattr(self, tower) == "selective"]
        if selective and parallel.pp > 1 and parallel.pp_schedule in SPLIT_BACKWARD:
            found.append(
                f"activations.{selective[0]} = 'selective' with parallel.pp_schedule = {parallel.pp_schedule!r}: it "
                "runs backward in two parts, and what a selective segment keeps is handed out once; choose 'full', or "
                "'1f1b', 'gpipe' or 'interleaved'"
            )
        if parallel.adaptive and "sqrt" in (self.vision, self.language):
            found.append(
                "activations: 'sqrt' with parallel.adaptive = true: the scheduler measures and moves single blocks, "
                "and a segment of several runs as one; choose 'full', or leave adaptive out"
            )
        if self.offload and parallel.tp > 1:
            found.append(
                f"activations.offload = true with parallel.tp = {parallel.tp}: what the ranks of a tp group keep are "
                "DTensors, which this offloading does not move; leave offload out"
            )
        return found


def find_policy_problem(policy: object) -> str:
    """Return what is wrong with a policy's name, or "" if nothing is."""
    if not isinstance(policy, str):
        return f"must be text, one of {', '.join(POLICIES)}"
    if policy in POLICIES and policy != "every:k":
        return ""
    name, colon, number = policy.partition(":")
    if name == "every":
        if colon and number.isascii() and number.isdecimal() and int(number) >= 1:
            return ""
        return "write every:k with a whole number k of 1 or more, such as every:2"
    return suggest_choice(policy, POLICIES)


def plan_segments(policy: str, num_blocks: int, first_number: int = 0) -> list[Segment]:
    """Return the segments of a tower, in order; blocks in none of them keep all that they make.

    Args:
        policy: none, full, every:k, sqrt or selective.
        num_blocks: of the tower, or of its part on one stage of a pipeline. A segment lies on one stage.
        first_number: number of the first of these blocks in the whole tower, from which every:k counts.

    Raises:
        ValueError: if there is no such policy.
    """
    problem = find_policy_problem(policy)
    if problem:
        raise ValueError(f"activation policy {policy!r}: {problem}")
    if policy == "none":
        return []
    if policy.startswith("every"):
        k = int(policy.partition(":")[2])
        return [Segment(i, 1) for i in range(num_blocks) if (first_number + i + 1) % k == 0]
    if policy == "sqrt":
        return split_segments(num_blocks, max(1, round(math.sqrt(num_blocks))))
    return [Segment(first, 1, selective=policy == "selective") for first in range(num_blocks)]


def split_segments(num_blocks: int, segment_length: int) -> list[Segment]:
    """Cut blocks into segments of at most `segment_length`, as equal as they can be.

    Raises:
        ValueError: if the length is below 1.
    """
    if segment_length < 1:
        raise ValueError(f"segment_length = {segment_length}: must be 1 or greater")
    num_segments = -(-num_blocks // segment_length)
    starts = [num_blocks * i // num_segments for i in range(num_segments)] + [num_blocks]
    return [Segment(first, end - first) for first, end in zip(starts, starts[1:], strict=False)]
