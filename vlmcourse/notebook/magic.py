"""`%%torchrun` in the notebook: a cell and its flags in; printed lines, figures and variables out, or an exception.

This module imports no torch: `%load_ext vlmcourse` takes a blink, and the kernel stays free of CUDA.
"""

from __future__ import annotations

import builtins
import contextlib
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class

from vlmcourse.config import did_you_mean
from vlmcourse.notebook.cell import PreparedCell, prepare_cell
from vlmcourse.notebook.failure import RankFailure, RankTimeout, build_failure
from vlmcourse.notebook.jobs import BOOT, MARK, Job, JobFolder, open_job_folder
from vlmcourse.notebook.launcher import run_ranks
from vlmcourse.notebook.options import CellOptions, CellOptionsError, parse_options, read_ranks
from vlmcourse.notebook.session import SessionEnded
from vlmcourse.notebook.session_commands import SessionCommands
from vlmcourse.notebook.starting import RANK_ENVIRONMENT, RankStarter, readable_path
from vlmcourse.notebook.streams import NotebookPrinter, Printer, TerminalPrinter
from vlmcourse.notebook.variables import CannotTravelError, dump_variables, load_variables


class RanksInterrupted(KeyboardInterrupt):
    """A person interrupted the cell; its ranks have been stopped."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@magics_class
class TorchrunMagics(Magics):
    """The magics of the course."""

    def __init__(self, shell: InteractiveShell) -> None:
        """Begin to prepare for the first cell."""
        super().__init__(shell)
        self.ranks = RankStarter()
        self.sessions = SessionCommands(self.ranks)

    @line_cell_magic
    def torchrun(self, line: str, cell: str | None = None) -> None:
        """Run this cell on several ranks: processes that form a `torch.distributed` group.

        %%torchrun [-n RANKS] [--in NAME,...] [--out NAME,...] [--timeout SECONDS]

        Flags:
          -n, --nproc RANKS   how many ranks (2). More than there are cores works, slowly. With a GPU for each rank
                              they talk by NCCL, else by gloo on the CPU, which they share fairly.
          --in a,b            variables of the notebook that every rank receives a copy of
          --out loss          variables of rank 0 that the notebook receives when the cell has ended
          --timeout SECONDS   when to stop a cell that has not ended (300); a collective waits for half of it at most

        Every rank starts empty: import in the cell what it uses. It finds the process group initialised (by
        `vlmcourse.parallel.mesh.init_ranks()`, which returns what is known about this rank) and these variables:
          rank, local_rank    0, 1, ...; equal on one machine
          world_size          how many ranks there are
          device              where this rank's tensors belong: cpu, cuda:0, ...

        What ranks print appears line by line with the rank in front. Figures, `display(...)` and the value of the last
        expression are shown for rank 0. An exception on any rank stops the others and is raised here, as RankFailure
        with the rank's own traceback. Interrupting the cell stops all ranks; nothing stays running.

        Tensors travel as copies on the CPU. Functions and classes of the notebook travel too, with what they use.

        Examples:
          %%torchrun -n 2
          import torch, torch.distributed as dist
          x = torch.tensor([float(rank)], device=device)
          dist.all_reduce(x)
          print("sum of all ranks:", x.item())

          %%torchrun -n 4 --in learning_rate,steps --out losses
          losses = train(learning_rate, steps)   # `losses` of rank 0 is a variable of the notebook afterwards

          %%torchrun -n 2 --timeout 30
          if rank == 0:
              dist.barrier()   # rank 1 never comes: an error after 15 s that names this line
        """
        shell = self.shell
        assert shell is not None
        if cell is None:
            try:
                self.sessions.run_command(line)
            except KeyboardInterrupt:
                raise RanksInterrupted(self.sessions.describe_stopped_command(line)) from None
            return
        options = parse_options(line)
        if self.sessions.current is not None:
            self.run_in_session(f"%%torchrun {line}", cell, self.sessions.adapt(options))
            return
        prepared = prepare_cell(f"%%torchrun {line}", cell, shell.transform_cell)
        inputs = dump_variables("--in", select_variables(options.in_names, shell.user_ns, shell.user_ns_hidden))
        with open_job_folder() as folder:
            show = OutputReader(folder, make_printer(shell), shell.display_pub)
            self.ranks.prepare()
            if hasattr(shell, "kernel") and not self.ranks.is_ready:
                show.notice(f"starting {options.nproc} ranks: the first time they wait for torch to be imported ...")
            folder.write_inputs(inputs)
            folder.write_job(build_job(options, prepared, show.token))
            run_job(folder, options, show, shell.user_ns, self.ranks)
            shell.push(read_outputs(folder, options.out_names))

    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run this cell on some ranks of the session.

        %%rank RANKS [--in NAME,...] [--out NAME,...] [--timeout SECONDS]

        RANKS are numbers and ranges, such as `0` or `0,2-3`. The other ranks do nothing meanwhile, so a collective of
        all ranks waits in vain. Variables of `--out` come from the first of these ranks. For the flags see %%torchrun?.

        Example:
          %%rank 0
          print(model)
        """
        choice, _, flags = line.strip().partition(" ")
        session = self.sessions.get("%%rank")
        ranks = read_ranks(choice, session.nproc)
        self.run_in_session(f"%%rank {line}", cell, self.sessions.adapt(parse_options(flags)), ranks)

    def run_in_session(
        self, first_line: str, cell: str, options: CellOptions, ranks: Sequence[int] | None = None
    ) -> None:
        """Run a cell on all, or some, ranks of the session that is there."""
        shell = self.shell
        assert shell is not None
        session = self.sessions.get(first_line)
        ranks = ranks if ranks is not None else range(session.nproc)
        prepared = prepare_cell(first_line, cell, shell.transform_cell)
        inputs = dump_variables("--in", select_variables(options.in_names, shell.user_ns, shell.user_ns_hidden))
        folder = session.make_cell_folder()
        try:
            show = OutputReader(folder, make_printer(shell), shell.display_pub, main_rank=min(ranks))
            folder.write_inputs(inputs)
            job = build_job(options, prepared, show.token, main_rank=min(ranks))
            with add_hint(shell.user_ns):
                session.run(folder, job, ranks, on_line=show.line, on_progress=show.progress)
            shell.push(read_outputs(folder, options.out_names))
        except SessionEnded:
            self.sessions.current = None
            raise
        except KeyboardInterrupt:
            raise RanksInterrupted(self.sessions.describe_interrupt()) from None
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)


def make_printer(shell: InteractiveShell) -> Printer:
    """Return what shows the ranks' output to a person: in a notebook, or in IPython in a terminal."""
    return NotebookPrinter() if hasattr(shell, "kernel") else TerminalPrinter()


class OutputReader:
    """Shows what ranks print, and what rank 0 displays, in the order in which it was printed."""

    def __init__(
        self, folder: JobFolder, printer: Printer, display_pub: DisplayPublisher, *, main_rank: int = 0
    ) -> None:
        self._main_rank = main_rank
        self.token = secrets.token_hex(8)
        self._folder = folder
        self._printer = printer
        self._display_pub = display_pub
        start, _, end = MARK.format(token=self.token, number="|").partition("|")
        self._has_notice = False
        self._mark = re.compile(re.escape(start) + r"(\d*)" + re.escape(end))

    def notice(self, text: str) -> None:
        """Show a line that the first output of a rank replaces."""
        print(text, flush=True)
        self._has_notice = True

    def end_notice(self, wait: bool = True) -> None:
        """Take the notice away, when the next output comes (`wait`) or at once."""
        if self._has_notice:
            self._has_notice = False
            sys.stdout.flush()
            self._display_pub.clear_output(wait=wait)

    def line(self, rank: int, text: str) -> None:
        """Show a finished line."""
        self.end_notice()
        before, *marked = self._mark.split(text)
        if before or not marked:
            self._printer.line(rank, before)
        for number, after in zip(marked[::2], marked[1::2], strict=True):
            if number:
                self._show(self._folder.take_display(int(number)))
            if after:
                self._printer.line(rank, after)

    def progress(self, rank: int, text: str) -> None:
        """Show the present state of a progress bar."""
        if not self._mark.search(text):
            self.end_notice()
            self._printer.progress(rank, text)

    def _show(self, message: dict[str, Any]) -> None:
        if message.pop("clear", False):
            self._display_pub.clear_output(**message)
        elif set(message["data"]) <= {"text/plain"} and not message["transient"]:
            for line in message["data"].get("text/plain", "").splitlines():
                self._printer.line(self._main_rank, line)
        else:
            self._display_pub.publish(**message)


def select_variables(
    names: tuple[str, ...], namespace: Mapping[str, Any], hidden: Collection[str] = ()
) -> dict[str, Any]:
    """Return the variables of `--in`.

    Args:
        names: what was asked for.
        namespace: the notebook's variables.
        hidden: those that IPython put there.

    Raises:
        CellOptionsError: if the notebook has no such variable.
    """
    for name in names:
        if name not in namespace:
            own = [known for known in namespace if not known.startswith("_") and known not in hidden]
            hint = f" ({did_you_mean(name, own)})" if own else ""
            raise CellOptionsError(
                f"--in {name}: the notebook has no variable {name!r}: run the cell that assigns it first{hint}"
            )
    return {name: namespace[name] for name in names}


def build_job(options: CellOptions, prepared: PreparedCell, token: str, *, main_rank: int = 0) -> Job:
    """Gather what the ranks need to know about a cell."""
    return Job(
        source=prepared.source,
        shown_lines=prepared.shown_lines,
        shows_last_value=prepared.shows_last_value,
        out_names=list(options.out_names),
        timeout_s=options.timeout_s,
        sys_path=readable_path(),
        token=token,
        main_rank=main_rank,
    )


def run_job(
    folder: JobFolder, options: CellOptions, show: OutputReader, namespace: Mapping[str, Any], ranks: RankStarter
) -> None:
    """Run the ranks of a cell to their end.

    Raises:
        RankFailure: if a rank failed; with that rank's traceback. `RankTimeout` if time ran out.
        RanksInterrupted: if a person interrupted the kernel.
    """
    try:
        ranks.wait_until_ready()
        run_ranks(
            [sys.executable, "-c", BOOT, str(folder.path)],
            options.nproc,
            starter=partial(ranks.start, folder.path),
            timeout_s=options.timeout_s,
            env=RANK_ENVIRONMENT,
            on_line=show.line,
            on_progress=show.progress,
            private_dir=folder.path,
        )
    except KeyboardInterrupt:
        raise RanksInterrupted(f"all {options.nproc} ranks were stopped; nothing is left running") from None
    except RankTimeout as error:
        raise RankTimeout(
            f"{error}; --timeout {options.timeout_s:g} set it: give the cell more time with --timeout SECONDS, or look "
            "for a rank that waits for another",
            ends=error.ends,
        ) from None
    except RankFailure as error:
        with add_hint(namespace):
            raise build_failure(error.ends, folder.read_reports(), folder.read_done()) from None
    finally:
        show.end_notice(wait=False)


@contextlib.contextmanager
def add_hint(namespace: Mapping[str, Any]) -> Iterator[None]:
    """Add to a failure how a rank gets the name that it has not."""
    try:
        yield
    except RankFailure as failure:
        if hint := explain_missing_name(failure.rank_traceback, namespace):
            failure.args = (f"{failure}\n{hint}",)
        raise


def explain_missing_name(rank_traceback: str, namespace: Mapping[str, Any]) -> str:
    """Say how a rank gets a name that it has not; empty where that was not the problem."""
    found = re.search(r"^NameError: name '(\w+)' is not defined", rank_traceback, re.MULTILINE)
    if found is None or hasattr(builtins, found[1]):
        return ""
    name = found[1]
    if name not in namespace:
        return f"  Ranks start empty but for rank, world_size and device: define {name} inside the cell."
    value = namespace[name]
    if isinstance(value, ModuleType):
        statement = f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}"
        return f"  Ranks start empty: `{statement}` inside the cell."
    return f"  Ranks start empty: send the notebook's {name} with --in {name}, or define it inside the cell."


def read_outputs(folder: JobFolder, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the variables of `--out` that rank 0 has left.

    Raises:
        CannotTravelError: if there are none: the cell did not assign one, or it cannot be pickled.
    """
    if folder.output_problem.exists():
        raise CannotTravelError(folder.output_problem.read_text(encoding="utf-8"))
    if not names:
        return {}
    if not folder.outputs.exists():
        raise CannotTravelError(
            f"--out {', '.join(names)}: rank 0 ended before the cell did, so its variables are lost: "
            "let it run to the end"
        )
    return load_variables(folder.outputs.read_bytes())


def register(ipython: object) -> None:
    """Register the magics with a notebook's shell (called by `%load_ext vlmcourse`).

    Raises:
        TypeError: if this is not an IPython shell.
    """
    if not isinstance(ipython, InteractiveShell):
        raise TypeError(f"{ipython!r} is not an IPython shell: use %load_ext vlmcourse in a notebook")
    ipython.register_magics(TorchrunMagics)
