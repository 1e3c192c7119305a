"""`--launcher elastic`: the ranks of a cell under the real `torchrun`, which starts them again when one fails.

Enters: the private folder of a cell and its options. Leaves: an `ElasticResult`, or the same `RankFailure` as where the
notebook starts the ranks itself. One guarded process, `python -m torch.distributed.run`, starts the ranks; they connect
to this side by themselves (see `elastic_group.py`), so their lines arrive whole, live and in order. What `torchrun`
prints of its own is read for how ranks ended, and shown only where nothing else explains a failure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmcourse.notebook.elastic_group import AGENT, Attempt, ElasticGroup, list_ends
from vlmcourse.notebook.failure import RankFailure, RankTimeout, build_failure, describe_exit
from vlmcourse.notebook.jobs import ELASTIC_BOOT, JobFolder
from vlmcourse.notebook.launcher import build_environment
from vlmcourse.notebook.options import CellOptions
from vlmcourse.notebook.rank_group import OnIdle, OnText
from vlmcourse.notebook.rank_names import name_ranks
from vlmcourse.notebook.starting import DirectRank
from vlmcourse.notebook.torchrun_command import LOOPBACK, build_cell_job, find_endpoint, format_command, torchrun_flags

SHUTDOWN_S = 2
"""How long ranks may take to end once `torchrun` has asked them to."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ElasticResult:
    """A run in which, after some restarts perhaps, every rank ended well."""

    folder: JobFolder
    """Of the attempt that succeeded."""
    num_restarts: int


def run_elastic(
    folder: JobFolder,
    options: CellOptions,
    *,
    env: Mapping[str, str],
    on_line: OnText,
    on_progress: OnText,
    on_idle: OnIdle,
    on_attempt: Callable[[JobFolder], None],
    say: Callable[[str], None],
) -> ElasticResult:
    """Run the ranks of a cell under `torchrun` and wait for them; whatever ends this call, none is left running.

    Args:
        folder: of the cell; its job and inputs are written.
        options: of the cell.
        env: variables added to this process's environment.
        on_line: called with (rank, line) for every finished line, in this thread.
        on_progress: called with (rank, text) for the changing state of a line.
        on_idle: called many times a second.
        on_attempt: called with the folder of every new attempt before its first line.
        say: called with a line about restarts and other machines.
    Raises:
        RankFailure: if the last attempt failed, with the failing rank's traceback; `RankTimeout` if time ran out.
        RuntimeError: if the machine could not start a process.
    """

    def start_attempt(attempt: Attempt) -> None:
        if len(group.attempts) > 1:
            say(describe_restart(group, options))
        on_attempt(attempt.folder)

    if options.nnodes[1] > 1:
        say(describe_waiting(options))
    command = build_command(folder, options)
    environment = build_environment(0, options.nproc, 0, {**env, "LOGLEVEL": "WARNING"})
    for name in RANK_VARIABLES:
        del environment[name]
    group = ElasticGroup(folder, on_line, on_progress, on_idle, start_attempt)
    started_s = time.monotonic()
    try:
        try:
            group.start(AGENT, lambda env: DirectRank(command, env, folder.path), environment)
            group.wait(until_s=started_s + options.timeout_s)
        finally:
            was_running = bool(group.unfinished)
            group.stop()
        group.drain()
    finally:
        group.close()
    if was_running:
        raise RankTimeout(describe_timeout(group, options), ends=list_ends(group))
    if group.ends[0].exit_code != 0:
        raise explain_failure(group)
    num_restarts = group.attempts[-1].restart_count
    if num_restarts:
        say(f"every rank ended well, after {count(num_restarts, 'restart')}")
    return ElasticResult(group.attempts[-1].folder, num_restarts)


def build_command(folder: JobFolder, options: CellOptions) -> list[str]:
    """Return the command that starts `torchrun` on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun_flags(build_cell_job(options, options.save))]
    if options.nnodes[1] == 1:
        command += ["--local-addr", LOOPBACK]  # else the ranks look for each other under this machine's public name
    command += ["--shutdown-timeout", str(SHUTDOWN_S), "--log-dir", str(folder.path / "torchrun")]
    return [*command, "--no-python", sys.executable, "-u", "-c", ELASTIC_BOOT, str(folder.path)]


def describe_waiting(options: CellOptions) -> str:
    """Say what to run on the other machines."""
    fewest, most = options.nnodes
    others = f"{fewest - 1} to {most - 1} other machines" if fewest < most else count(most - 1, "other machine")
    command = format_command(options, Path(options.save).name)
    return f"waiting for {others}: copy {options.save} there, and run in its folder\n  {command}"


def describe_restart(group: ElasticGroup, options: CellOptions) -> str:
    """Say in a line why `torchrun` has started all ranks again."""
    before, now = group.attempts[-2:]
    if now.restart_count == before.restart_count:
        return f"torchrun has started the ranks again: there are now {now.world_size}, there were {before.world_size}"
    number = f"restart {now.restart_count} of at most {options.max_restarts}"
    ends, reports = list_ends(group, before), before.folder.read_reports()
    try:
        reason = str(build_failure(ends, reports, world_size=before.world_size)).splitlines()[0]
    except ValueError:
        reason = "a rank on another machine failed" if options.nnodes[1] > 1 else "a rank failed"
    return f"torchrun starts all ranks again ({number}): {reason}"


def describe_timeout(group: ElasticGroup, options: CellOptions) -> str:
    """Say what was still running, or was still waited for, when the time was up."""
    limit = f"{options.timeout_s:g} s, the limit of this run"
    if group.attempts:
        ranks = sorted(group.attempts[-1].rank_of_pid.values())
        return f"torchrun and its {name_ranks(ranks)} were stopped after {limit}"
    if options.nnodes[1] > 1:
        return f"no rank had started after {limit}: the other machines did not come to {find_endpoint(options)}"
    return f"no rank had started after {limit}"


def explain_failure(group: ElasticGroup) -> RankFailure:
    """Make the exception for a run that `torchrun` gave up."""
    ends = list_ends(group)
    try:
        last = group.attempts[-1]
        failure = build_failure(ends, last.folder.read_reports(), last.folder.read_done(), world_size=last.world_size)
    except (IndexError, ValueError):  # no rank failed by itself: torchrun did, before or beside them
        words = group.log.last_words
        reason = words.splitlines()[-1] if words else describe_exit(group.ends[0].exit_code)
        return RankFailure(f"torchrun failed: {reason}", ends=ends)
    if last.restart_count:
        failure.args = (f"{failure}\n  this was after {count(last.restart_count, 'restart')} by torchrun",)
    return failure


def count(number: int, noun: str) -> str:
    """Return `1 restart` or `2 restarts`."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
