"""Traces of ranks: one clock, rows of their own, and the answers of traces written by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from handmade_traces import MS, gpu_trace, rank_trace, span

from vlmcourse.monitor.trace_activity import read_activities, read_step_spans
from vlmcourse.monitor.trace_files import find_format_problems, rank_name, read_traces, split_nested
from vlmcourse.monitor.trace_merge import ABOUT, find_clocks, merge_traces, read_merged
from vlmcourse.monitor.trace_summary import EXPOSED, summarise
from vlmcourse.parallel.overlap import subtract
from vlmcourse.spans import BACKWARD, COMMUNICATION, COMPUTE, DATA, FORWARD


def merged(clock_ahead_ms: float = 0.0, host: str = "one") -> dict[str, Any]:
    return merge_traces([rank_trace(0), rank_trace(1, clock_ahead_ms, host)])


def spans_named(trace: dict[str, Any], name: str, rank: int) -> list[tuple[float, float]]:
    """Begin and end in milliseconds."""
    pids = {row["pid"] for row in trace[ABOUT]["rows"] if row["rank"] == rank}
    found = [event for event in trace["traceEvents"] if event["name"] == name and event["pid"] in pids]
    return [(event["ts"] / MS, (event["ts"] + event["dur"]) / MS) for event in found]


def test_what_is_in_the_first_and_not_in_the_second() -> None:
    assert subtract([(0, 4), (5, 9), (10, 11)], [(1, 2), (3, 6), (8, 20)]) == ((0, 1), (2, 3), (6, 8))
    assert subtract([(0, 4)], []) == ((0, 4),) and subtract([], [(0, 4)]) == ()
    assert subtract([(0, 4)], [(0, 4)]) == () and subtract([(1, 2)], [(2, 3), (4, 5)]) == ((1, 2),)


def test_a_clock_that_is_seconds_ahead_is_found_within_what_the_barriers_allow() -> None:
    for ahead_ms in (3000.0, -250.0, 0.0):
        _, clock = find_clocks([rank_trace(0), rank_trace(1, ahead_ms, host="other")])
        # The first barrier allows the most and the least: -0.12 (1.0 - 1.12) to 0.6 ms (1.1 - 0.5) more than -ahead.
        assert clock.added_s + ahead_ms / 1e3 == pytest.approx(0.00024, abs=1e-8)
        assert clock.uncertainty_s == pytest.approx(0.00036, abs=1e-8)


def test_ranks_of_one_machine_keep_its_clock_where_the_barriers_agree() -> None:
    assert [clock.added_s for clock in find_clocks([rank_trace(0), rank_trace(1)])] == [0.0, 0.0]
    _, clock = find_clocks([rank_trace(0), rank_trace(1, 40.0)])  # the same host's name and another clock
    assert clock.added_s == pytest.approx(-0.040, abs=1e-3)


def test_bases_that_differ_by_months_are_taken_into_account() -> None:
    late = rank_trace(1)
    later = 90 * 86400 * 10**9
    moved = [event | {"ts": event["ts"] - later / 1e3} for event in late.events]
    other = type(late)(rank=1, world_size=2, host="one", base_ns=late.base_ns + later, events=moved)
    trace = merge_traces([rank_trace(0), other])
    assert spans_named(trace, "step 5", 1)[0] == pytest.approx(spans_named(trace, "step 5", 0)[0], abs=1e-2)


def test_ranks_without_the_same_barriers_are_refused() -> None:
    lacking = rank_trace(1)
    lacking.events.remove(next(event for event in lacking.events if event["name"] == "clock mark"))
    with pytest.raises(ValueError, match="rank 1 has 2 spans 'clock mark' and rank 0 has 3"):
        merge_traces([rank_trace(0), lacking])


def test_the_merged_trace_has_a_row_a_rank_and_the_form_that_viewers_read() -> None:
    trace = json.loads(json.dumps(merged()))
    assert find_format_problems(trace) == []
    heads = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [event["args"]["name"] for event in heads] == ["rank 0", "rank 1"]
    assert len({event["pid"] for event in heads}) == 2, "both ranks had the same number"
    order = [event["args"]["sort_index"] for event in trace["traceEvents"] if event["name"] == "process_sort_index"]
    assert order == sorted(order)
    flows = {(event["pid"], event["id"]) for event in trace["traceEvents"] if event["ph"] == "s"}
    assert len(flows) == 2 and len({number for _, number in flows}) == 2, "one with both ends on each rank"
    assert min(event["ts"] for event in trace["traceEvents"] if event["ph"] == "X") == 0


def test_names_of_ranks_sort_like_ranks_and_steps_have_one_number() -> None:
    own = [span(f"ProfilerStep#{i}", 100 * i - 95, 100 * i + 5, cat="user_annotation") for i in (1, 2)]
    twelve = [dataclasses.replace(rank_trace(rank % 2, more=own), rank=rank, world_size=12) for rank in range(12)]
    events = merge_traces(twelve)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == sorted(names) and names[2] == "rank 02" and names[10] == "rank 10"
    steps = {event["name"] for event in events if event.get("cat") == "user_annotation" and "tep" in event["name"]}
    assert steps == {"step 5", "step 6"}
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_sends_that_cross_other_spans_get_rows_of_their_own() -> None:
    sent = span("gloo:send", 12, 50, cat="user_annotation")
    trace = merge_traces([rank_trace(0, more=[sent, dict(sent) | {"ts": 14 * MS}]), rank_trace(1)])
    assert find_format_problems(trace) == []
    tids = [event["tid"] for event in trace["traceEvents"] if event["name"] == "gloo:send"]
    assert len(set(tids)) == 2
    linear = [event["tid"] for event in trace["traceEvents"] if event["name"] == "aten::linear"]
    assert len(set(linear)) == 1, "operators stay in their thread's row"
    around = [span("gloo:recv", 50, 70, cat="user_annotation"), span("aten::add", 60, 75)]
    trace = merge_traces([rank_trace(0, more=around), rank_trace(1)])
    [moved], [kept] = (
        [event["tid"] for event in trace["traceEvents"] if event["name"] == name] for name in ("gloo:recv", "aten::add")
    )
    assert moved != kept == linear[0], "what is on its way moves, and not the operator that crosses it"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ph": "X", "name": "a", "ts": 1.0, "pid": 1, "tid": 1}, "has no dur"),
        ({"ph": "X", "name": "a", "ts": 1.0, "dur": -1.0, "pid": 1, "tid": 1}, "lasts -1"),
        ({"ph": "X", "name": "a", "ts": 1.0, "dur": 1.0, "pid": "Spans", "tid": 1}, "must be whole numbers"),
        ({"ph": "B", "name": "a", "ts": 9.0, "pid": 1, "tid": 1}, "1 B without E"),
        ({"ph": "E", "name": "a", "ts": 9.0, "pid": 1, "tid": 1}, "an E without a B"),
        ({"ph": "s", "name": "a", "ts": 9.0, "pid": 1, "tid": 1, "id": 4}, "1 flows have one end"),
        ({"ph": "X", "name": "a", "ts": 0.5, "dur": 0.2, "pid": 1, "tid": 1}, "not in the order"),
        ({"ph": "X", "name": "a", "ts": 2.0, "dur": 9.0, "pid": 1, "tid": 1}, "has 1 spans that cross"),
    ],
)
def test_what_a_viewer_would_drop_is_found(wrong: dict[str, Any], said: str) -> None:
    good = {"ph": "X", "name": "good", "ts": 1.0, "dur": 2.0, "pid": 1, "tid": 1}
    assert find_format_problems({"traceEvents": [good]}) == []
    [found] = find_format_problems({"traceEvents": [good, wrong]})
    assert said in found


def test_spans_that_touch_do_not_cross() -> None:
    parts = [{"name": "a", "ts": at, "dur": 1.0004} for at in (0.0, 1.0, 2.0)]
    assert split_nested(parts) == (parts, [])
    inner, outer = {"name": "inner", "ts": 0.0, "dur": 1.0}, {"name": "outer", "ts": 0.0, "dur": 3.0}
    assert split_nested([inner, outer]) == ([outer, inner], []), "the one that begins with the other holds it"


def test_the_time_of_each_rank_is_split_as_it_was_planted() -> None:
    first, second = summarise(merged()).ranks
    parts = [(of.compute_s, of.exposed_s, of.stall_s, of.idle_s) for of in (first, second)]
    assert parts[0] == pytest.approx((0.170, 0.020, 0, 0.010))
    assert parts[1] == pytest.approx((0.120, 0.010, 0.050, 0.020)), "operators that load data are no computing"
    assert (first.seconds, first.communication_s, second.communication_s) == pytest.approx((0.2, 0.04, 0.01))


def test_the_slowest_rank_the_longest_gap_and_the_operators_are_named() -> None:
    summary = summarise(merged(), num_operators=3)
    assert (summary.slowest.rank, summary.slowest.own_s) == (1, pytest.approx(0.19))
    assert summary.spread == pytest.approx(0.19 / 0.18)  # the other rank has 0.18
    gap = summary.longest_gap
    assert gap is not None
    assert (gap.rank, gap.step, gap.kind, gap.after) == (1, 5, "data stall", "aten::linear")
    assert gap.seconds == pytest.approx(0.050)
    assert {(op.name, op.calls) for op in summary.operators} == {("aten::mm", 3), ("aten::mul", 1), ("aten::linear", 2)}
    assert [op.self_s for op in summary.operators] == pytest.approx([0.21, 0.04, 0.04])
    text = str(summary)
    assert "steps 5 to 6: 100.0 ms a step, on 2 rank(s)" in text and "slowest: rank 1 with 95.0 ms" in text
    assert "50.0 ms on rank 1 in step 5 (data stall)" in text and "50 %" in text


def test_what_lies_between_two_steps_counts_to_the_first_and_what_lies_outside_to_none() -> None:
    shorter = rank_trace(0, more=[span("aten::outside", 212, 218)])
    next(event for event in shorter.events if event["name"] == "step 5")["dur"] -= 5 * MS
    summary = summarise(merge_traces([shorter, rank_trace(1)]), num_operators=99)
    assert summary.ranks[0].seconds == pytest.approx(0.2)
    assert "aten::outside" not in {op.name for op in summary.operators}


def test_the_longest_gap_is_what_most_of_it_was_and_names_its_neighbours() -> None:
    busy = rank_trace(1, more=[span("aten::busy", 10, 110)])
    busy.events[:] = [event for event in busy.events if event["name"] != "phase data_wait"]
    gap = summarise(merge_traces([rank_trace(0), busy])).longest_gap
    assert gap is not None and gap.seconds == pytest.approx(0.030), "20 of all-reduce, 10 of nothing"
    assert (gap.rank, gap.kind, gap.before, gap.after) == (0, EXPOSED, "aten::mul, in gloo:all_reduce", "aten::mm")


def test_a_gap_of_exposed_communication_names_the_collective_and_what_stood_before_it() -> None:
    other = rank_trace(1)
    other.events[:] = [event for event in other.events if event["name"] != "phase data_wait"]
    longer = next(event for event in other.events if event["name"] == "gloo:all_reduce")
    longer |= {"dur": 30 * MS}
    gap = summarise(merge_traces([rank_trace(0), other])).longest_gap
    assert gap is not None and gap.seconds == pytest.approx(0.048), "without the phase it is nothing but idle"
    other.events[:] = [event for event in other.events if event["name"] != "step 5"]
    with pytest.raises(ValueError, match="step 5 was not recorded on every rank"):
        read_step_spans(merge_traces([rank_trace(0), other]), 5)
    first = summarise(merge_traces([rank_trace(0), rank_trace(1)])).ranks[0]
    assert first.exposed_s == pytest.approx(0.02)
    waiting = rank_trace(1)
    for event in waiting.events:
        if event["name"] == "phase data_wait":
            event["name"] = "phase communication"
    gap = summarise(merge_traces([rank_trace(0), waiting])).longest_gap
    assert gap is not None and gap.kind == EXPOSED and gap.before == "the begin of the trace, in phase communication"


def test_what_an_operator_waits_for_is_no_computing() -> None:
    frame, wait = span("aten::addmm", 80, 100), span("_c10d_functional::wait_tensor", 82, 99)
    activity = read_activities(merge_traces([rank_trace(0, more=[frame, wait]), rank_trace(1)]))[0]
    # 80 to 100 is an operator of a sharded tensor: 2 + 1 ms of it are work, and 17 are waiting.
    assert sum(end - begin for begin, end in activity.compute) == pytest.approx(0.173)
    assert sum(end - begin for begin, end in activity.exposed) == pytest.approx(0.017)


def test_a_gpus_kernels_are_what_counts_and_streams_keep_their_rows() -> None:
    trace = merge_traces([gpu_trace(0), gpu_trace(1)])
    assert find_format_problems(json.loads(json.dumps(trace))) == []
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 0, GPU 0", "rank 1", "rank 1, GPU 0"]
    streams = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event.get("cat") == "kernel"}
    assert len(streams) == 4 and {tid for _, tid in streams} == {7, 20}
    labels = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"stream 7 ", "stream 20 "} <= labels
    for of_rank in summarise(trace).ranks:
        parts = (of_rank.compute_s, of_rank.exposed_s, of_rank.stall_s, of_rank.idle_s)
        assert parts == pytest.approx((0.060, 0.015, 0.005, 0.020))
    drawn = {(s.lane, s.name): (s.start_s, s.end_s) for s in read_step_spans(trace) if s.rank == 1}
    assert drawn[COMPUTE, FORWARD] == pytest.approx((0.020, 0.050)), "when its kernels ran, not when it was asked for"
    assert drawn[COMPUTE, BACKWARD] == pytest.approx((0.050, 0.080)), "another thread launched it"
    assert drawn[COMMUNICATION, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"] == pytest.approx((0.070, 0.095))


def test_one_step_becomes_spans_on_one_axis() -> None:
    spans = read_step_spans(merged())
    drawn = {(s.rank, s.lane, s.name): (s.start_s, s.end_s) for s in spans}
    assert drawn[0, COMPUTE, FORWARD] == pytest.approx((0, 0.030))
    assert drawn[0, COMPUTE, BACKWARD] == pytest.approx((0.030, 0.070))
    assert drawn[0, COMMUNICATION, "all_reduce"] == pytest.approx((0.050, 0.090))
    assert drawn[1, DATA, "data_wait"] == pytest.approx((0, 0.050))
    assert {s.name for s in read_step_spans(merged(), 6)} == {"other"}
    with pytest.raises(ValueError, match="step 7 was not recorded on every rank: choose one of 5, 6"):
        read_step_spans(merged(), 7)


def write(folder: Path, rank: int, world_size: int) -> None:
    place = {"rank": rank, "world_size": world_size}
    whole = {"distributedInfo": place, "host_name": "one", "baseTimeNanoseconds": 0, "traceEvents": [{"ph": "M"}]}
    (folder / f"{rank_name(rank)}.17.pt.trace.json").write_text(json.dumps(whole), encoding="utf-8")


def test_a_folder_without_all_ranks_of_one_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no rank"):
        read_traces(tmp_path)
    write(tmp_path, 1, 2)
    with pytest.raises(FileNotFoundError, match=r"no trace of rank\(s\) 0 of 2"):
        read_traces(tmp_path)
    write(tmp_path, 0, 4)
    with pytest.raises(ValueError, match="runs on 2 and 4 ranks"):
        read_traces(tmp_path)
    (tmp_path / "rank0000.18.pt.trace.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is no trace of PyTorch's profiler"):
        read_traces(tmp_path)
    other = tmp_path / "other.json"
    other.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="is no merged trace"):
        read_merged(other)
