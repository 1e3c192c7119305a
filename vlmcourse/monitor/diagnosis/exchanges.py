"""Where ranks meet: how much earlier than the last of them each came to an exchange.

Enters: `RunFacts`. Leaves: what all ranks wait together, and `Meetings`, by which `hiding` tells what curing one rank
gains while the others go on as they do. What a rank waits beyond the rank that waits least is its time to spare: it
was there before the last one. Where waits are not known one by one, a step counts as one exchange; where they are not
told at all, only what ranks do between steps and for their samples is compared. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vlmcourse.monitor.diagnosis.facts import RunFacts
from vlmcourse.monitor.step_log import StepRecord
from vlmcourse.planner.efficiency_loss import shared_wait_s


def shared_waits(steps: Iterable[Mapping[int, StepRecord]]) -> tuple[float, bool]:
    """Return the seconds that even the rank that waits least waits, and whether that is so exchange by exchange.

    Where a step's waits are not known one by one, its sums are compared, which is an upper bound.
    """
    seconds, knows_each = 0.0, True
    for ranks in steps:
        found = shared_wait_s([record.waits_s for record in ranks.values()])
        knows_each = knows_each and found is not None
        seconds += min(r.communication_s or 0.0 for r in ranks.values()) if found is None else found
    return seconds, knows_each


@dataclass(frozen=True)
class Meetings:
    """All exchanges of the steps that are looked at, and of the events between them."""

    spare_s: list[dict[int, float]]
    """Of each exchange: how much earlier than the last rank each came."""
    after: dict[int, tuple[int, ...]]
    """By step: the exchanges that end what ranks do between it and the next: those of events, and the next's first."""
    knows_each: bool
    """Whether waits are known one by one in all steps."""

    def lead_s(self, exchange: int, rank: int) -> float:
        """Return by how much a rank came later to an exchange than all others; 0 if it was not the last."""
        spare_s = self.spare_s[exchange]
        return max(0.0, min(seconds for other, seconds in spare_s.items() if other != rank) - spare_s[rank])


def find_meetings(facts: RunFacts) -> Meetings:
    """Return the exchanges of a run on two or more ranks."""
    spare_s: list[dict[int, float]] = []
    after: dict[int, tuple[int, ...]] = {}
    for step, ranks in facts.steps.items():
        spare_s += _spare_by_exchange(ranks)[1:] if facts.tells_communication else []
        began = len(spare_s)
        spare_s += [_spare(waits_s) for waits_s in _event_waits(facts, step) if len(waits_s) == len(ranks)]
        following = facts.following[step]
        if facts.tells_communication:
            spare_s.append(_spare_by_exchange(following)[0])
        else:
            own_s = {rank: facts.gap_s(rank, step) + facts.event_s(rank, step) for rank in ranks}
            spare_s.append(_spare({rank: -own_s[rank] - (r.data_wait_s or 0.0) for rank, r in following.items()}))
        after[step] = tuple(range(began, len(spare_s)))
    return Meetings(spare_s, after, facts.tells_communication and shared_waits(facts.steps.values())[1])


def _spare_by_exchange(ranks: Mapping[int, StepRecord]) -> list[dict[int, float]]:
    """Return the time to spare at each exchange of a step, or at the step's end as the only one."""
    waits_s = {rank: record.waits_s or [] for rank, record in ranks.items()}
    if shared_wait_s(list(waits_s.values())) is None:
        return [_spare({rank: record.communication_s or 0.0 for rank, record in ranks.items()})]
    number = len(next(iter(waits_s.values())))
    return [_spare({rank: of_rank[i] for rank, of_rank in waits_s.items()}) for i in range(number)]


def _spare(waits_s: Mapping[int, float]) -> dict[int, float]:
    least_s = min(waits_s.values())
    return {rank: seconds - least_s for rank, seconds in waits_s.items()}


def _event_waits(facts: RunFacts, step: int) -> list[dict[int, float]]:
    """Return what ranks waited in the events after a step, by kind and rank, where that is known."""
    waits_s: dict[str, dict[int, float]] = {}
    for rank in facts.ranks:
        for event in facts.events_after(rank, step):
            if event.communication_s is not None:
                waits_s.setdefault(event.event, {})[rank] = event.communication_s
    return list(waits_s.values())
