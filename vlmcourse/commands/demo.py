"""`vlmcourse demo`: the whole course in small, on this machine, as one table.

Trains the tiny model on two ranks on real scans, runs chapter 1 from top to bottom, grades the reference answers and a
blank submission. Enters: the repository. Leaves: a table, or JSON, and exit code 0 where each part did what it should.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmcourse.grading.process import QUIET_KERNEL
from vlmcourse.grading.report import format_by_hand
from vlmcourse.grading.run import Marks, grade_submission, prepare_course
from vlmcourse.progress import heartbeat

CHAPTER = "ch01_parallelism"
NUM_RANKS = 2
NUM_STEPS = 200
"""Fewer than configs/tiny.toml has, so that the demo ends within three minutes on two cores."""
RUN_FOLDER = Path("runs") / "demo"
"""Where the training writes, below the current folder; an earlier run in it is kept under another name."""
CHAPTER_LIMIT_S = 300.0


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    seen: str
    expected: str
    """What is checked."""
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
    config = course / "configs" / "tiny.toml"
    command = [sys.executable, "-m", "vlmcourse.cli", "train", str(config), "--nproc", str(NUM_RANKS)]
    command += ["--set", f"train.num_steps={num_steps}", "--set", "train.eval_every=0"]
    command += ["--set", f"run.output_dir={json.dumps(str(RUN_FOLDER))}"]
    # In a terminal a progress bar tells.
    with contextlib.nullcontext() if sys.stdout.isatty() else heartbeat(lambda: "training"):
        done = subprocess.run(command, check=False)
    if done.returncode != 0:
        return [Part("training", f"exit code {done.returncode}", "exit code 0", False, _since(started_s))], {}
    summary = json.loads((RUN_FOLDER / "tiny" / "result.json").read_text(encoding="utf-8"))
    first, last, exact = summary["loss_first"], summary["loss_last"], summary["exact_match"]
    all_steps = tomllib.loads(config.read_text(encoding="utf-8"))["train"]["num_steps"]
    partly = f": {num_steps} of the {all_steps} steps of tiny.toml learn a part" if num_steps < all_steps else ""
    losses = f"{first:.3f} -> {last:.3f} nats a token"
    speed = f"{summary['tokens_per_s']:,.0f} tokens/s on {summary['world_size']} ranks"
    seconds = _since(started_s)
    rows = [
        Part("loss before -> after", losses, "half or less", last < first / 2, seconds),
        Part("held-out exact match", f"{100 * exact:.1f} %", f"above 0 %{partly}", exact > 0, seconds),
        Part("speed", speed, "shown, not checked", True, seconds),
    ]
    return rows, summary


def execute_chapter(course: Path) -> Part:
    """Run the chapter's notebook with its reference answers in a kernel of its own."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    path = course / "solutions" / CHAPTER / f"{CHAPTER}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    print(f"Running {path.relative_to(course)}, {len(code)} code cells ...", flush=True)
    started_s = time.monotonic()
    number = 0

    def on_cell_start(cell: object, cell_index: int) -> None:
        nonlocal number
        number = sum(index <= cell_index for index in code)

    client = NotebookClient(
        notebook,
        timeout=CHAPTER_LIMIT_S,
        kernel_name="python3",
        extra_arguments=list(QUIET_KERNEL),
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=on_cell_start,
    )
    expected = "every code cell runs without an error"
    try:
        with heartbeat(lambda: f"cell {number} of {len(code)}"):
            client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return Part(CHAPTER, f"stopped: {error}", expected, False, _since(started_s))
    return Part(CHAPTER, f"{len(code)} code cells ran", expected, True, _since(started_s))


def grade(course: Path) -> list[Part]:
    """Grade the reference answers and the blank release through nbgrader."""
    print("Grading the reference answers and a blank submission ...", flush=True)
    submissions = {
        "reference answers": course / "solutions" / CHAPTER / f"{CHAPTER}.ipynb",
        "blank submission": course / "chapters" / CHAPTER / f"{CHAPTER}.ipynb",
    }
    state, num_done = "making the tests from solutions/", 0

    def grade_one(item: tuple[str, Path]) -> Marks:
        nonlocal num_done, state
        marks = grade_submission(item[1], prepared, name=item[0])
        num_done += 1
        state = f"{num_done} of {len(submissions)} graded"
        return marks

    with heartbeat(lambda: state), prepare_course(course, CHAPTER) as prepared:
        state = f"{num_done} of {len(submissions)} graded"
        # Each is graded in a process of its own that keeps one core busy, so both at once take half the time.
        with ThreadPoolExecutor(len(submissions)) as pool:
            return [_grading_row(marks) for marks in pool.map(grade_one, submissions.items())]


def _grading_row(marks: Marks) -> Part:
    """Turn marks into a row; the reference must earn everything, a blank nothing."""
    is_reference = marks.submission == "reference answers"
    points = marks.max_auto_points if is_reference else 0.0
    by_hand = f"; by hand: {format_by_hand(marks)}"
    seen = f"{marks.points:g} of {marks.max_auto_points:g} points by tests" + by_hand
    good = not marks.failure and marks.max_auto_points > 0 and marks.points == points
    expected = "all points by tests" if is_reference else "no points"
    return Part(marks.submission, marks.failure or seen, expected, good, round(marks.seconds, 1))


def print_table(parts: list[Part]) -> None:
    """Print one row a part."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="vlmcourse demo")
    for column in ("part", "seen", "should be", "is so", "seconds"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for part in parts:
        is_so = "yes" if part.good else "[bold red]NO[/]"
        table.add_row(part.name, escape(part.seen), part.expected, is_so, f"{part.seconds:.0f}")
    Console(file=sys.stdout).print(table)


def _since(started_s: float) -> float:
    return round(time.monotonic() - started_s, 1)
