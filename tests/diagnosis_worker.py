"""What two ranks do for `test_monitor_diagnosis.py`: a short run a fault.

Usage: diagnosis_worker.py FOLDER [NAME …]
"""

from __future__ import annotations

import sys
import time

from vlmcourse.faults.catalog import FAULTS
from vlmcourse.faults.planted import run_planted
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks


def main() -> None:
    ranks = init_ranks(timeout_s=120)
    for name in sys.argv[2:] or FAULTS:
        began_s = time.perf_counter()
        run_planted(name, sys.argv[1], ranks)
        if ranks.is_main:
            print(f"{name}: {time.perf_counter() - began_s:.1f} s", flush=True)
    shutdown_ranks()


if __name__ == "__main__":
    main()
