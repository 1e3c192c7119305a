"""Which rank failed first and why: exit codes and the ranks' own reports in, one exception for the learner out."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vlmcourse.notebook.rank_names import group_ranks, name_ranks

LOST_CONNECTION = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was closed",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "failed to recv, got 0 bytes",
    "communicator was aborted",
    "connectfullmesh failed",
)
"""What gloo, NCCL and the store say on a rank whose partner has gone: a consequence, never the cause."""
IN_VAIN = ("timed out waiting", "wait timeout after", "failed to pass monitoredbarrier")
"""What they say on a rank that has waited for the others as long as a collective may take."""
CONNECTION_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
LIKELY_CAUSES = {
    signal.SIGKILL: "the machine probably ran out of memory, or someone killed it",
    signal.SIGSEGV: "compiled code touched memory that is not its own",
    signal.SIGBUS: "probably no room left in shared memory (/dev/shm)",
    signal.SIGABRT: "compiled code gave up; its reason is in the rank's output above",
    signal.SIGTERM: "someone asked it to end",
}
SOURCE_PLACE = re.compile(r"^\[[^\]\s]*\.\w+:\d+\] ")
"""Where in PyTorch's own source gloo found the trouble: of no use to a learner."""
MAX_LINE_CHARS = 160
FINISHED = "had finished"
LEFT = "had ended its process (exit code 0)"
"""What became of a rank that did not run its code to the end, though its process says that all is well."""


@dataclass(frozen=True)
class RankEnd:
    """How the process of one rank ended."""

    rank: int
    exit_code: int
    """0 is success; -n means killed by signal n."""
    ended_at_s: float
    """Seconds on the machine's monotonic clock."""
    was_stopped: bool
    """Whether the launcher ended it, because another rank failed, time ran out or a person interrupted."""
    peak_bytes: int | None = None
    """The most memory that it has had at a time, where that is known."""


@dataclass(frozen=True)
class RankReport:
    """What a rank wrote down about the exception that ended it."""

    rank: int
    failed_at_s: float
    """Seconds on the machine's monotonic clock, comparable between ranks."""
    error_type: str
    error_message: str
    traceback: str
    where: str
    """Such as `cell, line 3`; empty where the cell's code was not running."""

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only noticed that another one had gone."""
        message = self.error_message.lower()
        return self.error_type in CONNECTION_ERRORS and any(words in message for words in LOST_CONNECTION)

    @property
    def is_timeout(self) -> bool:
        """Whether a collective of this rank took longer than it may."""
        message = self.error_message.lower()
        return self.error_type in CONNECTION_ERRORS and any(words in message for words in IN_VAIN)

    @property
    def summary(self) -> str:
        """The exception in one line."""
        first_line = SOURCE_PLACE.sub("", (self.error_message.strip().splitlines() or [""])[0])
        text = f"{self.error_type}: {first_line}" if first_line else self.error_type
        return text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 3] + "..."


class RankFailure(RuntimeError):
    """A rank failed; the other ranks have been stopped and nothing is running any more."""

    def __init__(
        self, message: str, *, rank: int | None = None, ends: Sequence[RankEnd] = (), rank_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first; None where no single one did."""
        self.ends = tuple(ends)
        self.rank_traceback = rank_traceback
        """That rank's traceback, where it could write one."""

    def _render_traceback_(self) -> list[str]:
        """Show the rank's traceback in a notebook, rather than that of the magic."""
        shown = []
        if self.rank_traceback:
            shown = [f"[{self.rank}] {line}" for line in self.rank_traceback.splitlines()] + [""]
        return [*shown, f"{type(self).__name__}: {self}"]


class RankTimeout(RankFailure):
    """The ranks were stopped because their time was up."""


class RankHang(RankFailure):
    """The ranks were stopped because they waited for one another and none could ever have gone on."""


def describe_exit(exit_code: int) -> str:
    """Say in words how a process ended: `exited with code 3`, `was killed by SIGKILL (...)`."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"was killed by signal {-exit_code}"
    cause = LIKELY_CAUSES.get(number)
    return f"was killed by {number.name}" + (f" ({cause})" if cause else "")


def describe_peak(end: RankEnd) -> str:
    """Say how much memory a rank had that was killed, as running out of it does; empty where nothing is known."""
    if end.exit_code != -signal.SIGKILL or end.peak_bytes is None:
        return ""
    gib = end.peak_bytes / 2**30
    return f"; it had used {f'{gib:.1f} GiB' if gib >= 1 else f'{gib * 1024:.0f} MiB'} at most"


def find_root(ends: Sequence[RankEnd], reports: Mapping[int, RankReport]) -> RankEnd:
    """Return the rank whose failure came first; the others failed or were stopped because of it.

    A death by signal beats an exception: the partner of a killed rank may write its report before the launcher has
    seen the death. An abort does not, because NCCL aborts ranks whose partner has gone.

    Args:
        ends: how every rank ended.
        reports: the exceptions that ranks wrote down, by rank.
    Raises:
        ValueError: if no rank failed.
    """
    failed = [end for end in ends if _failed_by_itself(end, reports.get(end.rank))]
    if not failed:
        raise ValueError(f"none of {len(ends)} ranks failed by itself")

    def order(end: RankEnd) -> tuple[int, float]:
        report = reports.get(end.rank)
        if report is not None:
            return (3 if report.is_consequence else 1), report.failed_at_s
        if end.exit_code < 0:
            return (2 if -end.exit_code == signal.SIGABRT else 0), end.ended_at_s
        return 1, end.ended_at_s

    return min(failed, key=order)


def build_failure(
    ends: Sequence[RankEnd],
    reports: Mapping[int, RankReport],
    finished: Collection[int] | None = None,
    world_size: int | None = None,
    is_explained: bool = False,
) -> RankFailure:
    """Make the exception that names the first failing rank, with one line for what became of the others.

    Args:
        ends: how every rank ended.
        reports: the exceptions that ranks wrote down, by rank.
        finished: ranks that had run their code to its end, even if they were stopped afterwards; by default those
            whose process ended well.
        world_size: how many ranks there are, where some are on other machines; by default as many as `ends`.
        is_explained: whether it is said elsewhere whom the rank waited for.
    """
    root = find_root(ends, reports)
    report = reports.get(root.rank)
    others = {end.rank: _describe_other(end, reports.get(end.rank), finished) for end in ends if end is not root}
    left_early = [rank for rank, text in others.items() if text == FINISHED]
    where = f" in {report.where}" if report is not None and report.where else ""
    if report is None:
        reason = describe_exit(root.exit_code) + describe_peak(root)
    elif report.is_consequence and is_explained:
        reason = f"failed{where}: lost its connection"
    elif report.is_consequence and left_early:
        reason = f"failed{where}: it waited for {name_ranks(left_early)}, which had finished without joining in"
    else:
        reason = f"failed{where}: {report.summary}"
    message = "\n".join([f"rank {root.rank} of {world_size or len(ends)} {reason}", *_fold(others)])
    traceback = report.traceback if report is not None else ""
    return RankFailure(message, rank=root.rank, ends=ends, rank_traceback=traceback)


def _failed_by_itself(end: RankEnd, report: RankReport | None) -> bool:
    if end.exit_code == 0:
        return False
    if report is not None:
        return not (end.was_stopped and report.error_type == "KeyboardInterrupt")
    return not end.was_stopped


def _describe_other(end: RankEnd, report: RankReport | None, finished: Collection[int] | None) -> str:
    if end.rank in finished if finished is not None else end.exit_code == 0:
        return FINISHED
    if end.exit_code == 0:
        return LEFT
    if not _failed_by_itself(end, report):
        return "stopped"
    if report is None:
        return describe_exit(end.exit_code)
    where = f" in {report.where}" if report.where else ""
    return f"then failed{where}: {'lost its connection' if report.is_consequence else report.summary}"


def _fold(others: Mapping[int, str]) -> list[str]:
    """One line for each thing that happened, with the ranks it happened to."""
    return [f"  {name_ranks(ranks)}: {text}" for text, ranks in group_ranks(others).items()]
