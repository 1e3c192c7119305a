"""From a naive run to a tuned one, a change at a time: tokens/s and the peak of memory of each, as a table.

    python bench/naive_to_tuned.py                    # three turns of eight variants on 2 ranks, some minutes
    python bench/naive_to_tuned.py --turns 5 --out bench/naive_to_tuned.md

Every variant trains the same model on the same samples, 8 of them a step (`vlmcourse/labs/tuning.py` has the list).
All are measured in each turn, one after the other, on the same ranks of one core each: what else the machine does slows
them all. Speeds are medians of the turns; a peak counts the bytes alive in a step on the fullest rank. Tokens per CPU
second leave out what the busiest rank waits, for the other rank and for other programs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vlmcourse.labs.tuning import MAX_SEQ_LEN, Tuned, measure_tuning, tuned_shape
from vlmcourse.machine import describe_machine
from vlmcourse.notebook.launcher import check_rank_count, run_ranks
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks

TIMEOUT_S = 1800


def measure(num_turns: int, num_steps: int, out: Path | None) -> None:
    """Measure as one of the ranks; rank 0 prints."""
    ranks = init_ranks(timeout_s=300)
    rows = measure_tuning(num_turns=num_turns, num_steps=num_steps, ranks=ranks)
    shutdown_ranks()
    if ranks.is_main:
        shape = tuned_shape()
        lines = [
            "Made by `python bench/naive_to_tuned.py`.",
            "",
            f"Machine: {describe_machine()}, load at the end {os.getloadavg()[0]:.1f}",
            f"Model: {shape.name}, widths {shape.vision.hidden_size} and {shape.language.hidden_size}; naive rows are "
            f"padded to {MAX_SEQ_LEN} tokens; {num_turns} turns",
            "",
            *table(rows),
            "",
        ]
        print("\n".join(lines), flush=True)
        if out is not None:
            out.write_text("\n".join(lines), encoding="utf-8")


def table(rows: list[Tuned]) -> list[str]:
    """Return a Markdown table, each row held against the first."""
    first = rows[0]
    lines = [
        "| change | ranks | tokens/s | x naive | tokens per CPU second | x naive | peak (MB) | x naive | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row.change} | {row.num_ranks} | {row.tokens_per_s:.0f} | {row.tokens_per_s / first.tokens_per_s:.2f} "
        f"| {row.tokens_per_cpu_s:.0f} | {row.tokens_per_cpu_s / first.tokens_per_cpu_s:.2f} "
        f"| {row.peak_bytes / 1e6:.0f} | {row.peak_bytes / first.peak_bytes:.2f} | {row.loss:.4f} |"
        for row in rows
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="times that each variant is measured (default: 3)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each variant in each turn (default: 2)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        measure(args.turns, args.steps, args.out)
        return 0
    check_rank_count(2)
    command = [sys.executable, str(Path(__file__).resolve()), "--turns", str(args.turns), "--steps", str(args.steps)]
    command += ["--out", str(args.out.resolve())] if args.out else []
    env = {"OMP_NUM_THREADS": "1"}
    run_ranks(command, 2, timeout_s=TIMEOUT_S, env=env, on_line=lambda rank, line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
