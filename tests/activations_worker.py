"""Runs every case of `activations_cases.py` that needs two ranks. Usage: activations_worker.py FOLDER [STRATEGY]."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from activations_cases import FOUR_RANKS, LEDGERS, STRATEGIES, is_exact, run_case, run_ledger

from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks


def main(folder: Path, only: str = "") -> None:
    ranks = init_ranks(timeout_s=40)
    found: dict[str, Any] = {}
    for strategy, (_, _, policies) in STRATEGIES.items():
        if strategy.startswith("single") or strategy == FOUR_RANKS or only not in strategy:
            continue
        dtype = torch.float64 if is_exact(strategy) else torch.float32
        for policy in policies:
            try:
                found[f"{strategy} | {policy}"] = run_case(strategy, policy, ranks, dtype)
            except (ValueError, RuntimeError, AssertionError):
                found[f"{strategy} | {policy}"] = traceback.format_exc()
    if not only:
        found |= {f"ledger | {strategy}": run_ledger(strategy, ranks) for strategy in LEDGERS}
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
