"""The `vlmcourse` command: a table of subcommands, each a module with `add_arguments(parser)` and `run(args) -> int`.

A module is imported only when its command is used, so that `vlmcourse --help` answers at once. Exit codes: 0 success, 1
a run that failed, 2 something the user can correct, 130 an interrupt.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

import vlmcourse

COMMANDS = {
    "train": ("vlmcourse.commands.train", "train a model as a TOML file says, on one process or several ranks"),
    "doctor": ("vlmcourse.commands.doctor", "show what this machine has, and a fix for what is missing"),
    "grade": ("vlmcourse.commands.grade", "grade a notebook, or a folder of them, in isolation"),
    "demo": ("vlmcourse.commands.demo", "train on two ranks, run chapter 1, grade two submissions; a table at the end"),
}
"""Name -> module and one line of help."""


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Build the parser; only the chosen command's module is imported and gets its arguments."""
    parser = argparse.ArgumentParser(prog="vlmcourse", description="Distributed training of vision-language models.")
    parser.add_argument("--version", action="version", version=f"vlmcourse {vlmcourse.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        subparser.add_argument("-v", "--verbose", action="store_true", help="show what happens, and whole tracebacks")
        if name == chosen:
            importlib.import_module(module).add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments; by default those of the process.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    args = build_parser(chosen).parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s: %(message)s")
    module = importlib.import_module(COMMANDS[args.command][0])
    try:
        return module.run(args)
    except (ValueError, FileNotFoundError) as error:
        # What a user chose and can correct: the message says how, a traceback would bury it.
        if args.verbose:
            raise
        print(f"vlmcourse {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nvlmcourse {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
