"""One line around a loop of one's own: phases that add up, no change of numbers, a diagnosis of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loop_log_worker import NUM_STEPS, PAUSE_S, SLEEP_S
from ranks import run_worker
from torch import Tensor, nn

from vlmcourse.monitor.diagnosis import diagnose
from vlmcourse.monitor.loop_log import log_loop
from vlmcourse.monitor.step_clock import PHASES
from vlmcourse.monitor.step_log import StepRecord, read_step_log

WAIT_S = 0.02


def late_batches(num: int) -> Iterator[Tensor]:
    for _ in range(num):
        time.sleep(WAIT_S)
        yield torch.ones(2, 8)


def train(folder: Path | None, num_steps: int = 9, stop_after: int | None = None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = late_batches(num_steps)
    losses = []
    for x in batches if folder is None else log_loop(batches, folder, model, count_tokens=lambda x: x.numel()):
        loss = model(x).square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        losses.append(loss.item())
        if len(losses) == stop_after:
            break
    return losses


def records_of(folder: Path) -> list[StepRecord]:
    return read_step_log(folder)[0].steps


def test_the_loop_trains_the_same_and_every_step_is_written(tmp_path: Path) -> None:
    assert train(tmp_path) == train(None)
    records = records_of(tmp_path)
    assert [record.step for record in records] == list(range(1, 10))
    for record in records:
        parts = {phase: getattr(record, f"{phase}_s") for phase in PHASES}
        assert sum(parts.values()) == pytest.approx(record.step_s)
        assert parts["data_wait"] >= WAIT_S and parts["communication"] == 0
        assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
        assert record.text_tokens == 16


def test_a_slow_loader_is_what_the_diagnosis_says(tmp_path: Path) -> None:
    train(tmp_path)
    found = diagnose(tmp_path)
    assert found.cause == "data_loading" and found.findings[0].detail == "storage"


def test_a_loop_that_stops_early_leaves_whole_steps_and_no_hooks(tmp_path: Path) -> None:
    assert len(train(tmp_path, stop_after=4)) == 4
    assert [record.step for record in records_of(tmp_path)] == [1, 2, 3]  # the fourth has no end
    assert len(train(None)) == 9  # hooks of a clock that stands still do nothing


def test_on_two_ranks_ddps_wait_is_communication_and_the_sleeping_rank_is_found(tmp_path: Path) -> None:
    run_worker("loop_log_worker.py", str(tmp_path), timeout_s=60)
    logs = read_step_log(tmp_path)
    for before, sleeper in zip(logs[0].steps, logs[1].steps, strict=True):
        assert (sleeper.forward_s or 0) >= SLEEP_S and (before.communication_s or 0) > 0
        assert min(before.other_s or 0, sleeper.other_s or 0) >= PAUSE_S
    assert len(logs[0].steps) == NUM_STEPS
    waits_s = [sum(record.communication_s or 0 for record in logs[rank].steps[2:]) for rank in (0, 1)]
    assert waits_s[0] > waits_s[1]
    found = diagnose(tmp_path)
    assert (found.cause, found.findings[0].rank) == ("slow_rank", 1)
