"""Plant every fault in a real run on two ranks, diagnose each, and print what was found first.

    python bench/diagnosis_runs.py                  # each fault once
    python bench/diagnosis_runs.py --times 3        # three times in a row
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
from pathlib import Path
from typing import Any

from vlmcourse.config import TrainConfig
from vlmcourse.faults.catalog import FAULTS
from vlmcourse.faults.planted import run_name
from vlmcourse.machine import describe_machine
from vlmcourse.monitor.diagnosis import diagnose
from vlmcourse.monitor.recorded import FOLDER, INDEX_NAME

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "tests" / "diagnosis_worker.py"
TIMEOUT_S = 600
RECORDED_STEPS = 16
"""Of the runs that are kept; those that are only judged are a little shorter."""


def make_runs(folder: Path, num_steps: int | None) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    steps = [] if num_steps is None else [str(num_steps)]
    subprocess.run([*command, str(folder), *steps], check=True, timeout=TIMEOUT_S, cwd=ROOT, stdout=subprocess.DEVNULL)


def judge(folder: Path) -> dict[str, bool]:
    """Print what was found in each run; return by fault whether its cause came first."""
    right = {}
    for name, fault in FAULTS.items():
        found = diagnose(folder / run_name(name))
        right[name] = found.cause == fault.cause
        first = found.findings[0] if found.findings else None
        seen = f"{first.cause} {first.share:.0%} {first.detail}" if first else "healthy"
        print(f"{'right' if right[name] else 'WRONG':6} {name:28} {seen}")
    kinds = [name for name, fault in FAULTS.items() if fault.cause != "healthy"]
    healthy = [name for name, fault in FAULTS.items() if fault.cause == "healthy"]
    for what, names in (("faults", kinds), ("healthy runs", healthy)):
        print(f"{sum(right[name] for name in names)} of {len(names)} {what}")
    return right


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
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="keep the last runs' step logs in the package")
    parser.add_argument("--runs", type=Path, help="a folder of runs that were made before, instead of making them")
    arguments = parser.parse_args()
    print(f"{describe_machine()}; each fault in a run of the tiny model on 2 ranks")
    right: dict[str, bool] = {}
    for _ in range(arguments.times):
        with tempfile.TemporaryDirectory() as temporary:
            folder = arguments.runs or Path(temporary)
            if not arguments.runs:
                make_runs(folder, RECORDED_STEPS if arguments.record else None)
            right = judge(folder)
            if arguments.record and all(right.values()):
                record(folder, list(right))
    return 0 if all(right.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
