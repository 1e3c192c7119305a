"""The exact timeline of a pipeline's step: when each rank runs what, with unequal stages and links that take time.

Enters: orders of `pipeline_order.py`, or any others; seconds of each stage's forward and backward; seconds of a message
over each link. Leaves: a `Timeline`: start and end of every action, the step, what each rank waits. Events are played
one by one, nothing is averaged. Imports no torch. Chapter 7.

A forward needs the forward of the stage before, a backward (whole, B, or its part for activations, I) the backward of
the stage behind or, on the last stage, its own forward. Between two ranks it needs the message as well. A message takes
no time of its ranks, and messages of one rank to another follow each other.

Source: the rules are those of torch.distributed.pipelining; with equal stages and free messages they give the bubbles
    of `schedules.ideal_bubble_fraction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from vlmcourse.planner.pipeline_order import Step, list_steps
from vlmcourse.spans import BACKWARD, COMPUTE, FORWARD, Span

Order = Sequence[Sequence[Step]]


class StageTimes(NamedTuple):
    """Seconds of one micro-batch on one stage."""

    forward_s: float
    backward_input_s: float
    """Of the backward's part for activations, recomputation included."""
    backward_weight_s: float = 0.0
    """Of its part for weights."""

    def of_kind(self, kind: str) -> float:
        """Return the seconds of a kind of step: F, B, I or W."""
        return {
            "F": self.forward_s,
            "B": self.backward_input_s + self.backward_weight_s,
            "I": self.backward_input_s,
            "W": self.backward_weight_s,
        }[kind]


class TimedStep(NamedTuple):
    """One thing that a rank of a pipeline computes, and when."""

    rank: int
    """In the pipeline, 0 .. pp - 1."""
    kind: str
    microbatch: int
    stage: int
    start_s: float
    """Seconds since the step began."""
    end_s: float


@dataclass(frozen=True)
class PlayOrder:
    """An order in which each step comes after what it needs, with what it needs: made once, played many times."""

    ranks: tuple[tuple[Step, ...], ...]
    num_stages: int
    plays: tuple[tuple[int, int, int, int], ...]
    """Of each step: rank, place of its seconds (4 x stage + kind), place of the message that it needs, or -1, and of
    the message that it sends, or -1."""
    messages: tuple[tuple[int, int, bool], ...]
    """Of each message: number of its link, boundary between stages, whether it goes back."""
    num_links: int
    steps: tuple[tuple[int, Step], ...]
    """Rank and step, in the order of `plays`."""


KINDS = "FBIW"


def needed_by(kind: str, microbatch: int, stage: int, last_stage: int) -> tuple[str, int, int] | None:
    """Return kind (F or B), micro-batch and stage of what a step waits for, or None."""
    if kind == "F":
        return ("F", microbatch, stage - 1) if stage else None
    if kind == "W":
        return "B", microbatch, stage
    if stage == last_stage:
        return "F", microbatch, stage
    return "B", microbatch, stage + 1


def sort_steps(ranks: Order) -> list[tuple[int, Step]]:
    """Return rank and step of all steps, each after what it needs and after those before it on its rank.

    Raises:
        ValueError: if a step waits for one that never comes.
    """
    last_stage = max(step.stage for of_rank in ranks for step in of_rank)
    done: set[tuple[str, int, int]] = set()
    places = [0] * len(ranks)
    found: list[tuple[int, Step]] = []
    num_steps = sum(map(len, ranks))
    while len(found) < num_steps:
        before = len(found)
        for rank, of_rank in enumerate(ranks):
            while places[rank] < len(of_rank):
                step = of_rank[places[rank]]
                needed = needed_by(*step, last_stage)
                if needed is not None and needed not in done:
                    break
                done.add(("B" if step.kind == "I" else step.kind, step.microbatch, step.stage))
                found.append((rank, step))
                places[rank] += 1
        if len(found) == before:
            waiting = [(r, of_rank[places[r]]) for r, of_rank in enumerate(ranks) if places[r] < len(of_rank)]
            raise ValueError(
                f"{len(waiting)} ranks wait for actions that are not in this step, the first in {waiting[0][1]} on "
                f"rank {waiting[0][0]}"
            )
    return found


def prepare_order(ranks: Order) -> PlayOrder:
    """Bring the steps of all ranks into an order to play them in.

    Args:
        ranks: what each rank computes, in its order; a stage stands on one rank.

    Raises:
        ValueError: if a step waits for one that never comes.
    """
    steps = sort_steps(ranks)
    num_stages = 1 + max(step.stage for _, step in steps)
    owner = {step.stage: rank for rank, step in steps}
    links: dict[tuple[int, int], int] = {}
    messages: list[tuple[int, int, bool]] = []
    sent: dict[tuple[str, int, int], int] = {}
    plays: list[tuple[int, int, int, int]] = []
    for rank, step in steps:
        needed = needed_by(*step, num_stages - 1) if step.kind != "W" else None
        sends, to_stage = -1, step.stage + (1 if step.kind == "F" else -1)
        if step.kind != "W" and owner.get(to_stage, rank) != rank:
            sends = len(messages)
            link = links.setdefault((rank, owner[to_stage]), len(links))
            messages.append((link, min(step.stage, to_stage), step.kind != "F"))
            sent["F" if step.kind == "F" else "B", step.microbatch, step.stage] = sends
        # What is needed from the same rank was done before anyway.
        needs = sent.get(needed, -1) if needed is not None and owner[needed[2]] != rank else -1
        plays.append((rank, 4 * step.stage + KINDS.index(step.kind), needs, sends))
    of_ranks = tuple(map(tuple, ranks))
    return PlayOrder(of_ranks, num_stages, tuple(plays), tuple(messages), len(links), tuple(steps))


@lru_cache(maxsize=512)
def find_order(schedule: str, pp: int, num_microbatches: int) -> PlayOrder:
    """Return the prepared order of a schedule; arguments and errors as of `pipeline_order.list_steps`."""
    return prepare_order(list_steps(schedule, pp, num_microbatches))


@dataclass(frozen=True)
class Timeline:
    """When each rank of a pipeline computes what, in one step."""

    order: PlayOrder
    start_s: tuple[float, ...]
    """Of each of the order's steps."""
    end_s: tuple[float, ...]
    messages: tuple[tuple[float, float], ...] = field(default=())
    """Start and end of each message."""

    @cached_property
    def step_s(self) -> float:
        """Seconds from the first action of any rank to the end of the last."""
        return max(self.end_s) - min(self.start_s)

    @cached_property
    def ranks(self) -> tuple[tuple[TimedStep, ...], ...]:
        """What each rank does, in its order."""
        found: list[list[TimedStep]] = [[] for _ in self.order.ranks]
        for (rank, step), start, end in zip(self.order.steps, self.start_s, self.end_s, strict=True):
            found[rank].append(TimedStep(rank, *step, start, end))
        return tuple(map(tuple, found))

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        found = [0.0] * len(self.order.ranks)
        for (rank, _), start, end in zip(self.order.steps, self.start_s, self.end_s, strict=True):
            found[rank] += end - start
        return tuple(found)

    @cached_property
    def finish_s(self) -> tuple[float, ...]:
        """When each rank has done its last action, in seconds since the step began."""
        found = [0.0] * len(self.order.ranks)
        for (rank, _), end in zip(self.order.steps, self.end_s, strict=True):
            found[rank] = max(found[rank], end)
        return tuple(found)

    def idle_s(self, rank: int) -> float:
        """Return the seconds of the step in which a rank does not compute, before its first and after its last too."""
        return self.step_s - self.busy_s[rank]

    def bubble_fraction(self, rank: int | None = None) -> float:
        """Return the share of the time from a rank's first action to its last in which it waits.

        Args:
            rank: of the pipeline; None takes the one with the longest way from first to last, as
                `ideal_bubble_fraction` does.
        """
        ways_s = [actions[-1].end_s - actions[0].start_s for actions in self.ranks]
        rank = max(range(len(ways_s)), key=ways_s.__getitem__) if rank is None else rank
        return 1 - self.busy_s[rank] / ways_s[rank] if ways_s[rank] else 0.0

    def spans(self) -> list[Span]:
        """Return the timeline to draw it: forwards and backwards of each rank of the pipeline."""
        return [
            Span(step.rank, COMPUTE, FORWARD if step.kind == "F" else BACKWARD, step.start_s, step.end_s)
            for of_rank in self.ranks
            for step in of_rank
        ]


def play_order(
    order: PlayOrder,
    costs_s: Sequence[float],
    forward_messages_s: Sequence[float] | float = 0.0,
    backward_messages_s: Sequence[float] | float | None = None,
) -> Timeline:
    """Play a prepared order; see `simulate_timeline`, which gives `costs_s` a friendlier form.

    Args:
        order: of `prepare_order`.
        costs_s: seconds of a step at 4 x stage + place of its kind in "FBIW".
        forward_messages_s: of the message over each boundary between a stage and the next, or of every one.
        backward_messages_s: of its gradient; None takes as long.
    """
    forward = _of_boundaries(forward_messages_s, order.num_stages)
    backward = forward if backward_messages_s is None else _of_boundaries(backward_messages_s, order.num_stages)
    takes_s = [(backward if goes_back else forward)[boundary] for _, boundary, goes_back in order.messages]
    clock = [0.0] * len(order.ranks)
    arrived, left, free = [0.0] * len(takes_s), [0.0] * len(takes_s), [0.0] * order.num_links
    starts, ends = [0.0] * len(order.plays), [0.0] * len(order.plays)
    messages = order.messages
    for i, (rank, cost, needs, sends) in enumerate(order.plays):
        now = clock[rank]
        if needs >= 0 and arrived[needs] > now:
            now = arrived[needs]
        starts[i] = now
        now += costs_s[cost]
        ends[i] = clock[rank] = now
        if sends >= 0:
            link = messages[sends][0]
            if free[link] > now:
                now = free[link]
            left[sends] = now
            free[link] = arrived[sends] = now + takes_s[sends]
    return Timeline(order, tuple(starts), tuple(ends), tuple(zip(left, arrived, strict=True)))


def simulate_timeline(
    schedule: str,
    pp: int,
    num_microbatches: int,
    stages: Sequence[StageTimes],
    forward_messages_s: Sequence[float] | float = 0.0,
    backward_messages_s: Sequence[float] | float | None = None,
) -> Timeline:
    """Play one step of a pipeline.

    Args:
        schedule: one of `schedules.SCHEDULES`.
        pp: ranks of the pipeline.
        num_microbatches: of the step, any number that the schedule has an order for.
        stages: seconds of each stage, first to last; interleaved, zbv and dualpipev have two a rank.
        forward_messages_s: seconds of the message over each boundary between a stage and the next, or of every one.
            Boundaries inside a rank take none.
        backward_messages_s: of its gradient; None takes as long.

    Returns:
        The timeline.

    Raises:
        ValueError: if numbers of stages or boundaries do not fit, or the schedule has no order for them.
    """
    order = find_order(schedule, pp, num_microbatches)
    if len(stages) != order.num_stages:
        raise ValueError(
            f"{len(stages)} stages: {schedule} on pp={pp} ranks has {order.num_stages}; give times of each"
        )
    costs_s = [stage.of_kind(kind) for stage in stages for kind in KINDS]
    return play_order(order, costs_s, forward_messages_s, backward_messages_s)


def _of_boundaries(seconds: Sequence[float] | float, num_stages: int) -> Sequence[float]:
    if isinstance(seconds, (int, float)):
        return [float(seconds)] * (num_stages - 1)
    if len(seconds) != num_stages - 1:
        raise ValueError(
            f"{len(seconds)} messages: {num_stages} stages have {num_stages - 1} boundaries; give one each"
        )
    return seconds
