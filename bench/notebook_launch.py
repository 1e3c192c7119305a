"""Ways to run ranks from a notebook, measured side by side in real Jupyter kernels, as one table.

    pip install -c constraints.txt torch==2.13.0 -e '.[dev,bench]'      # the other tools; never needed by the course
    python bench/notebook_launch.py --out bench/notebook_launch.md      # 20 to 25 minutes; on a quiet machine
    python bench/notebook_launch.py --only cell torchrun --columns start warm

Every cell of the table comes from a kernel of its own that loads the tool first. Each measurement has a time limit, and
a tool's failure is what the table says in that place. Nothing is asserted. A tool that is not installed says so.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil
from notebook_tools import TOOLS, Tool, hide_pkill

from vlmcourse.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from notebook_kernel import MARK, Kernel  # noqa: E402

UP = """\
import os
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(f"up {total.item():.0f}, pid {rank} {os.getpid()}.", flush=True)
"""
IS_UP = "up 3"
"""What a rank prints when the all-reduce over both has worked."""
FAIL = """\
if rank == 1:
    raise ValueError("planted")
"""
HANG = """\
import os, time
dist.barrier()
print(f"pid {rank} {os.getpid()}.", flush=True)
if rank == 0:
    dist.all_reduce(torch.ones(1))
time.sleep(1000)
"""
FLOOD = """\
for number in range({lines}):
    print(f"line {{number}} of rank {{rank}}, about as long as a line of a log")
"""
TRIES = 3
"""How often a person runs the first cell again that showed nothing."""
DEATH = (r"Error: .*SIGKILL", "SIGKILL", r"signal:? 9|exitcode *: *-9", "killed", "died", "Error: ", "imeout")
"""Words that tell of a killed rank, the best first."""
MAX_WORDS = 70
SETTLE_S = 2.0
ORPHANS_AFTER_S = 5.0
SOURCE_PLACE = re.compile(r"\[\S*\.\w+:\d+\] |^\w\d{4} [\d:.]+ \d+ \S+\] ")
"""When, or where in PyTorch's own source, something went wrong."""
ESCAPES = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


class ToolFailedError(Exception):
    """The tool did not do what the measurement needs; the message goes into the table."""


@dataclass(frozen=True)
class Limits:
    """How much is measured."""

    repeat: int
    """Warm cells."""
    lines: int
    """Lines printed by each rank."""
    seconds: float
    """For each measurement."""


@dataclass
class Cell:
    """A cell that has been sent: what it has shown so far."""

    message_id: str
    sent_s: float
    parts: list[str] = field(default_factory=list)
    error: str = ""
    """`Name: message`; empty while there is none."""
    has_ended: bool = False

    @property
    def text(self) -> str:
        """Everything shown, without colours."""
        return ESCAPES.sub("", "".join(self.parts))

    def take(self, message: dict) -> None:
        """Note a message of the kernel."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.parts.append(content["text"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self.parts.append(content["data"].get("text/plain", "") + "\n")
        elif message["parent_header"].get("msg_id") != self.message_id:
            return
        elif kind == "error":
            self.error = f"{content['ename']}: {content['evalue']}"
            self.parts.append("\n".join([*content["traceback"], self.error]))
        elif kind == "status" and content["execution_state"] == "idle":
            self.has_ended = True


class Notebook:
    """A new kernel in which one tool is used."""

    def __init__(self, tool: Tool, folder: Path, limits: Limits) -> None:
        self.tool, self.limits, self._folder = tool, limits, folder
        hide_pkill(folder, MARK)
        search = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        self.kernel = Kernel(cwd=str(folder), env={"PATH": os.pathsep.join(search)})
        self.kernel_pid = self.kernel.pid

    def send(self, code: str) -> Cell:
        """Run a cell without waiting for it."""
        return Cell(self.kernel.client.execute(code), time.monotonic())

    def send_ranks(self, code: str) -> Cell:
        """Run code on both ranks without waiting for it."""
        return self.send(self.tool.make_cell(code, self._folder))

    def follow(self, cell: Cell, is_done: Callable[[Cell], object], limit_s: float | None = None) -> bool:
        """Read what the kernel sends until `is_done`; return whether that came in time."""
        end_s = time.monotonic() + (self.limits.seconds if limit_s is None else limit_s)
        while not is_done(cell):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            try:
                cell.take(self.kernel.client.get_iopub_msg(timeout=min(left_s, 0.5)))
            except queue.Empty:
                if not psutil.pid_exists(self.kernel_pid):
                    return False
        return True

    def run(self, code: str) -> None:
        """Run a cell of the notebook itself to its end.

        Raises:
            ToolFailedError: if it is an error, or does not end in time.
        """
        cell = self.send(code)
        if not self.follow(cell, has_ended):
            raise ToolFailedError(f"`{code.splitlines()[0]}` did not end within {self.limits.seconds:g} s")
        if cell.error:
            raise ToolFailedError(shorten(cell.error))

    def start(self) -> tuple[float, str]:
        """Load the tool and run the first cell on ranks until one has printed; return the seconds and a remark."""
        began_s = time.monotonic()
        for code in self.tool.setup:
            self.run(code)
        for number in range(1, TRIES + 1):
            cell = self.send_ranks(UP)
            if not self.follow(cell, lambda cell: IS_UP in cell.text or cell.has_ended):
                break
            if IS_UP in cell.text:
                seconds = time.monotonic() - began_s
                self.follow(cell, has_ended)
                return seconds, f", the first {number - 1} cell(s) lost" if number > 1 else ""
        raise ToolFailedError(shorten(cell.error or cell.text or "the first cell showed nothing"))

    def count_processes(self) -> int:
        """Return how many processes there are that the kernel or its tool have started."""
        return len([found for found in self.kernel.processes(with_server=True) if found.pid != self.kernel_pid])

    def close(self) -> None:
        """End everything."""
        self.kernel.close()


def has_ended(cell: Cell) -> bool:
    """Whether the notebook shows the cell as finished."""
    return cell.has_ended


def shorten(text: str) -> str:
    """Return the first line that says something, fit for a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=")] or [""]
    line = SOURCE_PLACE.sub("", lines[0]).replace("|", "/")
    return line if len(line) <= MAX_WORDS else line[: MAX_WORDS - 3] + "..."


def read_pids(text: str) -> set[int]:
    """Return the process ids that ranks have printed."""
    return {int(pid) for pid in re.findall(r"pid \d (\d+)\.", text)}


# --- The columns ------------------------------------------------------------------------------------------------------


def measure_start(notebook: Notebook) -> str:
    """From a new kernel to the first print after an all-reduce, loading the tool included."""
    seconds, remark = notebook.start()
    return f"{seconds:.1f} s{remark}"


def measure_warm(notebook: Notebook) -> str:
    """Time the same cell again and again, to its first print and to its end."""
    notebook.start()
    firsts, ends = [], []
    for _ in range(notebook.limits.repeat):
        cell = notebook.send_ranks(UP)
        if not notebook.follow(cell, lambda cell: IS_UP in cell.text):
            raise ToolFailedError(f"a later cell showed: {shorten(cell.error or cell.text or 'nothing')}")
        firsts.append(time.monotonic() - cell.sent_s)
        if not notebook.follow(cell, has_ended):
            raise ToolFailedError("a later cell did not end")
        ends.append(time.monotonic() - cell.sent_s)
    return f"{statistics.median(firsts):.3f} s, {statistics.median(ends):.3f} s"


def measure_exception(notebook: Notebook) -> str:
    """Let rank 1 raise an exception."""
    notebook.start()
    cell = notebook.send_ranks(FAIL)
    if not notebook.follow(cell, has_ended):
        return f"cell did not end within {notebook.limits.seconds:g} s"
    told = cell.text
    rank = "names the rank" if re.search(r"(?i)\brank[ :]*1\b|\[1[\]:]|\[\w+:1\]|process 1\b", told) else "no rank"
    line = "and the line" if re.search(r"raise ValueError\(.planted.\)|line 2, in <module>", told) else "no line"
    error = f"error ({cell.error.split(':')[0]})" if cell.error else "**shown as success**"
    return f"{error}, {rank}, {line}"


def measure_interrupt(notebook: Notebook) -> str:
    """Interrupt a collective that one rank never enters, as the notebook's stop button does."""
    notebook.start()
    hanging = notebook.send_ranks(HANG)
    if not notebook.follow(hanging, lambda cell: len(read_pids(cell.text)) == 2):
        raise ToolFailedError(f"the hanging cell showed: {shorten(hanging.text or 'nothing')}")
    time.sleep(SETTLE_S)
    before = read_pids(hanging.text)
    began_s = time.monotonic()
    notebook.kernel.manager.interrupt_kernel()
    if not notebook.follow(hanging, has_ended):
        return f"**cell goes on** for more than {notebook.limits.seconds:g} s"
    remark, after = make_usable(notebook)
    seconds = time.monotonic() - began_s
    left = {pid for pid in before - after if psutil.pid_exists(pid)}
    if notebook.tool.keeps_ranks:
        remark += ", ranks kept" if before == after else ", ranks replaced"
    return f"{seconds:.1f} s{remark}" + (f", **{len(left)} old ranks left running**" if left else "")


def make_usable(notebook: Notebook) -> tuple[str, set[int]]:
    """Run a cell on both ranks, after a restart of the tool where it takes one; return a remark and their ids."""
    cell = notebook.send_ranks(UP)
    notebook.follow(cell, has_ended)
    if IS_UP in cell.text:
        return "", read_pids(cell.text)
    if not cell.has_ended:
        notebook.kernel.manager.interrupt_kernel()
        notebook.follow(cell, has_ended)
    if not notebook.tool.keeps_ranks:
        raise ToolFailedError(f"the next cell showed: {shorten(cell.error or cell.text or 'nothing')}")
    for code in notebook.tool.restart:
        notebook.run(code)
    for _ in range(TRIES):
        cell = notebook.send_ranks(UP)
        notebook.follow(cell, has_ended)
        if IS_UP in cell.text:
            return " after a restart by hand", read_pids(cell.text)
    raise ToolFailedError("not usable again, even after a restart of the tool")


def measure_kill(notebook: Notebook) -> str:
    """Kill rank 1 while rank 0 waits in a collective."""
    notebook.start()
    cell = notebook.send_ranks(HANG)
    if not notebook.follow(cell, lambda cell: len(read_pids(cell.text)) == 2):
        raise ToolFailedError(f"the hanging cell showed: {shorten(cell.text or 'nothing')}")
    time.sleep(SETTLE_S)
    victim = re.search(r"pid 1 (\d+)\.", cell.text)
    assert victim is not None
    seen, began_s = len(cell.text), time.monotonic()
    os.kill(int(victim[1]), 9)
    if not notebook.follow(cell, has_ended):
        return f"not within {notebook.limits.seconds:g} s"
    seconds = time.monotonic() - began_s
    lines = [line for line in cell.text[seen:].splitlines() if line.strip()]
    words = next((line for word in DEATH for line in lines if re.search(word, line)), "nothing")
    return f"{seconds:.1f} s, {'error' if cell.error else '**no error**'}: “{shorten(words)}”"


def measure_lines(notebook: Notebook) -> str:
    """Print many lines on both ranks."""
    notebook.start()
    lines = notebook.limits.lines
    cell = notebook.send_ranks(FLOOD.format(lines=lines))
    ended = notebook.follow(cell, has_ended)
    seconds = time.monotonic() - cell.sent_s
    shown = len(re.findall(r"line \d+ of rank", cell.text))
    if not ended:
        return f"**not within {notebook.limits.seconds:g} s** ({shown:,} lines by then)"
    has_last = f"line {lines - 1} of rank" in cell.text
    what = "all" if shown >= 2 * lines else f"{shown:,} lines" + ("" if has_last else ", **the last is lost**")
    return f"{seconds:.1f} s, {what}"


def measure_orphans(notebook: Notebook) -> str:
    """Kill the kernel while the ranks run, and count what is left."""
    notebook.start()
    cell = notebook.send_ranks(HANG)
    if not notebook.follow(cell, lambda cell: len(read_pids(cell.text)) == 2):
        raise ToolFailedError(f"the hanging cell showed: {shorten(cell.text or 'nothing')}")
    os.kill(notebook.kernel_pid, 9)
    time.sleep(ORPHANS_AFTER_S)
    left = notebook.count_processes()
    return f"**{left}**" if left else "0"


COLUMNS: dict[str, tuple[str, Callable[[Notebook], str]]] = {
    "start": ("first start", measure_start),
    "warm": ("warm cell: first print, end", measure_warm),
    "exception": ("exception on rank 1", measure_exception),
    "interrupt": ("interrupt of a hang: usable again", measure_interrupt),
    "kill": ("rank 1 killed: reported", measure_kill),
    "lines": ("{lines:,} lines a rank", measure_lines),
    "orphans": ("processes left 5 s after the kernel is killed", measure_orphans),
}


def measure(tool: Tool, column: str, limits: Limits) -> str:
    """Return what one cell of the table says; a failure, whatever it is, is said there too."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        notebook = None
        try:
            notebook = Notebook(tool, Path(folder), limits)
            return COLUMNS[column][1](notebook)
        except Exception as error:  # the table's boundary
            name = "" if isinstance(error, ToolFailedError) else f"{type(error).__name__}: "
            return f"failed: {shorten(name + str(error))}"
        finally:
            if notebook is not None:
                notebook.close()


def measure_row(tool: Tool, columns: list[str], limits: Limits) -> list[str]:
    """Return a row of the table: the tool's name and what each column says."""
    installed = tool.find_version()
    if installed is None:
        return [
            tool.name,
            f"not installed: pip install -e '.[bench]' brings {tool.package}",
            *[""] * (len(columns) - 1),
        ]
    row = [f"{tool.name} {installed}".strip()]
    for column in columns:
        row.append(measure(tool, column, limits))
        print(f"{row[0]}, {column}: {row[-1]}", file=sys.stderr, flush=True)
        if column == "start" and row[-1].startswith("failed"):
            break
    return row + [""] * (len(columns) + 1 - len(row))


def describe_tools() -> str:
    """Say where the numbers are from."""
    versions = [f"{name} {version(name)}" for name in ("torch", "ipykernel")]
    return ", ".join([describe_machine(), *versions, "2 ranks on gloo"])


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[tool.key for tool in TOOLS], default=[tool.key for tool in TOOLS])
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--repeat", type=int, default=20, help="warm cells; their median is shown (20)")
    parser.add_argument("--lines", type=int, default=100_000, help="lines that each rank prints (100000)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each measurement (60)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    limits = Limits(options.repeat, options.lines, options.limit)
    head = ["", *(COLUMNS[column][0].format(lines=limits.lines) for column in options.columns)]
    rows = [measure_row(tool, options.columns, limits) for tool in TOOLS if tool.key in options.only]
    command = "python bench/notebook_launch.py " + " ".join(sys.argv[1:] if arguments is None else arguments)
    table = [head, ["---"] * len(head), *rows]
    text = f"{describe_tools()}. Made by `{command.strip()}`.\n\n" + "".join(
        f"| {' | '.join(row)} |\n" for row in table
    )
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
