"""One trace of all ranks on one clock, in which every rank has rows of its own.

Enters: a `RankTrace` a rank. Leaves: one JSON object in the Trace Event format, and how far apart the clocks were. Rows
and ids of flows are numbered anew, since every rank counts them from the same numbers; streams of a GPU keep theirs.
Left out: the profiler's own rows ("PyTorch Profiler", "Record Window End") and its own count of steps, which begins
elsewhere than the run's. Perfetto (tried with 52.0) takes no notice of `process_sort_index`: it puts the rank with the
most spans first, and sorts by name, as text, where they have equally many.

Clocks: PyTorch writes wall-clock times. All ranks pass the same barriers, each a span in the trace; no rank can leave
one before the last has reached it. So, for each barrier, what is to be added to the times of rank r lies between
(reached by rank 0) - (left by r) and (left by rank 0) - (reached by r); what all barriers allow is the answer, and half
its width the uncertainty. Source: the bound is that of Cristian 1989, "Probabilistic clock synchronization", section 3,
with a barrier in the place of request and reply. Chapter 6.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlmcourse.monitor.trace_files import CLOCK_MARK, Event, RankTrace, read_traces, split_nested
from vlmcourse.monitor.whole_file import replace_file
from vlmcourse.parallel.overlap import GLOO

MERGED_NAME = "all_ranks.json"
"""What `merge_folder` writes; its name keeps it out of TensorBoard's list of workers."""
ABOUT = "vlmcourse"
"""Key of the merged object under which stand the clocks and whose rows are whose."""
ROWS_PER_RANK, FLOWS_PER_RANK = 100, 2**32
"""Numbers of processes (its own, and one a GPU) and of flows that a rank has to itself."""
OWN_STEP = "ProfilerStep#"
"""What PyTorch calls steps as it counts them, from the start of the profiler; `step 12` is the run's step 12."""
FIRST_EXTRA_TID = 2**30
"""From here on are the rows of spans that cross others; PyTorch's are numbers of threads and streams."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How one rank's clock was set to that of rank 0."""

    rank: int
    added_s: float
    """What was added to its wall-clock times."""
    uncertainty_s: float
    """How far off these may still be."""


def merge_folder(folder: str | Path) -> Path:
    """Write the merged trace of the ranks' traces in a folder, beside them; return its path.

    One process does it, when all ranks have written theirs.

    Raises:
        FileNotFoundError: if traces are missing.
        ValueError: if they cannot be merged.
        OSError: if it cannot be written; then nothing of it is left.
    """
    path = Path(folder) / MERGED_NAME
    replace_file(path, json.dumps(merge_traces(read_traces(folder)), separators=(",", ":")))
    return path


def read_merged(path: str | Path) -> dict[str, Any]:
    """Read a merged trace.

    Raises:
        ValueError: if the file is not one.
    """
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict) or ABOUT not in found:
        raise ValueError(f"{str(path)!r} is no merged trace: give what merge_folder writes")
    return found


def merge_traces(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return one trace of all ranks.

    Args:
        traces: rank by rank, each with the same barriers.

    Returns:
        The JSON object: `traceEvents` in order of time, from 0 us on; under `vlmcourse` the clocks, and for every
        process row its rank and whether it is a GPU.

    Raises:
        ValueError: if a rank has other barriers than rank 0, or there is nothing in a trace.
    """
    traces = [_without_own_steps(trace) for trace in traces]
    clocks = find_clocks(traces)
    start_us = min(
        _shift_us(trace, traces[0], clock) + _first_us(trace) for trace, clock in zip(traces, clocks, strict=True)
    )
    heads: list[Event] = []
    timed: list[Event] = []
    rows: list[dict[str, Any]] = []
    for trace, clock in zip(traces, clocks, strict=True):
        shift_us = _shift_us(trace, traces[0], clock) - start_us
        numbers, gpus = _number_rows(trace), _gpu_pids(trace)
        rows += [{"pid": new, "rank": trace.rank, "is_gpu": old in gpus} for old, new in numbers.items()]
        moved = _move_events(trace, numbers, shift_us)
        heads += _name_rows(trace, numbers) + [event for event in moved if event["ph"] == "M"]
        timed += _untangle([event for event in moved if event["ph"] != "M"], heads)
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    about = {"clocks": [asdict(clock) for clock in clocks], "rows": rows}
    return {"displayTimeUnit": "ms", ABOUT: about, "traceEvents": heads + timed}


def find_clocks(traces: Sequence[RankTrace]) -> list[Clock]:
    """Return what to add to each rank's wall-clock times to have those of rank 0.

    Ranks of one machine read one clock: nothing is added where the barriers allow that. Else it is the middle of what
    they allow; where clocks drift so far within the recorded steps that they allow nothing, the middle is off by at
    most half of what they disagree.

    Raises:
        ValueError: if a rank has other barriers than rank 0.
    """
    first = traces[0]
    reference = _marks_s(first, first)
    clocks = []
    for trace in traces:
        marks = _marks_s(trace, first)
        if len(marks) != len(reference) or (len(traces) > 1 and not marks):
            raise ValueError(
                f"rank {trace.rank} has {len(marks)} spans {CLOCK_MARK!r} and rank {first.rank} has {len(reference)}: "
                "there must be equally many, and some; record all ranks with profile_steps, in one run"
            )
        pairs = list(zip(reference, marks, strict=True))
        low = max((reached - mine[1] for (reached, _), mine in pairs), default=0.0)
        high = min((left - mine[0] for (_, left), mine in pairs), default=0.0)
        is_same = trace is first or (trace.host == first.host != "" and low <= 0 <= high)
        added_s = 0.0 if is_same else (low + high) / 2
        off_s = 0.0 if trace is first else max(abs(high - added_s), abs(added_s - low))
        clocks.append(Clock(rank=trace.rank, added_s=added_s, uncertainty_s=off_s))
    return clocks


def _marks_s(trace: RankTrace, first: RankTrace) -> list[tuple[float, float]]:
    """Return when a rank reached and left each barrier, in seconds of its wall clock since the base of `first`."""
    base_s = (trace.base_ns - first.base_ns) / 1e9
    found = [event for event in trace.events if event.get("ph") == "X" and event.get("name") == CLOCK_MARK]
    # A GPU's copy of a mark (cat gpu_user_annotation) is when its kernels ran.
    found = [event for event in found if event.get("cat") != "gpu_user_annotation"]
    begins = sorted((event["ts"], event["dur"]) for event in found)
    return [(base_s + ts / 1e6, base_s + (ts + dur) / 1e6) for ts, dur in begins]


def _without_own_steps(trace: RankTrace) -> RankTrace:
    return replace(trace, events=[event for event in trace.events if not event.get("name", "").startswith(OWN_STEP)])


def _shift_us(trace: RankTrace, first: RankTrace, clock: Clock) -> float:
    """Return what to add to a trace's times to have those of `first`."""
    return (trace.base_ns - first.base_ns) / 1e3 + 1e6 * clock.added_s


def _first_us(trace: RankTrace) -> float:
    own = _number_rows(trace)
    times = [event["ts"] for event in trace.events if event.get("ph") == "X" and event["pid"] in own]
    if not times:
        raise ValueError(f"the trace of rank {trace.rank} is empty: record it again")
    return min(times)


def _gpu_pids(trace: RankTrace) -> set[Any]:
    """Return the process numbers under which a trace has what a GPU did."""
    return {
        event["pid"]
        for event in trace.events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
    }


def _number_rows(trace: RankTrace) -> dict[Any, int]:
    """Return new numbers of the processes in a trace that have spans, the rank's own first, then its GPUs."""
    gpus = _gpu_pids(trace)
    own = {
        event["pid"]
        for event in trace.events
        if event.get("ph") == "X" and isinstance(event["pid"], int) and event.get("cat") != "Trace"
    }
    ordered = sorted(own, key=lambda pid: (pid in gpus, pid))
    return {pid: ROWS_PER_RANK * (trace.rank + 1) + i for i, pid in enumerate(ordered)}


def _name_rows(trace: RankTrace, numbers: Mapping[Any, int]) -> list[Event]:
    """Return what names the processes of a rank, in such a way that names sort like ranks, and puts them into order."""
    num_digits = len(str(trace.world_size - 1))
    named: list[Event] = []
    gpus = _gpu_pids(trace)
    for old, new in numbers.items():
        name = f"rank {trace.rank:0{num_digits}}" + (f", GPU {old}" if old in gpus else "")
        for kind, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": new})):
            named.append({"ph": "M", "name": kind, "ts": 0, "pid": new, "tid": 0, "args": value})
        if trace.host:
            labels = {"labels": trace.host}
            named.append({"ph": "M", "name": "process_labels", "ts": 0, "pid": new, "tid": 0, "args": labels})
    return named


def _move_events(trace: RankTrace, numbers: Mapping[Any, int], shift_us: float) -> list[Event]:
    """Return the events of a rank with their new times and rows, and with ids of flows that no other rank has.

    Flows of which one end lies outside of the recorded steps are left out.
    """
    ids: dict[tuple[Any, Any], int] = {}
    ends: dict[int, set[str]] = {}
    moved: list[Event] = []
    for event in trace.events:
        is_name = event.get("ph") == "M"
        if event.get("pid") not in numbers or (is_name and event["name"].startswith("process_")):
            continue
        event = event | {"pid": numbers[event["pid"]], "ts": 0 if is_name else round(event["ts"] + shift_us, 3)}
        if "id" in event:
            which = event.get("cat"), event["id"]
            event["id"] = FLOWS_PER_RANK * trace.rank + ids.setdefault(which, len(ids))
            ends.setdefault(event["id"], set()).add(event["ph"])
        moved.append(event)
    return [event for event in moved if event["ph"] not in "sf" or ends[event["id"]] == {"s", "f"}]


def _untangle(events: list[Event], heads: list[Event]) -> list[Event]:
    """Give spans that cross others of their row, such as sends on their way, rows of their own below it."""
    rows: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    next_tid = FIRST_EXTRA_TID
    for (pid, tid), spans in rows.items():
        _, crossing = split_nested(spans)
        if sent := [span for span in spans if crossing and span["name"].startswith(GLOO)]:
            _, crossing = split_nested(span for span in spans if not span["name"].startswith(GLOO))
        for moving in (sent, crossing):
            while moving:
                name = {"name": f"{tid}, across other spans"}
                heads.append({"ph": "M", "name": "thread_name", "ts": 0, "pid": pid, "tid": next_tid, "args": name})
                for span in moving:
                    span["tid"] = next_tid
                _, moving = split_nested(moving)
                next_tid += 1
    return events
