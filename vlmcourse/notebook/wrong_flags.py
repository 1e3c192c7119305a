"""A word on a magic's line that it does not know: the word in, what to write instead out."""

from __future__ import annotations

from collections.abc import Collection

from vlmcourse.values import did_you_mean

COMMANDS = ("start", "status", "stop", "restart")
NOT_NEEDED = ("--standalone", "--no-python", "--no_python", "--module", "--node-rank", "--node_rank", "--master-addr")
"""Flags of `torchrun` that say what a cell's ranks know without them."""
FEW = 3
"""So many flags are all named."""
SPELLED = {
    "--nproc-per-node": "torchrun's --nproc-per-node is -n here",
    "--nproc_per_node": "torchrun's --nproc-per-node is -n here",
    "--n": "write -n",
    "--np": "write -n",
    "-np": "write -n",
}


def explain_unknown(words: list[str], magic: str, flags: Collection[str]) -> str:
    """Say what to write instead of the first of these words.

    Args:
        words: what was not understood, in order.
        magic: such as `%%torchrun`.
        flags: those that it takes.
    """
    flag = words[0].partition("=")[0]
    if flag in ("-h", "--help"):
        hint = f"type {magic.split(' ')[0]}? for help"
    elif flag in SPELLED:
        hint = SPELLED[flag]
    elif flag in COMMANDS:
        hint = f"it is a command of %torchrun with one percent sign: %torchrun {' '.join(words)}"
    elif flag.isdigit():
        hint = f"for {count_ranks(int(flag))} write -n {flag}"
    elif flag in NOT_NEEDED:
        hint = "not needed here: leave it out"
    elif flag.startswith("-"):
        hint = did_you_mean(flag, flags) if len(flags) > FEW else f"choose one of {', '.join(flags)}"
    elif flag.endswith(".py"):
        hint = "put the script's code into the cell, or run it there with %run; quote a path with spaces"
    else:
        hint = f"the flags are {', '.join(flags)}"
    return f"{magic} has no {'flag' if flag.startswith('-') else 'argument'} {flag!r}: {hint}"


def count_ranks(number: int) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{number} rank{'s' if number != 1 else ''}"
