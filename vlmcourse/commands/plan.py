"""`vlmcourse plan MODEL --gpus N --device NAME --global-batch B`: the best plans, why, and what the others broke.

Nothing is started. Numbers are predictions of the planner; how far off these are is in bench/planner_efficiency.md and
bench/validate_planner.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmcourse.planner.choice import Task
from vlmcourse.planner.hardware import get_device
from vlmcourse.planner.hf_folder import read_hf_shape
from vlmcourse.planner.memory import GB
from vlmcourse.planner.search import Search, search_plans
from vlmcourse.planner.search_reasons import (
    as_json,
    count_rejected,
    drop_alike,
    say_losses,
    say_memory,
    say_miss,
    say_reasons,
    say_stages,
)
from vlmcourse.planner.search_space import SearchSpace
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import CLUSTERS, Cluster, VLMShape, get_model
from vlmcourse.values import check_counts

DEVICES_PER_NODE = 8
ALIKE_FACTOR = 8
"""Times as many plans are ranked as shown, since those that are alike are shown once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", help="a preset, such as internvl2-26b, or a Hugging Face InternVL folder")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="devices of all machines together")
    parser.add_argument("--device", required=True, help="such as h100; an unknown name lists the known ones")
    parser.add_argument(
        "--global-batch", type=int, required=True, metavar="B", help="samples of one optimizer step, met exactly"
    )
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a sample, image tokens included")
    parser.add_argument(
        "--tiles",
        default="6",
        metavar="N[,N...]",
        help="tiles of a sample; several numbers are those of typical samples, each as likely as any other",
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="8, or all of them if there are fewer")
    parser.add_argument(
        "--network-gb-per-s", type=float, metavar="X", help="between machines, GB/s one way for each device"
    )
    parser.add_argument("--freeze", default="", metavar="TOWERS", help="not trained: vision, projector, language")
    parser.add_argument("--precision", default="bf16_mixed", help="bytes of a parameter, see planner/recipes.py")
    parser.add_argument("--optimizer", default="adamw", help="adamw, adamw_8bit or sgd_momentum")
    parser.add_argument("--offload", action="store_true", help="also plans with the optimizer in main memory")
    parser.add_argument("--runnable", action="store_true", help="only what `vlmcourse train` can run")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="how many plans to show")
    parser.add_argument(
        "--all", action="store_true", help="also plans that share the same work out between dp and cp in another way"
    )
    parser.add_argument("--pareto", metavar="PNG", help="also draw the plans that give the most speed for their memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object: best, rejected, misses")


def run(args: argparse.Namespace) -> int:
    """Search and print; return the exit code, 1 where no plan fits.

    Raises:
        ValueError: if model, device, cluster or samples cannot be.
    """
    task = build_task(args)
    space = SearchSpace(offload=args.offload, runnable=args.runnable)
    start_s = time.perf_counter()
    search = search_plans(task, space, top=args.top * (1 if args.all else ALIKE_FACTOR))
    seconds = time.perf_counter() - start_s
    shown = search.best if args.all else drop_alike(search.best)
    search = dataclasses.replace(search, best=tuple(shown[: args.top]))
    if args.pareto:
        _draw_front(task, dataclasses.replace(space, offload=False), args.pareto)
    if args.json:
        print(json.dumps(as_json(search) | {"search_s": seconds}))
    else:
        print_search(search, seconds, Console(soft_wrap=False))
    return 0 if search.best else 1


def build_task(args: argparse.Namespace) -> Task:
    """Return what the arguments ask for.

    Raises:
        ValueError: naming the argument that cannot be.
    """
    check_counts(1, gpus=args.gpus, global_batch=args.global_batch, seq_len=args.seq_len, top=args.top)
    try:
        tiles = tuple(int(word) for word in args.tiles.split(","))
    except ValueError:
        raise ValueError(f"--tiles {args.tiles!r}: must be a whole number, or several with commas between") from None
    return Task(
        model=_find_model(args.model),
        cluster=build_cluster(args.device, args.gpus, args.gpus_per_node, args.network_gb_per_s),
        global_batch_size=args.global_batch,
        workload=Workload(seq_len=args.seq_len, tiles_per_sample=tiles[0]),
        tile_counts=tiles if len(tiles) > 1 else (),
        frozen=tuple(word.strip() for word in args.freeze.split(",") if word.strip()),
        precision=args.precision,
        optimizer=args.optimizer,
    )


def _find_model(name: str) -> VLMShape:
    if not Path(name).is_dir():
        return get_model(name)
    shape = read_hf_shape(name)
    if shape is None:
        raise ValueError(f"{name!r} is a folder without a config.json: name a preset or a Hugging Face InternVL folder")
    return shape


def build_cluster(
    device: str, num_devices: int, devices_per_node: int | None = None, network_gb_per_s: float | None = None
) -> Cluster:
    """Return so many devices in equal machines: one of the presets where there is one, else one like them.

    Main memory is that of a preset with the same device; where there is none, 0, so that nothing can be offloaded.

    Raises:
        ValueError: if the device is not known, machines would be of unequal size, or the speed of the network between
            them is neither given nor known from a preset.
    """
    get_device(device)
    per_node = devices_per_node or min(num_devices, DEVICES_PER_NODE)
    if per_node < 1 or num_devices % per_node:
        raise ValueError(
            f"--gpus {num_devices} in machines of {per_node}: some would have fewer; set --gpus-per-node to a divisor"
        )
    num_nodes = num_devices // per_node
    alike = [known for known in CLUSTERS.values() if known.device == device]
    network = (
        1e9 * network_gb_per_s if network_gb_per_s else max((known.network_bytes_per_s for known in alike), default=0)
    )
    if num_nodes > 1 and not network > 0:
        raise ValueError(
            f"--gpus {num_devices} of {device} in {num_nodes} machines: no preset says how fast their network is; set "
            "--network-gb-per-s (400 Gb/s a device are 50)"
        )
    host = max(alike, key=lambda known: known.host_memory_bytes, default=None)
    share = per_node / host.devices_per_node if host else 0.0
    return Cluster(
        name=f"{device}x{num_devices}",
        device=device,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        host_memory_bytes=round(min(1.0, share) * host.host_memory_bytes) if host else 0,
        host_memory_bytes_per_s=min(1.0, share) * host.host_memory_bytes_per_s if host else 0.0,
        network_bytes_per_s=network if num_nodes > 1 else 0.0,
        source="as asked for",
    )


def print_search(search: Search, seconds: float, console: Console) -> None:
    """Print a table of the best plans, their reasons, and what the rejected ones broke."""
    task = search.task
    cluster = task.cluster
    console.print(
        Text(
            f"{task.model.name} on {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device}, "
            f"{task.global_batch_size} samples of {task.workload.seq_len} tokens and {task.workload.tiles_per_sample} "
            f"tiles a step: {search.num_plans:,} plans in {seconds:.1f} s. All numbers are predictions."
        )
    )
    if search.best:
        console.print(build_table(search))
        reasons = say_reasons(search.best)
        for place, cost in enumerate(search.best):
            why = f" {place + 1} is {reasons[place]}." if place < len(reasons) else ""
            stages = f" {say_stages(cost)}." if cost.choice.pp > 1 else ""
            console.print(Text(f"{place + 1}. Lost to {say_losses(cost)}.{stages}{why}"))
            console.print(Text(f"   Memory: {say_memory(cost)}."))
    else:
        console.print(Text("No plan fits."))
    console.print(Text("Rejected, each by the first rule it was found to break:"))
    for rule, number, words, example in count_rejected(search):
        console.print(Text(f"  {number:>9,} [{rule}] {words}" + (f"; e.g. {example}" if example else "")))
    if search.misses:
        console.print(Text("Nearest misses:"))
    for miss in search.misses:
        console.print(Text(f"  {say_miss(miss, search.best[0] if search.best else None)}"))


def build_table(search: Search) -> Table:
    """Return the best plans side by side."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("plan", ratio=1)
    for name in ("s/step", "tokens/s", "MFU", "GB/rank"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, cost in enumerate(search.best):
        table.add_row(
            str(place + 1),
            str(cost.choice),
            f"{cost.seconds:.3g}",
            f"{cost.tokens_per_s:,.0f}",
            f"{100 * cost.mfu:.1f} %",
            f"{cost.peak_bytes / GB:.1f}",
        )
    return table


def _draw_front(task: Task, space: SearchSpace, path: str) -> None:
    """Write the picture of the front."""
    from vlmcourse.planner.pareto import find_front
    from vlmcourse.plots.pareto import plot_pareto

    front = find_front(task, space)
    if not front:
        raise ValueError("--pareto: no plan at all breaks no rule, so there is nothing to draw")
    plot_pareto(front, task.used_device.memory_bytes, title=f"{task.model.name} on {task.cluster.name}").savefig(
        path, dpi=150
    )
