"""Rows of a run: names, what is absent, and what two ranks' numbers make together."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import pytest
import torch

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.samples import Batch
from vlmcourse.layout import Layout
from vlmcourse.monitor.metrics import TokenCount
from vlmcourse.monitor.peak import Peak
from vlmcourse.monitor.step_clock import StepTimes
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.flops import Work, count_step_flops
from vlmcourse.presets import MODELS
from vlmcourse.train import report, row_meter
from vlmcourse.train.evaluate import ExactMatch
from vlmcourse.train.loss import LossRows, RowLosses
from vlmcourse.train.report import RunTotals, StepReport
from vlmcourse.train.row_meter import RowMeter, count_work, sum_by_input
from vlmcourse.train.rows import COLUMNS, RATE_NAMES, TOWER_NAMES, build_row
from vlmcourse.train.run_monitor import count_contents

SHAPE = MODELS["tiny"]


def test_a_row_has_only_known_names_in_the_order_of_the_columns_and_only_values_that_are_there() -> None:
    step = StepReport(7, 2.5, math.inf, {"vision": 1e-3, "language": 2e-3}, TokenCount(), 0.5, skipped=True)
    measured = {"performance/mfu": 0.25, "performance/hfu": None, "memory/peak_rss_gib": math.nan, "loss/vision": 2.0}
    row = build_row(step, 3.0, measured=measured | {"performance/tokens_per_second": 30.0})
    assert row == {
        "step": 7,
        "time/seconds": 3.0,
        "loss/total": 2.5,
        "loss/vision": 2.0,
        "lr/vision": 1e-3,
        "lr/llm": 2e-3,
        "performance/tokens_per_second": 30,
        "performance/mfu": 0.25,
    }
    assert list(row) == [name for name in COLUMNS if name in row] and len(set(COLUMNS)) == len(COLUMNS)
    assert build_row(step, 3.0, exact_match=0.0)["eval/exact_match"] == 0


def batch_of(lengths: tuple[int, ...], tiles: tuple[int, ...], *, padded_to: int, is_mute: bool = False) -> Batch:
    """Return a micro-batch of samples of some lengths; a tile takes 4 positions."""
    mask_BS = torch.tensor([[i < length for i in range(padded_to)] for length in lengths])
    ids_BS = torch.zeros(len(lengths), padded_to, dtype=torch.int64)
    names = tuple(map(str, range(len(lengths))))
    return Batch(ids_BS, ids_BS, mask_BS, torch.zeros(sum(tiles), 3, 1, 1), tiles, names, 4, is_mute=is_mute)


BATCHES = (
    batch_of((10, 6), (2, 0), padded_to=10),
    batch_of((3,), (0,), padded_to=4),
    batch_of((5,), (1,), padded_to=5, is_mute=True),
)


def test_real_work_is_of_heard_samples_and_executed_work_of_all_that_runs() -> None:
    real, executed = count_work(BATCHES)
    assert real == Work(2, 10 + 6 + 3, 100 + 36 + 9)
    assert executed == Work(2 + 1 + 1, 2 * 10 + 4 + 5, 2 * 100 + 16 + 25)  # a blank tile where there is no image
    # A pipeline's messages are of one size: all micro-batches are as long, and of as many tiles, as the largest.
    assert count_work(BATCHES, is_stacked=True) == (real, Work(3 * 2, 4 * 10, 4 * 100))
    assert count_contents(BATCHES) == {
        "micro_batches": 3,
        "text_tokens": 10 + 6 + 3 - 8,
        "image_tokens": 8,
        "padding_tokens": 4 + 1 + 5,
        "samples": 3,
        "tiles": 2,
    }


def test_losses_are_by_kind_of_their_own_sample() -> None:
    first = RowLosses(torch.tensor([[2.0, 4.0], [0.0, 1.0]]), torch.tensor([[1.0, 2.0], [0.0, 2.0]]), None)
    rows = LossRows(found=[first, RowLosses(torch.tensor([[8.0]]), torch.ones(1, 1), None)])
    found = sum_by_input(BATCHES[:2], rows)
    assert found == {"loss vision": 6, "loss language": 9, "weight vision": 3, "weight language": 3}
    assert row_meter._losses(found) == {"loss/vision": 2, "loss/language": 3}
    assert set(sum_by_input(BATCHES, LossRows()).values()) == {0}


TIMES = StepTimes(10.0, data_wait_s=1, forward_s=2, backward_s=3, communication_s=0.5, optimizer_s=1.5, other_s=2)
CONFIG = parse_config({"model": {"freeze": ["vision"]}, "activations": {"language": "full"}})


def meter_of(config: TrainConfig, layout: Layout, rank: int, times: StepTimes, seconds: float) -> RowMeter:
    """Return one rank's meter after two steps of the same batches."""
    ranks = Ranks(rank=rank, local_rank=rank, world_size=2, device=torch.device("cpu"), backend="none")
    meter = RowMeter(config, SHAPE, layout, ranks)
    for _ in range(2):
        meter.begin(is_due=False)
        meter.add_step(BATCHES, seconds)
        meter.add_times(times)
    for i, tower in enumerate(TOWER_NAMES, start=1):
        meter._tower_squares |= {f"gradient of {tower}": 8.0 * i, f"update of {tower}": 2.0, f"weights of {tower}": 200}
    return meter


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(tp=2)])
def test_a_row_is_of_all_ranks_and_samples_that_they_share_count_once(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_meter, "find_run_peak", lambda ranks, precision: Peak(2e9, "said"))
    slow = dataclasses.replace(TIMES, step_s=10.0, forward_s=2.4, communication_s=0.1)
    meters = [meter_of(CONFIG, layout, 0, TIMES, 10.0), meter_of(CONFIG, layout, 1, slow, 12.0)]
    for meter, wall_s in zip(meters, (40.0, 39.0), strict=True):
        meter._window.began_s = time.perf_counter() - wall_s
        meter._memory = lambda rank=meter.ranks.rank: {  # type: ignore[method-assign]
            "peak_allocated": math.nan, "peak_reserved": math.nan, "peak_rss": 2.0**30 * (1 + rank)
        }  # fmt: skip
    sent = [list(meter._own_numbers().values()) for meter in meters]
    monkeypatch.setattr(row_meter, "gather_numbers", lambda mine, ranks: sent)
    row: dict[str, Any] = meters[0].measure(TokenCount(text=12, visual=36, supervised=6))
    num_own = 2 if layout.dp_degree == 2 else 1  # ranks with samples of their own
    seconds = 2 * 12.0  # of both steps, on the rank that took longest: all rates are over these
    rates = {"tokens": 48, "text_tokens": 12, "image_tokens": 36, "supervised_tokens": 6}
    for kind, count in rates.items():
        assert row[f"performance/{kind}_per_second"] == pytest.approx(count / seconds)
    # By the wall clock, from row to row: what comes between steps counts too.
    assert row["performance/wall_tokens_per_second"] == pytest.approx(48 / 40.0, rel=0.01)
    assert row["performance/samples_per_second"] == pytest.approx(num_own * 2 * 3 / seconds)
    assert row["performance/padding_tokens_per_second"] == pytest.approx(num_own * 2 * 10 / seconds)
    real, executed = (Work(*(2 * num_own * value for value in vars(work).values())) for work in count_work(BATCHES))
    trained = ("projector", "language")
    possible = seconds * 2e9
    assert row["performance/mfu"] == pytest.approx(count_step_flops(SHAPE, real, trained).model / possible)
    hardware = count_step_flops(SHAPE, executed, trained, {"language": "full"}).hardware
    assert row["performance/hfu"] == pytest.approx(hardware / possible)
    means = {"step": 10, "data_wait": 1, "forward": 2.2, "backward": 3, "communication": 0.3, "optimizer": 1.5}
    assert {name: row[f"performance/{name}_seconds"] for name in means} == pytest.approx(means)
    assert row["performance/slowest_rank"] == 1 and row["performance/rank_spread"] == pytest.approx(9.9 / 9.5)
    assert row["memory/peak_rss_gib"] == 2 and math.isnan(row["memory/peak_allocated_gib"])
    assert row["gradients/projector_norm"] == pytest.approx(math.sqrt(2 * 16))
    assert row["updates/llm_ratio"] == pytest.approx(0.1) and "gradients/vision_encoder_norm" not in row
    assert meters[0]._window == row_meter.Window()


def test_a_result_counts_tokens_over_the_seconds_of_the_rank_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank had 5 steps of 0.5 s, of which 3 are warm-up; the other one 1.6 s in the same two, and more memory."""
    totals = RunTotals()
    for step in range(1, 6):
        totals.add(StepReport(step, 2.0, 1.0, {}, TokenCount(text=30, visual=10), 0.5))
    sent: list[list[float]] = []

    def meet(values: list[float], _: Ranks) -> list[float]:
        sent.append(values)
        return [max(pair) for pair in zip(values, (2.0**50, 1.6), strict=True)]

    monkeypatch.setattr(report, "max_over_ranks", meet)
    ranks = Ranks(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"), backend="none")
    how: dict[str, Any] = {"strategy": "ddp", "exact": ExactMatch(0, 0), "global_batch_size": 8, "history": []}
    result = totals.summarise(CONFIG, ranks, Layout(dp_replicate=2), **how)
    assert sent[0][1] == pytest.approx(1.0) and result.tokens_per_s == pytest.approx(2 * 40 / 1.6)
    assert result.peak_bytes == 2**50 and result.train_seconds == pytest.approx(2.5)


def test_towers_are_called_by_their_names_in_rates() -> None:
    assert RATE_NAMES == {"vision": "vision", "projector": "projector", "language": "llm"}
