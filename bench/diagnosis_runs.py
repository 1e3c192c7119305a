"""Plant every fault in a real run on two ranks, diagnose each, and print what was found first.

    python bench/diagnosis_runs.py                  # each fault once
    python bench/diagnosis_runs.py --times 3        # three times in a row
    python bench/diagnosis_runs.py --lookalikes     # instead those of vlmcourse/faults/lookalikes.py
    python bench/diagnosis_runs.py --record         # keep the step logs in vlmcourse/monitor/recorded_runs

With --record only runs whose diagnosis is right are kept, and it fails if one is missing. What is kept is smaller than
the run: no checkpoints, numbers with four digits (times of the clock with six decimals, counted from the first step).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcourse.config import TrainConfig
from vlmcourse.faults.catalog import BASE, FAULTS, Fault
from vlmcourse.faults.lookalikes import LOOKALIKES
from vlmcourse.faults.planted import run_name
from vlmcourse.machine import describe_machine
from vlmcourse.monitor.diagnosis import Diagnosis, Finding, diagnose
from vlmcourse.monitor.recorded import FOLDER, INDEX_NAME

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "tests" / "diagnosis_worker.py"
TIMEOUT_S = 600
RECORDED_STEPS = 16
"""Of the runs that are kept; those that are only judged are a little shorter."""


def make_runs(folder: Path, num_steps: int, faults: Mapping[str, Fault]) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for num_ranks in sorted({fault.num_ranks for fault in faults.values()}):
        names = [name for name, fault in faults.items() if fault.num_ranks == num_ranks]
        command = [*start, str(num_ranks), str(WORKER), str(folder), str(num_steps), *names]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, cwd=ROOT, stdout=subprocess.DEVNULL)


def judge(folder: Path, faults: Mapping[str, Fault]) -> dict[str, bool]:
    """Print what was found in each run; return by fault whether its cause came first."""
    right = {}
    for name, fault in faults.items():
        found = diagnose(folder / run_name(name))
        right[name] = is_right(found, fault)
        seen = "; ".join(f"{one.cause} {one.share:.0%} {one.detail or name_rank(one)}" for one in found.findings[:2])
        print(f"{'right' if right[name] else 'WRONG':6} {name:32} {seen or 'healthy'}")
    kinds = [name for name, fault in faults.items() if fault.cause != "healthy"]
    healthy = [name for name, fault in faults.items() if fault.cause == "healthy"]
    for what, names in (("faults", kinds), ("healthy runs", healthy)):
        print(f"{sum(right[name] for name in names)} of {len(names)} {what}")
    return right


def is_right(found: Diagnosis, fault: Fault) -> bool:
    """Return whether the cause comes first (where there are two: either of them), with its rank, and all are named."""
    named = {finding.cause: finding.rank for finding in found.findings}
    in_front = {finding.cause for finding in found.findings[: 1 + len(fault.also)]}
    rank_is_right = fault.rank is None or named.get(fault.cause) == fault.rank
    if fault.cause == "healthy":
        return found.is_healthy
    return rank_is_right and in_front == {fault.cause, *fault.also}


def name_rank(finding: Finding) -> str:
    return "" if finding.rank is None else f"rank {finding.rank}"


def record(folder: Path, names: list[str]) -> None:
    """Keep the files of runs, made smaller."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    index = {}
    for name in names:
        run, kept = folder / run_name(name), FOLDER / run_name(name)
        (kept / "steps").mkdir(parents=True)
        first_s = min(json.loads(path.open().readline())["start_s"] for path in (run / "steps").iterdir())
        for path in sorted((run / "steps").iterdir()):
            rows = [shorten(json.loads(line), first_s) for line in path.read_text().splitlines()]
            (kept / "steps" / path.name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = without_defaults(json.loads((run / "config.json").read_text()))
        config["run"].pop("output_dir")
        (kept / "config.json").write_text(json.dumps(config) + "\n")
        (kept / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text())) + "\n")
        index[name] = {"cause": FAULTS[name].cause, "folder": run_name(name)}
    (FOLDER / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def shorten(row: dict[str, Any], first_s: float) -> dict[str, Any]:
    """Round the floats of a line; its beginning is counted from the run's first."""
    row = row | {"start_s": row["start_s"] - first_s}
    kept = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}
    return kept | {"start_s": round(row["start_s"], 6)}


def without_defaults(config: dict[str, Any]) -> dict[str, Any]:
    defaults = dataclasses.asdict(TrainConfig())
    return {
        section: {key: value for key, value in values.items() if value != json_form(defaults[section][key])}
        for section, values in config.items()
        if values != json_form(defaults[section])
    }


def json_form(value: Any) -> Any:
    return json.loads(json.dumps(value))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lookalikes", action="store_true", help="faults that look like others, instead")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="keep the last runs' step logs in the package")
    parser.add_argument("--runs", type=Path, help="a folder of runs that were made before, instead of making them")
    arguments = parser.parse_args()
    if arguments.lookalikes and arguments.record:
        parser.error("--record keeps runs of the catalogue: leave --lookalikes out")
    faults = LOOKALIKES if arguments.lookalikes else FAULTS
    print(f"{describe_machine()}; each fault in a run of the tiny model on 2 ranks, of pipelines with copies on 4")
    right: dict[str, bool] = {}
    for _ in range(arguments.times):
        with tempfile.TemporaryDirectory() as temporary:
            folder = arguments.runs or Path(temporary)
            if not arguments.runs:
                make_runs(folder, RECORDED_STEPS if arguments.record else BASE["train.num_steps"], faults)
            right = judge(folder, faults)
            if arguments.record and all(right.values()):
                record(folder, list(right))
    return 0 if all(right.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
