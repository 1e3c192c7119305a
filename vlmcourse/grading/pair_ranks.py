"""Runs answers to labs 1.1 and 5.1 and exercise 4.2 on real ranks, in processes of their own with a time limit.

Enters: learners' functions and cases. Leaves: for each answer what every rank found in every case. A hang ends with the
time that a collective may take, an endless loop with a time limit, a crash with its process: never with the grader.
"""

from __future__ import annotations

import json
import logging
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from vlmcourse.grading.traces import STARTING, Place, describe_place, files_of, show_printed
from vlmcourse.notebook.failure import RankFailure
from vlmcourse.notebook.launcher import run_ranks
from vlmcourse.notebook.rank_names import name_ranks

logger = logging.getLogger(__name__)

COLLECTIVE_LIMIT_S = 12.0
"""Seconds that a collective may wait for the other ranks."""
LOOP_FACTOR = 2
"""Times that, for code that waits for nobody: so that who waits for it is told so first."""
RUN_LIMIT_S = 80.0
"""Seconds for one start of the ranks and all its cases; a graded cell, with two starts, may take 180."""


@dataclass(kw_only=True)
class CaseReports:
    """What the ranks found in one case; a rank that did not come so far is missing."""

    case: Any
    """Such as a `PairCase`; it says its `world_size`."""
    by_rank: dict[int, dict[str, Any]] = field(default_factory=dict)

    def statuses(self) -> dict[int, str]:
        """Return how the case ended on each rank: done, hung, error, lost, endless, unsolved, or gone."""
        return {rank: self.by_rank.get(rank, {}).get("status", "gone") for rank in range(self.case.world_size)}

    @property
    def is_done(self) -> bool:
        """Whether every rank ended it."""
        return set(self.statuses().values()) == {"done"}


@dataclass(kw_only=True)
class AnswerReports:
    """What came of one answer."""

    cases: list[CaseReports] = field(default_factory=list)
    """Those that were begun, in order; after one that did not end no other is run."""
    failure: str = ""
    """Why the ranks as a whole did not end; empty if they did."""

    @property
    def ended(self) -> bool:
        """Whether all ranks have ended every case so far."""
        return not self.failure and all(case.is_done for case in self.cases)


def run_answers(
    functions: Sequence[Any],
    cases: Sequence[Any],
    *,
    worker: str = "vlmcourse.grading.pair_worker",
    collective_limit_s: float = COLLECTIVE_LIMIT_S,
    run_limit_s: float = RUN_LIMIT_S,
) -> list[AnswerReports]:
    """Run each function on each case, with one start of ranks for each number of ranks.

    Args:
        functions: each a learner's, such as `tp_mlp(x, w_in, b_in, w_out, b_out)`.
        cases: of any numbers of ranks; those of fewer ranks come first.
        worker: the module that runs a case on a rank.
        collective_limit_s: seconds that a collective may wait.
        run_limit_s: seconds for one start and all its cases.

    Raises:
        ValueError: if a function cannot be sent to another process.
        RuntimeError: if the machine could not start a rank.
    """
    answers = [AnswerReports() for _ in functions]
    packed = [_pack(function) for function in functions]
    files = {place: file for function in functions for place, file in files_of(function).items()}
    for world_size in sorted({case.world_size for case in cases}):
        # An answer that hangs on two ranks would keep four waiting as long.
        going = [number for number, answer in enumerate(answers) if answer.ended]
        if going:
            some = [case for case in cases if case.world_size == world_size]
            job = {"answers": [packed[number] for number in going], "cases": some, "timeout_s": collective_limit_s}
            failure, found = _start(job, world_size, run_limit_s, worker, files)
            for number, reports in zip(going, found, strict=True):
                answers[number].cases += reports
                answers[number].failure = failure
    return answers


def _start(
    job: dict[str, Any], world_size: int, run_limit_s: float, worker: str, files: Mapping[tuple[str, int], str]
) -> tuple[str, list[list[CaseReports]]]:
    """Start the ranks on a job; return why they failed, if they did, and what they found for each answer.

    A line is printed before, as nothing is for a while after it.
    """
    timeout_s = job["timeout_s"]
    print(
        f"{STARTING.format(n=world_size)}about 10 to 40 s (a rank that waits for another in vain is stopped after "
        f"{timeout_s:g} s, a loop without end after {LOOP_FACTOR * timeout_s:g} s, and all after {run_limit_s:g} s)",
        flush=True,
    )
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    failure = ""
    with tempfile.TemporaryDirectory(prefix="vlmcourse-pair-") as name:
        folder = Path(name)
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        try:
            run_ranks(
                [sys.executable, "-m", worker, str(folder)],
                world_size,
                timeout_s=run_limit_s,
                env=env | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
                on_line=lambda rank, line: logger.info("[%d] %s", rank, line),
            )
        except RankFailure as error:
            failure = _explain_failure(error)
        found = _collect(folder, job["cases"], len(job["answers"]), files)
        unfinished = [cases for cases in found if len(cases) < len(job["cases"]) and all(c.is_done for c in cases)]
        if unfinished and not failure:
            failure = (
                f"their processes had ended when {len(unfinished[0])} of {len(job['cases'])} cases were done: a "
                "function must return, not end its process"
            )
        return failure, found


def _explain_failure(error: RankFailure) -> str:
    """Return why ranks failed, in one line; gloo ends a process that is sent another collective's numbers."""
    aborted = [end.rank for end in error.ends if end.exit_code == -signal.SIGABRT]
    if aborted:
        return (
            f"{name_ranks(aborted)} was ended by SIGABRT, as gloo does where ranks call different collectives, or one "
            "with tensors of different sizes: every rank must call every collective, and in the same order"
        )
    return " ".join(str(error).split())[:300]


def show_unfinished(reports: AnswerReports, num_cases: int) -> None:
    """Say why and how many cases were not run to their end, where a process broke off or a case kept others waiting."""
    seen = {status for case in reports.cases for status in case.statuses().values()}
    if reports.failure and (len(reports.cases) < num_cases or "gone" in seen) and seen <= {"done", "lost", "gone"}:
        print(f"The ranks did not come to an end: {reports.failure}")
    if len(reports.cases) < num_cases:
        print(f"{num_cases - len(reports.cases)} more cases were not run")


def show_rank_prints(reports: AnswerReports) -> None:
    """Print what an answer printed in the first case that did not end on all ranks, else in the first."""
    found = [
        (case.is_done, number, rank, report.get("printed", ""))
        for number, case in enumerate(reports.cases)
        for rank, report in sorted(case.by_rank.items())
    ]
    loud = sorted(of_rank for of_rank in found if of_rank[-1].strip())
    if loud:
        *_, rank, printed = loud[0]
        show_printed([(printed, True)], who=f"your code, on rank {rank},")


def show_kinds(shown: Mapping[str, Sequence[str]], most: int) -> None:
    """Print the first sentence of each kind of mistake, for at most so many kinds, and how many are like it."""
    for sentences in list(shown.values())[:most]:
        print(sentences[0] + (f" (and {len(sentences) - 1} more like it)" if len(sentences) > 1 else ""))


def _pack(function: Any) -> bytes:
    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # whatever a learner's function refers to
        raise ValueError(
            f"your function cannot be sent to the ranks ({type(error).__name__}: {str(error)[:120]}): it must not use "
            "open groups, files or generators of the notebook"
        ) from error


def _collect(
    folder: Path, cases: Sequence[Any], num_answers: int, files: Mapping[tuple[str, int], str]
) -> list[list[CaseReports]]:
    """Read what the ranks wrote, and look up the lines that failed in these files."""
    found: list[dict[int, CaseReports]] = [{} for _ in range(num_answers)]
    for path in folder.glob("rank*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            report = json.loads(line)
            # Looked up here, as no rank knows the notebook's cells.
            places = [Place(*place) for place in report.get("places", ())]
            report["where"] = describe_place(
                [p._replace(file=files.get((p.function, p.begins), p.file)) for p in places]
            )
            report["error"] += report["where"] if report["error"] else ""
            reports = found[report["answer"]].setdefault(report["case"], CaseReports(case=cases[report["case"]]))
            reports.by_rank[int(path.stem.removeprefix("rank"))] = report
    return [[reports for _, reports in sorted(of_answer.items())] for of_answer in found]
