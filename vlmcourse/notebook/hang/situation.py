"""Who waits for whom: the states of all ranks as operations (collectives) with members that are in them or missing.

Pure functions, without words: `diagnosis.py` puts into words what is found here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vlmcourse.notebook.hang.rank_state import Collective, Condition, Group, RankState, Wait

SAME_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "broadcast", "reduce")
"""Collectives whose inputs have the same number of elements on every rank; in others each may bring its own."""
SAVING = ("save", "checkpoint", "state_dict")
STILL_S = 0.05
"""A process that computed for less than this between two looks has stood still: no thread of it was transferring."""


@dataclass
class Operation:
    """One collective of one group that ranks wait in."""

    group: Group
    number: int
    waiting: list[int] = field(default_factory=list)
    """The ranks that are in it."""
    missing: list[int] = field(default_factory=list)
    """The members that have not entered it."""
    entries: dict[int, Collective] = field(default_factory=dict)
    """What each rank called it with: those that are in it, and those that have left it already."""


class Situation:
    """The states of all ranks, and the operations that they wait in."""

    def __init__(
        self,
        states: Mapping[int, RankState],
        died: Mapping[int, str] | None = None,
        silent: Mapping[int, str] | None = None,
        *,
        is_over: bool = True,
    ) -> None:
        """Find the operations.

        Args:
            states: of the ranks that said something.
            died: ranks whose process ended by itself, each with how (`was killed by SIGKILL`).
            silent: why ranks said nothing, where that is known (`it is still starting`).
            is_over: whether no rank goes on after this; else what is missing may yet come.
        """
        self.is_over = is_over
        self.states = dict(sorted(states.items()))
        self.died, self.silent = dict(died or {}), dict(silent or {})
        self.waits: dict[int, Wait] = {
            rank: state.wait for rank, state in self.states.items() if state.wait is not None and not state.uses_cpu
        }
        """What PyTorch waits for on behalf of each rank that waits; one that computes meanwhile does not."""
        self.operations = self._find_operations()
        """In the order of their numbers."""

    def _find_operations(self) -> list[Operation]:
        found: dict[tuple[str, int], Operation] = {}
        for rank, wait in self.waits.items():
            entry = wait.collective
            if entry is not None:
                new = Operation(self._find_group(entry.group), entry.number)
                operation = found.setdefault((entry.group, entry.number), new)
                operation.waiting.append(rank)
                operation.entries[rank] = entry
        for operation in found.values():
            self._add_others(operation)
        return sorted(found.values(), key=lambda each: (each.number, each.group.name))

    def _add_others(self, operation: Operation) -> None:
        name, number = operation.group.name, operation.number
        for rank in operation.group.ranks:
            if rank in operation.waiting:
                continue
            state = self.states.get(rank)
            if state is None or not state.may_have_entered(name, number):
                operation.missing.append(rank)
                continue
            for entry in state.recent:
                if (entry.group, entry.number) == (name, number):
                    operation.entries[rank] = entry

    def _find_group(self, name: str) -> Group:
        known = [group for state in self.states.values() for group in state.groups if group.name == name]
        if known:
            return Group(name, known[0].label, known[0].ranks, min(group.num_before for group in known))
        waiting = [rank for rank, wait in self.waits.items() if wait.collective and wait.collective.group == name]
        return Group(name, name, tuple(waiting))

    def operation_of(self, rank: int) -> Operation | None:
        """Return the operation that a rank waits in."""
        return next((operation for operation in self.operations if rank in operation.waiting), None)

    def difference(self, operation: Operation) -> str:
        """Return in what the calls of one operation differ: `op`, `dtype`, `root` or `shape`; empty if in nothing."""
        entries = list(operation.entries.values())
        given = [entry for entry in entries if entry.sizes]  # of a scatter only the root's are recorded
        if len({entry.op for entry in entries}) > 1:
            return "op"
        if len({entry.dtypes for entry in given}) > 1:
            return "dtype"
        if len({self.waits[rank].root for rank in operation.waiting} - {None}) > 1:
            return "root"
        sizes = {tuple(map(math.prod, entry.sizes)) for entry in given}  # the shapes themselves need not be the same
        return "shape" if len(sizes) > 1 and entries[0].op.strip("_").startswith(SAME_SIZES) else ""

    def root_operation(self) -> Operation | None:
        """Return the operation at the end of the chain of waiting; None if no member of any is missing.

        Its missing ranks do something else than wait in another operation. Where ranks wait in a circle, it is one that
        stands under an `if` that the missing ranks are not under, or else the first.
        """
        incomplete = [operation for operation in self.operations if operation.missing]

        def order(operation: Operation) -> tuple[bool, bool]:
            ours = self.conditions(operation.waiting[0]).keys()
            is_conditional = any(ours - self.conditions(rank).keys() for rank in operation.missing)
            return all(self.operation_of(rank) is not None for rank in operation.missing), not is_conditional

        return min(incomplete, key=order, default=None)

    def conditions(self, rank: int) -> dict[tuple[str, int], Condition]:
        """Return the `if`s that a rank's code stands under, in all functions that are running, by file and line."""
        stack = self.states[rank].stack if rank in self.states else ()
        return {(place.file, each.line): each for place in stack for each in place.conditions}

    def are_opposite(self, first: int, second: int) -> bool:
        """Whether two ranks are in the two branches of one `if`."""
        ours, theirs = self.conditions(first), self.conditions(second)
        return any(ours[where].is_true != theirs[where].is_true for where in ours.keys() & theirs.keys())

    def is_in_backward(self, operation: Operation) -> bool:
        """Whether ranks wait in an operation that they have not called: `backward()` began it."""
        waits = [(self.waits.get(rank), self.states[rank]) for rank in operation.waiting if rank in self.states]
        return any(
            wait is not None and not wait.call and any(".backward(" in place.text for place in state.stack[:1])
            for wait, state in waits
        )

    def is_saving(self, ranks: Sequence[int]) -> bool:
        """Whether ranks are in something that saves, or gathers what is to be saved."""
        stacks = [self.states[rank].stack for rank in ranks if rank in self.states]
        return bool(stacks) and all(
            any(word in f"{place.function} {place.text}".lower() for place in stack for word in SAVING)
            for stack in stacks
        )


def is_deadlock(before: Mapping[int, RankState], now: Mapping[int, RankState], world_size: int) -> bool:
    """Whether it is certain that no rank will ever go on.

    So it is when every unfinished rank waits in a collective (or for a message), none has moved between the two looks,
    no collective has all its members in it with the same call, and no message meets its partner's. Nothing is certain
    where a rank may act otherwise than by its main thread going on: in another thread, or in an `except`; or if only
    the text of a line says that it waits.

    Args:
        before: what the ranks were doing some seconds ago.
        now: what they are doing.
        world_size: how many ranks there are.
    """
    running = [rank for rank in range(world_size) if rank not in now or now[rank].status == "running"]
    if any(rank not in now or rank not in before or not _stood_still(before[rank], now[rank]) for rank in running):
        return False
    if any(may_act(state) for state in now.values()):
        return False
    here = Situation(now)
    if not here.operations and any(state.has_pending for state in now.values()):
        return False  # messages alone can be told from those under way only if there are no others
    if any(not operation.missing and not here.difference(operation) for operation in here.operations):
        return False
    if not running or not here.operations and any(state.status != "running" for state in now.values()):
        return False  # what has ended may have left a message under way
    return all(here.operation_of(rank) is not None or _waits_in_vain(here, rank) for rank in running)


def may_act(state: RankState) -> bool:
    """Whether a rank that waits may yet do something about it."""
    is_guess = state.wait is not None and not state.wait.is_certain
    return state.has_threads or state.may_catch or is_guess


def _stood_still(before: RankState, now: RankState) -> bool:
    return before.position == now.position and now.process_cpu_s - before.process_cpu_s < STILL_S


def _waits_in_vain(here: Situation, rank: int) -> bool:
    """Whether a rank waits for a message to or from one that waits for something else."""
    wait = here.waits.get(rank)
    if wait is None or wait.kind not in ("send", "recv") or wait.peer is None:
        return False
    partner = here.waits.get(wait.peer)
    if partner is None:
        return False
    opposite = "recv" if wait.kind == "send" else "send"
    return partner.kind in ("collective", wait.kind) or (partner.kind == opposite and partner.peer not in (None, rank))
