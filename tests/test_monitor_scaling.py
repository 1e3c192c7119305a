"""Scaling read from step logs, measured on 1, 2 and 4 real ranks, and drawn."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from ranks import run_worker

from vlmcourse.labs.scaling import measure_scaling
from vlmcourse.monitor.scaling import NUM_WARMUP, ScalingReport, analyse_scaling, read_steps
from vlmcourse.monitor.step_log import StepLogWriter, StepRecord
from vlmcourse.planner.efficiency_loss import LOSSES
from vlmcourse.plots import plot_losses_of_efficiency, plot_speedups

FORWARD_S, OPTIMIZER_S, STRAGGLE_S, SENT_S = 0.75, 0.125, 0.25, 0.0625


def write_run(folder: Path, num_ranks: int, kind: str, slow: float = 1.0, **changes: Any) -> Path:
    """Write the logs of a run in which the last rank of several is late and all wait for messages; all times x slow."""
    share = num_ranks if kind == "strong" else 1
    straggle = STRAGGLE_S if num_ranks > 1 else 0.0
    sent = SENT_S * (num_ranks - 1)
    for rank in range(num_ranks):
        is_last = rank == num_ranks - 1
        parts = {
            "data_wait_s": 0.0625 / share,
            "forward_s": FORWARD_S / share + straggle * is_last,
            "backward_s": 2 * FORWARD_S / share,
            "communication_s": sent + straggle * (not is_last),
            "optimizer_s": OPTIMIZER_S,
            "other_s": 0.0,
        }
        writer = StepLogWriter(folder, rank)
        for step in range(1, NUM_WARMUP + 5):
            factor = slow * (50 if step <= NUM_WARMUP else 1)
            scaled: dict[str, Any] = {name: factor * value for name, value in parts.items()}
            record = StepRecord(
                step=step, start_s=float(step), step_s=sum(scaled.values()), world_size=num_ranks, **scaled
            )
            writer.write(dataclasses.replace(record, **changes))
        writer.close()
    return folder


def write_turns(folder: Path, kind: str, sizes: tuple[int, ...] = (1, 2, 4)) -> list[dict[int, str | Path]]:
    slows = (1.0, 1.5, 1.1)
    return [
        {n: write_run(folder / f"{turn}-{n}", n, kind, slow * (1 + 0.01 * n * turn)) for n in sizes}
        for turn, slow in enumerate(slows)
    ]


def analyse(folder: Path, kind: str, **options: Any) -> ScalingReport:
    return analyse_scaling(kind, write_turns(folder, kind), **({"machine": "a machine", "num_cores": 8} | options))


def test_the_split_of_logs_is_that_of_what_was_planted(tmp_path: Path) -> None:
    report = analyse(tmp_path, "strong")
    for n, loss in zip((2, 4), report.losses, strict=True):
        step_s = (0.0625 + 3 * FORWARD_S) / n + OPTIMIZER_S + STRAGGLE_S + SENT_S * (n - 1)
        wanted = {
            "communication": SENT_S * (n - 1),
            "imbalance": STRAGGLE_S * (n - 1) / n,
            "input": 0.0,
            "serial": OPTIMIZER_S * (n - 1) / n,
            "computing": STRAGGLE_S / n,  # what the last rank needed itself
        }
        assert loss.shares == pytest.approx({name: s / step_s for name, s in wanted.items()}, abs=0.02)
        assert sum(loss.shares.values()) == pytest.approx(loss.lost)
    assert [one.num_ranks for one in report.times] == [1, 2, 4] and len(report.times[0].step_s) == 3
    assert report.times[2].communication_s is not None
    assert report.times[2].communication_s[0] == pytest.approx(3 * SENT_S)
    assert report.communication is not None and report.communication.latency_s == pytest.approx(SENT_S, rel=0.5)


def test_a_report_says_what_it_does_not_know(tmp_path: Path) -> None:
    strong = analyse(tmp_path / "strong", "strong", num_cores=2)
    assert strong.crowded == (4,) and "4 ranks share 2 cores" in str(strong) and strong.warning in str(strong)
    assert "proves nothing" in str(strong) and "too few for its width" in str(strong)
    assert strong.gustafson is None and "Amdahl: serial" in str(strong)
    weak = analyse(tmp_path / "weak", "weak", num_cores=None)
    assert weak.crowded == () and not weak.warning and "note:" not in str(weak)
    assert weak.gustafson is not None and "Gustafson" in str(weak) and "Amdahl:" not in str(weak)
    pair = analyse_scaling("strong", write_turns(tmp_path / "p", "strong", (1, 2)), machine="a machine", num_cores=2)
    assert pair.communication is None and pair.comparison is None and str(pair)


def test_logs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", 2, "strong")
    with pytest.raises(ValueError, match=r"of \[2\] ranks: need 1 or more, of 4"):
        read_steps(run, 4)
    with pytest.raises(ValueError, match="0 steps after the first 30"):
        read_steps(run, 2, num_warmup=30)
    blind = write_run(tmp_path / "blind", 2, "strong", communication_s=None)
    with pytest.raises(ValueError, match="does not tell waits for other ranks from work"):
        read_steps(blind, 2)
    with pytest.raises(FileNotFoundError):
        read_steps(tmp_path / "none", 2)
    with pytest.raises(ValueError, match="need 2 turns or more"):
        analyse_scaling("strong", [{1: run}], machine="", num_cores=None)


# --- On real ranks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("scaling")
    run_worker("scaling_worker.py", str(folder), nproc=4)
    return [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(4)]


@pytest.mark.slow
def test_the_tiny_model_is_measured_on_1_2_and_4_ranks(found: list[dict[str, Any]]) -> None:
    assert all(of_rank["reports"] == found[0]["reports"] for of_rank in found)
    reports = found[0]["reports"]
    assert set(reports) == {"strong", "weak"}
    for kind, report in reports.items():
        assert report.kind == kind and [one.num_ranks for one in report.times] == [1, 2, 4]
        assert [len(one.step_s) for one in report.times] == [2, 2, 2] and report.num_cores is not None
        assert all(sum(loss.shares.values()) == pytest.approx(loss.lost) for loss in report.losses)
        assert all(one.communication_s is not None and one.communication_s[0] > 0 for one in report.times[1:])
    assert reports["strong"].times[-1] == reports["weak"].times[-1]  # the same runs
    assert "need 1 and larger ones that divide the largest" in found[0]["refusal"]


@pytest.mark.slow
def test_ranks_form_smaller_groups_and_the_whole_one_again(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        regrouped = of_rank["regrouped"]
        wanted = {n: (rank, n, "gloo" if n > 1 else "none", n if n > 1 else 0) for n in (2, 1, 3) if rank < n}
        assert regrouped["sums"] == wanted and regrouped["after"] == (4, 4)
        failed = "OSError: planted" if rank == 1 else f"RuntimeError: rank {rank}: another rank failed"
        assert regrouped["failure"].startswith(failed), regrouped["failure"]
        assert "num_ranks = 5 of 4" in regrouped["refusal"]


def test_what_cannot_be_measured_is_refused_before_anything_starts() -> None:
    wrong: tuple[dict[str, Any], ...] = ({"num_turns": 1}, {"num_steps": 0}, {"kinds": ("string",)}, {"kinds": ()})
    for options in wrong:
        with pytest.raises(ValueError, match="need some of"):
            measure_scaling(sizes=(1, 2), **options)
    with pytest.raises(ValueError, match="start 2 or more"):
        measure_scaling()


# --- Figures --------------------------------------------------------------------------------------------------------


def texts_of(figure: Figure) -> str:
    figure.draw_without_rendering()
    axes = figure.axes[0]
    texts = [*axes.texts, *figure.legends[0].get_texts(), axes.title, axes.xaxis.label, *axes.get_yticklabels()]
    return " | ".join(text.get_text() for text in texts)


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_figures_show_the_fits_the_losses_and_who_shared_cores(kind: str, tmp_path: Path) -> None:
    report = analyse(tmp_path, kind, num_cores=2)
    drawn = plot_speedups(report)
    shown = texts_of(drawn)
    crowded: Any
    (crowded,) = [line for line in drawn.axes[0].lines if str(line.get_label()).startswith("more ranks")]
    assert list(crowded.get_xdata()) == [4]
    law = "Amdahl" if kind == "strong" else "Gustafson"
    assert all(words in shown for words in (law, "with communication", "more ranks than the 2 cores", "measured, 95 %"))
    shown = texts_of(plot_losses_of_efficiency(report))
    assert all(name in shown for name in (*LOSSES, "efficiency", "4 ranks *", "more ranks than the 2 cores"))
    figure = plot_losses_of_efficiency(dataclasses.replace(report, num_cores=None))
    assert "*" not in texts_of(figure)
    bars: Any = figure.axes[0].patches
    widths = [bar.get_width() for bar in bars]
    assert sum(widths[:6]) == pytest.approx(100)  # the bars of 2 ranks: efficiency and five losses
    assert max(bar.get_x() + bar.get_width() for bar in bars[:6]) == pytest.approx(100)
