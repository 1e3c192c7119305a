"""What each rank did, step by step: one file a rank, written by that rank alone, without any communication.

Enters: a `StepRecord` an optimizer step, and an `EventRecord` for work between steps. Leaves: `steps/rank0000.jsonl` in
the run's folder, complete up to its last line at any moment, so that a live run can be watched and a killed one read;
and, read again, all of it by rank. Values that a machine cannot measure are absent, never 0. A file that goes on after
a checkpoint has a mark, event `RESUME`: the time before it is not the run's, and with other settings the steps before
it are others. Chapter 6.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import time
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcourse.monitor.whole_file import replace_file

logger = logging.getLogger(__name__)
FOLDER = "steps"
EVENTS = ("checkpoint", "evaluation", "log")
RESUME = "resume"
"""A mark of no length: here a process went on after this step. Steps after it are by another process than those before,
and warm up anew; between them is a pause of any length."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step of one rank: its times, and what it worked on itself."""

    step: int
    """Optimizer steps done, this one included."""
    start_s: float
    """When it began, by the wall clock: seconds since 1970, comparable between ranks as far as their clocks agree."""
    step_s: float
    data_wait_s: float | None = None
    """This part and the next five add up to `step_s`; see `monitor.step_clock`."""
    forward_s: float | None = None
    backward_s: float | None = None
    communication_s: float | None = None
    """Time in which the rank only waited for others; absent where that cannot be told."""
    waits_s: list[float] | None = None
    """The waits in `communication_s` in their order, neighbours added up where they are many: `step_clock`."""
    optimizer_s: float | None = None
    other_s: float | None = None
    world_size: int | None = None
    """Ranks of the run when the step was made; a resumed run may have others."""
    micro_batches: int | None = None
    text_tokens: int | None = None
    """Of the samples that this rank was given; ranks of a tp, cp or pp group are given the same."""
    image_tokens: int | None = None
    padding_tokens: int | None = None
    samples: int | None = None
    tiles: int | None = None
    rss_bytes: int | None = None
    """Resident set of the process at the end of the step."""
    allocated_bytes: int | None = None
    """In tensors on the GPU at the end of the step."""
    reserved_bytes: int | None = None
    """Taken by PyTorch's allocator on the GPU at the end of the step."""
    alloc_retries: int | None = None
    """Times that PyTorch's allocator on the GPU found no room and freed its cache, since the process began."""
    major_faults: int | None = None
    """Pages of the process that had to be read from disk, since it began."""
    data_cpu_s: float | None = None
    """CPU seconds that the process spent while samples were made; workers in processes of their own are not counted."""
    cpu_percent: float | None = None
    """CPU time of all threads of the process over the step's length; 100 is one core."""
    gpu_util_percent: float | None = None

    @property
    def own_s(self) -> float | None:
        """Seconds of this rank's own work, waits for others left out; None where they cannot be told."""
        return None if self.communication_s is None else self.step_s - self.communication_s


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Work between two steps."""

    event: str
    """One of `EVENTS`, or `RESUME`."""
    step: int
    """Optimizer steps done by then."""
    start_s: float
    """As in `StepRecord`."""
    seconds: float
    communication_s: float | None = None
    """Of these, those in which the rank only waited for others, late ones too; absent where that cannot be told."""
    changed: str | None = None
    """Of a `RESUME`: settings that make other steps than those before it, in words; "" where none has changed."""


@dataclass(frozen=True)
class RankLog:
    """All that one rank wrote, in its order."""

    steps: list[StepRecord]
    events: list[EventRecord]


class StepLogWriter:
    """Writes one rank's file."""

    def __init__(
        self, run_folder: str | Path, rank: int, *, keep_until_step: int | None = None, changed: str = ""
    ) -> None:
        """Open the file: new, or going on after step `keep_until_step` of what is there, which is marked.

        Args:
            run_folder: of the run.
            rank: of this process.
            keep_until_step: the last step that is kept, of a run that goes on.
            changed: for the mark; see `EventRecord`.

        Raises:
            OSError: if the file cannot be written to.
        """
        self.path = path = step_log_path(run_folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _whole_lines(path) if _step_of(line) <= keep_until_step] if keep_until_step else []
        replace_file(path, "".join(f"{line}\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._has_failed = False
        if keep_until_step:
            now_s = time.time()
            self.write(EventRecord(event=RESUME, step=keep_until_step, start_s=now_s, seconds=0.0, changed=changed))

    def write(self, record: StepRecord | EventRecord) -> None:
        """Write one line; values that are None or no number are left out.

        A disk that is full does not stop the run: the lines are lost, which is said once.
        """
        fields = vars(record).items()
        kept = {name: value for name, value in fields if value is not None and not _is_nonfinite(value)}
        try:
            self._file.write(json.dumps(kept) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._has_failed:
                logger.error("%s cannot be written to (%s): lines of its steps are lost", self.path, error.strerror)
            self._has_failed = True

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with contextlib.suppress(OSError):  # what could not be written before cannot be now
            self._file.close()


def step_log_path(run_folder: str | Path, rank: int) -> Path:
    """Return the file of one rank."""
    return Path(run_folder) / FOLDER / f"rank{rank:04d}.jsonl"


def read_step_log(run_folder: str | Path) -> dict[int, RankLog]:
    """Return what every rank of a run has written so far.

    A last line that is not whole is left out, and so are keys that this version does not know. Ranks may be behind:
    `common_steps` returns what all of them have.

    Args:
        run_folder: `output_dir/name` of the run.

    Returns:
        By rank, in order; of a step that was written twice the later line.

    Raises:
        FileNotFoundError: if the run has no such files.
        ValueError: if a whole line is no record.
    """
    found = sorted((Path(run_folder) / FOLDER).glob("rank*.jsonl"))
    paths = [path for path in found if path.stem.removeprefix("rank").isdigit()]
    if not paths:
        raise FileNotFoundError(
            f"{Path(run_folder) / FOLDER} has no file rank0000.jsonl: give the folder of a run, output_dir/name, that "
            "has made a step"
        )
    return {int(path.stem.removeprefix("rank")): _read_rank(path) for path in paths}


def common_steps(logs: dict[int, RankLog]) -> dict[int, dict[int, StepRecord]]:
    """Return the steps that every rank of its time has written: by step, then by rank.

    A run that was killed and went on with fewer ranks makes some steps again. The ranks that it lost keep their lines
    of them, as nobody writes to their files any more: of a step, only what the newest run of it wrote counts.
    """
    steps: dict[int, dict[int, StepRecord]] = {}
    for rank, log in logs.items():
        for record in log.steps:
            steps.setdefault(record.step, {})[rank] = record
    found: dict[int, dict[int, StepRecord]] = {}
    for step, ranks in sorted(steps.items()):
        size = max(ranks.values(), key=lambda record: record.start_s).world_size
        num_ranks = size or len(logs)
        of_run = {rank: r for rank, r in ranks.items() if rank < num_ranks and r.world_size == size}
        if len(of_run) == num_ranks:
            found[step] = of_run
    return found


def steps_after_resume(events: list[EventRecord], num_steps: int) -> set[int]:
    """Return the steps before which a run was resumed, and `num_steps` of the first ones after that.

    The time from such a step to the next one is no measure of the run: it holds the pause, or a process's first work.

    Args:
        events: of one rank.
        num_steps: that a process needs to warm up.
    """
    marks = [event.step for event in events if event.event == RESUME]
    return {mark + number for mark in marks for number in range(num_steps + 1)}


def _read_rank(path: Path) -> RankLog:
    steps: dict[int, StepRecord] = {}
    events: list[EventRecord] = []
    for number, line in enumerate(_whole_lines(path), start=1):
        record = parse_record(line, f"{path}, line {number}")
        if isinstance(record, EventRecord):
            events.append(record)
        else:
            steps[record.step] = record
    return RankLog(list(steps.values()), events)


def parse_record(line: str, place: str) -> StepRecord | EventRecord:
    """Return what a whole line says.

    Args:
        line: without its end.
        place: where it stands, for the error message.

    Raises:
        ValueError: if it is no record.
    """
    try:
        row = json.loads(line)
        return _build(EventRecord if "event" in row else StepRecord, row)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{place}: {line[:80]!r} is no record of a step or an event ({error}): remove the line"
        ) from error


def _build(kind: Any, row: dict[str, Any]) -> Any:
    """Make a record of a line's known keys; a known key's value must be of the field's type."""
    allowed, required = _describe_fields(kind)
    known = {name: row[name] for name in allowed if name in row}
    for name, value in known.items():
        numbers = value if isinstance(value, list) else [value]
        if not isinstance(value, allowed[name]) or any(isinstance(number, bool) for number in numbers):
            raise ValueError(f"{name} = {value!r}")
        if isinstance(value, list) and not all(isinstance(number, (float, int)) for number in numbers):
            raise ValueError(f"{name} = {value!r}")
    absent = [name for name in required if name not in known]
    if absent:
        raise ValueError(f"without {', '.join(absent)}")
    return kind(**known)


@functools.cache
def _describe_fields(kind: Any) -> tuple[dict[str, tuple[type, ...]], tuple[str, ...]]:
    """Return the types that a record's fields may have, by name, and the fields that it must have."""
    allowed = {}
    for name, hint in typing.get_type_hints(kind).items():
        types_of = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        types_of = tuple(typing.get_origin(one) or one for one in types_of)
        allowed[name] = (*types_of, int) if float in types_of else types_of
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    return allowed, tuple(required)


def _whole_lines(path: Path) -> list[str]:
    """Return the lines that end, without their ends; none where there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return -1


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
