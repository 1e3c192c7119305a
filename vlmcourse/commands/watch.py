"""`vlmcourse watch RUN`: how a run stands, rank by rank, in a terminal, until it ends.

Reads the files of the run's folder and asks no rank, so that it works beside any run on this machine or a shared disk,
and after it. Exit code 1 if the run has stopped without a result.
"""

from __future__ import annotations

import argparse
import json
import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vlmcourse.colours import PHASE_COLOURS
from vlmcourse.monitor.live_run import LiveRun, find_run_problem
from vlmcourse.monitor.run_view import FINISHED, STOPPED, RankView, RunView, list_facts, list_remarks
from vlmcourse.planner.offload_cost import show_bytes
from vlmcourse.spans import PHASE_LABELS

EVERY_S = 0.5
BAR_CELLS = 36
"""Length of the longest rank's bar, in letters."""
LETTERS = {"data_wait": "d", "forward": "f", "backward": "b", "communication": "w", "optimizer": "o", "other": "."}
"""What a phase's part of a bar is made of, for terminals without colours."""
LEGEND = ", ".join(f"{letter} {PHASE_LABELS[phase]}" for phase, letter in LETTERS.items())
DARK = ("data_wait", "backward")
"""Phases whose colour needs a light letter."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("run", help="the folder that the run writes to, such as runs/tiny")
    parser.add_argument("--once", action="store_true", help="look once, and do not wait for the run's end")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, at the run's end or with --once now"
    )


def run(args: argparse.Namespace) -> int:
    """Watch; return the exit code.

    Raises:
        ValueError: if the folder is no run's.
    """
    if problem := find_run_problem(args.run):
        raise ValueError(problem)
    live_run = LiveRun(args.run)
    view = live_run.read()
    if args.json:
        while not args.once and not has_ended(view):
            time.sleep(EVERY_S)
            view = live_run.read()
        print(json.dumps(view.summary()), flush=True)
    elif args.once or has_ended(view):
        Console(highlight=False).print(draw_view(view))
    else:
        with Live(draw_view(view), console=Console(highlight=False), auto_refresh=False) as live:
            while not has_ended(view):
                time.sleep(EVERY_S)
                view = live_run.read()
                live.update(draw_view(view), refresh=True)
    return 1 if view.state == STOPPED and not args.once else 0


def has_ended(view: RunView) -> bool:
    """Whether nothing more will come."""
    return view.state in (FINISHED, STOPPED)


def draw_view(view: RunView) -> Group:
    """Return what the terminal shows: facts, a row a rank, sentences."""
    parts: list[Text | Table] = [_head(view)]
    if view.ranks:
        parts.append(_table(view))
        if any(rank.phases_s for rank in view.ranks):
            means = f"; means of {view.window_steps} steps" if view.window_steps > 1 else ""
            parts.append(Text(LEGEND + means, style="dim"))
    if view.owners_bytes:
        held = ", ".join(f"{owner} {show_bytes(size)}" for owner, size in view.owners_bytes.items() if size)
        parts.append(Text(f"memory by owner, the most that any rank holds of each: {held}"))
    parts += [Text(remark) for remark in list_remarks(view)]
    return Group(*parts)


def _head(view: RunView) -> Text:
    state = "waiting for its first step" if view.state == "waiting" else view.state
    return Text.assemble((view.folder, "bold"), f": {state}, {', '.join(list_facts(view))}")


def _table(view: RunView) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("step", justify="right")
    table.add_column("ended", justify="right")
    table.add_column("a step", justify="right")
    table.add_column("by phase", no_wrap=True)
    table.add_column("memory", justify="right")
    longest_s = max((rank.step_s or 0.0 for rank in view.ranks), default=0.0) or 1.0
    is_live = not has_ended(view)
    for rank in view.ranks:
        name = f"{rank.rank}{' slowest' if rank.rank == view.slowest_rank else ''}"
        ago = "" if rank.since_step_s is None or not is_live else f"{rank.since_step_s:.1f} s ago"
        step = "none yet" if rank.step_s is None else f"{1e3 * rank.step_s:,.0f} ms"
        memory = rank.allocated_bytes if rank.allocated_bytes is not None else rank.rss_bytes
        style = "bold red" if rank.problem else ""
        table.add_row(
            *(name, str(rank.step), f"{ago} {rank.problem}".strip(), step),
            draw_bar(rank, BAR_CELLS / longest_s),
            f"{memory / 1e9:.2f} GB" if memory is not None else "",
            style=style,
        )
    return table


def draw_bar(rank: RankView, cells_per_second: float) -> Text:
    """Return a rank's step as letters, one phase after the other; a part's end is rounded, so that the sum is right."""
    bar, end_s = Text(), 0.0
    for name, seconds in rank.phases_s.items():
        begin, end_s = round(cells_per_second * end_s), end_s + seconds
        letters = LETTERS[name] * (round(cells_per_second * end_s) - begin)
        bar.append(letters, style=f"{'white' if name in DARK else 'black'} on {PHASE_COLOURS[name]}")
    return bar
