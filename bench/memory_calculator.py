"""How long the memory calculator takes from a moved slider to the new bar, in the kernel: median and slowest.

    python bench/memory_calculator.py > bench/memory_calculator.md      # a minute

What is not in it: the message to the browser and its drawing. A figure of matplotlib is timed beside it.
"""

from __future__ import annotations

import io
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

GOAL_MS = 50
STATE = ("weights", "gradients", "optimizer", "activations")


def move(calculator: Any, rng: random.Random) -> None:
    """Move one control to another of its values."""
    import ipywidgets as widgets

    control = calculator.controls[rng.choice(list(calculator.controls))]
    if isinstance(control, widgets.IntSlider):
        values = [value for value in range(control.min, control.max + 1) if value != control.value]
        control.value = rng.choice(values)
        return
    options = [option[1] if isinstance(option, tuple) else option for option in control.options]
    control.value = rng.choice([option for option in options if option != control.value])


def measure_updates_ms(num_moves: int, seed: int = 0) -> list[float]:
    """Move random controls and return the milliseconds of each update."""
    from vlmcourse.labs.memory_calculator import MemoryCalculator

    calculator, rng = MemoryCalculator(), random.Random(seed)
    found = []
    for _ in range(num_moves):
        started_s = time.perf_counter()
        move(calculator, rng)
        found.append(1000 * (time.perf_counter() - started_s))
    return found


def measure_figure_ms(num_figures: int) -> list[float]:
    """Draw the same kind of bar with matplotlib into a PNG and return the milliseconds of each."""
    from vlmcourse.plots.style import new_figure, stack_bars

    found = []
    for _ in range(num_figures):
        started_s = time.perf_counter()
        figure, axes = new_figure(1.5)
        stack_bars(axes, 0, dict.fromkeys(STATE, 1.0), horizontal=True)
        figure.savefig(io.BytesIO(), format="png")
        found.append(1000 * (time.perf_counter() - started_s))
    return found


def main() -> None:
    # Of this folder, comm.py would stand for the package that ipywidgets imports.
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    from vlmcourse.machine import describe_machine

    print(f"{describe_machine()}, load {os.getloadavg()[0]:.1f}. Made by `python bench/memory_calculator.py`.\n")
    print(f"| goal: within {GOAL_MS} ms of the slider | median (ms) | slowest (ms) |\n| --- | --- | --- |")
    for name, found in (
        ("calculator, 1000 moves", measure_updates_ms(1000)),
        ("a matplotlib figure, 20", measure_figure_ms(20)),
    ):
        print(f"| {name} | {statistics.median(found):.2f} | {max(found):.2f} |")


if __name__ == "__main__":
    main()
