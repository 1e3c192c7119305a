"""What ranks do for `test_planner_run_peak.py` and bench/planner_vs_ledger.py: compare planner and ledger.

Usage: memory_worker.py FOLDER NAME... Each rank writes its comparisons to FOLDER/found<rank>.json; without names, of
all strategies for so many ranks.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from vlmcourse.labs.memory_check import CHECKED, compare
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks


def main(folder: Path, names: list[str]) -> None:
    ranks = init_ranks(timeout_s=100)
    known = CHECKED[ranks.world_size]
    found = [dataclasses.asdict(compare(name, known[name], ranks)) for name in names or known]
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
