"""Traces of ranks as they lie in a folder: which file is whose, what is in it, and whether it has the form it should.

Enters: a folder of `rank0000.<time>.pt.trace.json`, as `monitor.profiler` writes them. Leaves: a `RankTrace` a rank.
Also checks a trace against the Trace Event format, which Perfetto reads.

Source: "Trace Event Format", Google 2016, sections "Event Descriptions" and "JSON Object Format". Chapter 6.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
"""One entry of `traceEvents`; times in microseconds."""
STEP_PREFIX = "step "
CLOCK_MARK = "clock mark"
"""Names in a trace: what a recorded step's begins with, and that of a barrier that compares clocks."""
TRACE_ENDING = ".pt.trace.json"
ROUNDING_US = 0.0015
"""Traces give times to the nanosecond, so that begins and ends may be this far off."""
PHASES_WITH_TIME = frozenset("XBEsfitCbenNODR")
"""Kinds of event (`ph`) that must have a time."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded."""

    rank: int
    world_size: int
    host: str
    base_ns: int
    """Wall clock to which the times of the events are to be added."""
    events: list[Event]


def rank_name(rank: int) -> str:
    """Return what the name of a rank's file begins with; TensorBoard shows it as the worker."""
    return f"rank{rank:04d}"


def read_traces(folder: str | Path) -> list[RankTrace]:
    """Return the traces of all ranks of a profile, rank by rank.

    Raises:
        FileNotFoundError: if there are none, or those of some ranks are not there.
        ValueError: if a file is no trace, or the traces are of different runs.
    """
    traces: dict[int, RankTrace] = {}
    for path in sorted(Path(folder).glob(f"rank*{TRACE_ENDING}")):  # of one rank, the newest comes last
        trace = read_trace(path)
        traces[trace.rank] = trace
    if not traces:
        raise FileNotFoundError(f"There is no rank*{TRACE_ENDING} in {str(folder)!r}: give the folder of profile_steps")
    sizes = sorted({trace.world_size for trace in traces.values()})
    if len(sizes) > 1:
        raise ValueError(
            f"{str(folder)!r} has traces of runs on {' and '.join(map(str, sizes))} ranks: keep those of one run"
        )
    if missing := sorted(set(range(sizes[0])) - set(traces)):
        raise FileNotFoundError(
            f"{str(folder)!r} has no trace of rank(s) {', '.join(map(str, missing))} of {sizes[0]}: give all ranks one "
            "folder that they share, or copy the files of every machine into it"
        )
    return [traces[rank] for rank in sorted(traces)]


def read_trace(path: Path) -> RankTrace:
    """Read what one rank recorded.

    Raises:
        ValueError: if the file is not what PyTorch's profiler writes.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        place = found.get("distributedInfo", {"rank": 0, "world_size": 1})
        return RankTrace(
            rank=int(place["rank"]),
            world_size=int(place["world_size"]),
            host=str(found.get("host_name", "")),
            base_ns=int(found.get("baseTimeNanoseconds", 0)),
            events=[event for event in found["traceEvents"] if event],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is no trace of PyTorch's profiler ({error}): record it again") from error


def find_format_problems(trace: Mapping[str, Any]) -> list[str]:
    """Return what in a trace is not as the Trace Event format says, or would be dropped when it is shown.

    Args:
        trace: the JSON object.

    Returns:
        Sentences: events without what their kind must have, ids that are no whole numbers, times out of order, B
        without E, flows with one end, spans of one row that overlap without one holding the other.
    """
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        return ["there is no list 'traceEvents'"]
    found: list[str] = []
    for event in events:
        where = f"{event.get('name')!r} (ph {event.get('ph')!r}, ts {event.get('ts')!r})"
        needed = {"ph", "pid", "tid", "name"} | ({"ts"} if event.get("ph") in PHASES_WITH_TIME else set())
        needed |= {"dur"} if event.get("ph") == "X" else {"id"} if event.get("ph") in ("s", "f", "t") else set()
        if missing := sorted(needed - event.keys()):
            found.append(f"{where} has no {', '.join(missing)}")
        elif not isinstance(event["pid"], int) or not isinstance(event["tid"], int):
            found.append(f"{where}: pid {event['pid']!r} and tid {event['tid']!r} must be whole numbers")
        elif event["ph"] == "X" and event["dur"] < 0:
            found.append(f"{where} lasts {event['dur']} us")
    if found:
        return found
    times = [event["ts"] for event in events if event["ph"] in PHASES_WITH_TIME]
    if times != sorted(times):
        found.append("events are not in the order of their times")
    return found + _find_unmatched(events) + _find_crossing(events)


def _find_unmatched(events: Sequence[Event]) -> list[str]:
    """Return what opens and never closes, or closes what is not open."""
    open_spans: Counter[tuple[int, int]] = Counter()
    flows: dict[tuple[Any, Any, Any], set[str]] = {}
    for event in events:
        row = event["pid"], event["tid"]
        if event["ph"] in "BE":
            open_spans[row] += 1 if event["ph"] == "B" else -1
            if open_spans[row] < 0:
                return [f"an E without a B in row {row}"]
        elif event["ph"] in "sf":
            flows.setdefault((event.get("cat"), event["name"], event["id"]), set()).add(event["ph"])
    found = [f"{count} B without E in row {row}" for row, count in open_spans.items() if count]
    lonely = [which for which, ends in flows.items() if ends != {"s", "f"}]
    return found + ([f"{len(lonely)} flows have one end only, the first is {lonely[0]}"] if lonely else [])


def _find_crossing(events: Iterable[Event]) -> list[str]:
    """Return the rows in which a span begins in another and ends after it: no viewer can stack these."""
    rows: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    found = []
    for row, spans in rows.items():
        _, crossing = split_nested(spans)
        if crossing:
            found.append(f"row {row} has {len(crossing)} spans that cross others, the first is {crossing[0]['name']!r}")
    return found


def split_nested(spans: Iterable[Event]) -> tuple[list[Event], list[Event]]:
    """Return the spans of one row that lie within or beside each other, and those that cross one of these."""
    nested: list[Event] = []
    crossing: list[Event] = []
    ends_us: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        end_us = span["ts"] + span["dur"]
        while ends_us and ends_us[-1] <= span["ts"] + ROUNDING_US:
            ends_us.pop()
        if ends_us and end_us > ends_us[-1] + ROUNDING_US:
            crossing.append(span)
        else:
            nested.append(span)
            ends_us.append(end_us)
    return nested, crossing
