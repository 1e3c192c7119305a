"""What measuring a run costs: the step clock, the step log and the rows, against the step that they measure.

    python bench/step_monitor.py                              # one rank
    torchrun --nproc-per-node 2 bench/step_monitor.py         # two; rank 0 prints the table

Two ways, since the cost is smaller than what a step's length varies by. "Alone": everything that the monitor does in a
step, with as many marks as a real one has and nothing between them, and what it does for a row over `log_every`.
"In turns": steps with and without it, one after the other. By CPU time of the rank, which other programs on the machine
change least, and by the clock. The tiny model is the worst case: its steps are the shortest.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vlmcourse.config import load_config
from vlmcourse.machine import describe_machine
from vlmcourse.monitor.step_clock import StepClock
from vlmcourse.parallel.comm import wait_for_all
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.train.loss import LossRows
from vlmcourse.train.rows import build_row
from vlmcourse.train.trainer import Trainer

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "tiny.toml"
GOAL_PERCENT = 1.0


class NoMonitor:
    """Stands where a trainer has its `RunMonitor`, and does nothing."""

    def __init__(self) -> None:
        self.clock, self.meter = StepClock(), self
        self.loss_rows = LossRows()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run what is inside."""
        yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Run what is inside."""
        yield

    def ignore(self, *_: Any) -> None:
        """Do nothing."""

    step_done = see_gradients = see_update = ignore


def spent(run: Callable[[], object]) -> tuple[float, float]:
    """Return CPU and wall milliseconds of one call."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    run()
    return 1e3 * (time.process_time() - cpu_s), 1e3 * (time.perf_counter() - wall_s)


def medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(cpu for cpu, _ in times), statistics.median(wall for _, wall in times)


def measure_alone(trainer: Trainer, num_marks: int, repeats: int) -> tuple[float, float]:
    """Return what the monitor itself takes in a step, the log's line included."""
    monitor, batches = trainer.monitor, trainer.load_step(0)

    def step() -> None:
        with monitor.step(1):
            for _ in range(num_marks // 2):
                with monitor.clock.phase("forward"):
                    pass
        monitor.step_done(1, batches)

    return medians([spent(step) for _ in range(repeats)])


def measure_row(trainer: Trainer, ranks: Ranks, repeats: int) -> tuple[float, float]:
    """Return what a row takes: looking at the gradients and the update, the exchange, the arithmetic."""
    meter, times = trainer.monitor.meter, []
    for _ in range(repeats):
        report = trainer.train_step()
        meter.loss_rows.is_open = True
        wait_for_all(ranks)  # the exchange, and not what the ranks wait for each other

        def row(report: Any = report) -> None:
            meter.see_gradients(trainer.model, trainer.optimizer)
            meter.see_update(trainer.model, trainer.optimizer)
            build_row(report, 1.0, None, meter.measure(report.tokens))

        times.append(spent(row))
    return medians(times)


def count_marks(trainer: Trainer) -> int:
    """Return how many marks the clock makes in a step."""
    found: list[int] = []
    take = trainer.monitor.clock.take
    trainer.monitor.clock.take = lambda **_: (  # type: ignore[method-assign]
        found.append(len(trainer.monitor.clock._pending[0])),
        take(),
    )[1]
    trainer.train_step()
    trainer.monitor.clock.take = take  # type: ignore[method-assign]
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of each kind, in turns")
    parser.add_argument("--repeats", type=int, default=300, help="of the monitor's calls alone")
    arguments = parser.parse_args()
    ranks = init_ranks(timeout_s=120)
    strategy = "ddp" if ranks.world_size > 1 else "single"
    config = load_config(CONFIG, {"parallel.strategy": strategy, "data.num_train_samples": 4096})
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, output_dir=folder))
        trainer = Trainer(config, ranks, show_progress=False)
        with_it, without = trainer.monitor, NoMonitor()
        with_it.open(Path(folder), 0)
        for _ in range(5):
            trainer.train_step()
        num_marks = count_marks(trainer)
        turns: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
        for _ in range(arguments.steps):
            for name, monitor in (("without", without), ("with", with_it)):
                trainer.monitor = monitor  # type: ignore[assignment]
                turns[name].append(spent(trainer.train_step))
        alone = measure_alone(trainer, num_marks, arguments.repeats)
        row = measure_row(trainer, ranks, 20)
        with_it.close()
    if ranks.is_main:
        off, on = medians(turns["without"]), medians(turns["with"])
        print_table(config.train.log_every, ranks, num_marks, off, on, alone, row)
    shutdown_ranks()


def print_table(
    log_every: int,
    ranks: Ranks,
    num_marks: int,
    without: tuple[float, float],
    with_it: tuple[float, float],
    alone: tuple[float, float],
    row: tuple[float, float],
) -> None:
    print(f"Machine: {ranks.world_size} ranks, {ranks.backend}, {describe_machine()}, torch {torch.__version__}")
    print(f"Model: configs/tiny.toml, {num_marks} marks a step, a row every {log_every} steps; medians\n")
    print("| | CPU of the rank (ms) | clock (ms) |\n|---|---|---|")
    for name, (cpu_ms, wall_ms) in (
        ("step without", without),
        ("step with, in turns", with_it),
        ("clock and step log alone, a step", alone),
        ("row, each", row),
    ):
        print(f"| {name} | {cpu_ms:.3f} | {wall_ms:.3f} |")
    total = [100 * (alone[i] + row[i] / log_every) / without[i] for i in (0, 1)]
    clock_alone = [100 * alone[i] / without[i] for i in (0, 1)]
    print(f"| **clock and step log, of a step** | **{clock_alone[0]:.2f} %** | **{clock_alone[1]:.2f} %** |")
    print(f"| **with rows, of a step** | **{total[0]:.2f} %** | **{total[1]:.2f} %** |")
    print(f"\nThe goal is under {GOAL_PERCENT:g} % of a step.")


if __name__ == "__main__":
    main()
