"""`vlmcourse launch CONFIG --target slurm|k8s|torchrun`: write what starts a training run on several machines.

Enters: the same TOML file that `vlmcourse train` reads, and how many machines of how many ranks. Leaves: a Slurm batch
script, a Kubernetes PyTorchJob (`pytorchjob.py`), or one `torchrun` command a machine, on stdout or in a file. Nothing
is started or sent anywhere. Everything is checked here: a mistake found by the cluster costs a place in its queue.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from vlmcourse.commands.launch_request import count_nodes, find_folder_problems, find_problems, list_hosts
from vlmcourse.commands.pytorchjob import PodRequest, check_pods, write_pytorchjob
from vlmcourse.commands.start import check_activations, check_deepspeed_settings, check_room, choose_degrees
from vlmcourse.commands.train import add_config_arguments, parse_overrides
from vlmcourse.config import TrainConfig, load_config
from vlmcourse.notebook.torchrun_command import (
    DEFAULT_PORT,
    NO_GPUS,
    SlurmRequest,
    TorchrunJob,
    join_command,
    slurm_script,
    split_hosts,
)

TARGETS = ("slurm", "k8s", "torchrun")
DEFAULT_RANKS = 8
DEFAULT_MINUTES = 60
TRAIN = ("-m", "vlmcourse.cli", "train")

ELSEWHERE = "it will run on other machines; where these are one machine of GPUs, its ranks search for the best plan"
"""What `choose_degrees` is told about auto."""


@dataclass(frozen=True)
class Launch:
    """What a target's file or commands are."""

    text: str
    commands: tuple[str, ...] = ()
    """What a person types, one command a machine; empty where a file is handed in."""
    submit: str = ""
    """The command that the file is handed in with."""
    hosts: tuple[str, ...] = ()
    """The machine of each command, where there are several."""
    strategy: str = ""
    """How the ranks will share the work; auto where they choose themselves when they start."""
    choice: str = ""
    """What auto chose and why; empty under another strategy."""

    def commands_for(self, path: Path | None) -> list[str]:
        """Return what a person types where the text is saved in `path`."""
        return [f"{self.submit} {shlex.quote(str(path or 'FILE'))}"] if self.submit else list(self.commands)

    def tell(self, path: Path) -> str:
        """Return what a person is told once the text is in `path`."""
        commands = self.commands_for(path)
        if not self.hosts:
            return "\n  ".join([f"wrote {path}; start it with", *commands])
        lines = [f"on {host}: {command}" for host, command in zip(self.hosts, commands, strict=True)]
        return "\n  ".join([f"wrote {path}, a list of commands, one a machine, and no script; start", *lines])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--target", required=True, choices=TARGETS, help="what starts the ranks")
    parser.add_argument("--nodes", type=int, metavar="N", help="machines (default: 1, or as many as --hosts names)")
    parser.add_argument("--nproc-per-node", type=int, default=DEFAULT_RANKS, metavar="M", help="ranks on each (8)")
    parser.add_argument(
        "--cpu", action="store_true", help="ask for no GPUs and hide them: ranks run on CPU cores with gloo"
    )
    parser.add_argument("--cpus-per-node", type=int, default=0, metavar="C", help="cores on each (slurm, k8s)")
    parser.add_argument("--name", help="of the job (default: run.name of the file)")
    parser.add_argument("--port", type=int, help=f"where machines meet (slurm: by job; torchrun: {DEFAULT_PORT})")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint of this run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to a file instead of stdout")
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    parser.add_argument("--json", action="store_true", help="print text and commands as one JSON object")
    slurm = parser.add_argument_group("slurm")
    slurm.add_argument("--minutes", type=int, help=f"time limit of the job (default: {DEFAULT_MINUTES})")
    slurm.add_argument("--partition")
    slurm.add_argument("--account")
    slurm.add_argument("--setup", action="append", metavar="LINE", help="of shell, before; may be repeated")
    k8s = parser.add_argument_group("k8s")
    k8s.add_argument("--image", help="a container image with vlmcourse in it")
    k8s.add_argument("--namespace", help="(default: default)")
    k8s.add_argument("--memory", help="of each pod, such as 64Gi")
    k8s.add_argument("--claim", help="a PersistentVolumeClaim that keeps what the run writes")
    torchrun = parser.add_argument_group("torchrun")
    torchrun.add_argument("--hosts", metavar="A,B", help="addresses of the machines, as they reach each other")
    torchrun.add_argument("--interface", metavar="NAME", help="the network interface of those addresses, such as eth0")


def run(args: argparse.Namespace) -> int:
    """Write the file or print the text; return the exit code.

    Raises:
        ValueError: naming everything about the request that cannot be used, or the file that is there already.
        FileNotFoundError: if there is no such TOML file or ds_config.json, or no folder to write to.
    """
    config = load_config(args.config, parse_overrides(args.overrides))
    launch = build_launch(args, config)
    if args.out is not None:
        write_file(args.out, launch.text, overwrite=args.force)
    if launch.choice:  # not on stdout, which may go to a file or to sbatch
        print(launch.choice, file=sys.stderr)
    if args.json:
        nodes = count_nodes(args)
        data = {
            "target": args.target,
            "nodes": nodes,
            "nproc_per_node": args.nproc_per_node,
            "world_size": nodes * args.nproc_per_node,
            "strategy": launch.strategy,
            "choice": launch.choice,
            "path": None if args.out is None else str(args.out),
            "commands": launch.commands_for(args.out),
            "hosts": list(launch.hosts),
            "text": launch.text,
        }
        print(json.dumps(data))
    elif args.out is None:
        print(launch.text, end="")
    else:
        print(launch.tell(args.out))
    return 0


def build_launch(args: argparse.Namespace, config: TrainConfig) -> Launch:
    """Check the request and the run, and write the text for its target.

    Raises:
        ValueError: naming everything that cannot be used.
        FileNotFoundError: if there is no such ds_config.json.
    """
    problems = find_problems(args)
    name = args.name or config.run.name
    if args.target == "k8s":
        problems += check_pods(_read_pods(args, name)) + find_folder_problems(args, config)
    elif not name.isprintable() or not name.strip():
        problems.append(f"--name {name!r}: must be printable text")
    if problems:
        raise ValueError(f"--target {args.target} cannot be written:\n" + "\n".join(f"  - {text}" for text in problems))
    world_size = count_nodes(args) * args.nproc_per_node
    settled, choice = choose_degrees(config, world_size, ELSEWHERE)
    check_deepspeed_settings(config, world_size)
    check_room(config)
    check_activations(config)
    return replace(_write_target(args, name, config), strategy=settled.strategy, choice=choice)


def _write_target(args: argparse.Namespace, name: str, config: TrainConfig) -> Launch:
    """Write the text of a request that has been checked."""
    nodes = count_nodes(args)
    if args.target == "k8s":
        toml, path = Path(args.config).read_text(encoding="utf-8-sig"), config.parallel.deepspeed_config
        settings = Path(path).read_text(encoding="utf-8-sig") if path else ""
        text = write_pytorchjob(_read_pods(args, name), toml, tuple(train_flags(args)), settings)
        return Launch(text, submit="kubectl apply -f")
    job = TorchrunJob(
        command=(*TRAIN, args.config, *train_flags(args)), nproc=args.nproc_per_node, nnodes=(nodes, nodes)
    )
    if args.target == "torchrun":
        return _write_torchrun(args, job)
    request = SlurmRequest(
        job_name=name,
        minutes=args.minutes or DEFAULT_MINUTES,
        gpus_per_node=0 if args.cpu else args.nproc_per_node,
        cpus_per_task=args.cpus_per_node,
        partition=args.partition or "",
        account=args.account or "",
        setup=tuple(args.setup or ()),
        port=args.port or 0,
        hides_gpus=args.cpu,
    )
    return Launch(slurm_script(job, request), submit="sbatch")


def train_flags(args: argparse.Namespace) -> list[str]:
    """Return what `vlmcourse train` is told after the file."""
    flags = [part for text in args.overrides for part in ("--set", text)]
    return [*flags, "--resume"] if args.resume else flags


def _write_torchrun(args: argparse.Namespace, job: TorchrunJob) -> Launch:
    hosts = list_hosts(args)
    prefix = [NO_GPUS] if args.cpu else []
    if args.interface:
        prefix += [f"{library}_SOCKET_IFNAME={args.interface}" for library in ("GLOO", "NCCL")]
    jobs = split_hosts(job, hosts, args.port or DEFAULT_PORT) if len(hosts) > 1 else [job]
    start = f"env {' '.join(prefix)} " if prefix else ""
    commands = [start + join_command(one) for one in jobs]
    if len(hosts) < 2:
        return Launch(f"{commands[0]}\n", (commands[0],))
    head = (
        "# A list of commands, one a machine, and no script: bash would start the first of them and no other.\n"
        f"# Start each on its machine, in the same folder. They wait for each other at {jobs[0].endpoint}.\n"
        "# Rank 0 writes the run's folder and may be on any of them: let them share it.\n"
    )
    parts = [f"# on {host}:\n{command}\n" for host, command in zip(hosts, commands, strict=True)]
    return Launch("\n".join([head, *parts]), tuple(commands), hosts=tuple(hosts))


def _read_pods(args: argparse.Namespace, name: str) -> PodRequest:
    return PodRequest(
        name=name,
        nodes=count_nodes(args),
        nproc=args.nproc_per_node,
        image=args.image or "",
        namespace=args.namespace or "default",
        gpus=0 if args.cpu else args.nproc_per_node,
        cpus=args.cpus_per_node,
        memory=args.memory or "",
        claim=args.claim or "",
    )


def write_file(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a text to a file.

    Raises:
        ValueError: if it is a folder, there is one already and it is not to be overwritten, or it cannot be written.
        FileNotFoundError: if there is no such folder.
    """
    if os.path.isdir(path):  # unlike Path's own, without an error for a name that is too long
        raise ValueError(f"--out {path}: this is a folder: name a file in it, such as {path / 'job'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out {path}: there is no folder {path.parent}: make it first")
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ValueError(f"--out {path}: there is such a file already: choose another name, or add --force") from error
    except OSError as error:
        raise ValueError(f"--out {path}: it cannot be written ({error.strerror})") from error
