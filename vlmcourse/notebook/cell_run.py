"""One run of a cell on ranks of its own: what they are given, how they are started, what comes of them.

Enters: a prepared cell and its options. Leaves: the variables of `--out`, or an exception that explains itself.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from vlmcourse.notebook.cell import PreparedCell
from vlmcourse.notebook.elastic import run_elastic
from vlmcourse.notebook.failure import RankFailure, RankHang, RankTimeout, build_failure
from vlmcourse.notebook.hang.doctor import HangDoctor
from vlmcourse.notebook.hints import START_EMPTY, add_hint
from vlmcourse.notebook.jobs import BOOT, Job, JobFolder
from vlmcourse.notebook.launcher import run_ranks
from vlmcourse.notebook.options import CellOptions, CellOptionsError
from vlmcourse.notebook.output_reader import OutputReader
from vlmcourse.notebook.rank_names import name_ranks
from vlmcourse.notebook.starting import RANK_ENVIRONMENT, RankStarter, readable_path
from vlmcourse.notebook.variables import CannotTravelError, load_variables
from vlmcourse.values import did_you_mean


class RanksInterrupted(KeyboardInterrupt):
    """A person interrupted the cell; its ranks have been stopped."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


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
        shown_rank=options.shown_ranks[0] if options.shown_ranks and options.nnodes[1] == 1 else main_rank,
    )


def run_job(
    folder: JobFolder,
    options: CellOptions,
    show: OutputReader,
    namespace: Mapping[str, Any],
    ranks: RankStarter,
    has: str = START_EMPTY,
) -> JobFolder:
    """Run the ranks of a cell to their end; return the folder in which they left their outputs.

    `has` says which variables the ranks have, for a cell that misses one.

    Raises:
        RankFailure: if a rank failed; with that rank's traceback. `RankTimeout` if time ran out, `RankHang` if they
            could not have gone on.
        RanksInterrupted: if a person interrupted the kernel.
    """
    doctor = HangDoctor(folder, show.say)
    try:
        return launch(folder, options, show, ranks, doctor)
    except KeyboardInterrupt:
        message = f"all {options.nproc} ranks were stopped; nothing is left running"
        raise RanksInterrupted("\n".join(filter(None, [message, doctor.text]))) from None
    except RankHang as error:
        raise error from None
    except RankTimeout as error:
        raise RankTimeout(
            f"{error}. More time: --timeout {2 * options.timeout_s:g}"
            + (f"\n{doctor.text}" if doctor.text else ", or look for a rank that waits for another"),
            ends=error.ends,
        ) from None
    except RankFailure as error:
        with add_hint(namespace, has, options.timeout_s):
            if options.launcher == "elastic" or not error.ends:  # nothing more is known: reports have been read
                raise error from None
            failure = build_failure(
                error.ends, folder.read_reports(), folder.read_done(), is_explained=bool(doctor.text)
            )
            failure.args = ("\n".join(filter(None, [doctor.text, str(failure)])),)
            if doctor.text:
                failure.rank_traceback = ""  # it ends in a guess of gloo's own, which the diagnosis contradicts
            raise failure from None
    finally:
        show.finish()


def launch(
    folder: JobFolder, options: CellOptions, show: OutputReader, ranks: RankStarter, doctor: HangDoctor
) -> JobFolder:
    """Start the ranks as `--launcher` says and wait for them; return the folder in which they left their outputs."""
    if options.launcher == "elastic":
        return run_elastic(
            folder,
            options,
            env=RANK_ENVIRONMENT,
            on_line=show.line,
            on_progress=show.progress,
            on_idle=show.idle,
            on_attempt=show.read_from,
            say=show.say,
            doctor=doctor,
        ).folder
    is_forked = options.launcher == "fork"
    if is_forked:
        ranks.wait_until_ready()
    run_ranks(
        [sys.executable, "-c", BOOT, str(folder.path)],
        options.nproc,
        starter=partial(ranks.start, folder.path) if is_forked else None,
        timeout_s=options.timeout_s,
        env=RANK_ENVIRONMENT,
        on_line=show.line,
        on_progress=show.progress,
        on_idle=show.idle,
        doctor=doctor,
        private_dir=folder.path,
    )
    if left := sorted(set(range(options.nproc)) - folder.read_done()):
        raise RankFailure(
            f"{name_ranks(left)} of {options.nproc} ended the process (exit code 0) before the cell's last line: end a "
            "cell with exit(0) or by its end, not with os._exit()",
            rank=left[0],
        )
    return folder


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
