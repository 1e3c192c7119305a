"""A trace shows DDP's all-reduces behind the backward pass, and those after it behind nothing."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import read_part
from torch.autograd import DeviceType

from vlmcourse.parallel.overlap import STEP, Communication, StepTrace, intersect, merge, read_trace

NUM_MATRICES, MATRIX_BYTES = 8, 512 * 512 * 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return read_part(tmp_path_factory, "communication_worker.py", "overlap")


def test_ddp_hides_communication_and_reducing_afterwards_does_not(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        in_backward = statistics.median(trace["fraction"] for trace in of_rank["in backward"])
        after = statistics.median(trace["fraction"] for trace in of_rank["after backward"])
        assert in_backward > 0.2, "with a bucket for each matrix, only the last one has nothing to hide behind"
        assert after < 0.05


def test_every_bucket_is_in_the_trace_and_inside_the_step(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for traces in of_rank.values():
            for trace in traces:
                assert [name for name, _, _ in trace["communication"]] == ["gloo:all_reduce"] * NUM_MATRICES
                assert all(0 <= start < end <= trace["seconds"] for _, start, end in trace["communication"])
                assert 0 < trace["communication_s"] <= trace["seconds"]
                assert all(0 <= start <= end <= trace["seconds"] for start, end in trace["compute"])


def test_fractions_are_of_the_time_with_any_collective_on_its_way() -> None:
    trace = StepTrace(
        seconds=10.0,
        compute=((0.0, 4.0), (7.0, 8.0)),
        communication=tuple(
            Communication(name="gloo:all_reduce", start_s=start, end_s=end)
            for start, end in ((3.0, 5.0), (4.0, 7.5), (9.0, 10.0))
        ),
    )
    assert trace.communication_s == 5.5
    assert trace.overlapped_s == 1.5
    assert trace.overlapped_fraction == pytest.approx(1.5 / 5.5)
    assert StepTrace(seconds=1.0, compute=((0.0, 1.0),), communication=()).overlapped_fraction == 0


def test_intervals_merge_and_intersect() -> None:
    assert merge([(3, 4), (0, 1), (1, 2), (3.5, 3.6)]) == ((0, 2), (3, 4))
    assert intersect([(0, 2), (3, 4)], [(1, 3.5), (3.8, 9)]) == ((1, 2), (3, 3.5), (3.8, 4))
    assert intersect([(0, 1)], [(1, 2)]) == ()


def event(name: str, start_us: float, end_us: float, device: DeviceType = DeviceType.CPU) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start_us, end=end_us), device_type=device)


def test_on_a_gpu_kernels_count_and_not_their_launches() -> None:
    gpu = DeviceType.CUDA
    events = [
        event(STEP, 100, 1000),
        event("aten::mm", 110, 120),
        event("sgemm_kernel", 200, 300, gpu),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 250, 350, gpu),
    ]
    trace = read_trace(events, on_gpu=True)
    assert trace.compute[0] == pytest.approx((100e-6, 200e-6)) and len(trace.compute) == 1
    assert trace.overlapped_fraction == pytest.approx(0.5)
    assert trace.seconds == pytest.approx(250e-6)


def test_a_trace_without_a_step_or_without_work_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="recorded no step"):
        read_trace([event("aten::mm", 1, 2)], on_gpu=False)
    with pytest.raises(RuntimeError, match="saw no computation"):
        read_trace([event(STEP, 1, 2)], on_gpu=False)
