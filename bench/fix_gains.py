"""Apply what a diagnosis advises, and compare the time that it said would be saved with the time that is saved.

    python bench/fix_gains.py                          # every cure of vlmcourse/faults/cures.py, five times
    python bench/fix_gains.py --times 2 --only "slow links" "sleeping rank"

In each turn, for each fault: the faulty run, its diagnosis, at once the run with the advised fix applied, and the
faulty run again, on the same two ranks. What else the machine does disturbs all of them; the mean of the two faulty
runs is held against the run between. Time is that of a token, from step to
step, without warm-up: with a larger batch a step may take longer and the run still gain. Waits that are planted are
sleeps where they can be; what is computing (decoding, small operations, recomputation) takes as long as the cores are
shared. The median and the range of the turns are printed, and the load before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from vlmcourse.faults.catalog import FAULTS, Fault
from vlmcourse.faults.cures import ALL_CURES, apply_cure, find_fix
from vlmcourse.faults.lookalikes import LOOKALIKES
from vlmcourse.faults.planted import run_fault, run_name
from vlmcourse.machine import describe_machine
from vlmcourse.monitor.diagnosis import Diagnosis, diagnose
from vlmcourse.parallel.comm import wait_for_all
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS = 18
TIMEOUT_S = 3000


def measure_fault(name: str, folder: Path, ranks: Ranks) -> list[dict[str, Any]]:
    """Run a fault, each of its cures, and the fault again; return a row a cure: shares of the faulty runs' time."""
    faulty = FAULTS.get(name) or LOOKALIKES[name]

    def run_faulty(number: int) -> Diagnosis:
        return run_and_diagnose(faulty, f"{run_name(name)}-{number}", folder, ranks)

    before = run_faulty(0)
    fixes, cured = {}, {}
    for number, cure in enumerate(ALL_CURES[name]):
        try:
            fix = find_fix(cure, (*before.findings, *before.below), faulty.cause)
        except ValueError as error:
            if ranks.is_main:
                print(f"{name}: {error}", file=sys.stderr)
            continue
        fixes[number] = fix
        fault = apply_cure(name, cure, fix)
        cured[number] = run_and_diagnose(fault, f"{run_name(name)}-cured-{number}", folder, ranks)
    tokens_per_s = mean([before.tokens_per_s, run_faulty(1).tokens_per_s])
    return [
        {
            "fault": name,
            "fix": fix.what,
            "cure": number,
            "predicted": fix.saved_share,
            "uncertainty": fix.uncertainty_share,
            "measured": 1 - tokens_per_s / cured[number].tokens_per_s,
        }
        for number, fix in fixes.items()
    ]


def run_and_diagnose(fault: Fault, name: str, folder: Path, ranks: Ranks) -> Diagnosis:
    run_fault(fault, name, folder, ranks, num_steps=NUM_STEPS)
    wait_for_all(ranks)  # all ranks have written their last step
    return diagnose(folder / name)


def run_here(names: list[str], times: int, out: Path) -> None:
    """Be one rank: make all runs, and on rank 0 write the rows as they come."""
    ranks = init_ranks(timeout_s=120)
    for turn in range(times):
        for name in names:
            for row in measure_fault(name, out.parent / str(turn), ranks):
                if ranks.is_main:
                    with out.open("a") as file:
                        file.write(json.dumps(row | {"turn": turn}) + "\n")
    shutdown_ranks()


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| planted | fix that was applied | turns | said to be saved | +- | saved | saved less said | within +- |")
    print("|---|---|---|---|---|---|---|---|")
    for name, cures in ALL_CURES.items():
        for number in range(len(cures)):
            mine = [row for row in rows if (row["fault"], row["cure"]) == (name, number)]
            if mine:
                said, saved = ([row[key] for row in mine] for key in ("predicted", "measured"))
                off = [b - a for a, b in zip(said, saved, strict=True)]
                allowed = [row["uncertainty"] for row in mine]
                within = sum(abs(value) <= limit for value, limit in zip(off, allowed, strict=True))
                cells = [describe(said), f"{100 * median(allowed):.0f}", describe(saved), describe(off, sign="+")]
                cells.append(f"{within} of {len(mine)}")
                print(f"| {name} | {mine[-1]['fix']} | {len(mine)} | {' | '.join(cells)} |")


def describe(values: list[float], sign: str = "") -> str:
    """Return the median and the range, in percent of the faulty run's time."""
    return " ".join(
        [f"{100 * median(values):{sign}.0f} %", f"({100 * min(values):{sign}.0f} to {100 * max(values):{sign}.0f})"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(ALL_CURES), default=list(ALL_CURES), metavar="FAULT")
    parser.add_argument("--rank-writes", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_writes:
        run_here(arguments.only, arguments.times, arguments.rank_writes)
        return 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "rows.jsonl"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        wanted = ["--times", str(arguments.times), "--only", *arguments.only, "--rank-writes", str(out)]
        done = subprocess.run([*launch, *wanted], check=False, timeout=TIMEOUT_S, cwd=ROOT, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    print(f"{describe_machine()}; the tiny model on 2 ranks, {NUM_STEPS} steps a run")
    print(f"load before {load:.1f}, after {os.getloadavg()[0]:.1f}\n")
    print_table(rows)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
