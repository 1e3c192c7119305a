"""The line after `%%torchrun`: flags in, checked `CellOptions` out, and an error that says what to change."""

from __future__ import annotations

import argparse
import keyword
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from vlmcourse.config import did_you_mean
from vlmcourse.notebook.launcher import check_rank_count

DEFAULT_RANKS = 2
DEFAULT_TIMEOUT_S = 300.0
FLAGS = ("-n", "--nproc", "--in", "--out", "--ranks", "--timeout")
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CellOptionsError(f"%%torchrun: {message}; type %%torchrun? for help")


def parse_options(line: str, default_nproc: int = DEFAULT_RANKS) -> CellOptions:
    """Read the flags of a cell.

    Args:
        line: what follows `%%torchrun`, such as `-n 4 --in model,batch --out loss`.
        default_nproc: how many ranks where the line does not say.
    Returns:
        The checked options.
    Raises:
        CellOptionsError: if a flag is unknown or a value cannot be used.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, prog="%%torchrun")
    parser.add_argument("-n", "--nproc", type=_read_count)
    parser.add_argument("--in", dest="in_names", nargs="+", action="extend", default=[])
    parser.add_argument("--out", dest="out_names", nargs="+", action="extend", default=[])
    parser.add_argument("--ranks")
    parser.add_argument("--timeout", type=_read_seconds)
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise CellOptionsError(f"%%torchrun {line}: {error}") from error
    known, unknown = parser.parse_known_args(words)
    if unknown:
        flag = unknown[0].partition("=")[0]
        kind = "flag" if flag.startswith("-") else "argument"
        hint = did_you_mean(flag, FLAGS) if kind == "flag" else f"the flags are {', '.join(FLAGS)}"
        raise CellOptionsError(f"%%torchrun has no {kind} {flag!r}: {hint}")
    in_names, out_names = _read_names("--in", known.in_names), _read_names("--out", known.out_names)
    taken = [name for name in in_names if name in PREDEFINED]
    if taken:
        raise CellOptionsError(
            f"--in {taken[0]}: every rank has a {taken[0]!r} of its own; rename the notebook's variable"
        )
    given = {name: value for name in ("nproc", "timeout") if (value := getattr(known, name)) is not None}
    nproc = given.get("nproc", default_nproc)
    return CellOptions(
        nproc=nproc,
        in_names=in_names,
        out_names=out_names,
        timeout_s=given.get("timeout", DEFAULT_TIMEOUT_S),
        shown_ranks=read_ranks("--ranks", known.ranks, nproc) if known.ranks is not None else (),
        explicit=frozenset(given),
    )


def read_ranks(flag: str, text: str, nproc: int) -> tuple[int, ...]:
    """Return the ranks that a text such as `0,2-3` names, in order.

    Args:
        flag: what the person wrote before it, for the error message.
        text: numbers and ranges, separated by commas.
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
                f"{flag} {text}: {part.strip()!r} names no ranks: write numbers and ranges, such as 0,2-3"
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
        reason = str(error) if text.lstrip("-").isdigit() else "must be a whole number, such as 2"
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


def _read_names(flag: str, words: Sequence[str]) -> tuple[str, ...]:
    names = [name for word in words for name in word.split(",") if name]
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise CellOptionsError(f"{flag} {name}: must be names of variables, separated by commas, such as a,b")
    return tuple(dict.fromkeys(names))
