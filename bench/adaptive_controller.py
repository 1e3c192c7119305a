"""The course's controller on the simulated cluster, trouble by trouble, beside doing nothing and an oracle.

    python bench/adaptive_controller.py [--seeds 50] [--oracle-seeds 10]

Every number is of the simulation (`vlmcourse/control/`): its prices are the planner's with the assumptions that stand
there, no GPU was measured. Deterministic: a second run prints the same. Prints a Markdown table; asserts nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from vlmcourse.control.controller import ReferenceController
from vlmcourse.control.oracle import Oracle
from vlmcourse.control.rates import Job
from vlmcourse.control.simulation import DATA_PARALLEL, PIPELINED, RunLog, Simulation, do_nothing
from vlmcourse.control.world import KINDS, make_world

JOBS = {"data parallel": DATA_PARALLEL, "pipelined": PIPELINED}
ALL = tuple(kind for kind in KINDS if kind != "quiet")


@dataclass
class Row:
    """What came of one job under one kind of trouble, seed by seed."""

    found: list[RunLog] = field(default_factory=list)
    baseline: list[RunLog] = field(default_factory=list)
    oracle: list[RunLog] = field(default_factory=list)

    def describe(self) -> list[str]:
        """Return the cells of a line of the table."""
        ratios = [
            one.samples_per_s / max(1e-9, other.samples_per_s)
            for one, other in zip(self.found, self.baseline, strict=True)
        ]
        known = list(zip(self.found, self.baseline, self.oracle, strict=False))
        best = fmean(oracle.samples_per_s - base.samples_per_s for _, base, oracle in known)
        score = fmean(found.samples_per_s - base.samples_per_s for found, base, _ in known) / best
        worse = sum(one.num_oom > 0 and not other.num_oom for one, other in zip(self.found, self.baseline, strict=True))
        return [
            f"{fmean(log.samples_per_s for log in self.baseline):.2f}",
            f"{fmean(log.samples_per_s for log in self.found):.2f}",
            f"{quantiles(ratios, n=10)[0]:.2f} / {quantiles(ratios, n=2)[0]:.2f}",
            f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}",
            f"{score:.2f}",
            f"{sum(log.num_oom for log in self.baseline)} / {sum(log.num_oom for log in self.found)}",
            f"{worse}",
            f"{sum(log.lost_samples for log in self.baseline)} / {sum(log.lost_samples for log in self.found)}",
        ]


def run(job: Job, kinds: Sequence[str], num_seeds: int, num_oracle_seeds: int) -> Row:
    """Run one job under one kind of trouble with all seeds."""
    row = Row()
    for seed in range(num_seeds):
        world = make_world(10_000 + seed, tuple(kinds), job.num_ranks)
        row.baseline.append(Simulation(world, job).run(do_nothing))
        row.found.append(Simulation(world, job).run(ReferenceController().observe))
        if seed < num_oracle_seeds:
            simulation = Simulation(world, job)
            row.oracle.append(simulation.run(Oracle(simulation)))
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="seeds of each line")
    parser.add_argument("--oracle-seeds", type=int, default=10, help="of these, those that the oracle runs too")
    chosen = parser.parse_args()
    titles = [
        "run",
        "trouble",
        "nothing, samples/s",
        "controller, samples/s",
        "ratio, 10th percentile / median",
        "faster",
        f"score ({chosen.oracle_seeds} seeds)",
        "out of memory, nothing / controller",
        "runs only the controller took out of memory",
        "samples lost, nothing / controller",
    ]
    print(f"{chosen.seeds} seeds a line.\n")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    for name, job in JOBS.items():
        for kinds in (*((kind,) for kind in KINDS), ALL):
            row = run(job, kinds, chosen.seeds, chosen.oracle_seeds)
            label = "all at once" if kinds == ALL else kinds[0]
            print(f"| {name} | {label} | {' | '.join(row.describe())} |", flush=True)


if __name__ == "__main__":
    main()
