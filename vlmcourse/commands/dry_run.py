"""`vlmcourse dry-run CONFIG --rank R --world-size N`: what one rank of a run would hold and send, without the ranks.

Enters: a run's configuration and a rank. Leaves: a table of bytes by owner at the peak, of collectives by axis, and
FLOPs; or all of it as JSON. Exit code 1 where a cluster is named whose devices are too small.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from typing import TYPE_CHECKING, Any

from vlmcourse.commands.start import find_shape
from vlmcourse.commands.train import parse_overrides
from vlmcourse.config import TrainConfig, load_config
from vlmcourse.planner.hardware import DeviceSpec, get_device
from vlmcourse.presets import VLMShape, get_cluster
from vlmcourse.values import check_counts

if TYPE_CHECKING:  # with torch, which --help does without
    from rich.table import Table

    from vlmcourse.dryrun.against_planner import Row
    from vlmcourse.dryrun.result import DryRun

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="the run's TOML file, such as configs/tiny.toml")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which rank to play (default: 0)")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks of the run (default: the cluster's devices)")
    parser.add_argument("--cluster", metavar="NAME", help="say whether it fits a cluster's devices, such as h100x8")
    parser.add_argument(
        "--full-depth", action="store_true", help="play every layer, not a few of each tower (same bytes, slower)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change one value of the configuration; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Play the rank; return 1 where its peak and the allowance do not fit the cluster's device, else 0.

    Raises:
        FileNotFoundError: if there is no such file, or no model of which the shape could be read.
        ValueError: if ranks, cluster and configuration do not fit together, or ask for what is not played.
    """
    config = load_config(args.config, parse_overrides(args.overrides))
    shape = find_shape(config)
    if shape is None:
        raise FileNotFoundError(
            f"model.hf_folder = {config.model.hf_folder!r} is not on this machine: a dry run needs its config.json; "
            "download the folder, or name a model.preset"
        )
    world_size, device = _find_ranks(args)
    from vlmcourse.dryrun import dry_run, extrapolate_run
    from vlmcourse.dryrun.against_planner import compare_with_planner
    from vlmcourse.planner.degrees import settle

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about speed on this machine
        play = dry_run if args.full_depth else extrapolate_run
        found = play(config, args.rank, world_size, shape=shape)
    parallel, _ = settle(config.parallel, world_size, shape, config.train.accumulation_steps)
    rows = compare_with_planner(found, config, parallel, shape)
    fits = device is None or found.device_bytes <= device.memory_bytes
    if args.json:
        print(json.dumps(_as_data(found, rows, device)))
    else:
        _print_tables(found, rows, config, shape, device)
    return 0 if fits else 1


def _find_ranks(args: argparse.Namespace) -> tuple[int, DeviceSpec | None]:
    """Return the number of ranks and the device of the cluster, where one is named."""
    if args.world_size is not None:
        check_counts(1, world_size=args.world_size)
    if args.cluster is None:
        if args.world_size is None:
            raise ValueError("how many ranks has the run? Give --world-size N, or --cluster NAME")
        return args.world_size, None
    cluster = get_cluster(args.cluster)
    if args.world_size not in (None, cluster.num_devices):
        raise ValueError(
            f"--world-size {args.world_size} with --cluster {cluster.name}: it has {cluster.num_devices} devices, and "
            "each runs one rank; leave --world-size out, or name another cluster"
        )
    return cluster.num_devices, get_device(cluster.device)


def _as_data(found: DryRun, rows: list[Row], device: DeviceSpec | None) -> dict[str, Any]:
    data = found.to_json() | {"planner": [dataclasses.asdict(row) for row in rows]}
    if device is not None:
        data["device"] = {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "fits": found.device_bytes <= device.memory_bytes,
        }
    return data


def _print_tables(
    found: DryRun, rows: list[Row], config: TrainConfig, shape: VLMShape, device: DeviceSpec | None
) -> None:
    from rich.console import Console
    from rich.text import Text

    console, peak, size = Console(soft_wrap=False), found.peak, found.size
    where = ", ".join(f"{axis} {place}" for axis, place in found.coordinates.items())
    how = "every layer played" if found.is_full_depth else "from a few layers of each tower"
    console.print(
        Text(
            f"{shape.name}: {found.num_vision_layers} vision and {found.num_language_layers} language layers, {how}\n"
            f"rank {found.rank} of {found.world_size} ({where}), {config.parallel.strategy}, {config.train.precision}\n"
            f"micro-batch: {size.num_samples} sample(s) of {size.seq_len} positions, {size.num_tiles} tile(s)\n"
            f"peak in {peak.phase}{f' of {peak.layer}' if peak.layer else ''}, micro-batch {peak.micro_batch + 1}"
        )
    )
    console.print(_owners_table(found, rows))
    console.print(_collectives_table(found))
    console.print(
        Text(
            f"FLOPs of this rank in one step, recomputation included: {found.flops:.4g}\n"
            f"Not in the peak: {found.allowance_bytes / GIB:.1f} GiB allowed for the CUDA context, NCCL's buffers, "
            "cuBLAS's workspace and fragmentation\n"
            "Counted as PyTorch's CPU operations keep it: RMSNorm in single steps, which a GPU's kernel fuses"
        )
    )
    if device is not None:
        verdict = "fits" if found.device_bytes <= device.memory_bytes else "does not fit"
        console.print(
            Text(
                f"Peak and allowance, {found.device_bytes / GIB:.1f} GiB: {verdict} into {device.name} "
                f"({device.memory_bytes / GIB:.1f} GiB)"
            )
        )


def _owners_table(found: DryRun, rows: list[Row]) -> Table:
    from rich.table import Table

    table = Table("owner at the peak")
    table.add_column("dry run, GiB", justify="right")
    table.add_column("closed formula, GiB", justify="right")
    formulas = {row.owner: f"{row.formula_bytes / GIB:.3f}" for row in rows}
    for owner, size in sorted(found.peak.live_bytes.items(), key=lambda item: -item[1]):
        table.add_row(owner, f"{size / GIB:.3f}", formulas.get(owner, ""))
    table.add_section()
    table.add_row("all", f"{found.peak.total_bytes / GIB:.3f}", "")
    return table


def _collectives_table(found: DryRun) -> Table:
    from rich.table import Table

    table = Table("collective", "axis")
    for heading in ("ranks", "calls a step", "whole tensors, GiB", "sent in rings, GiB"):
        table.add_column(heading, justify="right")
    for one in found.collectives:
        table.add_row(
            one.kind,
            one.axis,
            f"{one.num_ranks:,}",
            f"{one.calls:,}",
            f"{one.payload_bytes / GIB:.3f}",
            f"{one.sent_bytes / GIB:.3f}",
        )
    return table
