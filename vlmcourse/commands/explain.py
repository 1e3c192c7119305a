"""`vlmcourse explain FILE`: a ds_config.json explained key by key, and all that is wrong with it.

With `--config` it is read for a run: 'auto' is filled in, and what the two say differently is listed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from vlmcourse.commands.start import find_shape
from vlmcourse.commands.train import parse_overrides
from vlmcourse.config import load_config
from vlmcourse.deepspeed_config import (
    KEYS,
    Run,
    explain_deepspeed,
    explanation_table,
    find_deepspeed_problems,
    load_deepspeed_json,
)
from vlmcourse.values import ConfigError, check_counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("file", help="DeepSpeed's configuration, such as ds_config.json")
    parser.add_argument("--config", metavar="TOML", help="the run that it is for")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change one value of the run; may be repeated",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks of the run, for the samples of a step")
    parser.add_argument(
        "--all", action="store_true", help="explain all keys that DeepSpeed has, not only those written"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: keys and problems")


def run(args: argparse.Namespace) -> int:
    """Explain the file; return the exit code.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: listing what is wrong with the file, after the explanation; with --json it is printed instead.
    """
    if args.nproc is not None:
        check_counts(1, nproc=args.nproc)
    settings = load_deepspeed_json(args.file)
    target, refused = _read_run(args)
    rows = explain_deepspeed(settings, target, [name for name in KEYS if "." not in name] if args.all else None)
    problems = refused + find_deepspeed_problems(settings, target)
    if args.json:
        print(json.dumps({"keys": [dataclasses.asdict(row) for row in rows], "problems": problems}))
        return 2 if problems else 0
    print(explanation_table(rows), flush=True)
    if problems:
        raise ConfigError(args.file, problems)
    return 0


def _read_run(args: argparse.Namespace) -> tuple[Run | None, list[str]]:
    """Return the run that the file is for, and why that run would not read the file, as `train` says it."""
    if args.config is None:
        if args.overrides or args.nproc is not None:
            raise ValueError("--set and --nproc describe a run: name its file too, with --config")
        return None, []
    overrides = parse_overrides(args.overrides)
    config, refused = load_config(args.config, overrides), []
    try:
        load_config(args.config, overrides | {"parallel.deepspeed_config": args.file})
    except ConfigError as error:
        refused = list(error.problems)
    shape = find_shape(config)
    return Run(config, args.nproc, shape.language.hidden_size if shape is not None else None), refused
