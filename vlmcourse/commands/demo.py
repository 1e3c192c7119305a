"""`vlmcourse demo`: the whole course in small, on this machine, as one table.

Trains the tiny model on two ranks on real scans, runs chapter 1 from top to bottom, grades the reference answers and a
blank submission. Enters: the repository. Leaves: a table, or JSON, and exit code 0 where each part did what it should.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmcourse.grading.run import Marks, grade_submission, prepare_course

CHAPTER = "ch01_parallelism"
NUM_RANKS = 2
NUM_STEPS = 200
"""Shorter than the 1000 steps of configs/tiny.toml, so that the demo ends within three minutes on two cores."""
CHAPTER_LIMIT_S = 300.0


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    seen: str
    good: bool
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the table as one JSON object on the last line")
    parser.add_argument(
        "--steps", type=int, default=NUM_STEPS, metavar="N", help="training steps (default: %(default)s)"
    )
    parser.add_argument("--course", type=Path, default=Path(), help="folder that holds solutions/ (default: this one)")


def run(args: argparse.Namespace) -> int:
    """Run every part and print the table; return 1 if one went wrong.

    Raises:
        ValueError: if the folder is not the course's, or the number of steps is below 1.
    """
    course = args.course.resolve()
    if not (course / "solutions" / CHAPTER).is_dir() or not (course / "configs" / "tiny.toml").is_file():
        raise ValueError(f"{course} is not the course: run this in the repository's folder, or name it with --course")
    if args.steps < 1:
        raise ValueError(f"--steps = {args.steps}: must be 1 or greater")
    parts, summary = train(course, args.steps)
    parts.append(execute_chapter(course))
    parts += grade(course)
    if args.json:
        print(json.dumps({"parts": [asdict(part) for part in parts], "training": summary}), flush=True)
    else:
        print_table(parts)
    return 0 if all(part.good for part in parts) else 1


def train(course: Path, num_steps: int) -> tuple[list[Part], Mapping[str, Any]]:
    """Train the tiny model on two ranks, showing their progress.

    Returns:
        Rows for loss, exact match and speed, and the run's summary (empty if it failed).
    """
    print(f"Training the tiny model on {NUM_RANKS} ranks, {num_steps} steps ...", flush=True)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vlmcourse-demo-") as folder:
        command = [sys.executable, "-m", "vlmcourse.cli", "train", str(course / "configs" / "tiny.toml")]
        command += ["--nproc", str(NUM_RANKS), "--set", f"train.num_steps={num_steps}", "--set", "train.eval_every=0"]
        command += ["--set", f"run.output_dir={json.dumps(folder)}"]
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            return [Part("training", f"failed with exit code {done.returncode}", False, _since(started_s))], {}
        summary = json.loads((Path(folder) / "tiny" / "result.json").read_text(encoding="utf-8"))
    first, last = summary["loss_first"], summary["loss_last"]
    seconds = _since(started_s)
    rows = [
        Part("loss before -> after", f"{first:.3f} -> {last:.3f} nats a token", last < first / 2, seconds),
        Part("held-out exact match", f"{100 * summary['exact_match']:.1f} %", summary["exact_match"] > 0, seconds),
        Part("speed", f"{summary['tokens_per_s']:,.0f} tokens/s on {summary['world_size']} ranks", True, seconds),
    ]
    return rows, summary


def execute_chapter(course: Path) -> Part:
    """Run the chapter's notebook with its reference answers in a kernel of its own."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    path = course / "solutions" / CHAPTER / f"{CHAPTER}.ipynb"
    print(f"Running {path.relative_to(course)} ...", flush=True)
    started_s = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    num_code = sum(cell.cell_type == "code" for cell in notebook.cells)
    client = NotebookClient(
        notebook,
        timeout=CHAPTER_LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return Part(CHAPTER, f"stopped: {error}", False, _since(started_s))
    return Part(CHAPTER, f"{num_code} code cells ran", True, _since(started_s))


def grade(course: Path) -> list[Part]:
    """Grade the reference answers and the blank release through nbgrader."""
    print("Grading the reference answers and a blank submission ...", flush=True)
    submissions = {
        "reference answers": course / "solutions" / CHAPTER / f"{CHAPTER}.ipynb",
        "blank submission": course / "chapters" / CHAPTER / f"{CHAPTER}.ipynb",
    }
    # Each submission is graded in a process of its own that keeps one core busy, so both at once take half the time.
    with prepare_course(course, CHAPTER) as prepared, ThreadPoolExecutor(len(submissions)) as pool:
        graded = pool.map(lambda item: grade_submission(item[1], prepared, name=item[0]), submissions.items())
        return [_grading_row(marks) for marks in graded]


def _grading_row(marks: Marks) -> Part:
    """Turn marks into a row; the reference must earn everything, a blank nothing."""
    expected = marks.max_auto_points if marks.submission == "reference answers" else 0.0
    seen = f"{marks.points:g} of {marks.max_auto_points:g} points" + (f" ({marks.failure})" * bool(marks.failure))
    good = not marks.failure and marks.max_auto_points > 0 and marks.points == expected
    return Part(marks.submission, seen, good, round(marks.seconds, 1))


def print_table(parts: list[Part]) -> None:
    """Print one row a part."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="vlmcourse demo")
    for column in ("part", "seen", "as it should be", "seconds"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for part in parts:
        table.add_row(part.name, part.seen, "yes" if part.good else "[bold red]NO[/]", f"{part.seconds:.0f}")
    Console(file=sys.stdout).print(table)


def _since(started_s: float) -> float:
    return round(time.monotonic() - started_s, 1)
