"""`vlmcourse train CONFIG`: one process, or `--nproc N` ranks that this process starts and watches.

As a rank (RANK is set by a launcher, ours or torchrun) it trains and rank 0 writes the plot and prints the outcome. As
the starting process with `--nproc` it checks the configuration, starts the ranks through the notebook's launcher and
passes on what they print. Whoever starts the run first checks that its folder can be written to.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmcourse.commands.gpu_order import order_gpus
from vlmcourse.commands.start import (
    check_activations,
    check_deepspeed_settings,
    check_degrees,
    check_rank_environment,
    check_room,
    find_shape,
)
from vlmcourse.config import ConfigError, TrainConfig, load_config
from vlmcourse.config_files import check_files
from vlmcourse.notebook.failure import RankFailure
from vlmcourse.notebook.folding import FoldingPrinter
from vlmcourse.notebook.launcher import check_rank_count, run_ranks
from vlmcourse.notebook.streams import TerminalPrinter
from vlmcourse.planner.grid import share_table
from vlmcourse.train.folder import (
    POINTER_NAME,
    aside,
    check_run_folder,
    check_steps_left,
    find_checkpoint,
    read_meta,
    run_folder,
)

JSON_KEYS = (
    "loss_first",
    "loss_last",
    "exact_match",
    "tokens_per_s",
    "peak_bytes",
    "strategy",
    "world_size",
    "seconds",
)
"""What `--json` promises; further keys may follow them."""

CHECKED = "VLMCOURSE_START_CHECKED"
"""Set for ranks by the process that started them: it has refused what would stop them all."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which run it is: a file, and changes to its values."""
    parser.add_argument("config", help="a TOML file, such as configs/tiny.toml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change one value of the file, such as train.num_steps=20; may be repeated",
    )
    parser.add_argument(
        "--deepspeed",
        action="append",
        dest="overrides",
        type=_name_deepspeed_file,
        metavar="FILE",
        help="take DeepSpeed's settings from a ds_config.json: short for --set parallel.deepspeed_config=FILE",
    )


def _name_deepspeed_file(path: str) -> str:
    """Return `--deepspeed FILE` as the override that it is short for; an empty one would name no file."""
    if not path:
        raise argparse.ArgumentTypeError("the path is empty: name a ds_config.json, or leave --deepspeed out")
    return f"parallel.deepspeed_config={json.dumps(path)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="go on from the latest checkpoint of this run, or of the run or checkpoint in FOLDER",
    )
    parser.add_argument(
        "--profile",
        action="append_const",
        dest="overrides",
        const="profile.active=2",
        help="record the third and fourth step of every rank and say where the time went: short for "
        "--set profile.active=2; the section [profile] says more",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object on the last line")


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code."""
    if args.nproc is not None and "RANK" in os.environ:
        raise ValueError("--nproc inside a rank: RANK is set already; leave --nproc out under torchrun or %%torchrun")
    world_size = check_rank_environment(os.environ) if args.nproc is None else None
    config = load_config(args.config, parse_overrides(args.overrides))
    if world_size is not None:
        if int(os.environ["RANK"]) == 0 and CHECKED not in os.environ:  # by torchrun: one rank says it
            _check_start(args, config, world_size)
        return _train_here(args, config)
    if args.nproc is not None:
        check_rank_count(args.nproc)
    check_degrees(config, args.nproc or 1)
    _check_start(args, config, args.nproc or 1)
    known = _read_pointer(config)
    try:
        return _train_here(args, config) if args.nproc is None else _start_ranks(args, config)
    except KeyboardInterrupt:
        ended = "" if args.nproc is None else f"; all {args.nproc} ranks have ended"
        print(f"\nvlmcourse train: interrupted{ended}. {_resume_hint(args, config, known)}", file=sys.stderr)
        return 130


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Turn `section.key=value` texts into values, typed as TOML does; what is no TOML value is a string.

    Raises:
        ConfigError: listing every text without a dot and an equals sign.
    """
    bad = [text for text in texts if "=" not in text or "." not in text.partition("=")[0]]
    if bad:
        raise ConfigError("--set", [f"{text!r}: write section.key=value, such as train.num_steps=20" for text in bad])
    overrides = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            overrides[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            overrides[key.strip()] = value.strip()
    return overrides


def _order_gpus(config: TrainConfig) -> None:
    """Put tensor-parallel ranks on GPUs that are close to each other."""
    settled = check_degrees(config, int(os.environ.get("WORLD_SIZE", "1")))
    variables, explanation = order_gpus(settled, os.environ)
    os.environ.update(variables)
    if explanation and os.environ.get("RANK") == "0":
        print(explanation, flush=True)


def _check_start(args: argparse.Namespace, config: TrainConfig, world_size: int) -> None:
    """Refuse what would stop every rank, and say what becomes of an earlier run; see each check for what it raises.

    With --verbose, also say which rank will hold what.
    """
    check_files(config)
    check_deepspeed_settings(config, world_size)
    check_room(config)
    check_activations(config)
    check_run_folder(config, is_resumed=args.resume is not None)
    folder = run_folder(config)
    if args.resume is not None:
        meta = read_meta(find_checkpoint(Path(args.resume) if args.resume else folder))
        check_steps_left(config, meta["step"])
    elif kept_as := aside(folder):
        print(f"the earlier run in {folder} will be kept as {kept_as}", flush=True)
    if args.verbose and (shape := find_shape(config)) is not None:
        print(share_table(check_degrees(config, world_size), world_size, shape), flush=True)


def _train_here(args: argparse.Namespace, config: TrainConfig) -> int:
    """Train in this process, which is the only one or one rank of several."""
    _order_gpus(config)  # before anything asks for a GPU
    from vlmcourse.parallel.comm import wait_for_all
    from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks
    from vlmcourse.train.trainer import Trainer

    ranks = init_ranks(config.parallel.timeout_s)
    if ranks.rank > 0:
        logging.getLogger().setLevel(logging.ERROR)  # rank 0 says it once
    trainer = Trainer(config, ranks)
    if args.resume is not None:
        trainer.resume(args.resume or None)
    trainer.load_step(trainer.step)  # what no step can be made of must not move an earlier run aside
    wait_for_all(ranks)
    result = trainer.fit()
    if ranks.is_main:
        from vlmcourse.plots import plot_training

        plot_training(result.history).savefig(Path(result.output_dir) / "training.png", dpi=150)
        if config.profile.active:
            _show_profile(config)
        _print_outcome(result.summary(), as_json=args.json)
    shutdown_ranks()
    return 0


def _show_profile(config: TrainConfig) -> None:
    """Print what the traces of a profiled run say, and draw its first recorded step beside them."""
    from vlmcourse.monitor.trace_activity import read_step_spans
    from vlmcourse.monitor.trace_merge import MERGED_NAME, read_merged
    from vlmcourse.plots import plot_timeline
    from vlmcourse.train.profiling import SUMMARY_NAME, profile_folder

    folder = profile_folder(config)
    if not (folder / SUMMARY_NAME).is_file():
        return  # the traces could not be merged, and why has been said
    trace = read_merged(folder / MERGED_NAME)
    plot_timeline({"measured": read_step_spans(trace)}).savefig(folder / "timeline.png", dpi=150)
    print((folder / SUMMARY_NAME).read_text(encoding="utf-8").rstrip())
    print(f"traces, for Perfetto (ui.perfetto.dev) {MERGED_NAME}, and a picture of a step: {folder}", flush=True)


def _start_ranks(args: argparse.Namespace, config: TrainConfig) -> int:
    """Start the ranks, each of which runs this command again, and print what they say."""
    argv = [sys.executable, "-m", "vlmcourse.cli", "train", args.config]
    argv += [part for text in args.overrides for part in ("--set", text)]
    argv += ["--verbose"] if args.verbose else []
    argv += ["--resume", *([args.resume] if args.resume else [])] if args.resume is not None else []
    print(f"starting {args.nproc} ranks; each imports torch first, which takes a few seconds", flush=True)
    try:
        with FoldingPrinter(TerminalPrinter(), range(args.nproc)) as printer:
            run_ranks(
                argv,
                args.nproc,
                timeout_s=math.inf,
                env={CHECKED: "1"},
                on_line=printer.line,
                on_progress=printer.progress,
                on_idle=printer.idle,
            )
    except RankFailure as error:
        print(f"vlmcourse train: {error}", file=sys.stderr)
        return 1
    if args.json:
        result = run_folder(config) / "result.json"
        _print_outcome(json.loads(result.read_text(encoding="utf-8")), as_json=True)
    return 0


def _read_pointer(config: TrainConfig) -> tuple[str, int] | None:
    """Return what names the latest checkpoint in the run's folder, and when it was written; None without one."""
    pointer = run_folder(config) / "checkpoints" / POINTER_NAME
    try:
        return pointer.read_text(encoding="utf-8"), pointer.stat().st_mtime_ns
    except OSError:
        return None


def _resume_hint(args: argparse.Namespace, config: TrainConfig, known: tuple[str, int] | None) -> str:
    """Say how to go on.

    Args:
        args: of the command.
        config: the run.
        known: the checkpoint that was in the run's folder at the start, which is another run's unless this one went on
            from there.
    """
    folder, found = run_folder(config), _read_pointer(config)
    continues = args.resume is not None and Path(args.resume or folder).resolve().is_relative_to(folder.resolve())
    if found is not None and (found != known or continues):
        return "Go on from the last checkpoint with --resume."
    if every := config.train.checkpoint_every:
        due = f"every {every} steps, and that many were not" if every > 1 else "with every step, and none was"
        return (
            f"This run has saved no checkpoint to go on from: train.checkpoint_every = {every} saves one {due} done "
            "yet; start it again without --resume."
        )
    return "This run has saved no checkpoint to go on from: train.checkpoint_every saves some."


def _print_outcome(summary: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({key: summary[key] for key in JSON_KEYS} | dict(summary)), flush=True)
        return
    splits_more = any(axis in summary["layout"] for axis in ("tp", "cp", "pp"))
    layout = f" ({summary['layout']})" if splits_more else ""
    print(
        f"{summary['strategy']} on {summary['world_size']} rank(s){layout}, {summary['num_steps']} steps of "
        f"{summary['global_batch_size']} samples in {summary['seconds']:.1f} s: "
        f"loss {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}, exact match "
        f"{100 * summary['exact_match']:.1f} % of {summary['num_questions']} held-out questions, "
        f"{summary['tokens_per_s']:,.0f} tokens/s, at most {summary['peak_bytes'] / 2**20:,.0f} MiB a rank "
        f"({summary['peak_is']})"
    )
    print(f"log, plot and checkpoints: {summary['output_dir']}", flush=True)
