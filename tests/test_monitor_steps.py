"""Where the time of a step goes: the clock's phases, waits for other ranks, the file of each rank."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import build_trainer, parity_config
from ranks import run_worker
from ranks_worker import config_in
from step_clock_worker import CASES, REFERENCE, SLEEP_S, SLOW_RANK, build, config_of
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.config import parse_config
from vlmcourse.monitor import peak, rank_spread, step_clock, step_log, waits
from vlmcourse.monitor.energy import EnergyMeter
from vlmcourse.monitor.ledger import measure_ledger
from vlmcourse.monitor.live_run import LiveRun
from vlmcourse.monitor.peak import Peak, find_peak, find_run_peak
from vlmcourse.monitor.step_clock import (
    MAX_WAITS,
    PHASES,
    StepClock,
    StepTimes,
    shorten_waits,
    tells_communication,
)
from vlmcourse.monitor.step_log import (
    RESUME,
    EventRecord,
    RankLog,
    StepLogWriter,
    StepRecord,
    common_steps,
    read_step_log,
    steps_after_resume,
)
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.flops import Work, count_step_flops
from vlmcourse.precision_rules import PRECISIONS
from vlmcourse.strategies import DEEPSPEED, SHARDED
from vlmcourse.train import row_meter
from vlmcourse.train.report import StepReport
from vlmcourse.train.rows import OWNERS, TOWER_NAMES

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
PARTS = [f"{phase}_s" for phase in PHASES]


class FakeTime:
    """A clock that moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(step_clock.time, "perf_counter", lambda: self.now_s)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def parts_of(times: StepTimes) -> dict[str, float]:
    return {name.removesuffix("_s"): value for name, value in vars(times).items() if name not in ("step_s", "waits_s")}


def test_a_moment_belongs_to_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, clock = FakeTime(monkeypatch), StepClock()
    with clock.step():
        fake.pass_s(1)
        with clock.phase("data_wait"):
            fake.pass_s(2)
        with clock.phase("forward"):
            fake.pass_s(4)
            with clock.phase("communication"):
                fake.pass_s(8)
                with clock.phase("communication"):
                    fake.pass_s(16)
            fake.pass_s(32)
        with clock.phase("backward"):
            fake.pass_s(64)
            clock.turn("communication")
            fake.pass_s(128)
        with clock.phase("optimizer"):
            fake.pass_s(256)
        fake.pass_s(512)
    (times,) = clock.take()
    assert times.waits_s == [24, 128]  # one opened inside of the other
    expected = {"data_wait": 2, "forward": 36, "backward": 64, "communication": 152, "optimizer": 256, "other": 513}
    assert parts_of(times) == expected
    assert times.step_s == 1023 and times.own_s == 1023 - 152
    assert clock.take() == [] and not clock.is_running


def test_outside_of_a_step_and_after_one_that_failed_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, clock = FakeTime(monkeypatch), StepClock()
    with clock.phase("forward"):
        clock.turn("communication")
    with pytest.raises(ZeroDivisionError), clock.step(), clock.phase("forward"):
        fake.pass_s(1)
        raise ZeroDivisionError
    assert clock.take() == [] and not clock.is_running
    with clock.step():
        fake.pass_s(2)
    assert [times.step_s for times in clock.take()] == [2]


class FakeEvent:
    """A CUDA event whose moment comes when the GPU has got there."""

    gpu_s = 0.0
    done_s = -1.0

    def record(self, stream: object) -> None:
        self.at_s = FakeEvent.gpu_s

    def query(self) -> bool:
        return self.at_s <= FakeEvent.done_s

    def synchronize(self) -> None:
        FakeEvent.done_s = max(FakeEvent.done_s, self.at_s)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query() or FakeEvent.done_s >= end.at_s, "an event was read before it had come"
        return 1e3 * (end.at_s - self.at_s)


def test_on_a_gpu_a_step_is_read_when_its_events_have_come_and_nothing_waits_for_them() -> None:
    FakeEvent.gpu_s, FakeEvent.done_s = 0.0, -1.0
    with (
        mock.patch.object(torch.cuda, "Event", lambda enable_timing: FakeEvent()),
        mock.patch.object(torch.cuda, "current_stream", lambda device: "the stream"),
    ):
        clock = StepClock(torch.device("cuda", 0))
        for length_s in (1.0, 2.0):
            with clock.step(), clock.phase("forward"):
                FakeEvent.gpu_s += length_s
            if length_s == 1.0:
                assert clock.take() == []
                FakeEvent.done_s = 1.0
        assert [times.forward_s for times in clock.take()] == [1.0]
        assert clock.take() == [] and [times.forward_s for times in clock.take(wait=True)] == [2.0]
        with clock.step():
            assert clock.sees_this_thread()
            seen: list[bool] = []
            thread = threading.Thread(target=lambda: seen.append(clock.sees_this_thread()))
            thread.start()
            thread.join()
            assert seen == [True]  # backward runs in another thread, on the same stream
            with mock.patch.object(torch.cuda, "current_stream", lambda device: "another"):
                assert not clock.sees_this_thread()


def test_where_a_wait_is_between_streams_communication_is_absent_and_not_zero() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for strategy in (*SHARDED, *DEEPSPEED):
        assert not tells_communication(strategy, gpu) and tells_communication(strategy, cpu)
    assert all(tells_communication(strategy, gpu) for strategy in ("single", "ddp", "zero1", "accelerate-ddp"))
    clock = StepClock(tells_communication=False)
    with clock.step(), waits.watch_waits(clock):
        pass
    (times,) = clock.take()
    assert times.communication_s is None and times.own_s is None


def test_waits_of_other_threads_are_not_the_steps() -> None:
    clock, calls = StepClock(), []
    watched = waits._counted(lambda: calls.append(1), [clock])
    with clock.step(), mock.patch.object(clock, "phase", side_effect=clock.phase) as phase:
        thread = threading.Thread(target=watched)
        thread.start()
        thread.join()
        assert phase.call_count == 0
        watched()
        assert phase.call_count == 1
    assert calls == [1, 1]


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Let waits be watched without a process group; return the functions as they are before."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    return dist.Work.wait, waits.functional.wait_tensor


def functions_now() -> tuple[Any, Any]:
    return dist.Work.wait, waits.functional.wait_tensor


def test_what_is_watched_is_put_back_even_after_an_error(watching: tuple[Any, Any]) -> None:
    with waits.watch_waits(StepClock()):
        assert not any(now is before for now, before in zip(functions_now(), watching, strict=True))
    assert functions_now() == watching
    with pytest.raises(ZeroDivisionError), waits.watch_waits(StepClock()):
        raise ZeroDivisionError
    assert functions_now() == watching
    with (
        mock.patch.object(waits, "functional", object()),  # the second place cannot be watched
        pytest.raises(AttributeError),
        waits.watch_waits(StepClock()),
    ):
        pass
    assert functions_now() == watching and not waits._watched


def test_on_a_gpu_the_calls_count_too_since_they_wait_in_the_stream(watching: tuple[Any, Any]) -> None:
    names = [name for name in waits.CALLS if hasattr(dist, name)]
    before = [getattr(dist, name) for name in names]
    with waits.watch_waits(StepClock()):
        assert [getattr(dist, name) for name in names] == before
    with waits.watch_waits(StepClock(torch.device("cuda", 0))):
        assert not any(getattr(dist, name) is function for name, function in zip(names, before, strict=True))
    assert [getattr(dist, name) for name in names] == before and {"all_reduce", "broadcast"} <= set(names)


@pytest.mark.parametrize(("kind", "tail_s"), [(DistributedDataParallel, 4), (torch.nn.Linear, 0)])
def test_what_follows_the_last_gradient_is_the_tail_of_ddp_only(
    kind: type[torch.nn.Module], tail_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, clock = FakeTime(monkeypatch), StepClock()
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: fake.pass_s(2))  # computing a gradient
    with clock.step(), clock.phase("backward"):
        loss = weight.sum()
        step_clock.mark_tail(clock, object.__new__(kind), loss)
        loss.backward()
        fake.pass_s(4)  # DDP's own callback
    (times,) = clock.take()
    assert (times.communication_s, times.backward_s) == (tail_s, 6 - tail_s)


def test_clocks_may_come_and_go_in_any_order(watching: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    monkeypatch.setattr(waits.functional, "wait_tensor", lambda seconds: fake.pass_s(seconds))
    before = functions_now()
    first, second = StepClock(), StepClock()
    with first.step(), second.step():
        outer, inner = waits.watch_waits(first), waits.watch_waits(second)
        outer.__enter__()
        waits.functional.wait_tensor(1)
        inner.__enter__()
        waits.functional.wait_tensor(2)
        outer.__exit__(None, None, None)  # the one that came first leaves first
        waits.functional.wait_tensor(4)
        inner.__exit__(None, None, None)
        assert functions_now() == before
        waits.functional.wait_tensor(8)
    assert [clock.take()[0].communication_s for clock in (first, second)] == [3, 6]


def test_threads_that_watch_leave_nothing_behind(watching: tuple[Any, Any]) -> None:
    def watch() -> None:
        for _ in range(50):
            with waits.watch_waits(StepClock()):
                pass

    threads = [threading.Thread(target=watch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert functions_now() == watching and not waits._watched


def test_what_others_have_replaced_meanwhile_is_theirs(
    watching: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def theirs() -> None: ...

    with waits.watch_waits(StepClock()):
        monkeypatch.setattr(waits.functional, "wait_tensor", theirs)
    assert waits.functional.wait_tensor is theirs and dist.Work.wait is watching[0]
    monkeypatch.setattr(waits.functional, "wait_tensor", watching[1])


def test_an_error_in_a_wait_ends_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, clock = FakeTime(monkeypatch), StepClock()

    def fail() -> None:
        fake.pass_s(1)
        raise ZeroDivisionError

    with clock.step():
        with pytest.raises(ZeroDivisionError):
            waits._counted(fail, [clock])()
        fake.pass_s(2)
    (times,) = clock.take()
    assert (times.communication_s, times.other_s) == (1, 2)


# --- Files ----------------------------------------------------------------------------------------------------------


def test_a_log_is_read_up_to_its_last_whole_line_and_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    writer = StepLogWriter(tmp_path, 0)
    records = [StepRecord(step=i, start_s=float(i), step_s=0.5, samples=3, cpu_percent=float("nan")) for i in (1, 2, 3)]
    for record in records:
        writer.write(record)
    event = EventRecord(event="checkpoint", step=2, start_s=2.5, seconds=0.25)
    dropped = EventRecord(event="log", step=3, start_s=3.5, seconds=0.25)
    writer.write(event)
    writer.write(dropped)
    path = tmp_path / "steps" / "rank0000.jsonl"
    lines = path.read_text().splitlines()  # before the file is closed
    assert json.loads(lines[0]) == {"step": 1, "start_s": 1.0, "step_s": 0.5, "samples": 3}
    with path.open("a") as file:
        file.write('{"step": 4, "start_s": 4.0, "ste')
    (log,) = read_step_log(tmp_path).values()
    assert [record.step for record in log.steps] == [1, 2, 3] and log.events == [event, dropped]
    writer.close()
    began_s = time.time()
    writer = StepLogWriter(tmp_path, 0, keep_until_step=2)
    writer.write(StepRecord(step=3, start_s=9.0, step_s=0.5))
    writer.close()
    (log,) = read_step_log(tmp_path).values()
    assert [(record.step, record.start_s) for record in log.steps] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert log.events[0] == event and [(e.event, e.step, e.seconds) for e in log.events[1:]] == [(RESUME, 2, 0.0)]
    assert began_s <= log.events[1].start_s <= time.time()
    assert steps_after_resume(log.events, 0) == {2} and steps_after_resume(log.events, 2) == {2, 3, 4}
    StepLogWriter(tmp_path, 0).close()
    assert read_step_log(tmp_path)[0] == RankLog([], [])
    assert [path.name for path in path.parent.iterdir()] == ["rank0000.jsonl"]


def test_of_a_step_that_was_made_twice_the_later_line_counts_and_own_work_leaves_waits_out(tmp_path: Path) -> None:
    writer = StepLogWriter(tmp_path, 0)
    for start_s in (1.0, 2.0):
        writer.write(StepRecord(step=1, start_s=start_s, step_s=0.5, communication_s=0.125))
    writer.close()
    (record,) = read_step_log(tmp_path)[0].steps
    assert record.start_s == 2 and record.own_s == 0.375
    assert StepRecord(step=1, start_s=0.0, step_s=0.5).own_s is None


def test_ranks_may_be_behind_and_a_resumed_run_may_have_fewer(tmp_path: Path) -> None:
    for rank, last in ((0, 5), (1, 4), (2, 2)):
        writer = StepLogWriter(tmp_path, rank)
        for step in range(1, last + 1):
            writer.write(StepRecord(step=step, start_s=0.0, step_s=1.0, world_size=3 if step <= 2 else 2))
    assert {step: list(ranks) for step, ranks in common_steps(read_step_log(tmp_path)).items()} == {
        **dict.fromkeys((1, 2), [0, 1, 2]),
        **dict.fromkeys((3, 4), [0, 1]),
    }


def test_steps_made_again_on_fewer_ranks_count_without_what_the_lost_ranks_had_of_them(tmp_path: Path) -> None:
    """4 ranks were killed in step 7 and went on from step 3 on 2, then from step 5 on 3; nobody cut ranks 2 and 3."""
    for rank in range(4):
        writer = StepLogWriter(tmp_path, rank)
        runs = [(1, 7, 4, 0.0)]
        runs += [(4, 8, 2, 100.0)] if rank < 2 else []
        runs += [(6, 9, 3, 200.0)] if rank < 3 else []
        for first, last, size, start_s in runs:
            writer.close()
            writer = StepLogWriter(tmp_path, rank, keep_until_step=first - 1)
            for step in range(first, last + 1):
                writer.write(StepRecord(step=step, start_s=start_s + step, step_s=1.0, world_size=size))
        writer.close()
    steps = common_steps(read_step_log(tmp_path))
    assert {step: list(ranks) for step, ranks in steps.items()} == {
        **dict.fromkeys((1, 2, 3), [0, 1, 2, 3]),
        **dict.fromkeys((4, 5), [0, 1]),
        **dict.fromkeys((6, 7, 8, 9), [0, 1, 2]),
    }
    assert all(record.start_s > 100 for step in (4, 5) for record in steps[step].values())
    old, new = (StepRecord(step=1, start_s=s, step_s=1.0, world_size=n) for s, n in ((0.0, 3), (9.0, 2)))
    assert common_steps({0: RankLog([new], []), 1: RankLog([old], []), 2: RankLog([old], [])}) == {}  # rank 1 is behind


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no json", "no record of a step or an event"),
        ('{"step": 1, "start_s": 0.0}', "without step_s"),
        ('{"step": 1, "start_s": "soon", "step_s": 1.0}', "start_s = 'soon'"),
        ('{"event": "log", "step": 1}', "without start_s, seconds"),
        ("[1]", "no record of a step or an event"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, reason: str) -> None:
    StepLogWriter(tmp_path, 0).close()
    path = tmp_path / "steps" / "rank0000.jsonl"
    path.write_text('{"step": 1, "start_s": 0, "step_s": 1, "new_key": []}\n' + line + "\n")
    with pytest.raises(ValueError, match="rank0000.jsonl, line 2") as caught:
        read_step_log(tmp_path)
    assert reason in str(caught.value)


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give the folder of a run"):
        read_step_log(tmp_path)


def test_a_full_disk_stops_no_run_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = StepLogWriter(tmp_path, 0)
    writer._file.close()
    writer._file = open("/dev/full", "w")  # noqa: SIM115 (closed by close)
    with caplog.at_level(logging.WARNING, logger=step_log.__name__):
        for step in (1, 2, 3):
            writer.write(StepRecord(step=step, start_s=0.0, step_s=1.0))
        writer.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/steps/rank0000.jsonl cannot be written to (No space left on device): lines of its steps are lost"
    ]


def test_a_file_that_cannot_be_replaced_stays_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "energy" / "rank0000.json"
    EnergyMeter().save(tmp_path, 0)
    before = path.read_bytes()
    assert [found.name for found in path.parent.iterdir()] == [path.name]

    def write_no_more(part: Path, _: bytes) -> int:
        part.touch()  # a full disk still takes a name
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_no_more)
    with pytest.raises(OSError, match="No space left"):
        EnergyMeter().save(tmp_path, 0)
    with pytest.raises(OSError, match="No space left"):
        StepLogWriter(tmp_path, 0)
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == before
    assert list((tmp_path / "steps").iterdir()) == []


# --- Runs -----------------------------------------------------------------------------------------------------------


def test_one_process_writes_every_step_with_its_work_and_events(tmp_path: Path) -> None:
    config = config_in(tmp_path, "single", "run", world_size=1, num_steps=4, log_every=2, checkpoint_every=3)
    trainer = build_trainer(config, ALONE, seed=0)
    began_s = time.time()
    trainer.fit()
    (log,) = read_step_log(tmp_path / "run").values()
    assert [record.step for record in log.steps] == [1, 2, 3, 4]
    kinds = [(event.event, event.step) for event in log.events]
    assert kinds == [("log", 2), ("checkpoint", 3), ("checkpoint", 4), ("evaluation", 4), ("log", 4)]
    ends_s = [record.start_s + record.step_s for record in log.steps]
    assert all(event.start_s > ends_s[event.step - 1] - 1e-3 for event in log.events)  # two clocks
    for step, record in enumerate(log.steps):
        assert sum(getattr(record, part) for part in PARTS) == pytest.approx(record.step_s)
        assert record.communication_s == 0 and record.forward_s and record.backward_s and record.optimizer_s
        batches = trainer.load_step(step)
        assert record.micro_batches == len(batches)
        assert record.samples == sum(len(batch.sample_ids) for batch in batches)
        assert record.tiles == sum(batch.pixel_values_ICHW.shape[0] for batch in batches)
        real = sum(int(batch.attention_mask_BS.sum()) for batch in batches)
        assert (record.text_tokens or 0) + (record.image_tokens or 0) == real
        assert record.padding_tokens == sum(int((~batch.attention_mask_BS).sum()) for batch in batches)
        assert record.rss_bytes and record.cpu_percent and record.allocated_bytes is None
        assert began_s <= record.start_s <= record.start_s + record.step_s <= time.time()


def test_a_slow_loader_is_data_wait_and_an_event_lasts_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(parity_config("single", 2, 1, "all towers"), ALONE, seed=0)
    load_step = trainer.load_step
    trainer.load_step = lambda step: (time.sleep(0.2), load_step(step))[1]  # type: ignore[method-assign]
    began_s = time.process_time()
    trainer.train_step()
    assert 0 < trainer.monitor._loading_cpu_s < time.process_time() - began_s
    times = trainer.monitor.last_times
    assert times is not None and times.data_wait_s >= 0.2
    assert times.step_s >= 0.2 + times.forward_s + times.backward_s
    trainer.monitor.open(tmp_path, 0)
    fake = FakeTime(monkeypatch)
    with trainer.monitor.event("log", 1):
        fake.pass_s(1)
        with trainer.monitor._event_clock.phase("communication"):
            fake.pass_s(2)
    trainer.monitor.close()
    (event,) = read_step_log(tmp_path)[0].events
    assert event.seconds == 3 and event.communication_s == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    run_worker("step_clock_worker.py", str(folder), timeout_s=240)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_sleeps_works_longer_and_the_other_one_waits(folder: Path, name: str) -> None:
    steps = common_steps(read_step_log(folder / name))
    assert list(steps) == [1, 2, 3]
    for of_rank in steps.values():
        for record in of_rank.values():
            parts: list[Any] = [getattr(record, part) for part in PARTS]
            assert sum(parts) == pytest.approx(record.step_s) and min(parts) >= 0
    # All of the sleep is the slow rank's forward. The other one waits for what is left of it when its own work is done:
    # the larger part, unless the machine is busy with other things in both of the steps.
    assert all((steps[step][SLOW_RANK].forward_s or 0) >= SLEEP_S for step in (2, 3))
    waits_s = [steps[step][1 - SLOW_RANK].communication_s or 0 for step in (2, 3)]
    assert max(waits_s) >= SLEEP_S / 3
    for record in (record for of_rank in steps.values() for record in of_rank.values()):
        assert sum(record.waits_s or ()) == pytest.approx(record.communication_s, abs=1e-4)
        assert 0 < len(record.waits_s or ()) <= MAX_WAITS
    counts = {len(record.waits_s or ()) for record in steps[3].values()}
    assert len(counts) == 1 or name == "pp"  # can be compared exchange by exchange


@pytest.mark.slow
def test_what_a_row_waits_for_a_late_rank_is_a_wait(folder: Path) -> None:
    """In "ddp" the slow rank sleeps after step 2 as well, before it comes to the row."""
    events = {rank: log.events for rank, log in read_step_log(folder / "ddp").items()}
    (waits,), (late,) = ([e for e in events[rank] if (e.event, e.step) == ("log", 2)] for rank in (1 - SLOW_RANK, 1))
    assert (waits.communication_s or 0) >= SLEEP_S / 3 and waits.seconds >= (waits.communication_s or 0)
    assert late.communication_s is not None and late.communication_s < SLEEP_S / 3


def test_many_waits_are_added_up_alike() -> None:
    waits_s = [0.001 * i for i in range(MAX_WAITS * 2 + 1)]
    short = shorten_waits(waits_s)
    assert len(short) == 11 and sum(short) == pytest.approx(sum(waits_s)) and short[0] == pytest.approx(0.003)
    assert shorten_waits([]) == [] and shorten_waits([0.5]) == [0.5]


# --- Rows -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of one process, by the name of the reference."""
    folder = tmp_path_factory.mktemp("alone")
    sizes = {"alone": 4, "alone, twice as many": 8}
    return {name: build(config_of(folder, name, micro_batch_size=n), ALONE).fit().history for name, n in sizes.items()}


OF_THE_RANK = ("hardware/", "energy/", "performance/gpu_util", "performance/memory_used_gb")
"""Beginnings of the names of what each rank's sampler sees of its own device or process."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_by_kind_and_norms_by_tower_are_those_of_one_process(
    folder: Path, alone: dict[str, list[dict[str, Any]]], name: str
) -> None:
    rows = [json.loads((folder / f"found{rank}.json").read_text())[name]["history"] for rank in (0, 1)]
    expected = alone[REFERENCE.get(name, "alone, twice as many")]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in expected] == [2, 3]
    by_tower = [f"gradients/{tower}_norm" for tower in TOWER_NAMES.values()]
    by_tower += [f"updates/{tower}_ratio" for tower in TOWER_NAMES.values()]
    for mine, other, one in zip(*rows, expected, strict=True):
        shared = [
            {key: value for key, value in row.items() if key != "time/seconds" and not key.startswith(OF_THE_RANK)}
            for row in (mine, other)
        ]
        assert shared[0] == shared[1]
        losses = [key for key in one if key.startswith("loss/")]
        assert [key for key in mine if key.startswith("loss/")] == losses and len(losses) > 5  # digits' kinds as well
        for key in (*losses, "gradients/norm"):
            assert mine[key] == pytest.approx(one[key], rel=1e-3), key
        if name == "deepspeed-zero1":
            assert not any(key in mine for key in by_tower)
            continue
        for key in by_tower:
            assert mine[key] == pytest.approx(one[key], rel=0.01), key
        norms = [mine[f"gradients/{tower}_norm"] for tower in TOWER_NAMES.values()]
        assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(mine["gradients/norm"], rel=1e-4)


@pytest.mark.slow
def test_bytes_by_owner_are_what_the_fullest_rank_holds(folder: Path) -> None:
    found = json.loads((folder / "found0.json").read_text())
    last = {name: case["history"][-1] for name, case in found.items()}
    whole = {owner: last["ddp"][f"memory/{owner}_gib"] for owner in ("weights", "gradients", "optimizer")}
    assert whole["optimizer"] == pytest.approx(2 * whole["weights"], rel=0.01)
    for name, owners in (("fsdp", whole), ("pp", ("weights", "optimizer")), ("zero1", ("optimizer",))):
        for owner in owners:  # parts are rounded up: embeddings of a stage, rows of a shard, whole weights of ZeRO-1
            assert 0.45 * whole[owner] < last[name][f"memory/{owner}_gib"] < 0.8 * whole[owner], (name, owner)
    assert last["deepspeed-zero1"]["memory/weights_gib"] > 0.9 * whole["weights"]


@pytest.mark.slow
def test_the_rank_that_sleeps_is_named(folder: Path) -> None:
    rows = [row for case in json.loads((folder / "found0.json").read_text()).values() for row in case["history"]]
    named = [row["performance/slowest_rank"] for row in rows]
    assert named.count(SLOW_RANK) > len(rows) / 2  # a busy machine may let another one be slower now and then
    assert all(row["performance/rank_spread"] >= 1 for row in rows)


@pytest.mark.parametrize("asked", [True, False])
def test_bytes_by_owner_are_those_of_the_ledger_where_asked(tmp_path: Path, asked: bool) -> None:
    table = {
        "run": {"output_dir": str(tmp_path)},
        "train": {"num_steps": 2, "micro_batch_size": 4, "log_every": 2, "eval_every": 0},
        "logging": {"memory_owners": asked},
    }
    trainer = build(parse_config(table), ALONE)
    found: list[dict[str, int]] = []
    trainer.after_step.append(lambda trainer, _: found.append(vars(measure_ledger(trainer.model, trainer.optimizer))))
    (row,) = trainer.fit().history
    owners = {owner: row.get(f"memory/{owner}_gib") for owner in OWNERS}
    expected = {owner: found[-1][f"{owner}_bytes"] / 2**30 if asked else None for owner in OWNERS}
    assert owners == expected
    assert found[-1]["optimizer_bytes"] > found[-1]["weights_bytes"] > 0
    assert LiveRun(tmp_path / trainer.config.run.name).read().owners_bytes == {
        owner: found[-1][f"{owner}_bytes"] for owner in (OWNERS if asked else ())
    }


@pytest.mark.parametrize("freeze", [[], ["vision"]])
def test_utilisation_is_flops_of_real_tokens_over_time_and_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freeze: list[str]
) -> None:
    monkeypatch.setattr(row_meter, "find_run_peak", lambda ranks, precision: Peak(1e9, "said"))
    config = parse_config(
        {
            "run": {"output_dir": str(tmp_path)},
            "train": {"num_steps": 3, "micro_batch_size": 4, "accumulation_steps": 2, "log_every": 2},
            "model": {"freeze": freeze},
            "activations": {"language": "full"},
        }
    )
    trainer = build(config, ALONE)
    reports: list[StepReport] = []
    trainer.after_step.append(lambda trainer, report: reports.append(report))
    history = trainer.fit().history
    trained = [tower for tower in TOWER_NAMES if tower not in freeze]
    for row, steps in zip(history, ([0, 1], [2]), strict=True):
        batches = [batch for step in steps for batch in trainer.load_step(step)]
        real, executed, num_padding, num_samples = Work(), Work(), 0, 0
        for batch in batches:
            num_tiles = batch.pixel_values_ICHW.shape[0]
            real += Work.of_sequences([int(mask.sum()) for mask in batch.attention_mask_BS], num_tiles)
            executed += Work.of_sequences([len(mask) for mask in batch.attention_mask_BS], max(1, num_tiles))
            num_padding += int((~batch.attention_mask_BS).sum())
            num_samples += len(batch.sample_ids)
        seconds = sum(reports[step].seconds for step in steps)
        model = count_step_flops(trainer.shape, real, trained).model
        hardware = count_step_flops(trainer.shape, executed, trained, {"language": "full"}).hardware
        # Seconds of a report leave out what the monitor itself does at the beginning of a step.
        assert row["performance/mfu"] == pytest.approx(model / seconds / 1e9, rel=0.05)
        assert row["performance/hfu"] / row["performance/mfu"] == pytest.approx(hardware / model)
        assert row["performance/padding_tokens_per_second"] / row["performance/samples_per_second"] == pytest.approx(
            num_padding / num_samples
        )
        parts = [row[f"performance/{phase}_seconds"] for phase in PHASES]
        assert sum(parts) == pytest.approx(row["performance/step_seconds"], rel=0.01)
        assert row["memory/peak_rss_gib"] > 0 and "memory/peak_allocated_gib" not in row
        assert row["gradients/llm_norm"] > 0 and row["updates/llm_ratio"] > 0  # of step 3 too
        absent = [f"gradients/{TOWER_NAMES[tower]}_norm" for tower in freeze]
        assert not any(name in row for name in ("performance/slowest_rank", *absent))


def test_rates_of_a_row_are_over_one_clock_and_of_the_steps_of_the_run(tmp_path: Path) -> None:
    trainer = build(config_of(tmp_path, "run", num_steps=2), ALONE)
    trainer.train_step()  # by hand, before the run: in no row
    reports: list[StepReport] = []
    trainer.after_step += [lambda _, report: reports.append(report), lambda *_: time.sleep(0.2)]
    (row,) = trainer.fit().history
    (report,) = reports
    samples = sum(len(batch.sample_ids) for batch in trainer.load_step(1))
    rate = row["performance/tokens_per_second"]
    assert rate / row["performance/samples_per_second"] == pytest.approx(report.tokens.total / samples)
    assert report.tokens.total / rate == pytest.approx(report.seconds, rel=0.05)
    # The callback is in the wall clock's seconds only.
    wall_s = report.tokens.total / row["performance/wall_tokens_per_second"]
    assert 0.2 + report.seconds < wall_s < row["time/seconds"]


def test_a_machine_of_unknown_peak_has_no_utilisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_meter, "find_run_peak", lambda ranks, precision: None)
    (row,) = build(config_of(tmp_path, "run", num_steps=1), ALONE).fit().history
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["hardware"]["peak_flop_per_s"] is None and "no MFU" in about["hardware"]["peak_source"]
    assert "performance/mfu" not in row and "performance/hfu" not in row and row["performance/samples_per_second"] > 0


def test_a_peak_is_of_the_datasheet_or_measured_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for name, precision, expected in (
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),  # TF32 is off
        ("NVIDIA H100 PCIe", "bf16", 756e12),  # another peak than the SXM card's
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Some new card", "fp32", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = find_peak(gpu, precision)
        assert (found and found.flop_per_s) == expected, name
    measured = find_peak(torch.device("cpu"), "fp32")
    assert measured is not None and measured.flop_per_s > 1e8 and measured.source.startswith("measured: ")
    assert find_peak(torch.device("cpu"), "fp32") is measured  # once a process
    assert find_peak(torch.device("cpu"), "fp16") is None and set(peak.DTYPES) == set(PRECISIONS)


def test_a_measured_peak_is_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products go on until their time is over, so that a busy moment, the first three here, does not lower the peak."""
    lengths_s = iter([0.03, 0.05, 0.04, 0.002, 0.05, 0.05, 9.0])
    now_s = 50.0

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        nonlocal now_s
        now_s += next(lengths_s)

    monkeypatch.setattr(peak.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(peak.torch, "mm", product)
    for num_threads, side in ((1, 384), (2, 384), (8, 1152)):
        lengths_s = iter([0.03, 0.05, 0.04, 0.002, 0.05, 0.05, 9.0])
        found = peak._measure_cpu.__wrapped__("fp32", num_threads)
        assert found.flop_per_s == pytest.approx(2 * side**3 / 0.002) and next(lengths_s) == 9.0
    lengths_s = iter([1.0, 2.0, 0.5, 9.0])  # on a slow machine three will do
    assert peak._measure_cpu.__wrapped__("fp32", 1).flop_per_s == pytest.approx(2 * 384**3 / 0.5)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(10.0, 1, 2, 0, 7)], (10.0, 1)),
        ([(10.0, 1, 2, 0, 7), (10.0, 1, 2, 1, 7)], (20.0, 2)),
        ([(10.0, 1, 2, 0, 7), (5.0, 1, 2, 1, 7)], (20.0, 2)),  # rank 1 has measured in a busy moment
        ([(10.0, 1, 2, i, 7) for i in range(4)], (20.0, 2)),  # two cores do no more for four ranks
        ([(18.0, 2, 2, i, 7) for i in range(2)], (18.0, 2)),
        ([(18.0, 4, 2, 0, 7)], (18.0, 2)),  # more threads than cores
        ([(10.0, 1, 1, 0, 7), (10.0, 1, 1, 1, 8)], (20.0, 2)),  # each is bound to a core of its own
        ([(10.0, 1, 2, i % 2, 7) for i in range(4)], (40.0, 4)),  # two machines
        ([(10.0, 1, 2, 0, 7), (4.0, 1, 2, 0, 7)], (14.0, 2)),  # of which one is slower
    ],
)
def test_ranks_together_do_no_more_than_their_cores(
    ranks: list[tuple[float, ...]], expected: tuple[float, int]
) -> None:
    assert peak.add_peaks([peak.RankPeak(*rank) for rank in ranks]) == pytest.approx(expected)


def test_the_peak_of_a_run_is_of_all_ranks_and_unknown_if_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "find_peak", lambda device, precision: Peak(10.0, "said"))
    monkeypatch.setattr(peak, "num_usable_cores", lambda: 8)
    monkeypatch.setattr(peak.torch, "get_num_threads", lambda: 1)

    def tell(other: float) -> None:
        """Rank 1 has measured `other`."""
        monkeypatch.setattr(peak, "gather_numbers", lambda mine, _: [mine, [other, *mine[1:3], 1.0, mine[4]]])

    for other, expected in ((10.0, 20.0), (30.0, 60.0), (float("nan"), None)):
        tell(other)
        found = peak.find_run_peak(ALONE, "fp32")
        assert (found and found.flop_per_s) == expected
        assert found is None or found.source == "said; 2 rank(s) on 2 core(s)"
    tell(30.0)
    gpus = dataclasses.replace(ALONE, device=torch.device("cuda", 0))
    assert peak.find_run_peak(gpus, "fp32") == Peak(40.0, "said; 2 rank(s)")  # two cards


def test_a_run_says_what_its_utilisation_is_of(tmp_path: Path) -> None:
    (row,) = build(config_of(tmp_path, "run", num_steps=1), ALONE).fit().history
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    found = find_run_peak(ALONE, "fp32")
    assert found is not None and found.flop_per_s == about["hardware"]["peak_flop_per_s"] > 1e8
    assert about["hardware"]["peak_source"].startswith("measured: best of ") and row["performance/mfu"]
    assert {"performance/mfu", "performance/hfu", "seconds", "FLOPs"} == set(about["formulas"])


def test_the_slowest_rank_has_the_longest_work_of_its_own_not_the_longest_step() -> None:
    def rank(step_s: float, communication_s: float) -> dict[str, float]:
        return {"timed": 2.0, "step_s": step_s, "communication_s": communication_s}

    ranks = [rank(10, 8), rank(10, 2), rank(11, 7)]
    assert row_meter._spread(ranks) == {"performance/slowest_rank": 1, "performance/rank_spread": 8 / 3}
    assert row_meter._spread([*ranks, rank(10, float("nan"))]) == {} and row_meter._spread(ranks[:1]) == {}


def test_the_slowest_rank_is_compared_with_the_others_of_which_it_is_none() -> None:
    assert rank_spread.find_slowest({0: 1.0, 1: 100.0}) == (1, 100.0)  # with its own time in the median: 1.98
    assert rank_spread.find_slowest({0: 3.0, 1: 1.0, 2: 2.0, 3: 1.0}) == (0, 3.0)
    assert rank_spread.find_slowest({4: 2.0, 5: 2.0}) == (4, 1.0)
    assert rank_spread.find_slowest({0: 1.0}) == rank_spread.find_slowest({0: 1.0, 1: 0.0}) == (0, None)
    assert rank_spread.describe_slowest(2) == "the other rank's"
