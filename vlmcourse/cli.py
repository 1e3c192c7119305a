"""The `vlmcourse` command: a table of subcommands, each a module with `add_arguments(parser)` and `run(args) -> int`.

A module is imported only when its command is used, so that `vlmcourse --help` answers at once. Exit codes: 0 success, 1
a run that failed, 2 something the user can correct, 130 an interrupt or a request to end, 141 nobody reads the output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import select
import sys
from collections.abc import Sequence

import vlmcourse
from vlmcourse.termination import end_as_interrupted
from vlmcourse.values import did_you_mean

COMMANDS = {
    "train": ("vlmcourse.commands.train", "train a model as a TOML file says, on one process or several ranks"),
    "doctor": ("vlmcourse.commands.doctor", "show what this machine has, and a fix for what is missing"),
    "watch": ("vlmcourse.commands.watch", "show a run while it trains, rank by rank: who is slow, behind or silent"),
    "diagnose": ("vlmcourse.commands.diagnose", "say why a run is slow, with evidence, and what to change"),
    "dry-run": ("vlmcourse.commands.dry_run", "say what one rank of a run would hold and send, without any other rank"),
    "launch": ("vlmcourse.commands.launch", "write what starts a run on several machines: Slurm, Kubernetes, torchrun"),
    "export": ("vlmcourse.commands.export", "write a run's checkpoint as a Hugging Face folder"),
    "explain": ("vlmcourse.commands.explain", "explain a ds_config.json key by key, and what is wrong with it"),
    "plan": ("vlmcourse.commands.plan", "find the best plan for a model, devices and a batch, and say why"),
    "validate": ("vlmcourse.commands.validate", "compare the planner's predictions with published figures in a CSV"),
    "grade": ("vlmcourse.commands.grade", "grade a notebook, or a folder of them, in isolation"),
    "demo": ("vlmcourse.commands.demo", "train on two ranks, run chapter 1, grade two submissions; a table at the end"),
}
"""Name -> module and one line of help."""
NOT_READ = 141
"""What a shell makes of a process that SIGPIPE has ended."""


def build_parsers(chosen: str | None = None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Build the parsers; only the chosen command's module is imported and gets its arguments.

    Returns:
        The whole parser, and the one of the chosen command (the whole one where none is chosen).
    """
    parser = argparse.ArgumentParser(prog="vlmcourse", description="Distributed training of vision-language models.")
    parser.add_argument("--version", action="version", version=f"vlmcourse {vlmcourse.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen_parser = parser
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        subparser.add_argument("-v", "--verbose", action="store_true", help="show what happens, and whole tracebacks")
        if name == chosen:
            importlib.import_module(module).add_arguments(subparser)
            chosen_parser = subparser
    return parser, chosen_parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments; a wrong word ends the process with the usage of its command and the nearest right word."""
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    parser, chosen_parser = build_parsers(chosen)
    if argv and chosen is None and not argv[0].startswith("-"):
        parser.error(f"invalid choice: {argv[0]!r}: {did_you_mean(argv[0], COMMANDS)}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for flag in chosen_parser._option_string_actions if flag.startswith("--")]
        wrong = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        hints = [f"{word}: {did_you_mean(word, flags)}" for word in wrong]
        chosen_parser.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints]))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments; by default those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        except KeyboardInterrupt:  # also while modules are imported, which takes a rank seconds
            print(f"\nvlmcourse {''.join(words[:1])}: interrupted", file=sys.stderr)
            return 130
        finally:
            if sys.stdout is not None:  # as it is where a shell has closed it: `vlmcourse ... >&-`
                sys.stdout.flush()
    except BrokenPipeError:
        if sys.stdout is None or _is_read():
            raise
        # As in `vlmcourse ... | head`: what is left must not fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_READ


def _is_read() -> bool:
    """Whether somebody still reads what goes to stdout."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
    except (OSError, ValueError):  # it is no file
        return True
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _run(argv: list[str]) -> int:
    args = parse(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s: %(message)s")
    module = importlib.import_module(COMMANDS[args.command][0])
    # A rank is ended by who started it, who waits for it: it may be where no exception can be raised.
    ending = contextlib.nullcontext() if "RANK" in os.environ else end_as_interrupted()
    try:
        with ending:
            return module.run(args)
    except (ValueError, FileNotFoundError) as error:
        # What a user chose and can correct: the message says how, a traceback would bury it.
        if args.verbose:
            raise
        print(f"vlmcourse {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
