"""The planner's bytes by owner beside the ledger of real steps on CPU ranks, for every strategy of the course.

    python bench/planner_vs_ledger.py > bench/planner_vs_ledger.md      # two to four minutes on two cores

Each line is a rank: measured bytes, and predicted / measured - 1. Weights, gradients and optimizer state are those
between backward and update, activations the most that is kept for backward at once, peak is everything at the fullest
moment. What does not come out within 3 % by owner is listed at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from vlmcourse.labs.memory_check import CHECKED, OWNERS, TOLERANCE, Comparison, checked_shape
from vlmcourse.notebook.launcher import run_ranks

WORKER = Path(__file__).parent.parent / "tests" / "memory_worker.py"
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 900


def measure(num_ranks: int) -> list[Comparison]:
    """Run all strategies for a number of ranks; return the comparisons of the first and the last rank."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks([sys.executable, str(WORKER), folder], num_ranks, timeout_s=TIMEOUT_S, env=CPU_ONLY)
        found: list[Comparison] = []
        for rank in sorted({0, num_ranks - 1}):
            rows = json.loads((Path(folder) / f"found{rank}.json").read_text(encoding="utf-8"))
            found += [Comparison(**row) for row in rows]
    order = list(CHECKED[num_ranks])
    return sorted(found, key=lambda row: (order.index(row.strategy), row.rank))


def print_table(rows: list[Comparison]) -> None:
    """Print a line for each rank."""
    print(f"| strategy | rank | {' | '.join(OWNERS)} | peak |\n|" + " --- |" * (3 + len(OWNERS)))
    for row in rows:
        cells = [f"{row.measured[owner] / 1e6:.3f} MB, {100 * row.error(owner):+.2f} %" for owner in OWNERS]
        cells.append(f"{row.peak_measured / 1e6:.3f} MB, {100 * row.peak_error:+.2f} %")
        print(f"| {row.strategy} | {row.rank} | {' | '.join(cells)} |")


def main() -> None:
    """Measure and print."""
    shape = checked_shape()
    print("Made by `python bench/planner_vs_ledger.py` on CPU ranks; errors are predicted / measured - 1.")
    print(
        f"The model: {shape.vision.num_layers} vision and {shape.language.num_layers} language layers, as wide as the "
        "preset tiny; micro-batches of 2 samples with 64 tokens and 2 tiles each. Ranks: the first and the last.\n"
    )
    outside: list[Comparison] = []
    for num_ranks in CHECKED:
        rows = measure(num_ranks)
        print(f"## {num_ranks} rank{'s' * (num_ranks > 1)}\n")
        print_table(rows)
        print(flush=True)
        outside += [row for row in rows if row.worst > TOLERANCE]
    names = list(dict.fromkeys(row.strategy for row in outside))
    total = sum(map(len, CHECKED.values()))
    print(f"Within {100 * TOLERANCE:.0f} % by owner: {total - len(names)} of {total} strategies.")
    print(f"Not: {', '.join(names)}.")


if __name__ == "__main__":
    main()
