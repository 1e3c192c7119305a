"""Ranks that stay: a session keeps them, their variables and their process group alive from cell to cell.

Lives in the kernel. Enters: cells. Leaves: what the ranks print, or an exception after which the session is either
usable or has clearly ended. Each rank reads the names of cell folders from a pipe of its own in the session's private
folder (see `session_worker.py`) and tells that it has finished one by a mark in what it prints, so that nothing printed
before can come after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from vlmcourse.notebook.cell_end import CellEnd, find_difference
from vlmcourse.notebook.failure import RankEnd, RankFailure, RankTimeout, build_failure, describe_exit
from vlmcourse.notebook.hang.doctor import HangDoctor, waited_in_vain
from vlmcourse.notebook.interrupts import hold_interrupts, ignore_interrupts
from vlmcourse.notebook.jobs import CELL_END, Job, JobFolder, control_path, make_job_folder, remove_folder
from vlmcourse.notebook.launcher import build_environment, reserve_port
from vlmcourse.notebook.rank_group import RankGroup
from vlmcourse.notebook.rank_names import name_ranks
from vlmcourse.notebook.starting import RANK_ENVIRONMENT, RankStarter

GRACE_S = 1.0
"""How long the other ranks may take to end a cell by themselves after one failed, or after all were interrupted."""
LEAVE_S = 3.0
"""How long ranks may take to leave when the session is stopped."""


class SessionError(RuntimeError):
    """A session cannot do what was asked; the message says what to do instead."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class SessionEnded(RankFailure):
    """The session is over: its ranks have been stopped and their variables are gone."""


class CellOutput(Protocol):
    """Takes what ranks print."""

    def line(self, rank: int, text: str) -> None:
        """Take a finished line."""
        ...

    def progress(self, rank: int, text: str) -> None:
        """Take the present state of a line that is being overwritten."""
        ...

    def say(self, text: str) -> None:
        """Show a remark that is not a rank's."""
        ...

    def idle(self) -> None:
        """Show what has been taken long enough ago; called many times a second."""
        ...


class RankSession:
    """The ranks of one session, seen from the kernel."""

    def __init__(self, nproc: int, timeout_s: float) -> None:
        """Prepare a session; `start` starts its ranks.

        Args:
            nproc: how many ranks.
            timeout_s: seconds that a cell may take unless it says otherwise.
        """
        self.nproc = nproc
        self.timeout_s = timeout_s
        self.started_at = time.time()
        self.num_cells = 0
        self._folder = make_job_folder()
        self._controls: list[int] = []
        self._is_ending = False
        """Whether the ranks are being stopped: what they say of that is nobody's concern."""
        self.doctor = HangDoctor(self._folder, print)
        """What it found out about the last cell, if that hung or was stopped."""
        self._reader: CellOutput | None = None
        self._cell_ends: dict[int, CellEnd] = {}
        self._end_mark = re.compile("$^")
        self._group = RankGroup(self._folder.path, self._on_line, self._on_progress, self._on_idle)

    def start(self, starter: RankStarter, job: Job) -> None:
        """Start the ranks; they are ready for cells when this returns.

        Whoever calls this must hold the session already: an interrupt right after it leaves ranks that run.

        Args:
            starter: starts a rank.
            job: an empty cell: what ranks need to know besides.

        Raises:
            RankFailure: if a rank could not start or the ranks did not meet; none is left running.
        """
        try:
            self._start(starter, job)
        except BaseException:
            self._end()
            raise

    def _start(self, starter: RankStarter, job: Job) -> None:
        for rank in range(self.nproc):
            path = control_path(self._folder.path, rank)
            os.mkfifo(path, 0o600)
            self._controls.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        job = replace(job, stays=True, timeout_s=self.timeout_s, token=secrets.token_hex(8))
        self._expect(job.token)
        self._folder.write_inputs(b"")
        self._folder.write_job(job)
        start = partial(starter.start, self._folder.path)
        with reserve_port() as port:
            for rank in range(self.nproc):
                environment = build_environment(rank, self.nproc, port, RANK_ENVIRONMENT)
                self._group.start(rank, start, environment)
            self._wait(range(self.nproc), time.monotonic() + self.timeout_s, self.doctor)
        if self._group.ends:
            raise build_failure(self._stop_all(), self._folder.read_reports())
        if len(self._cell_ends) < self.nproc:
            raise RankTimeout(f"{self.nproc} ranks did not meet within {self.timeout_s:g} s", ends=self._stop_all())

    # --- Cells ------------------------------------------------------------------------------------------------------

    def run(self, folder: JobFolder, job: Job, ranks: Sequence[int], reader: CellOutput) -> None:
        """Run a cell on some of the ranks and wait until they have finished it.

        Args:
            folder: the cell's, made by `make_cell_folder`; inputs are in it.
            job: the cell; `job.timeout_s` says how long it may take.
            ranks: which ranks run it; the others do nothing meanwhile.
            reader: gets what the ranks print meanwhile.

        Raises:
            RankFailure: if the cell failed on a rank; the session is still usable.
            SessionEnded: if a rank is gone, or ranks still waited for each other; all have been stopped.
            KeyboardInterrupt: if a person interrupted; `is_alive` says whether the session is still usable.
        """
        self.check_alive()
        self.num_cells += 1
        self._reader = reader
        self._expect(job.token)
        folder.write_job(job)
        request = json.dumps({"folder": str(folder.path)}).encode() + b"\n"
        until_s = time.monotonic() + job.timeout_s
        self.doctor = doctor = HangDoctor(folder, reader.say)
        try:
            with hold_interrupts():  # a cell that only some ranks have been told of would go on in the next one
                for rank in ranks:
                    os.write(self._controls[rank], request)
            self._wait(ranks, until_s, doctor)
            in_time = len(self._cell_ends) == len(ranks) or doctor.is_deadlock or time.monotonic() < until_s
            self._examine(folder, ranks, doctor)
            self._settle(ranks, interrupts=not in_time or doctor.is_deadlock)
        except KeyboardInterrupt:
            self._stop_cell(folder, ranks, doctor)
            raise
        finally:
            self._reader = None
        if self._group.ends or self._why_unusable(folder, ranks):
            raise self._end_with(folder, ranks, in_time)
        if not in_time:
            told = f"the cell was stopped after {job.timeout_s:g} s, its --timeout; the session goes on"
            raise RankTimeout("\n".join(filter(None, [told, doctor.text])))
        if any(end.failed for end in self._cell_ends.values()):
            raise build_failure(self._as_ends(ranks), folder.read_reports(), world_size=self.nproc)

    def _examine(self, folder: JobFolder, ranks: Sequence[int], doctor: HangDoctor) -> None:
        """Before anything is stopped, find out why ranks have not finished a cell."""
        if len(self._cell_ends) == len(ranks) or doctor.is_deadlock:
            return
        failed = [end.rank for end in self._cell_ends.values() if end.failed]
        reports = folder.read_reports()
        if not self._group.ends and all(waited_in_vain(reports.get(rank)) for rank in failed):
            doctor.examine(self._group)

    def _stop_cell(self, folder: JobFolder, ranks: Sequence[int], doctor: HangDoctor) -> None:
        """Stop what an interrupted cell runs, and the session too if its ranks cannot be used any more."""
        with contextlib.suppress(KeyboardInterrupt):  # a second one: nothing more is asked
            doctor.examine(self._group, is_hurried=True)
        with ignore_interrupts():
            self._settle(ranks, interrupts=True)
            if self._group.ends or self._why_unusable(folder, ranks):
                self._end()

    def check_alive(self) -> None:
        """Refuse to go on with ranks that have died since the last cell.

        Raises:
            SessionEnded: saying which and how.
        """
        if dead := [end for end in self._group.ends]:
            self._end()
            raise SessionEnded(
                "\n".join(f"rank {end.rank} {describe_exit(end.exit_code)} since the last cell" for end in dead)
                + f"\n{ENDED}",
                rank=dead[0].rank,
                ends=dead,
            )

    @property
    def is_alive(self) -> bool:
        """Whether all ranks are there."""
        return bool(self._controls) and len(self._group.unfinished) == self.nproc

    def pids(self) -> list[int]:
        """Return the process ids of the ranks' guards, by rank."""
        return self._group.pids

    def make_cell_folder(self) -> JobFolder:
        """Make the private folder of the next cell; `remove_cell_folder` removes it."""
        path = self._folder.path / f"cell-{self.num_cells + 1}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        return JobFolder(path)

    def stop(self) -> None:
        """Let the ranks leave their group, and end them; safe to call twice."""
        with ignore_interrupts():
            for control in self._controls:
                with contextlib.suppress(OSError):
                    os.write(control, b'{"stop": true}\n')
            self._group.wait(time.monotonic() + LEAVE_S)
            self._end()

    # --- Waiting and settling ---------------------------------------------------------------------------------------

    def _wait(self, ranks: Sequence[int], until_s: float, doctor: HangDoctor) -> None:
        """Wait until all have finished the cell, one has failed or died, they hang, or the clock reads `until_s`."""

        def is_done() -> bool:
            ends = self._cell_ends
            is_over = len(ends) == len(ranks) or any(end.failed for end in ends.values()) or bool(self._group.ends)
            return is_over or doctor.look(self._group)

        self._group.wait(until_s, is_done)

    def _settle(self, ranks: Sequence[int], *, interrupts: bool) -> None:
        """Give the ranks that still run the cell a moment to end it, then interrupt them and give another."""

        def is_done() -> bool:
            return len(self._cell_ends) == len(ranks) or bool(self._group.ends)

        for interrupts_now in (True,) if interrupts else (False, True):
            if is_done():
                return
            if interrupts_now:
                if not interrupts and self.doctor.diagnosis is None:  # after a failure: what the others wait for
                    self.doctor.examine(self._group, is_hurried=True)
                self._group.interrupt([rank for rank in ranks if rank not in self._cell_ends])
            self._group.wait(time.monotonic() + GRACE_S, is_done)

    def _why_unusable(self, folder: JobFolder, ranks: Sequence[int]) -> str:
        """Say why ranks that are all there cannot run another cell; "" if they can."""
        ends = self._cell_ends
        running = [rank for rank in ranks if rank not in ends]
        if running:
            it = "it" if len(running) == 1 else "they"
            return f"{name_ranks(running)} did not stop within {GRACE_S:g} s, so {it} had to be ended"
        if not any(end.failed for end in ends.values()) and len(ranks) == self.nproc:
            return find_difference(ends)
        for end in ends.values():
            for name, (begun, members) in end.groups.items():
                outside = [rank for rank in members if rank not in ranks]
                if outside:
                    verb = "does" if len(outside) == 1 else "do"
                    return (
                        f"{name_ranks([end.rank])} began a collective, or sent a message, with {name_ranks(outside)}, "
                        f"which {verb} not run this cell: run it on all of them with %%torchrun"
                    )
                if any(ends[rank].groups.get(name, (0, ()))[0] != begun for rank in members):
                    return "the ranks are out of step: some had begun more collectives than others when the cell failed"
        if any(end.has_pending for end in ends.values()):
            return "the ranks are out of step: a collective had not ended when the cell failed"
        if any(waited_in_vain(report) for report in folder.read_reports().values()):
            return "a collective failed, and with it the connection between the ranks"
        return ""

    def _end_with(self, folder: JobFolder, ranks: Sequence[int], in_time: bool) -> SessionEnded:
        """End the session and return the exception that says why."""
        reports = folder.read_reports()
        dead = self._group.ends
        left = [end.rank for end in dead if end.exit_code == 0]
        told = [] if dead else list(filter(None, [self.doctor.text, self._why_unusable(folder, ranks)]))
        told += [f"rank {rank} of {self.nproc} left the session (exit code 0)" for rank in left]
        if not in_time:
            told.insert(0, "the cell passed its --timeout")
        finished = [end.rank for end in self._cell_ends.values() if not end.failed]
        ends = self._stop_all(reports)
        failure = None
        if len(dead) > len(left) or (reports and in_time):
            failure = build_failure(ends, reports, finished, self.nproc)
            told.insert(0, str(failure))
        return SessionEnded(
            "\n".join([*told, ENDED]),
            rank=failure.rank if failure else None,
            ends=ends,
            rank_traceback=failure.rank_traceback if failure else "",
        )

    def _as_ends(self, ranks: Sequence[int]) -> list[RankEnd]:
        """Describe how the ranks finished a cell as if each were a process that ended with it."""
        now_s = time.monotonic()
        ends = self._cell_ends
        return [RankEnd(rank, int(rank not in ends or ends[rank].failed), now_s, rank not in ends) for rank in ranks]

    def _stop_all(self, reported: Collection[int] = ()) -> list[RankEnd]:
        """End the session and return how each rank ended; a rank that reported an exception ended by that."""
        self._end()
        return [
            replace(end, was_stopped=False, exit_code=end.exit_code or 1) if end.rank in reported else end
            for end in self._group.ends
        ]

    def _end(self) -> None:
        """Stop what still runs, and remove everything of the session."""
        self._is_ending = True
        with ignore_interrupts():
            self._group.stop()
            self._group.drain()
            for control in self._controls:
                os.close(control)
            self._controls = []
            remove_folder(self._folder.path)

    # --- What ranks print -------------------------------------------------------------------------------------------

    def _expect(self, token: str) -> None:
        self._cell_ends = {}
        start, _, end = CELL_END.format(token=token, content="|").partition("|")
        self._end_mark = re.compile(re.escape(start) + r"(\{.*?\})" + re.escape(end))

    def _on_line(self, rank: int, text: str) -> None:
        found = self._end_mark.search(text)
        if found is not None:
            self._cell_ends[rank] = CellEnd(rank, **json.loads(found[1]))
            text = text[: found.start()] + text[found.end() :]
            if not text:
                return
        if self._reader is not None:
            self._reader.line(rank, text)
        elif not self._is_ending:
            sys.stdout.write(f"[{rank}] {text}\n")

    def _on_progress(self, rank: int, text: str) -> None:
        if self._reader is not None and not self._end_mark.search(text):
            self._reader.progress(rank, text)

    def _on_idle(self) -> None:
        if self._reader is not None:
            self._reader.idle()


ENDED = "The session has ended and its variables are gone: begin another with %torchrun start."
