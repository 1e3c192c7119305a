"""A live picture of a run in the notebook, while the cell that trains blocks the kernel's main thread.

Enters: a run's folder, which need not be there yet. Leaves: a widget that a thread of the kernel updates twice a second
from what is new in the run's files; the ranks are never asked. The thread ends by itself when the run has ended, when
nothing has come for ten minutes, and with the kernel. `%%torchrun --dashboard RUN` shows it above a cell's output and
ends it with the cell. In a terminal, `vlmcourse watch RUN` shows the same. Chapter 6.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import psutil
from IPython.core.getipython import get_ipython
from IPython.display import display

from vlmcourse.monitor.live_run import LiveRun, find_run_problem
from vlmcourse.monitor.run_view import FINISHED, RUNNING, STOPPED, WAITING, RunView, list_remarks
from vlmcourse.notebook.dashboard_drawing import draw_run

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult

EVERY_S = 0.5
"""Between two looks."""
GIVE_UP_S = 600.0
"""A dashboard that has seen nothing new for so long ends."""
RESTART_S = 30.0
"""So long after a run has stopped without a result another one may begin in its folder: a restart by `torchrun`."""
RANK_MAGICS = ("%%torchrun", "%%rank")
HEADINGS = {
    WAITING: "waiting for its first step",
    RUNNING: "running",
    FINISHED: "finished",
    STOPPED: "stopped",
}


class Dashboard(widgets.HTML):
    """Shows one run's folder; see `watch_run`."""

    def __init__(
        self,
        folder: str | Path,
        *,
        every_s: float = EVERY_S,
        is_of_cell: bool = False,
        give_up_s: float = GIVE_UP_S,
        restart_s: float = RESTART_S,
    ) -> None:
        """Look once; `start` begins to look again and again.

        Args:
            folder: `output_dir/name` of the run.
            every_s: seconds between two looks, above 0.
            is_of_cell: whether it is for the runs of one cell: a run that is there before is not shown, and only `end`
                ends it.
            give_up_s: after so many seconds without anything new it ends.
            restart_s: it ends so many seconds after a run that has stopped without a result.

        Raises:
            ValueError: if `every_s` is not above 0.
        """
        if not every_s > 0:
            raise ValueError(f"every_s = {every_s}: must be above 0; 0.5 looks twice a second")
        super().__init__()
        self.folder, self.every_s = Path(folder), every_s
        self.end_reason = ""
        """Why it no longer looks; empty while it does."""
        self._is_of_cell, self._give_up_s, self._restart_s = is_of_cell, give_up_s, restart_s
        self._run = LiveRun(folder)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.view: RunView = self._run.read()
        """How the run stood at the last look."""
        self._earlier = self._run.start_stamp if is_of_cell or self.view.state in (FINISHED, STOPPED) else None
        self._hides = self._earlier is not None and is_of_cell
        self._changed_s = self._state_s = time.monotonic()
        self._draw()

    @property
    def is_watching(self) -> bool:
        """Whether its thread looks at the run."""
        return self._thread is not None and self._thread.is_alive() and not self._done.is_set()

    def start(self) -> None:
        """Begin to look; once is enough."""
        if self.is_watching:
            return
        self._done, self.end_reason = threading.Event(), ""
        self._changed_s = self._state_s = time.monotonic()
        name = f"dashboard of {self.folder}"
        self._thread = threading.Thread(target=self._watch, args=(self._done,), name=name, daemon=True)
        self._thread.start()

    def end(self, reason: str = "no longer watched") -> None:
        """Look a last time, say why no more, and stop looking; safe to call twice."""
        with self._lock:
            is_first = not self._done.is_set()
            self._done.set()
        if is_first:
            self.refresh(reason)

    def refresh(self, end_reason: str = "") -> None:
        """Look once and show what has changed."""
        with self._lock:
            seen, self.view = self.view, self._run.read()
            if (seen.step, seen.state, len(seen.losses)) != (self.view.step, self.view.state, len(self.view.losses)):
                self._changed_s = time.monotonic()
            if seen.state != self.view.state:
                self._state_s = time.monotonic()
            self._hides = self._hides and self._is_earlier
            self.end_reason = end_reason or self.end_reason
            self._draw()

    @property
    def has_stopped(self) -> bool:
        """Whether a run that it saw in its course has ended without a result."""
        return self.view.state == STOPPED and not self._is_earlier

    @property
    def _is_earlier(self) -> bool:
        return self._earlier is not None and self._run.start_stamp == self._earlier

    def is_of_this_kernel(self) -> bool:
        """Whether the run's first rank is a process that this one has started, itself or through others."""
        try:
            return os.getpid() in [parent.pid for parent in psutil.Process(int(self._run.process["pid"])).parents()]
        except (KeyError, ValueError, TypeError, psutil.Error):
            return False

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(self.every_s):
            self.refresh()
            if reason := self._find_end():
                self.end(reason)

    def _find_end(self) -> str:
        """Return why there is nothing more to come; empty while there may be."""
        if self._is_of_cell:
            return ""
        now_s = time.monotonic()
        if self.view.state == FINISHED and not self._is_earlier:
            return HEADINGS[FINISHED]
        if self.has_stopped and now_s - self._state_s > self._restart_s:
            return HEADINGS[STOPPED]
        if now_s - self._changed_s > self._give_up_s:
            return f"nothing new for {self._give_up_s:.0f} s, so no longer watched: call watch_run again"
        return ""

    def _draw(self) -> None:
        """Give the widget its text; only a change is sent to the browser."""
        view = RunView(folder=str(self.folder), state=WAITING) if self._hides else self.view
        self.value = draw_run(view, self._heading())

    def _heading(self) -> str:
        """Say how the run stands; of a folder that no run has written to, which one to give."""
        state, folder = HEADINGS[self.view.state], "give the folder that a run writes to, run.output_dir/run.name"
        if self._hides:
            if self.end_reason:
                return f"{self.end_reason}, and none of its runs has written here; an earlier one has: {folder}"
            return "waiting for a run; the one that is there is an earlier one"
        if self.view.state == WAITING and (problem := find_run_problem(self.folder)):
            if self.end_reason:
                return f"{self.end_reason}; no run has written here: {problem}"
            return f"{state}; there is no run yet in this folder, which must be its run.output_dir/run.name"
        if self.end_reason and self.view.state == STOPPED and self.end_reason != state:
            return f"{state}: {self.end_reason}"
        return self.end_reason if self.end_reason and self.view.state != FINISHED else state

    def __repr__(self) -> str:
        """Say the same in words, where no widget can be shown."""
        if self._hides or self.view.state == WAITING:
            return f"{self.folder}: {self._heading()}"
        head = f"{self.folder}: {self.end_reason or HEADINGS[self.view.state]}, step {self.view.step}"
        return "\n".join([head, *list_remarks(self.view)])


def watch_run(folder: str | Path, *, every_s: float = EVERY_S) -> Dashboard:
    """Return a widget that shows a run's folder as it fills; put it at the end of a cell, before the one that trains.

    It shows loss and tokens/s by step, and for every rank a bar of its steps by phase and one of its memory; it names
    the slowest rank, and ranks that are behind or silent. Memory by owner (weights, gradients, optimizer state) is
    drawn where the run has `logging.memory_owners = true`. The folder need not be there yet; a run that has ended there
    is shown until the next one begins. It ends by itself when a run that it saw has ended, or its cell was interrupted.

    Args:
        folder: `run.output_dir/run.name` of the run, such as "runs/tiny".
        every_s: seconds between two looks at the files.
    """
    dashboard = Dashboard(folder, every_s=every_s)
    dashboard.start()
    _end_with_cells(dashboard)
    return dashboard


@contextmanager
def show_dashboard(folder: str) -> Iterator[Callable[[], None]]:
    """Show a dashboard of `folder` in the running cell's output until the body has ended.

    Gives a function that shows the same widget again, for when the cell's output has been cleared.
    """
    dashboard = Dashboard(folder, is_of_cell=True)
    reason = "its cell was interrupted or has failed"

    def show_again() -> None:
        display(dashboard)

    show_again()
    dashboard.start()
    try:
        yield show_again
        reason = "its cell has ended"
    finally:
        dashboard.end(reason)


def _end_with_cells(dashboard: Dashboard) -> None:
    """End with the cell in whose ranks the run is: ranks of a session outlive it, and an interrupt leaves no result."""
    shell: Any = get_ipython()
    if shell is None:
        return

    def see_end(result: ExecutionResult) -> None:
        if dashboard.is_watching and result.info is not None:
            source = (result.info.raw_cell or "").lstrip()
            if not source.startswith(RANK_MAGICS):
                return
            dashboard.refresh()
            if dashboard.has_stopped or (dashboard.view.state == RUNNING and dashboard.is_of_this_kernel()):
                dashboard.end("its cell has ended")
        if not dashboard.is_watching:
            shell.events.unregister("post_run_cell", see_end)

    shell.events.register("post_run_cell", see_end)
