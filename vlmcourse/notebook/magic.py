"""`%%torchrun`, `%%rank` and `%torchrun` as a person types them: flags and help here, the work in other modules.

This module imports no torch: `%load_ext vlmcourse` takes a blink, and the kernel stays free of CUDA.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from vlmcourse.notebook.cell import PreparedCell, prepare_cell
from vlmcourse.notebook.cell_run import (
    RanksInterrupted,
    build_job,
    read_outputs,
    run_job,
    select_variables,
)
from vlmcourse.notebook.completion import complete_torchrun, find_assigned
from vlmcourse.notebook.hints import IN_SESSION, SESSION_LOST, START_EMPTY, add_hint
from vlmcourse.notebook.jobs import open_job_folder
from vlmcourse.notebook.options import CellOptions, CellOptionsError, parse_options, read_ranks
from vlmcourse.notebook.output_reader import OutputReader, make_printer
from vlmcourse.notebook.script import build_script, describe_script, save_script
from vlmcourse.notebook.session import SessionEnded
from vlmcourse.notebook.session_commands import SessionCommands
from vlmcourse.notebook.starting import RankStarter
from vlmcourse.notebook.subcommands import Subcommand, run_subcommand
from vlmcourse.notebook.variables import dump_variables


@magics_class
class TorchrunMagics(Magics):
    """The magics of the course."""

    def __init__(self, shell: InteractiveShell) -> None:
        """Begin to prepare for the first cell."""
        super().__init__(shell)
        self.ranks = RankStarter()
        self.sessions = SessionCommands(self.ranks)
        self.subcommands = {
            "--show": Subcommand(self.show_last, "print the last cell as a script, and its commands"),
            **self.sessions.table(),
        }
        self._last_cell: tuple[CellOptions, PreparedCell] | None = None

    @cell_magic
    def torchrun(self, line: str, cell: str) -> None:
        """Run this cell on several ranks: processes that form a `torch.distributed` group.

        %%torchrun [-n RANKS] [--in NAME,...] [--out NAME,...] [--timeout SECONDS] [--ranks RANKS]
                   [--dashboard RUN] [--save FILE.py] [--show]
                   [--launcher fork|direct|elastic] [flags of elastic, see the end]

        It is the first line of the cell. For example:
          %%torchrun -n 2
          import torch, torch.distributed as dist
          x = torch.tensor([float(rank)], device=device)
          dist.all_reduce(x)
          print("sum of all ranks:", x.item())

          %%torchrun -n 4 --in steps --out losses
          losses = [1 / (step + 1) for step in range(steps)]   # those of rank 0 are in the notebook afterwards

        A rank is one of the processes, with a number from 0. A collective is a call that all ranks make together, such
        as all_reduce or barrier. They talk by NCCL between GPUs and by gloo between CPUs, two libraries of PyTorch.

        Flags:
          -n, --nproc RANKS   how many ranks (2). More than there are cores works, slowly. With a GPU for each rank
                              they talk by NCCL, else by gloo on the CPU, which they share fairly.
          --in a,b            variables of the notebook that every rank receives a copy of
          --out loss          variables of rank 0 that the notebook receives when the cell has ended
          --timeout SECONDS   when to stop a cell that has not ended (300); a collective waits for half of it at most
          --ranks 0,2-3       show only what these ranks print; all of them run, and an error of any is raised
          --dashboard RUN     show the run that the cell trains, from the folder that it writes to, such as runs/tiny:
                              loss, tokens/s, each rank's steps and memory, twice a second; the ranks are not asked
          --save train.py     write the cell as a script that runs under plain torchrun, then run the cell
          --show              print that script, its torchrun command and a Slurm batch script, and run nothing

        Every rank starts empty: import in the cell what it uses. It finds the process group initialised (by
        `vlmcourse.parallel.ranks.init_ranks()`, which returns what is known about this rank) and these variables:
          rank, local_rank    0, 1, ...; equal on one machine
          world_size          how many ranks there are
          device              where this rank's tensors belong: cpu, cuda:0, ...

        What ranks print appears line by line with the rank in front; what several print alike, once, as [0-3]. Figures,
        `display(...)` and pictures and tables as the last expression are shown for rank 0, or the first of --ranks; a
        last expression that is text, for every rank. An exception on any rank stops the others and is raised here, as
        RankFailure with the rank's own traceback. Interrupting the cell stops all ranks; nothing stays running. Ranks
        that hang are asked first: the error says who waits where for whom. If none of them can ever go on, that is
        after seconds.

        Tensors travel as copies on the CPU. Functions and classes of the notebook travel too, with what they use.

        Sessions, whose ranks stay alive and keep their variables from cell to cell:
          %torchrun start -n 4    start one: %%torchrun cells now run in its ranks, until it is stopped
          %%rank 0,2              run a cell on some of its ranks
          %torchrun status        show its ranks, with their processes and memory
          %torchrun restart       empty ranks instead, as many as before
          %torchrun stop          end it
        start and restart take -n, and --timeout for cells that name none. %torchrun --show does for the last cell what
        %%torchrun --show does for this one.

        More examples:
          %%torchrun -n 2 --timeout 30
          import torch.distributed as dist
          if rank == 0:
              dist.barrier()   # rank 1 never comes: an error that names this line, and what rank 1 did instead

          %%torchrun -n 8 --ranks 0
          print("shown once")   # the other ranks print it too, unseen

          %%torchrun -n 2 --in learning_rate --save train.py
          print("with", learning_rate)   # then, in a terminal: torchrun --standalone --nproc-per-node 2 train.py

        How ranks start:
          --launcher HOW      fork (the default): ranks split off from a process that has imported torch, and start in
                                a blink; where that is not possible, the same as direct
                              direct: every rank is a new process, which imports torch itself
                              elastic: the real torchrun starts the ranks; slower, and it can restart them. Ranks that
                                hang are asked there when you interrupt the cell, or its time is up

        Only with --launcher elastic:
          --max-restarts 3    how often torchrun starts all ranks again after one has failed (0). They begin the cell
                              anew: TORCHELASTIC_RESTART_COUNT in os.environ says how often that has happened
          --nnodes 2          how many machines take part, or the fewest and the most, such as 1:2. The cell says what
                              to run on the others (with --save), and waits for them. -n counts the ranks of one
                              machine; the notebook shows those of its own, and --out comes from the first of them
          --rdzv-endpoint HOST:PORT   where the machines meet (this one, port 29400)

          %%torchrun --launcher elastic --max-restarts 2
          import os
          if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
              raise RuntimeError("lost")   # torchrun starts both ranks again, and the cell succeeds

          %%torchrun -n 8 --launcher elastic --nnodes 2 --rdzv-endpoint node1:29400 --save train.py
          print(rank, "of", world_size)   # of 16, once the command that the cell prints runs on the other machine
        """
        shell = self.shell
        assert shell is not None
        if self.sessions.current is not None:
            self._run_in_session("%%torchrun", line, cell)
            return
        options = parse_options(line)
        prepared = prepare_cell(f"%%torchrun {line}", cell, shell.transform_cell)
        self._last_cell = options, prepared
        values = select_variables(options.in_names, shell.user_ns, shell.user_ns_hidden)
        told = leave_notebook(options, prepared, values)
        if options.show:
            print(told)
        else:
            self._run(options, prepared, values, told)

    @line_magic("torchrun")
    def torchrun_line(self, line: str) -> None:
        """Work with what `%%torchrun` has run (`%%torchrun?` explains how cells run on several ranks).

        %torchrun --show             print the last %%torchrun cell as a script, with its torchrun command and a Slurm
                                     batch script; nothing is run
        %torchrun start [-n RANKS] [--timeout SECONDS]   start ranks that stay alive and keep their variables (a
                                     session); %%torchrun and %%rank cells then run in them
        %torchrun status             show the ranks of the session, with their processes and memory
        %torchrun stop               end the session; nothing is left running
        %torchrun restart            end the session and start a new, empty one with as many ranks; it takes the flags
                                     of start
        """
        try:
            run_subcommand(line, self.subcommands)
        except KeyboardInterrupt:
            raise RanksInterrupted(self.sessions.describe_stopped_command(line)) from None

    def show_last(self, rest: str) -> None:
        """Print the last cell as a script, with its commands (`%torchrun --show`).

        Raises:
            CellOptionsError: if there is none yet, or more was said than `--show`.
        """
        shell = self.shell
        assert shell is not None
        if rest:
            raise CellOptionsError(f"%torchrun --show {rest}: it takes nothing else; remove {rest!r}")
        if self._last_cell is None:
            raise CellOptionsError("%torchrun --show: no %%torchrun cell has run yet: run one first")
        options, prepared = self._last_cell
        values = select_variables(options.in_names, shell.user_ns, shell.user_ns_hidden)
        print(leave_notebook(replace(options, save="", show=True), prepared, values))

    def _run(self, options: CellOptions, prepared: PreparedCell, values: Mapping[str, Any], told: str) -> None:
        """Run a cell to its end; `told` is shown before its output."""
        shell = self.shell
        assert shell is not None
        inputs = dump_variables("--in", values)
        with open_job_folder() as folder, self._dashboard("%%torchrun", options) as show_dashboard_again:
            show = OutputReader(folder, make_printer(shell, options), shell.display_pub)
            show.show_pinned = show_dashboard_again
            for remark in filter(None, [told, self.sessions.describe_loss(options.nproc)]):
                show.say(remark)
            is_ready = False
            if options.launcher == "fork":
                self.ranks.prepare()
                is_ready = self.ranks.is_ready
            if hasattr(shell, "kernel") and not is_ready:
                when = "the first time they" if options.launcher == "fork" else "they"
                show.notice(f"starting {options.nproc} ranks: {when} wait for torch to be imported ...")
            folder.write_inputs(inputs)
            folder.write_job(build_job(options, prepared, show.token))
            last_folder = run_job(folder, options, show, shell.user_ns, self.ranks, self._what_ranks_have())
            shell.push(read_outputs(last_folder, options.out_names))

    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run this cell on some ranks of the session that `%torchrun start -n 4` began.

        %%rank RANKS [--in NAME,...] [--out NAME,...] [--timeout SECONDS]

        RANKS are numbers and ranges, such as `0` or `0,2-3`. The other ranks do nothing meanwhile, so a collective of
        all ranks waits in vain. Variables of `--out` come from the first of these ranks. For the flags see %%torchrun?.

        Example:
          %%rank 0
          print(model)
        """
        words = line.split()
        at = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
        choice, flags = " ".join(words[:at]), line[line.find(words[at]) :] if at < len(words) else ""
        if not choice:
            raise CellOptionsError("%%rank: which ranks? Such as %%rank 0, or %%rank 0,2-3; flags follow them")
        ranks = read_ranks("%%rank", choice, self.sessions.get("%%rank").nproc)
        self._run_in_session(f"%%rank {choice}", flags, cell, ranks)

    def _run_in_session(self, magic: str, flags: str, cell: str, ranks: Sequence[int] = ()) -> None:
        """Run a cell on the ranks of the session that is there: all of them if `ranks` names none."""
        shell = self.shell
        assert shell is not None
        session = self.sessions.get(magic)
        ranks = ranks or range(session.nproc)
        options = self.sessions.adapt(parse_options(flags, session.nproc, magic.split(" ")[0]))
        if magic != "%%torchrun" and (options.save or options.show):
            raise CellOptionsError(
                f"{magic} --{'save' if options.save else 'show'}: a script runs on all ranks: write this cell as "
                f"%%torchrun with `if rank in {tuple(ranks)}:` around it, and save that"
            )
        prepared = prepare_cell(f"{magic} {flags}", cell, shell.transform_cell)
        values = select_variables(options.in_names, shell.user_ns, shell.user_ns_hidden)
        if magic == "%%torchrun":
            self._last_cell = options, prepared
        if told := leave_notebook(options, prepared, values):
            print(told)
        if options.show:
            return
        inputs = dump_variables("--in", values)
        folder = session.make_cell_folder()
        try:
            show = OutputReader(folder, make_printer(shell, options, ranks), shell.display_pub)
            folder.write_inputs(inputs)
            job = build_job(options, prepared, show.token, main_rank=min(ranks))
            with (
                self._dashboard(magic, options) as show.show_pinned,
                add_hint(shell.user_ns, IN_SESSION, options.timeout_s, self.sessions.assigned_by),
            ):
                try:
                    session.run(folder, job, ranks, show)
                finally:
                    show.finish()
            self.sessions.note_assigned(magic, find_assigned(cell))
            shell.push(read_outputs(folder, options.out_names))
        except SessionEnded:
            self.sessions.lose()
            raise
        except KeyboardInterrupt:
            raise RanksInterrupted(self.sessions.describe_interrupt()) from None
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)

    def _dashboard(self, magic: str, options: CellOptions) -> AbstractContextManager[Callable[[], None] | None]:
        """Show the run of `--dashboard` while a cell runs; gives what shows it again, or None without the flag."""
        if not options.dashboard:
            return nullcontext()
        if not hasattr(self.shell, "kernel"):
            raise CellOptionsError(
                f"{magic} --dashboard {options.dashboard}: only a notebook can show it: leave it out, and run "
                f"vlmcourse watch {options.dashboard} in another terminal"
            )
        from vlmcourse.notebook.dashboard import show_dashboard  # widgets take a moment to import

        return show_dashboard(options.dashboard)

    def _what_ranks_have(self) -> str:
        return SESSION_LOST if self.sessions.lost is not None else START_EMPTY


def leave_notebook(options: CellOptions, prepared: PreparedCell, values: Mapping[str, Any]) -> str:
    """Write a cell as a script (`--save`), and return what to tell the person: the script and its commands (`--show`).

    Raises:
        ScriptError: if something in the cell works only in a notebook, or the file is not to be replaced.
    """
    if not options.save and not options.show:
        return ""
    script = build_script(options, prepared, values)
    told = [save_script(script, options, values)] if options.save else []
    return "\n\n".join([*told, describe_script(script, options)] if options.show else told)


def register(ipython: object) -> None:
    """Register the magics with a notebook's shell (called by `%load_ext vlmcourse`).

    Raises:
        TypeError: if this is not an IPython shell.
    """
    if not isinstance(ipython, InteractiveShell):
        raise TypeError(f"{ipython!r} is not an IPython shell: use %load_ext vlmcourse in a notebook")
    magics = TorchrunMagics(ipython)
    ipython.register_magics(magics)
    complete_torchrun(ipython, magics.subcommands)
