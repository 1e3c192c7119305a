"""Ledger and throughput."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vlmcourse.monitor import step_cost
from vlmcourse.monitor.ledger import Ledger, measure_ledger
from vlmcourse.monitor.metrics import Throughput, TokenCount, measure_peak_bytes


def test_adam_keeps_two_moments_so_fp32_training_takes_16_bytes_a_weight() -> None:
    model = nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    num_weights = 64 * 32
    before = measure_ledger(model, optimizer)
    assert (before.weights_bytes, before.gradients_bytes, before.optimizer_bytes) == (4 * num_weights, 0, 0)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    ledger = measure_ledger(model, optimizer)
    assert ledger.gradients_bytes == 4 * num_weights
    assert ledger.optimizer_bytes == 8 * num_weights + 4  # two moments, and one step counter
    assert ledger.total_bytes == 16 * num_weights + 4


def test_ledger_counts_tied_weights_once_and_frozen_ones_without_gradient_or_state() -> None:
    first, second, frozen = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    frozen.requires_grad_(False)
    model = nn.Sequential(first, frozen, second)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    ledger = measure_ledger(model, optimizer)
    assert ledger.weights_bytes == 2 * 64 * 4
    assert ledger.gradients_bytes == 64 * 4
    assert ledger.optimizer_bytes == 2 * 64 * 4 + 4


def test_throughput_leaves_the_warm_up_out() -> None:
    throughput = Throughput(num_warmup_steps=2)
    for seconds in (10.0, 10.0, 1.0, 1.0):
        throughput.add(TokenCount(text=60, visual=40, supervised=10), seconds)
    mean = throughput.mean()
    assert (mean.total, mean.text, mean.visual, mean.supervised) == (100, 60, 40, 10)


def test_throughput_of_a_run_shorter_than_the_warm_up_counts_all_of_it() -> None:
    throughput = Throughput(num_warmup_steps=2)
    throughput.add(TokenCount(text=60), 2.0)
    assert throughput.mean().total == 30


def test_tokens_of_a_row_are_counted_anew_at_each_call() -> None:
    throughput = Throughput(num_warmup_steps=0)
    throughput.add(TokenCount(text=100), 1.0)
    assert throughput.take_tokens().text == 100
    throughput.add(TokenCount(text=30), 4.0)
    assert throughput.take_tokens().text == 30


def test_peak_of_the_process_grows_with_what_it_holds() -> None:
    before_bytes, what = measure_peak_bytes(torch.device("cpu"))
    block = torch.ones(before_bytes // 4)  # as much as there ever was, on top of what is there now
    after_bytes, _ = measure_peak_bytes(torch.device("cpu"))
    assert what == "resident set size"
    assert after_bytes >= before_bytes + 0.2 * block.nbytes


def test_a_step_is_timed_from_and_to_moments_when_the_gpu_has_nothing_left_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's work is queued: without waiting, a clock would show how long it takes to ask for it."""
    events: list[str] = []
    now_s = 0.0

    def note(event: str) -> float:
        nonlocal now_s
        events.append(event)
        now_s += 1
        return now_s

    model: Any = nn.Linear(2, 2)
    weight = SimpleNamespace(device=torch.device("cuda", 0))  # as far as the timing goes
    model.parameters = lambda: iter([weight])
    trainer = SimpleNamespace(model=model, optimizer=None, train_step=lambda: note("step"))
    monkeypatch.setattr(step_cost, "time", SimpleNamespace(perf_counter=lambda: note("clock")))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: note("wait"))
    monkeypatch.setattr(step_cost, "measure_ledger", lambda model, optimizer: Ledger(1, 2, 3))
    costs: Any = step_cost.measure_step_costs({"it": trainer}, num_warmup=0, num_timed=1)  # type: ignore[arg-type]
    assert events[:5] == ["wait", "clock", "step", "wait", "clock"]
    assert costs["it"].step_s == 3
