"""The line after `%%torchrun`: flags in, checked `CellOptions` out, and an error that says what to change."""

from __future__ import annotations

import argparse
import keyword
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from vlmcourse.notebook.launcher import check_rank_count
from vlmcourse.notebook.wrong_flags import SPELLED, explain_unknown
from vlmcourse.values import suggest_choice

DEFAULT_RANKS = 2
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_LAUNCHER = "fork"
LAUNCHERS = ("fork", "direct", "elastic")
"""Ways to start ranks: forked from a process that has imported torch, as new processes, or by the real `torchrun`."""
ELASTIC_FLAGS = ("--max-restarts", "--nnodes", "--rdzv-endpoint")
FLAGS = (
    "-n",
    "--nproc",
    "--in",
    "--out",
    "--ranks",
    "--timeout",
    "--launcher",
    *ELASTIC_FLAGS,
    "--dashboard",
    "--save",
    "--show",
)
PREDEFINED = ("rank", "local_rank", "world_size", "device")
"""Variables that every rank has before the cell's first line."""


class CellOptionsError(ValueError):
    """The line after `%%torchrun` cannot be used."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """How a cell is run."""

    nproc: int = DEFAULT_RANKS
    in_names: tuple[str, ...] = ()
    out_names: tuple[str, ...] = ()
    timeout_s: float = DEFAULT_TIMEOUT_S
    shown_ranks: tuple[int, ...] = ()
    """The ranks whose output is shown; empty for all."""
    explicit: frozenset[str] = field(default=frozenset(), compare=False)
    """Those of nproc and timeout that the line names; a session has its own where it does not."""
    launcher: str = DEFAULT_LAUNCHER
    max_restarts: int = 0
    """How often `torchrun` starts all ranks again after one has failed."""
    nnodes: tuple[int, int] = (1, 1)
    """The fewest and the most machines that may take part."""
    rdzv_endpoint: str = ""
    """`HOST:PORT` where the machines meet; empty where nobody said."""
    dashboard: str = ""
    """The folder of the run that is shown while the cell runs; empty where none is."""
    save: str = ""
    """The file that the cell is written to as a script; empty where it is not."""
    show: bool = False
    """Whether script and commands are printed, and nothing is run."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CellOptionsError(
            f"{self.prog}: {message}{'' if message.endswith('?') else ';'} type %%torchrun? for help"
        )


def parse_options(
    line: str, default_nproc: int = DEFAULT_RANKS, magic: str = "%%torchrun", flags: Sequence[str] = FLAGS
) -> CellOptions:
    """Read the flags of a cell.

    Args:
        line: what follows `%%torchrun`, such as `-n 4 --in model,batch --out loss`.
        default_nproc: how many ranks where the line does not say.
        magic: what the line begins with, for messages.
        flags: those that may be used.
    Returns:
        The checked options.
    Raises:
        CellOptionsError: if a flag is unknown or a value cannot be used.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, prog=magic)
    parser.add_argument("-n", "--nproc", type=_read_count)
    parser.add_argument("--in", dest="in_names", nargs="+", action="extend", default=[])
    parser.add_argument("--out", dest="out_names", nargs="+", action="extend", default=[])
    parser.add_argument("--ranks", nargs="+")
    parser.add_argument("--timeout", type=_read_seconds)
    parser.add_argument("--launcher", type=_read_launcher, default=DEFAULT_LAUNCHER)
    parser.add_argument("--max-restarts", type=_read_restarts)
    parser.add_argument("--nnodes", type=_read_nodes)
    parser.add_argument("--rdzv-endpoint", type=_read_endpoint)
    parser.add_argument("--dashboard", type=_read_run_folder)
    parser.add_argument("--save", type=_read_script_name)
    parser.add_argument("--show", action="store_true")
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise CellOptionsError(f"{magic} {line}: {error}") from error
    wrong = [words[index:] for index, word in enumerate(words) if word in SPELLED or word in ("-h", "--help")]
    known, unknown = (None, wrong[0]) if wrong else parser.parse_known_args(words)
    unknown = unknown or [word for word in words if word.startswith("-") and not _is_one_of(word, flags)]
    if unknown or known is None:
        raise CellOptionsError(explain_unknown(unknown, magic, flags))
    in_names, out_names = _read_names("--in", known.in_names), _read_names("--out", known.out_names)
    taken = [name for name in in_names if name in PREDEFINED]
    if taken:
        raise CellOptionsError(
            f"--in {taken[0]}: every rank has a {taken[0]!r} of its own; rename the notebook's variable"
        )
    given = {name: value for name in ("nproc", "timeout") if (value := getattr(known, name)) is not None}
    nproc = given.get("nproc", default_nproc)
    options = CellOptions(
        nproc=nproc,
        in_names=in_names,
        out_names=out_names,
        timeout_s=given.get("timeout", DEFAULT_TIMEOUT_S),
        shown_ranks=read_ranks("--ranks", " ".join(known.ranks), nproc) if known.ranks is not None else (),
        explicit=frozenset(given),
        launcher=known.launcher,
        max_restarts=known.max_restarts or 0,
        nnodes=known.nnodes or (1, 1),
        rdzv_endpoint=known.rdzv_endpoint or "",
        dashboard=known.dashboard or "",
        save=known.save or "",
        show=known.show,
    )
    elastic = [flag for flag in ELASTIC_FLAGS if getattr(known, flag.strip("-").replace("-", "_")) is not None]
    check_elastic(options, elastic)
    return options


def _is_one_of(word: str, flags: Sequence[str]) -> bool:
    """Whether a word that begins with a dash is one of these flags, a value of its own included, or a number."""
    return word.partition("=")[0] in flags or word[:2] in flags or word.lstrip("-").replace(".", "", 1).isdigit()


def check_elastic(options: CellOptions, given: Sequence[str]) -> None:
    """Refuse flags that would have no effect, and several machines of which all but this one lack the cell.

    Args:
        options: everything that was asked for.
        given: those of `ELASTIC_FLAGS` that were.
    Raises:
        CellOptionsError: naming the flag to add or to remove.
    """
    if given and options.launcher != "elastic":
        raise CellOptionsError(
            f"{given[0]}: only torchrun itself knows it, and "
            + (
                f"--launcher {options.launcher} does without: write --launcher elastic in its place"
                if options.launcher != DEFAULT_LAUNCHER
                else "cells do without unless you add --launcher elastic"
            )
        )
    if options.rdzv_endpoint and options.nnodes[1] == 1:
        raise CellOptionsError(
            f"--rdzv-endpoint {options.rdzv_endpoint}: one machine needs no meeting point; leave it out, or say how "
            "many machines meet there with --nnodes 2"
        )
    if options.nnodes[1] > 1 and not options.save and not options.show:
        raise CellOptionsError(
            f"--nnodes {options.nnodes[1]}: the other machines run this cell as a script: add --save train.py, and "
            "copy that file to them"
        )


def read_ranks(flag: str, text: str, nproc: int) -> tuple[int, ...]:
    """Return the ranks that a text such as `0,2-3` names, in order.

    Args:
        flag: what the person wrote before it, for the error message.
        text: numbers and ranges, separated by commas, each perhaps with a space after it.
        nproc: how many ranks there are.
    Raises:
        CellOptionsError: if it is something else, or there is no such rank.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(number.isdecimal() for number in numbers) or int(numbers[0]) > int(numbers[1]):
            raise CellOptionsError(
                f"{flag} {text}: {part.strip()!r} names no ranks: write numbers and ranges with commas between them, "
                "such as 0,2-3"
            )
        if int(numbers[1]) >= nproc:
            there_are = "the only rank is 0" if nproc == 1 else f"the ranks are 0 to {nproc - 1}"
            raise CellOptionsError(f"{flag} {text}: there is no rank {numbers[1]}: with -n {nproc} {there_are}")
        ranks.update(range(int(numbers[0]), int(numbers[1]) + 1))
    return tuple(sorted(ranks))


def _read_count(text: str) -> int:
    try:
        count = int(text)
        check_rank_count(count)
    except ValueError as error:
        reason = str(error).partition(": ")[2] if text.lstrip("-").isdigit() else "must be a whole number, such as 2"
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from None
    return count


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: must be a number of seconds above 0, such as 60")
    return seconds


def _read_launcher(text: str) -> str:
    if text not in LAUNCHERS:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {suggest_choice(text, LAUNCHERS)}")
    return text


def _read_restarts(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: must be a whole number, 0 or more, such as 3")
    return int(text)


def _read_nodes(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if low.isdecimal() and (high.isdecimal() or not colon):
        fewest, most = int(low), int(high or low)
        if 1 <= fewest <= most:
            return fewest, most
    raise argparse.ArgumentTypeError(
        f"{text!r} cannot be used: must be a number of machines, such as 2, or the fewest and the most, such as 1:2"
    )


def _read_endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used: must be a host that all machines reach and a free port there: node1:29400"
        )
    return text


def _read_run_folder(text: str) -> str:
    if not text.strip() or text.endswith(".toml"):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used: must be the folder that the run writes to, run.output_dir/run.name, such as "
            "runs/tiny; it need not be there yet"
        )
    return text


def _read_script_name(text: str) -> str:
    if not text.endswith(".py"):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used: must be the name of a script, such as train.py; quote a path with spaces"
        )
    return text


def _read_names(flag: str, words: Sequence[str]) -> tuple[str, ...]:
    names = [name for word in words for name in word.split(",") if name]
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise CellOptionsError(f"{flag} {name}: must be names of variables, separated by commas, such as a,b")
    return tuple(dict.fromkeys(names))
