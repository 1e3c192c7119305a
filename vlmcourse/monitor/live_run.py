"""A run's folder, looked at again and again: each look reads only what is new and returns how the run stands.

Enters: `output_dir/name` of a run that may not have begun, goes on, or has ended. Leaves: a `RunView` a look. The
folder may be moved aside and made anew at any time, and a run may go on in it after a restart: what was read is then
forgotten. Chapter 6.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlmcourse.monitor.line_tail import LineTail
from vlmcourse.monitor.run_process import is_process_alive
from vlmcourse.monitor.run_view import (
    FINISHED,
    RUNNING,
    STOPPED,
    WAITING,
    RankTrail,
    RunView,
    find_owners,
    find_slowest_view,
    find_window,
    view_ranks,
)
from vlmcourse.monitor.step_log import FOLDER, RESUME, EventRecord, StepRecord, parse_record, step_log_path

START_NAME, CONFIG_NAME, RESULT_NAME, ROWS_NAME = "run.json", "config.json", "result.json", "log.jsonl"
LAST_BYTES = 1 << 18
"""Of a rank's file that the first look reads: some hundred steps, however long the run is."""


class LiveRun:
    """What has been read of one folder."""

    def __init__(self, folder: str | Path, clock: Callable[[], float] = time.time) -> None:
        """Read nothing yet.

        Args:
            folder: of the run; it need not be there.
            clock: the wall clock, in seconds since 1970.
        """
        self.folder, self._clock = Path(folder), clock
        self._start_stamp: tuple[int, int] | None = None
        self._forget()

    @property
    def start_stamp(self) -> tuple[int, int] | None:
        """Differs between two runs in the folder, and between a run and its resumption; None before the first."""
        return self._start_stamp

    @property
    def process(self) -> dict[str, Any]:
        """The mark of rank 0's process; empty where the run left none."""
        return self._process

    def read(self) -> RunView:
        """Look once.

        Returns:
            How the run stands. A line that is no record is passed over and named in `problem`.
        """
        stamp = _stamp(self.folder / START_NAME)
        if stamp != self._start_stamp:
            self._forget()
            self._read_start(stamp)
        is_alive = is_process_alive(self._process) if self._process else None  # before its last files are looked for
        self._read_rows()
        self._read_ranks()
        return self._view(is_alive)

    def _forget(self) -> None:
        self._tails: dict[int, LineTail] = {}
        self._trails: dict[int, RankTrail] = {}
        self._rows_tail = LineTail(self.folder / ROWS_NAME)
        self._rows: dict[int, tuple[float | None, float | None]] = {}
        self._last_row: dict[str, Any] = {}
        self._first_s: float | None = None
        self._resumed: EventRecord | None = None
        self._process: dict[str, Any] = {}
        self._world_size: int | None = None
        self._num_steps: int | None = None
        self._problem = ""

    def _read_start(self, stamp: tuple[int, int] | None) -> None:
        """Take what was written at the start; files that are only half there are read at the next look."""
        try:
            start = json.loads((self.folder / START_NAME).read_text(encoding="utf-8")) if stamp else {}
            config_path = self.folder / CONFIG_NAME
            config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
            self._process = dict(start.get("process", {}))
            self._world_size = start.get("hardware", {}).get("world_size")
            self._num_steps = config.get("train", {}).get("num_steps")
        except (OSError, ValueError, TypeError, AttributeError):
            return
        self._start_stamp = stamp

    def _read_rows(self) -> None:
        lines, is_anew = self._rows_tail.read()
        if is_anew:
            self._rows, self._last_row = {}, {}
        for line in lines:
            try:
                row = json.loads(line)
                loss, rate = (_number(row.get(name)) for name in ("loss/total", "performance/tokens_per_second"))
                self._rows[int(row["step"])] = loss, rate
                self._last_row = row
            except (ValueError, TypeError, KeyError, AttributeError):
                self._problem = (
                    f"{self._rows_tail.path} has a line that is no row, which was passed over: {line[:60]!r}"
                )

    def _read_ranks(self) -> None:
        for path in (self.folder / FOLDER).glob("rank*.jsonl"):
            if (digits := path.stem.removeprefix("rank")).isdecimal() and int(digits) not in self._tails:
                self._tails[int(digits)] = LineTail(step_log_path(self.folder, int(digits)), LAST_BYTES)
        for rank, tail in self._tails.items():
            lines, is_anew = tail.read()
            if is_anew:
                self._trails.pop(rank, None)
            trail = self._trails.setdefault(rank, RankTrail())
            for line in lines:
                try:
                    record = parse_record(line, str(tail.path))
                except ValueError as error:
                    self._problem = str(error)
                    continue
                trail.add(record)
                self._note_start(record)

    def _note_start(self, record: StepRecord | EventRecord) -> None:
        """Keep when the run began, and its last resumption."""
        if self._first_s is None or record.start_s < self._first_s:
            self._first_s = record.start_s
        if isinstance(record, EventRecord) and record.event == RESUME:
            is_newer = self._resumed is None or record.start_s > self._resumed.start_s
            self._resumed = record if is_newer else self._resumed

    def _view(self, is_alive: bool | None) -> RunView:
        trails = self._trails_of_run()
        steps = [trail.last.step for trail in trails.values() if trail.last]
        state = self._find_state(is_alive, has_steps=bool(steps))
        signs_s = [trail.sign_s for trail in trails.values() if trail.sign_s is not None]
        is_live = state in (RUNNING, WAITING)
        now_s = self._clock() if is_live or not signs_s else max(signs_s)
        ranks = view_ranks(trails, now_s, is_live=is_live)
        slowest, spread = find_slowest_view(ranks)
        began_s = self._resumed.start_s if self._resumed else self._first_s
        return RunView(
            folder=str(self.folder),
            state=state,
            step=max(steps, default=0),
            num_steps=self._num_steps,
            world_size=len(trails),
            running_s=now_s - began_s if began_s is not None else None,
            resumed_step=self._resumed.step if self._resumed else None,
            losses=[(step, loss) for step, (loss, _) in self._rows.items() if loss is not None],
            tokens_per_s=[(step, rate) for step, (_, rate) in self._rows.items() if rate is not None],
            owners_bytes=find_owners(self._last_row),
            ranks=ranks,
            window_steps=len(find_window(trails)),
            slowest_rank=slowest,
            rank_spread=spread,
            last_event=_describe_event([trail.long_event for trail in trails.values() if trail.long_event]),
            problem=self._problem,
        )

    def _trails_of_run(self) -> dict[int, RankTrail]:
        """Return the ranks that the run has now: it may have been resumed on fewer, or some have not begun."""
        size = self._world_size
        if size is None:
            lasts = [trail.last for trail in self._trails.values() if trail.last]
            newest = max(lasts, key=lambda record: record.start_s, default=None)
            size = newest.world_size if newest else None
        if size is None:
            return dict(self._trails)
        return {rank: self._trails.get(rank, RankTrail()) for rank in range(size)}

    def _find_state(self, is_alive: bool | None, *, has_steps: bool) -> str:
        start, result = _stamp(self.folder / START_NAME), _stamp(self.folder / RESULT_NAME)
        if result is not None and (start is None or result[1] >= start[1]):  # not that of a run that was resumed
            return FINISHED
        if is_alive is False:
            return STOPPED
        return RUNNING if has_steps else WAITING


def find_run_problem(folder: str | Path) -> str:
    """Return why a folder is no run's, and what to give instead; "" where it is one."""
    path = Path(folder)
    if _is_run(path):
        return ""
    if not path.exists():
        found = "is not there"
    elif not path.is_dir():
        found = "is a file"
    else:
        found = f"has neither {START_NAME} nor {FOLDER}/ in it"
    near = path if path.is_dir() else path.parent
    runs = sorted(str(each) for each in near.iterdir() if _is_run(each)) if near.is_dir() else []
    hint = f"runs are in {', '.join(runs[:8])}" if runs else "start one with vlmcourse train"
    return f"{str(path)!r} {found}: give the folder that a run writes to, run.output_dir/run.name; {hint}"


def _is_run(path: Path) -> bool:
    return path.is_dir() and ((path / START_NAME).is_file() or (path / FOLDER).is_dir())


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _describe_event(events: list[EventRecord]) -> str:
    if not events:
        return ""
    last = max(events, key=lambda event: event.start_s)
    return f"{last.event} after step {last.step}: {last.seconds:.1f} s"
