"""What the notebook and its ranks tell each other about one cell: files in a private folder, no network.

The folder belongs to the user alone (mode 0700, its files 0600) and lives as long as the cell runs. The notebook writes
`job.json` and `inputs.pickle`; ranks write reports of exceptions and marks of completion, rank 0 also its outputs and
what it displays. A display is announced in rank 0's printed output, so that it keeps its place between the lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlmcourse.notebook.failure import RankReport
from vlmcourse.notebook.interrupts import ignore_interrupts

FOLDER_PREFIX = "vlmcourse-cell-"
REMOVE_TRIES = 10
REMOVE_PAUSE_S = 0.05
FILE_NAME = "cell"
"""What tracebacks call the code of the cell."""
MARK = "\x1b_{token}:{number}\x1b\\"
"""Announces display number `number`, or ends a line where that is empty; terminals do not show it."""
CELL_END = "\x1b_{token}/{content}\x1b\\"
"""Tells that a rank of a session has finished a cell: `content` is a `CellEnd` as JSON."""

_BOOT_MODULE = (
    "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/job.json'))['sys_path']; "
    "from vlmcourse.notebook.{} import main; main(sys.argv.pop())"
)
BOOT = _BOOT_MODULE.format("worker")
"""Run with `python -c BOOT FOLDER`: the rank finds modules where the notebook does."""
ELASTIC_BOOT = _BOOT_MODULE.format("elastic_worker")
"""The same for a rank that `torchrun` starts."""


@dataclass(frozen=True)
class Job:
    """One cell to run, as rank processes read it."""

    source: str
    """The cell as Python, with as many empty lines before it as the notebook's cell has before its code."""
    shown_lines: list[str]
    """The cell as the person wrote it, for tracebacks."""
    shows_last_value: bool
    out_names: list[str]
    timeout_s: float
    sys_path: list[str]
    token: str
    """A random word that marks what is not printed text in rank 0's output."""
    main_rank: int = 0
    """The rank whose variables `--out` takes."""
    shown_rank: int = 0
    """The rank whose pictures and tables are shown."""
    stays: bool = False
    """Whether the rank waits for further cells afterwards, as those of a session do."""


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only this user can read; it appears under its name when it is complete.

    Raises:
        OSError: if it exists or cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    handle = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    partial.rename(path)


class JobFolder:
    """The private folder of one cell: who writes which file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inputs = path / "inputs.pickle"
        self.outputs = path / "outputs.pickle"
        self.output_problem = path / "output_problem.txt"

    def write_job(self, job: Job) -> None:
        """Describe the cell to the ranks."""
        write_private(self.path / "job.json", json.dumps(dataclasses.asdict(job)).encode())

    def write_inputs(self, data: bytes) -> None:
        """Leave the packed variables that every rank starts with."""
        write_private(self.inputs, data)

    def add_attempt(self, name: str) -> JobFolder:
        """Make a folder for one more run of the same cell, whose reports and displays are its own."""
        attempt = JobFolder(self.path / name)
        attempt.path.mkdir(mode=0o700)
        for file in (self.path / "job.json", self.inputs):
            (attempt.path / file.name).symlink_to(file)
        return attempt

    def read_job(self) -> Job:
        """Return the cell to run."""
        return Job(**json.loads((self.path / "job.json").read_bytes()))

    def write_report(self, report: RankReport) -> None:
        """Leave a rank's exception for the notebook."""
        write_private(self.path / f"report-{report.rank}.json", json.dumps(dataclasses.asdict(report)).encode())

    def read_reports(self) -> dict[int, RankReport]:
        """Return the exceptions that ranks have left, by rank."""
        found = (RankReport(**json.loads(path.read_bytes())) for path in self.path.glob("report-*.json"))
        return {report.rank: report for report in found}

    def write_done(self, rank: int) -> None:
        """Say that a rank has run the cell to its end."""
        write_private(self.path / f"done-{rank}", b"")

    def read_done(self) -> set[int]:
        """Return the ranks that have run the cell to its end."""
        return {int(path.name.removeprefix("done-")) for path in self.path.glob("done-*[0-9]")}

    def write_display(self, number: int, message: dict[str, object]) -> None:
        """Leave something for the notebook to show."""
        write_private(self.path / f"display-{number}.json", json.dumps(message).encode())

    def take_display(self, number: int) -> dict[str, object]:
        """Return what rank 0 wants shown, and delete the file."""
        path = self.path / f"display-{number}.json"
        message = json.loads(path.read_bytes())
        path.unlink()
        return message


def make_job_folder() -> JobFolder:
    """Make a private folder that `remove_orphans` knows; it goes with the object, or at the latest with this process.

    So an interrupt at any moment, even before the caller has the object, leaves nothing.
    """
    folder = JobFolder(Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{os.getpid()}-{secrets.token_hex(6)}")
    weakref.finalize(folder, _remove_own, folder.path, os.getpid())
    folder.path.mkdir(mode=0o700)
    return folder


def remove_folder(path: Path) -> None:
    """Remove a private folder; a guard that writes its last file meanwhile makes it take another try."""
    for _ in range(REMOVE_TRIES):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(REMOVE_PAUSE_S)


def _remove_own(path: Path, maker: int) -> None:
    if os.getpid() == maker:  # a process forked from it has the object too
        with ignore_interrupts():
            remove_folder(path)


def control_path(folder: Path, rank: int) -> Path:
    """Return the named pipe through which a rank of a session is told which cell to run next."""
    return folder / f"control-{rank}"


@contextlib.contextmanager
def open_job_folder() -> Iterator[JobFolder]:
    """Make a private folder for one cell, and remove it afterwards."""
    folder = make_job_folder()
    try:
        yield folder
    finally:
        with ignore_interrupts():
            remove_folder(folder.path)


def remove_orphans() -> None:
    """Remove the folders of this user's kernels that were killed before a guard could do it."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        owner = path.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if owner.isdigit() and not is_alive(int(owner)):
            remove_folder(path)


def is_alive(pid: int) -> bool:
    """Whether a process has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
