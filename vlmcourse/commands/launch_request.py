"""What cannot be written as asked: flags of `vlmcourse launch` that a target has no meaning for, or no machine takes.

Enters: the parsed arguments, checked by nobody yet. Leaves: sentences, one for each thing that has to be changed. What
Kubernetes alone would refuse is in `pytorchjob.py`.
"""

from __future__ import annotations

import argparse
import re

from vlmcourse.commands.pytorchjob import RUNS_FOLDER
from vlmcourse.commands.start import MAX_PORT
from vlmcourse.config import RunConfig, TrainConfig

FLAGS_OF = {
    "slurm": ("minutes", "partition", "account", "setup", "port"),
    "k8s": ("image", "namespace", "memory", "claim"),
    "torchrun": ("hosts", "port", "interface"),
}
"""Flags that not every target has a meaning for."""
CLUSTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,-]*")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")


def count_nodes(args: argparse.Namespace) -> int:
    """Return how many machines there are."""
    return args.nodes or len(list_hosts(args)) or 1


def list_hosts(args: argparse.Namespace) -> list[str]:
    """Return the addresses that --hosts names."""
    return [] if args.hosts is None else [host.strip() for host in args.hosts.split(",")]


def find_problems(args: argparse.Namespace) -> list[str]:
    """Return what is wrong with a request, whatever its target, one sentence each."""
    targets_of = {
        flag: [target for target, flags in FLAGS_OF.items() if flag in flags]
        for flag in dict.fromkeys(flag for flags in FLAGS_OF.values() for flag in flags)
    }
    found = [
        f"--{flag}: has no meaning for --target {args.target}, only for {' and '.join(targets)}; leave it out"
        for flag, targets in targets_of.items()
        if args.target not in targets and getattr(args, flag) is not None
    ]
    found += [
        f"--{flag} '': must not be empty; leave it out"
        for flag in ("name", "namespace", "memory", "claim")
        if getattr(args, flag) == ""
    ]
    if args.target == "torchrun" and args.cpus_per_node:
        found.append("--cpus-per-node: torchrun reserves no cores; leave it out")
    if args.force and args.out is None:
        found.append("--force without --out: nothing is written")
    counts = {"--nodes": args.nodes, "--nproc-per-node": args.nproc_per_node, "--minutes": args.minutes}
    found += [
        f"{flag} {value}: must be 1 or greater" for flag, value in counts.items() if value is not None and value < 1
    ]
    if args.cpus_per_node < 0:
        found.append(f"--cpus-per-node {args.cpus_per_node}: must be 0 or greater")
    for flag in ("partition", "account"):
        value = getattr(args, flag)
        if value is not None and not CLUSTER_NAME.fullmatch(value):
            found.append(f"--{flag} {value!r}: must be letters, digits, '_', '.', ',' and '-'")
    if args.port is not None and not 1 <= args.port <= MAX_PORT:
        found.append(f"--port {args.port}: must be from 1 to {MAX_PORT}")
    for line in args.setup or ():
        if not line.isprintable():
            found.append(f"--setup {line!r}: must be one line of shell; repeat --setup for more")
    return found + (_find_host_problems(args) if args.target == "torchrun" else [])


def _find_host_problems(args: argparse.Namespace) -> list[str]:
    hosts, found = list_hosts(args), []
    found += [f"--hosts {host!r}: must be a host name or an IPv4 address" for host in hosts if not HOST.fullmatch(host)]
    if len(set(hosts)) < len(hosts):
        found.append(f"--hosts {args.hosts}: names a machine twice")
    if hosts and args.nodes is not None and args.nodes != len(hosts):
        found.append(f"--nodes {args.nodes}: --hosts names {len(hosts)}; leave --nodes out")
    if not hosts and args.nodes is not None and args.nodes > 1:
        found.append(f"--nodes {args.nodes} without --hosts: torchrun has to know where they meet; name all machines")
    if args.interface is not None and not INTERFACE.fullmatch(args.interface):
        found.append(f"--interface {args.interface!r}: must be the name of a network interface, such as eth0")
    if len(hosts) < 2:
        found += [
            f"--{flag}: one machine needs none; leave it out, or name several with --hosts"
            for flag in ("port", "interface")
            if getattr(args, flag) is not None
        ]
    return found


def find_folder_problems(args: argparse.Namespace, config: TrainConfig) -> list[str]:
    """Return why a run in pods would write, or look for its checkpoint, elsewhere than its file and flags say."""
    found, output_dir = [], config.run.output_dir
    if output_dir not in (RunConfig.output_dir, RUNS_FOLDER):
        found.append(
            f"run.output_dir = {output_dir!r}: in a pod a run writes to {RUNS_FOLDER}, where --claim is mounted; leave "
            f"it out, or --set run.output_dir={RUNS_FOLDER}"
        )
    if args.resume and not args.claim:
        found.append(
            "--resume without --claim: pods start with an empty folder, in which there is no checkpoint; name the "
            "claim that the earlier run wrote to"
        )
    return found
