"""Traces written by hand, whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmcourse.monitor.trace_files import CLOCK_MARK, RankTrace

MS = 1000.0
"""Microseconds."""
CPU_PID, MAIN, SENDER = 7000, 7000, 7001
"""The ranks' own numbers: the same on both, as in two containers."""
BASE_NS = 1_790_000_000_000_000_000


def span(
    name: str, start_ms: float, end_ms: float, tid: int = MAIN, cat: str = "cpu_op", **more: Any
) -> dict[str, Any]:
    """A span of the main thread; times in milliseconds."""
    times = {"ts": start_ms * MS, "dur": (end_ms - start_ms) * MS}
    return {"ph": "X", "cat": cat, "name": name, "pid": CPU_PID, "tid": tid} | times | more


def flow(name: str, start_ms: float, end_ms: float, number: int) -> list[dict[str, Any]]:
    head = {"cat": "fwdbwd", "name": name, "id": number, "pid": CPU_PID, "tid": MAIN}
    return [head | {"ph": "s", "ts": start_ms * MS}, head | {"ph": "f", "ts": end_ms * MS, "bp": "e"}]


def head() -> list[dict[str, Any]]:
    """What PyTorch writes besides spans of the rank, in part on rows whose ids are words."""
    names = {"ph": "M", "ts": 0.0, "pid": CPU_PID, "tid": 0}
    return [
        names | {"name": "process_name", "args": {"name": "python"}},
        names | {"name": "thread_name", "tid": MAIN, "args": {"name": "thread 7000 (python)"}},
        {"ph": "M", "ts": 0.0, "pid": "Spans", "tid": 0, "name": "process_sort_index", "args": {"sort_index": 9}},
        {"ph": "X", "cat": "Trace", "ts": 0.0, "dur": 1e6, "pid": "Spans", "tid": "PyTorch Profiler", "name": "All"},
        {"ph": "i", "s": "g", "ts": 0.0, "pid": "", "tid": "", "name": "Record Window End"},
    ]


def work(rank: int) -> list[dict[str, Any]]:
    """Two steps of 100 ms from 10 ms on; rank 1 loads data for 50 ms of its first.

    Rank 0: compute 30 + 40 of step 5 (an operator of 30 with one of 10 in it; one of 40), all-reduce 40 behind 20 of
    it, so 20 exposed; then nothing for 10; data 0. Rank 1: data 50, compute 20, all-reduce 10 exposed, nothing 20. In
    step 6 both compute for all of its 100 ms.
    """
    steps = [span("step 5", 10, 110, cat="user_annotation"), span("step 6", 110, 210, cat="user_annotation")]
    later = [span("aten::mm", 110, 210)]
    if rank == 0:
        first = [
            span("phase forward", 10, 40, cat="user_annotation"),
            span("aten::linear", 10, 40),
            span("aten::mm", 15, 25),
            span("phase backward", 40, 100, cat="user_annotation"),
            span("aten::mul", 40, 80),
            span("gloo:all_reduce", 60, 100, tid=SENDER, cat="user_annotation"),
            *flow("fwdbwd", 12, 41, 1),
            {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 2, "pid": CPU_PID, "tid": MAIN, "ts": 13 * MS},
        ]
    else:
        first = [
            span("phase data_wait", 10, 60, cat="user_annotation"),
            span("aten::stack", 58, 60),
            span("phase forward", 60, 80, cat="user_annotation"),
            span("aten::linear", 60, 80),
            span("gloo:all_reduce", 80, 90, tid=SENDER, cat="user_annotation"),
            *flow("fwdbwd", 61, 62, 1),
        ]
    return steps + first + later


def marks(rank: int) -> list[dict[str, Any]]:
    """Two barriers before the steps and one after them; rank 0 comes to each last."""
    late = ((1.0, 1.1), (3.0, 3.1), (220.0, 220.1))
    early = ((0.5, 1.12), (2.0, 3.13), (219.0, 220.2))
    return [span(CLOCK_MARK, *times, cat="user_annotation") for times in ((late, early)[rank])]


def rank_trace(rank: int, clock_ahead_ms: float = 0.0, host: str = "one", more: Sequence[dict] = ()) -> RankTrace:
    """A rank's trace; its clock reads `clock_ahead_ms` more than rank 0's."""
    events = [event for event in head() + work(rank) + marks(rank) + list(more)]
    for event in events:
        event["ts"] += 5e12 + clock_ahead_ms * MS
    return RankTrace(rank=rank, world_size=2, host=host, base_ns=BASE_NS, events=events)


GPU_EVENTS = [
    *({"ph": "M", "ts": 0.0, "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "python"}},),
    *(
        {"ph": "M", "ts": 0.0, "pid": 0, "tid": stream, "name": "thread_name", "args": {"name": f"stream {stream} "}}
        for stream in (7, 20)
    ),
]


def gpu_trace(rank: int) -> RankTrace:
    """One step of 100 ms: the CPU launches forward at 5 and backward at 12 ms, the kernels run at 20-50 and 50-80 ms.

    NCCL's kernel runs at 70-95 ms on its own stream, 15 of it exposed. Data are loaded from 15 to 45 ms, 5 of it before
    the first kernel: a stall; the rest hides behind kernels.
    """

    def launch(name: str, at_ms: float, number: int) -> dict[str, Any]:
        return span(name, at_ms, at_ms + 0.1, cat="cuda_runtime", args={"correlation": number})

    def kernel(name: str, start_ms: float, end_ms: float, number: int, stream: int = 7) -> dict[str, Any]:
        return span(name, start_ms, end_ms, stream, "kernel", args={"correlation": number, "stream": stream}) | {
            "pid": 0
        }

    events = [
        span("step 2", 0, 100, cat="user_annotation"),
        span("phase forward", 4, 10, cat="user_annotation"),
        span("aten::mm", 4, 10),
        launch("cudaLaunchKernel", 5, 1),
        span("phase backward", 10, 14, cat="user_annotation"),
        launch("cudaLaunchKernel", 12, 2) | {"tid": 7009},  # by autograd's thread
        launch("cudaLaunchKernelExC", 13, 3),
        span("phase data_wait", 15, 45, cat="user_annotation"),
        kernel("gemm", 20, 50, 1),
        kernel("gemm_backward", 50, 80, 2),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 70, 95, 3, stream=20),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": CPU_PID, "tid": MAIN, "ts": 5 * MS},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 0, "tid": 7, "ts": 20 * MS, "bp": "e"},
        *(span(CLOCK_MARK, *times, cat="user_annotation") for times in ((-2, -1), (101, 102))),
    ]
    return RankTrace(
        rank=rank,
        world_size=2,
        host="one",
        base_ns=BASE_NS,
        events=[dict(event) for event in head() + GPU_EVENTS + events],
    )
