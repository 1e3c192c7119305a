"""Finds out why the ranks of a cell hang, before they are stopped; and while they run, whether they ever can go on.

Enters: the folder in which the ranks listen (see `listener.py`). Leaves: a `Diagnosis`. Nothing here waits for more
than a second and a half, and a rank that does not answer costs no more than that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from vlmcourse.notebook.failure import LEFT, RankEnd, RankReport, describe_exit
from vlmcourse.notebook.hang.diagnosis import Diagnosis, describe_slow, diagnose
from vlmcourse.notebook.hang.listener import STACK_SIGNAL
from vlmcourse.notebook.hang.observer import SAMPLE_S
from vlmcourse.notebook.hang.places import add_conditions, find_places
from vlmcourse.notebook.hang.rank_state import Place, RankState, read_states
from vlmcourse.notebook.hang.situation import is_deadlock
from vlmcourse.notebook.jobs import JobFolder
from vlmcourse.notebook.rank_group import RankGroup

ANSWER_S = 1.0
HURRIED_ANSWER_S = 0.25
"""How long an interrupted cell waits for answers before it is known that somebody waits for somebody."""
STACK_S = 0.5
POLL_S = 0.01
QUIET_S = 5.0
"""Ranks that print are not looked at."""
BETWEEN_LOOKS_S = 2.0
MAX_BETWEEN_LOOKS_S = 20.0
SLOW_S = 20.0
"""When a person is told which rank the others wait for."""
UNHELPFUL = ("computing", "died", "in_progress")
"""Kinds of diagnosis that do not explain why a rank failed."""
WAITING = ("slow", "waiting", "finished_early")
"""Kinds that do not explain why a rank was aborted."""
STARTING = "it is still starting"
STACK_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class AskedRanks(Protocol):
    """The ranks that can be asked."""

    @property
    def unfinished(self) -> Sequence[int]:
        """Those that are running."""
        ...

    @property
    def ends(self) -> Sequence[RankEnd]:
        """How the others ended."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...


class HangDoctor:
    """Asks the ranks of one cell what they do."""

    def __init__(self, folder: JobFolder, say: Callable[[str], None]) -> None:
        """Begin with nothing known.

        Args:
            folder: of the cell.
            say: shows a line to the person while the cell runs.
        """
        self._folder = folder
        self._say = say
        self._num_asked = 0
        self._unseen: dict[int, str] = {}
        """Ranks that could not look at themselves when they were asked last, each with the reason."""
        self._looks = self._look_again_and_again()
        self._group: RankGroup | None = None
        self.diagnosis: Diagnosis | None = None
        """What was found; None if nothing was looked for."""
        self.is_deadlock = False
        """Whether it is certain that the ranks would have waited for ever."""

    @property
    def text(self) -> str:
        """The diagnosis as lines for a message; empty where there is none."""
        return self.diagnosis.text if self.diagnosis is not None else ""

    def look(self, group: RankGroup) -> bool:
        """Have a short look, which never waits, now and then; return whether it is certain that the ranks hang."""
        self._group = group
        next(self._looks)
        return self.is_deadlock

    def move_to(self, folder: JobFolder) -> None:
        """Ask in another folder from now on: that of a new attempt."""
        self._folder = folder

    def examine(self, group: AskedRanks, is_hurried: bool = False) -> None:
        """Ask all ranks and make a diagnosis.

        Args:
            group: the ranks.
            is_hurried: whether a person waits: ranks that only compute are then not asked twice.
        """
        ended = self._read_ends(group)  # ranks of a session, whose processes stay
        running = [rank for rank in group.unfinished if rank not in ended]
        number = self._ask(running, SAMPLE_S)
        answers = self._wait_for(number, running, HURRIED_ANSWER_S if is_hurried else ANSWER_S)
        if is_hurried and len(answers) < len(running) and any(state.wait for state in answers.values()):
            answers = self._wait_for(number, running, ANSWER_S - HURRIED_ANSWER_S)
        heard = {*answers, *self._unseen}
        silent = [rank for rank in running if rank not in heard and self._listens(rank)]
        if silent and (not is_hurried or any(state.wait for state in answers.values())):
            answers.update(self._read_stacks(silent))
        states = {**self._read_ends(group), **answers}  # being asked can itself make a rank go on, and fail
        reasons = {rank: self._unseen.get(rank) or ("" if self._listens(rank) else STARTING) for rank in running}
        silent = {rank: reason for rank, reason in reasons.items() if rank not in states}
        self.diagnosis = diagnose(self._complete(states), describe_deaths(group.ends, states), silent)

    def examine_failure(self, group: RankGroup) -> None:
        """Ask the other ranks, if one failed because it waited in vain, or was aborted within a collective."""
        reports, last_words = self._folder.read_reports(), self._read_ends(group)
        failed = [end for end in group.ends if end.exit_code]
        aborted = [end for end in failed if end.exit_code == -signal.SIGABRT and end.rank in last_words]
        if not all(end in aborted or waited_in_vain(reports.get(end.rank)) for end in failed):
            return
        self.examine(group)
        found = self.diagnosis
        if found is not None and (found.kind in UNHELPFUL or (aborted and found.kind in WAITING)):
            self.diagnosis = None  # the failure itself says more

    def _look_again_and_again(self) -> Iterator[None]:
        """The looks as one story: whoever calls `look` lets it go on a little."""
        group_of_look: RankGroup
        before: dict[int, RankState] = {}
        between_s, next_s, has_said = BETWEEN_LOOKS_S, time.monotonic() + QUIET_S, False
        silent_since_s = math.inf  # until then, once a person has been told of it
        while True:
            while self._group is None or time.monotonic() < max(next_s, self._group.last_output_s + QUIET_S):
                if self._group is not None and self._group.last_output_s > silent_since_s:
                    self._say(f"the ranks went on after {self._group.last_output_s - silent_since_s:.0f} s")
                    silent_since_s = math.inf
                yield
            group_of_look = self._group
            number, end_s = self._ask(group_of_look.unfinished, 0.0), time.monotonic() + ANSWER_S
            while len(self._read(number, group_of_look.unfinished)) < len(group_of_look.unfinished):
                if time.monotonic() > end_s:
                    break
                yield
            answers = self._read(number, group_of_look.unfinished)
            now = {**answers, **self._read_ends(group_of_look)}
            if is_deadlock(before, now, group_of_look.size):
                self.diagnosis, self.is_deadlock = diagnose(self._complete(now)), True
            waited_s = time.monotonic() - group_of_look.last_output_s
            if not has_said and waited_s > SLOW_S and (line := describe_slow(self._complete(now))):
                self._say(f"no output for {waited_s:.0f} s; the ranks may only be slow. If this goes on: {line}")
                has_said, silent_since_s = True, group_of_look.last_output_s
            before = answers
            next_s, between_s = time.monotonic() + between_s, min(between_s * 1.2, MAX_BETWEEN_LOOKS_S)
            yield

    def _ask(self, ranks: Sequence[int], sample_s: float) -> int:
        """Put a question to ranks, those that listen; return its number."""
        self._num_asked += 1
        self._unseen = {}
        for rank in ranks:
            with contextlib.suppress(OSError):  # it has not come so far, or has ended
                fifo = os.open(self._folder.path / f"ask-{rank}", os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(fifo, f"{self._num_asked} {sample_s}\n".encode())
                finally:
                    os.close(fifo)
        return self._num_asked

    def _read(self, number: int, ranks: Collection[int]) -> dict[int, RankState]:
        """Return the answers to a question that have come, of ranks that could look at themselves."""
        found = read_states({rank: self._folder.path / f"state-{rank}-{number}.json" for rank in ranks})
        for rank in [rank for rank, state in found.items() if state.status == "unseen"]:
            self._unseen[rank] = f"it could not look at itself: {found.pop(rank).error}"
        return found

    def _read_ends(self, group: AskedRanks) -> dict[int, RankState]:
        """Return what ranks that have finished or failed said at their end."""
        return read_states({rank: self._folder.path / f"end-{rank}.json" for rank in range(group.size)})

    def _wait_for(self, number: int, ranks: Sequence[int], seconds: float) -> dict[int, RankState]:
        end_s = time.monotonic() + seconds
        while True:
            answers = self._read(number, ranks)
            asked = [rank for rank in ranks if self._listens(rank)]
            if all(rank in answers or rank in self._unseen for rank in asked) or time.monotonic() > end_s:
                return answers
            time.sleep(POLL_S)

    def _listens(self, rank: int) -> bool:
        """Whether a rank has begun and has not ended."""
        path = self._folder.path
        return (path / f"rank-{rank}.json").exists() and not (path / f"end-{rank}.json").exists()

    def _read_stacks(self, ranks: Sequence[int]) -> dict[int, RankState]:
        """Have ranks that hold Python's lock write their stacks, which needs no answer from Python."""
        threads = {}
        for rank in ranks:
            with contextlib.suppress(OSError, ValueError):
                about = json.loads((self._folder.path / f"rank-{rank}.json").read_bytes())
                os.kill(about["pid"], STACK_SIGNAL)
                threads[rank] = about["main_thread"]
        found: dict[int, RankState] = {}
        end_s = time.monotonic() + STACK_S
        while len(found) < len(threads) and time.monotonic() < end_s:
            time.sleep(POLL_S)
            for rank, thread in threads.items():
                lines = parse_stack((self._folder.path / f"stack-{rank}.txt").read_text(errors="replace"), thread)
                if lines:
                    found[rank] = RankState(rank, "silent", stack=self._add_text(find_places(lines)))
        return found

    def _complete(self, states: Mapping[int, RankState]) -> dict[int, RankState]:
        """Add the `if`s around the places of ranks: they say no more than where they are, see `parse_source`."""
        is_in_cell = any(place.is_cell for state in states.values() for place in state.stack)
        cell = self._folder.read_job().shown_lines if is_in_cell else ()
        return {rank: add_conditions(state, cell) for rank, state in states.items()}

    def _add_text(self, places: Sequence[Place]) -> tuple[Place, ...]:
        """Add what stands in the lines of the cell, which only ranks know by its file's name."""
        cell = self._folder.read_job().shown_lines
        return tuple(replace(each, text=cell[each.line - 1].strip()) if each.is_cell else each for each in places)


def watch_ranks(group: RankGroup, until_s: float, doctor: HangDoctor | None) -> None:
    """Wait for the ranks of a run; if they are to be stopped before they have ended, find out first what they do.

    Args:
        group: the ranks.
        until_s: the reading of the monotonic clock at which they are stopped.
        doctor: None for ranks that do not listen.
    """
    if doctor is None:
        group.wait(until_s)
        return
    try:
        group.wait(until_s, lambda: doctor.look(group))
        if any(end.exit_code for end in group.ends):
            doctor.examine_failure(group)
        elif group.unfinished and not doctor.is_deadlock:
            doctor.examine(group)
    except KeyboardInterrupt:
        try:
            doctor.examine(group, is_hurried=True)
        except KeyboardInterrupt:
            group.stop(at_once=True)
        raise


def waited_in_vain(report: RankReport | None) -> bool:
    """Whether an exception says that a collective did not end, or that a partner had gone."""
    return report is not None and (report.is_consequence or report.is_timeout)


def describe_deaths(ends: Sequence[RankEnd], states: Mapping[int, RankState]) -> dict[int, str]:
    """Return how ranks ended that left no word, by rank."""
    return {
        end.rank: describe_exit(end.exit_code) if end.exit_code else LEFT
        for end in ends
        if not end.was_stopped and end.rank not in states
    }


def parse_stack(text: str, thread: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame of one thread, innermost first, from what `faulthandler` wrote."""
    lines: list[tuple[str, int, str]] = []
    is_thread = False
    for line in text.splitlines():
        found = STACK_LINE.match(line)
        if found is None:
            is_thread = f"0x{thread:016x}" in line
        elif is_thread:
            lines.append((found[1], int(found[2]), found[3]))
    return lines
