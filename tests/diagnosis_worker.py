"""What two ranks do for `test_monitor_diagnosis.py`: a short run a fault.

Usage: diagnosis_worker.py FOLDER [NUM_STEPS [NAME ...]]; by default the catalogue, and a few that look like others.
"""

from __future__ import annotations

import sys

from vlmcourse.faults.catalog import FAULTS
from vlmcourse.faults.lookalikes import LOOKALIKES
from vlmcourse.faults.planted import run_planted
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks

SHORT = ("callback and rows", "slow messages", "two late ranks")
"""Of `LOOKALIKES`, those that the slow test makes; bench/diagnosis_runs.py has all."""
SHORT_STEPS = 9


def main() -> None:
    ranks = init_ranks(timeout_s=120)
    num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else None
    for name in sys.argv[3:] or (*FAULTS, *SHORT):
        steps = SHORT_STEPS if name in LOOKALIKES and num_steps is None else num_steps
        run_planted(name, sys.argv[1], ranks, num_steps=steps)
    shutdown_ranks()


if __name__ == "__main__":
    main()
