"""What two ranks do for `test_labs_ch05.py`. Usage: budget_worker.py FOLDER.

Each rank trains the tiny model under several budgets and writes what it found to FOLDER/rank<r>.json.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from vlmcourse.labs.ch05 import HEADROOM_FRACTION, BudgetRun, needed_bytes, run_within_budget
from vlmcourse.labs.offload_levels import compare_offload_levels
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks
from vlmcourse.planner.offload_memory import OFFLOAD_LEVELS


def describe(run: BudgetRun) -> dict[str, Any]:
    return {
        "answer": run.decision.answer,
        "offload": dataclasses.asdict(run.offload),
        "budget": run.budget_bytes,
        "held": run.held_bytes,
        "moved": run.moved_bytes,
        "owners": run.owners,
        "kept": run.kept_within,
        "losses": run.losses,
        "text": str(run),
    }


def main() -> None:
    ranks = init_ranks(60)
    ample = run_within_budget(10**9, ranks)
    needs = needed_bytes(ample.decision)
    found: dict[str, Any] = {"needs": needs, "ample": describe(ample)}
    for level in OFFLOAD_LEVELS:
        budget = int(needs[level] / (1 - HEADROOM_FRACTION)) + 1
        found[level] = describe(run_within_budget(budget, ranks))
    try:
        run_within_budget(needs["layered"] - 1, ranks, headroom_fraction=0)
    except ValueError as error:
        found["nothing"] = str(error)
    table = compare_offload_levels(num_rounds=1, ranks=ranks)
    found["rows"] = [
        dataclasses.asdict(row) | {"fits": row.fits, "verdict": row.verdict, "cells": row.cells()} for row in table.rows
    ]
    found["gap"], found["table"] = table.loss_gap, str(table)
    Path(sys.argv[1], f"rank{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown_ranks()


if __name__ == "__main__":
    main()
