"""`vlmcourse doctor`: what this machine has, what each chapter can do on it, and how to get what is missing.

Enters: the machine. Leaves: a list of `Finding` and a table. Nothing is changed and no process group is started.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from vlmcourse.machine import num_usable_cores

GIB = 2**30
PACKAGES = ("torch", "transformers", "jupyterlab", "nbgrader", "matplotlib")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: str
    """ok, note (works, but less than it could) or missing (something will not run)."""
    value: str
    fix: str = ""
    """What to do; empty where nothing is wrong."""


@dataclass(frozen=True)
class Chapter:
    """What a chapter needs."""

    title: str
    minutes: int
    min_memory_gib: float
    on_cpu: str
    """What runs on CPU ranks."""
    on_gpu: str
    """What GPUs add."""


CHAPTERS = {
    "ch01_parallelism": Chapter(
        title="More than one GPU: split the samples",
        minutes=60,
        min_memory_gib=4,
        on_cpu="everything, on 2 gloo ranks",
        on_gpu="the same cells on NCCL, with peak memory read from the CUDA allocator",
    ),
    "ch01b_model_parallelism": Chapter(
        title="More than one GPU: split the matrices, the sequence, the layers",
        minutes=80,
        min_memory_gib=4,
        on_cpu="everything, on 2 gloo ranks, two cells on 4",
        on_gpu="the same cells on NCCL, with times of the links between GPUs",
    ),
    "ch02_accumulation": Chapter(
        title="A batch larger than the memory: accumulation",
        minutes=75,
        min_memory_gib=4,
        on_cpu="everything, on 2 gloo ranks",
        on_gpu="the same cells on NCCL, with PyTorch's own SyncBatchNorm",
    ),
    "ch03_precision": Chapter(
        title="Fewer bits: which numbers survive",
        minutes=60,
        min_memory_gib=4,
        on_cpu="everything, on 2 gloo ranks; fp8 as casts before fp32 products",
        on_gpu="bf16 from compute capability 8.0, fp8 products from 8.9 with torchao; before that fp16",
    ),
    "ch04_checkpointing": Chapter(
        title="Keep it or compute it again: activation checkpointing",
        minutes=70,
        min_memory_gib=3,
        on_cpu="everything, one cell on 2 gloo ranks",
        on_gpu="the same cells on NCCL; offloading goes over the bus to pinned memory",
    ),
    "ch05_zero_offload": Chapter(
        title="Whose bytes, and where: ZeRO, DeepSpeed, FSDP, offload",
        minutes=60,
        min_memory_gib=4,
        on_cpu="everything, on 2 gloo ranks; the device of offloading is an account",
        on_gpu="the same cells on NCCL; offloading moves real bytes",
    ),
    "ch05b_memory_engines": Chapter(
        title="Will it fit, and what should run it: fragmentation, engines, checkpoints",
        minutes=60,
        min_memory_gib=4,
        on_cpu="everything, on 2 gloo ranks; fragmentation is simulated",
        on_gpu="the same cells on NCCL; the allocator's own map can be drawn",
    ),
    "ch06_monitoring": Chapter(
        title="What is a run doing? Phases, tokens, FLOPs, energy, and a timeline of every rank",
        minutes=70,
        min_memory_gib=4,
        on_cpu="everything, on 2 gloo ranks; the peak is measured, the power estimated",
        on_gpu="the same cells on NCCL; the data sheet's peak; NVML has use and power, traces have kernels",
    ),
    "ch06b_diagnosis": Chapter(
        title="Why is it slow: bottlenecks, stragglers, scaling",
        minutes=75,
        min_memory_gib=4,
        on_cpu="everything, on 2 gloo ranks, one cell on 4; most bad runs are recorded ones",
        on_gpu="the same cells on NCCL; scaling with a GPU for each rank",
    ),
    "ch07b_tuned": Chapter(
        title="From weights to a tuned run: Hugging Face folders in and out, tuning, a controller",
        minutes=55,
        min_memory_gib=4,
        on_cpu="everything, on 2 gloo ranks, from random weights; the exercise has a simulated cluster",
        on_gpu="the same cells on NCCL; speeds and peaks of the GPUs",
    ),
}


def check_python() -> Finding:
    """Report the interpreter."""
    return Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def check_cores() -> Finding:
    """Report the cores that this process may use, a container's limit included."""
    cores = num_usable_cores()
    if cores < 2:
        return Finding("cores", "note", str(cores), "two ranks will share one core: labs take about twice as long")
    return Finding("cores", "ok", str(cores))


def check_memory() -> Finding:
    """Report main memory, total and free (GiB)."""
    memory = psutil.virtual_memory()
    value = f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB free"
    if memory.available < 4 * GIB:
        return Finding("memory", "note", value, "close other programs: two ranks and JupyterLab want about 4 GiB")
    return Finding("memory", "ok", value)


def check_disk(folder: Path) -> Finding:
    """Report free disk space where runs are written."""
    free_bytes = shutil.disk_usage(folder).free
    value = f"{free_bytes / GIB:.1f} GiB free in {folder}"
    if free_bytes < 2 * GIB:
        return Finding("disk", "missing", value, "free at least 2 GiB: checkpoints and logs are written to runs/")
    if not os.access(folder, os.W_OK):
        return Finding("disk", "missing", f"{folder} is read-only", "work in a folder that you can write to")
    return Finding("disk", "ok", value)


def check_packages() -> list[Finding]:
    """Report the versions of the packages that the course stands on."""
    findings = []
    for package in PACKAGES:
        try:
            findings.append(Finding(package, "ok", importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package, "missing", "not installed", "run make lab, which installs every package"))
    return findings


def check_backends() -> list[Finding]:
    """Report GPUs and the collective backends that torch was built with."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    findings = []
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    fix = "" if gloo else "install the torch of constraints.txt: run make lab"
    findings.append(Finding("gloo", "ok" if gloo else "missing", "available" if gloo else "not in this torch", fix))
    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        fix = (
            "an NVIDIA driver is here but this torch cannot use it: install a CUDA build of torch 2.13.0"
            if has_driver
            else "not needed: ranks run on CPU cores; parts that need a GPU say so and are skipped"
        )
        findings.append(Finding("gpu", "missing" if has_driver else "note", "none", fix))
        findings.append(Finding("nccl", "note", "not used without a GPU"))
        return findings
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        value = f"{properties.name}, {properties.total_memory / GIB:.1f} GiB"
        bf16 = torch.cuda.get_device_capability(index) >= (8, 0)
        fix = (
            ""
            if bf16
            else "no bf16 before the Ampere generation: train.precision = 'fp16' (with a loss scaler) or 'fp32'"
        )
        findings.append(Finding(f"gpu {index}", "ok" if bf16 else "note", value, fix))
    nccl = torch.distributed.is_nccl_available()
    fix = "" if nccl else "ranks fall back to gloo over CPU: install a CUDA build of torch 2.13.0"
    findings.append(Finding("nccl", "ok" if nccl else "missing", "available" if nccl else "not in this torch", fix))
    return findings


def check_allocator() -> list[Finding]:
    """Report the setting of the CUDA allocator in the environment, if there is one."""
    if importlib.util.find_spec("torch") is None:
        return []
    from vlmcourse.monitor.alloc_conf import check_alloc_conf

    verdict = check_alloc_conf()
    if verdict.state == "unset":
        return []
    state = "ok" if verdict.state == "in effect" and not verdict.fix else "note"
    return [Finding("allocator", state, verdict.value, verdict.fix)]


def check_compiler() -> Finding:
    """Report a C++ compiler, which torch.compile and compiled extensions call."""
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Finding("compiler", "ok", path)
    fix = "only torch.compile needs one (Debian, Ubuntu: apt install g++; macOS: xcode-select --install)"
    return Finding("compiler", "note", "none", fix)


def check_chapters() -> list[Finding]:
    """Report what of each chapter runs on this machine."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    total_gib = psutil.virtual_memory().total / GIB
    findings = []
    for name, chapter in CHAPTERS.items():
        if total_gib < chapter.min_memory_gib:
            fix = f"it wants {chapter.min_memory_gib:g} GiB of memory and this machine has {total_gib:.1f} GiB"
            findings.append(Finding(name, "missing", "may run out of memory", fix))
        elif gpus >= 2:
            findings.append(Finding(name, "ok", f"{chapter.on_cpu}; on {gpus} GPUs: {chapter.on_gpu}"))
        else:
            findings.append(Finding(name, "ok", chapter.on_cpu, f"with 2 or more GPUs: {chapter.on_gpu}"))
    return findings


def examine(folder: Path | None = None) -> list[Finding]:
    """Return everything the doctor sees.

    Args:
        folder: where runs would be written; the current folder by default.
    """
    findings = [check_python(), check_cores(), check_memory(), check_disk(folder or Path.cwd())]
    findings += check_packages()
    findings += check_backends()
    findings += check_allocator()
    findings.append(check_compiler())
    if importlib.util.find_spec("torch") is not None:
        findings += check_chapters()
    return findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 when something that the course needs is missing."""
    findings = examine()
    missing = [finding for finding in findings if finding.state == "missing"]
    if args.json:
        sys.stdout.write(json.dumps({"ok": not missing, "findings": [asdict(f) for f in findings]}) + "\n")
        return 1 if missing else 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title="vlmcourse doctor", show_lines=False)
    for column in ("what", "state", "found", "note or fix"):
        table.add_column(column, overflow="fold")
    style = {"ok": "green", "note": "yellow", "missing": "bold red"}
    for finding in findings:
        table.add_row(finding.name, f"[{style[finding.state]}]{finding.state}[/]", finding.value, finding.fix)
    console = Console(file=sys.stdout)
    console.print(table)
    verdict = f"{len(missing)} missing: see the last column." if missing else "Everything the course needs is here."
    console.print(verdict)
    return 1 if missing else 0
