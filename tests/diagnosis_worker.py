"""What two ranks do for `test_monitor_diagnosis.py`: a short run a fault.

Usage: diagnosis_worker.py FOLDER [NUM_STEPS]
"""

from __future__ import annotations

import sys

from vlmcourse.faults.catalog import FAULTS
from vlmcourse.faults.planted import run_planted
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks


def main() -> None:
    ranks = init_ranks(timeout_s=120)
    num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else None
    for name in FAULTS:
        run_planted(name, sys.argv[1], ranks, num_steps=num_steps)
    shutdown_ranks()


if __name__ == "__main__":
    main()
