"""The order in which each rank of a pipeline runs its forwards and backwards, for every schedule of `schedules.py`.

Enters: a schedule's name, ranks, micro-batches. Leaves: a list of `Step`s a rank. They are the orders that
torch.distributed.pipelining runs, which tests compare one by one; `timeline.py` gives them times. Imports no torch.
Chapters 1 and 7.

Kinds: F forward, B backward; where a schedule splits backward, I is its part for activations and W that for weights.

Source: Huang et al. 2019 (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; Qi et al. 2023
    (arXiv:2401.10241), section 6; DeepSeek-AI 2024 (arXiv:2412.19437), section 3.2.1, in its form for a V.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import lru_cache
from typing import NamedTuple

from vlmcourse.planner.schedules import SCHEDULES, stages_of_rank


class Step(NamedTuple):
    """One thing that a rank of a pipeline computes."""

    kind: str
    """F, B, I or W."""
    microbatch: int
    stage: int


class _Order:
    """The steps of one rank so far; counts the micro-batches of each kind and stage."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._counts: Counter[tuple[str, int]] = Counter()
        self._postponed: deque[Step] = deque()

    def add(self, kind: str, stage: int) -> None:
        """Append the stage's next forward (F) or backward, whole (B) or its part for activations (I)."""
        which = "F" if kind == "F" else "B", stage
        step = Step(kind, self._counts[which], stage)
        self._counts[which] += 1
        self.steps.append(step)
        if kind == "I":
            self._postponed.append(step._replace(kind="W"))

    def add_split(self, stage: int) -> None:
        """Append the stage's next backward for activations, and its oldest part for weights that is not done."""
        self.add("I", stage)
        self.add_postponed(stage)

    def add_postponed(self, stage: int | None = None) -> bool:
        """Append the oldest part for weights that is still to be done, of a stage or of any; return whether one was."""
        for step in self._postponed:
            if stage in (None, step.stage):
                self._postponed.remove(step)
                self.steps.append(step)
                return True
        return False

    def num_forwards(self, stage: int) -> int:
        """Return how many forwards of a stage there are."""
        return self._counts["F", stage]


@lru_cache(maxsize=512)
def list_steps(schedule: str, pp: int, num_microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """Return what each rank of a pipeline computes, in its order.

    Args:
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline; 1 is a rank that runs its stages one after the other.
        num_microbatches: micro-batches of one optimizer step.

    Raises:
        ValueError: if the schedule is not known, a count is below 1, or the schedule has no order for this number of
            micro-batches (`schedules.find_schedule_problems` says which it has).
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}")
    if pp < 1 or num_microbatches < 1:
        raise ValueError(f"pp = {pp}, num_microbatches = {num_microbatches}: both must be 1 or more")
    make = {
        "gpipe": _gpipe,
        "1f1b": _one_f_one_b,
        "interleaved": _interleaved,
        "zbv": _zbv,
        "dualpipev": _dualpipev,
    }[schedule]
    return tuple(tuple(make(pp, num_microbatches, rank)) for rank in range(pp))


def _gpipe(pp: int, num_microbatches: int, rank: int) -> list[Step]:
    return [Step(kind, microbatch, rank) for kind in "FB" for microbatch in range(num_microbatches)]


def _one_f_one_b(pp: int, num_microbatches: int, rank: int) -> list[Step]:
    """As many forwards as there are stages from here on; then a backward and a forward in turn."""
    order = _Order()
    for _ in range(min(num_microbatches, pp - rank)):
        order.add("F", rank)
    for _ in range(num_microbatches):
        order.add("B", rank)
        if order.num_forwards(rank) < num_microbatches:
            order.add("F", rank)
    return order.steps


def _interleaved(pp: int, num_microbatches: int, rank: int) -> list[Step]:
    """Rounds of micro-batches through the rank's first stage, then its second; backward in the opposite order."""
    num_rounds = max(1, num_microbatches // pp)
    if num_microbatches % num_rounds:
        raise ValueError(
            f"interleaved has no order for {num_microbatches} micro-batches with pp={pp}, {num_rounds} rounds: give a "
            f"multiple of {num_rounds}, such as one of pp"
        )
    round_size, stages = num_microbatches // num_rounds, stages_of_rank("interleaved", pp, rank)
    total = len(stages) * num_microbatches
    warmups = min((len(stages) - 1) * round_size + 2 * (pp - 1 - rank), total)
    order = _Order()
    for place in range(total + warmups):
        if place < total:
            order.add("F", stages[place // round_size % len(stages)])
        if place >= warmups:
            order.add("B", stages[-1 - (place - warmups) // round_size % len(stages)])
    return order.steps


def _zbv(pp: int, num_microbatches: int, rank: int) -> list[Step]:
    """Two stages a rank in a V; parts for weights fill what would be waiting while the pipeline empties.

    The order is that of enough micro-batches to fill the V; where there are fewer, theirs are taken from it.
    """
    near, far = stages_of_rank("zbv", pp, rank)
    num_ordered = max(num_microbatches, 2 * pp - 1)
    order = _Order()
    for _ in range(2 * (pp - rank) - 1):
        order.add("F", near)
    for _ in range(rank):
        order.add("F", far)
        order.add("F", near)
    for _ in range(pp - rank):
        order.add("F", far)
        order.add_split(far)
    while order.num_forwards(far) < num_ordered:
        if order.num_forwards(near) < num_ordered:
            order.add("F", near)
        order.add_split(near)
        order.add("F", far)
        order.add_split(far)
    for _ in range(rank):
        order.add("I", near)
        order.add("I", far)
    for _ in range(pp - rank):
        order.add_split(near)  # its own part for weights, or that of an older micro-batch
    for stage in (far, near):
        while order.add_postponed(stage):
            pass
    return [step for step in order.steps if step.microbatch < num_microbatches]


def _dualpipev(pp: int, num_microbatches: int, rank: int) -> list[Step]:
    """Two stages a rank in a V, a forward of one beside a backward of the other; here one after the other."""
    if num_microbatches < 2 * pp:
        raise ValueError(
            f"dualpipev has no order for {num_microbatches} micro-batches with pp={pp}: give at least {2 * pp}"
        )
    near, far = stages_of_rank("dualpipev", pp, rank)
    order = _Order()
    for _ in range(2 * (pp - rank - 1)):
        order.add("F", near)
    for _ in range(rank + 1):
        order.add("F", near)
        order.add("F", far)
    for _ in range(pp - rank - 1):
        order.add("I", far)
        order.add_postponed()
        order.add("F", far)
    for _ in range(num_microbatches - 2 * pp + rank + 1):
        for forward, backward in ((near, far), (far, near)):
            order.add("F", forward)
            order.add("B", backward)
    for _ in range(pp - rank - 1):
        order.add("B", far)
        order.add("F", far)
        order.add("B", near)
    # The second half of what is left to go back is split: parts for weights wait until nothing else is to be done.
    for place in range(2 * (rank + 1)):
        order.add("I" if place > rank else "B", near if place % 2 else far)
    for _ in range(pp - rank - 1):
        order.add_postponed()
        order.add("I", near)
    while order.add_postponed():
        pass
    return order.steps
