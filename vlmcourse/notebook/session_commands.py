"""`%torchrun start | status | stop | restart`: the one session of a kernel, as a person handles it."""

from __future__ import annotations

import atexit
import shlex
import time
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime

import psutil

from vlmcourse.notebook.jobs import Job
from vlmcourse.notebook.options import (
    DEFAULT_LAUNCHER,
    CellOptions,
    CellOptionsError,
    parse_options,
)
from vlmcourse.notebook.session import ENDED, RankSession, SessionError
from vlmcourse.notebook.starting import RankStarter, readable_path
from vlmcourse.notebook.subcommands import Subcommand
from vlmcourse.notebook.wrong_flags import count_ranks

START_FLAGS = ("-n", "--nproc", "--timeout")
NOT_THERE = "there is no session: begin one with %torchrun start -n 2"


class SessionCommands:
    """Starts, shows and stops the session of a kernel."""

    def __init__(self, starter: RankStarter) -> None:
        """Take note of what starts ranks."""
        self.current: RankSession | None = None
        self.lost: RankSession | None = None
        """The last session, if it ended without being asked to."""
        self.assigned_by: dict[str, str] = {}
        """Names that only some ranks of the session have, each with the magic of the cell that assigned it."""
        self._starter = starter
        atexit.register(self._stop_quietly)

    def table(self) -> dict[str, Subcommand]:
        """Return what may follow `%torchrun`."""
        flags = START_FLAGS
        return {
            "start": Subcommand(self.start, "start ranks that stay, with their variables", flags),
            "status": Subcommand(self.status, "show the ranks that stay"),
            "restart": Subcommand(self.restart, "end them and start others, by default as many", flags),
            "stop": Subcommand(self.stop, "end them"),
        }

    def lose(self) -> None:
        """Note that the session has ended by itself."""
        self.current, self.lost = None, self.current

    def get(self, asked_by: str) -> RankSession:
        """Return the session.

        Raises:
            SessionError: if there is none.
            SessionEnded: if it has died since the last cell.
        """
        if self.current is None:
            raise SessionError(f"{asked_by.split(' ')[0]}: {NOT_THERE}")
        session = self.current
        if not session.is_alive:
            self.lose()
            session.check_alive()
            raise SessionError(f"{asked_by.split(' ')[0]}: {NOT_THERE}")  # it was stopped while it started
        return session

    def adapt(self, options: CellOptions) -> CellOptions:
        """Fit a cell's flags to the session: it has its own number of ranks and time limit.

        Raises:
            CellOptionsError: if the cell asks for another number of ranks.
        """
        session = self.get("%%torchrun")
        if "nproc" in options.explicit and options.nproc != session.nproc:
            raise CellOptionsError(
                f"-n {options.nproc}: the session has {session.nproc} ranks; leave -n out, or end the session with "
                "%torchrun stop"
            )
        if options.launcher != DEFAULT_LAUNCHER:
            raise CellOptionsError(
                f"--launcher {options.launcher}: the ranks of the session have been started; end it with %torchrun stop"
            )
        timeout_s = options.timeout_s if "timeout" in options.explicit else session.timeout_s
        return replace(options, nproc=session.nproc, timeout_s=timeout_s)

    def start(self, flags: str) -> None:
        """Begin a session."""
        options = parse_options(flags, magic="%torchrun start", flags=START_FLAGS)
        session = self.current
        if session is not None and session.is_alive:
            if options.nproc != session.nproc:
                raise SessionError(
                    f"a session of {count_ranks(session.nproc)} is there already: %torchrun restart {flags} begins "
                    "anew, %torchrun stop ends it"
                )
            session.timeout_s = options.timeout_s if "timeout" in options.explicit else session.timeout_s
            print(
                f"{count_ranks(session.nproc)} are there already, with their variables: %torchrun restart begins anew"
            )
            return
        self.lost, self.assigned_by = None, {}
        self._starter.prepare()
        self._starter.wait_until_ready()
        started_s = time.monotonic()
        job = Job(
            source="",
            shown_lines=[],
            shows_last_value=False,
            out_names=[],
            timeout_s=0,
            sys_path=readable_path(),
            token="",
        )
        self.current = session = RankSession(options.nproc, options.timeout_s)
        try:
            session.start(self._starter, job)
        except BaseException:
            self.current = None
            raise
        print(
            f"{options.nproc} ranks are ready after {time.monotonic() - started_s:.1f} s: %%torchrun cells run in them "
            "and keep their variables, until %torchrun stop"
        )

    def status(self, flags: str) -> None:
        """Show the ranks of the session."""
        _refuse_flags("status", flags)
        if self.current is None:
            print(f"T{NOT_THERE[1:]}")
            return
        session = self.get("%torchrun status")
        began = datetime.fromtimestamp(session.started_at).strftime("%H:%M:%S")
        print(f"{session.nproc} ranks since {began}, {session.num_cells} cells run, --timeout {session.timeout_s:g}")
        for rank, guard in enumerate(session.pids()):
            processes = psutil.Process(guard).children(recursive=True)
            memory = sum(process.memory_info().rss for process in processes)
            pid = processes[0].pid if processes else guard
            print(f"  rank {rank}: process {pid}, {memory / 2**20:,.0f} MiB in use")

    def stop(self, flags: str) -> None:
        """End the session."""
        _refuse_flags("stop", flags)
        self.lost = None
        if self.current is None:
            print(f"T{NOT_THERE[1:]}")
            return
        self._stop_quietly()
        print("the session has ended")

    def restart(self, flags: str) -> None:
        """End the session and begin another of the same size, or of the flags given."""
        before = self.current or self.lost
        if self.current is None:
            print("the session had ended: this is another" if before else "there was no session: this is the first")
        self._stop_quietly()
        same = f"-n {before.nproc} --timeout {before.timeout_s:g}" if before is not None else ""
        self.start(" ".join([same, flags]) if flags or same else "")

    def describe_loss(self, nproc: int) -> str:
        """Say of a cell that its ranks are not those of the session which was there; empty if there was none."""
        if self.lost is None:
            return ""
        return (
            f"the session has ended: this cell runs on {count_ranks(nproc)} of its own, new and empty (%torchrun "
            f"restart begins another session, of {self.lost.nproc})"
        )

    def note_assigned(self, magic: str, names: Collection[str]) -> None:
        """Remember which names a cell of some ranks has assigned; a cell of all ranks gives them to every rank."""
        for name in names:
            if magic == "%%torchrun":
                self.assigned_by.pop(name, None)
            else:
                self.assigned_by[name] = magic

    def describe_interrupt(self) -> str:
        """Say what an interrupt of a cell has left of the session."""
        assert self.current is not None
        found = self.current.doctor.text
        if self.current.is_alive:
            told = "the cell was stopped; the session goes on with its variables"
        else:
            self.lose()
            told = f"the cell was stopped, and its ranks cannot run another. {ENDED}"
        return "\n".join(filter(None, [told, found]))

    def describe_stopped_command(self, line: str) -> str:
        """Say what is there after a person has interrupted `%torchrun` with this line."""
        is_there = self.current is not None and self.current.is_alive
        return f"%torchrun {line.strip()} was stopped; {'the session is there' if is_there else NOT_THERE}"

    def _stop_quietly(self) -> None:
        if self.current is not None:
            self.current.stop()
            self.current = None


def _refuse_flags(name: str, flags: str) -> None:
    if shlex.split(flags, comments=True):
        raise CellOptionsError(f"%torchrun {name} takes nothing more, but {flags.strip()!r} follows")
