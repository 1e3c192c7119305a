"""Which engine for which need: FSDP2, DeepSpeed or accelerate, with the reason of every answer.

Enters: what a person needs. Leaves: an `EngineChoice`: the strategy to begin with, the reasons for it, and why each
other one was left out. What this package refuses is asked of the configuration itself, so that the guide cannot promise
what a run would not do; what lies outside the package says its source. No torch. Chapter 5; the table that it follows
from is `labs.engine_table`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vlmcourse.config import parse_config
from vlmcourse.values import ConfigError

CANDIDATES = ("fsdp", "deepspeed-zero3", "accelerate-deepspeed-zero3")
"""Strategies that split everything, in the order in which they are preferred where nothing decides."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs besides shards of weights, gradients and optimizer state."""

    nvme: bool = False
    """Optimizer state in files, since main memory too is too small."""
    cpu_offload: str = "none"
    """none, optimizer (weights stay on the device) or all."""
    hf_trainer: bool = False
    """The training loop is that of Hugging Face's Trainer or uses accelerate already."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    frozen_vision: bool = False
    torch_compile: bool = False
    precision: str = "fp32"
    """Of `train.precision`."""
    recomputation: bool = False
    """Activation checkpointing in the language tower."""


@dataclass(frozen=True)
class EngineChoice:
    """An answer of the guide."""

    strategy: str
    """A value of `parallel.strategy`; "" if nothing here does it all."""
    reasons: tuple[str, ...]
    """Why this one, a sentence a need."""
    left_out: dict[str, tuple[str, ...]]
    """Other candidate -> why not; nothing where it would do as well."""

    def __str__(self) -> str:
        """Show the answer and all reasons, a line each."""
        lines = [self.strategy or "no single engine here: give up one of the needs below"]
        lines += [f"  {reason}" for reason in self.reasons]
        for name, why in self.left_out.items():
            lines += [f"not {name}:", *(f"  {reason}" for reason in why)]
        return "\n".join(lines)


def choose_engine(needs: Needs) -> EngineChoice:
    """Answer which engine to begin with, and why.

    Args:
        needs: of the run.

    Returns:
        The first of `CANDIDATES` that nothing rules out; with `hf_trainer` accelerate's comes first.

    Raises:
        ValueError: if `cpu_offload` is no known word.
    """
    if needs.cpu_offload not in ("none", "optimizer", "all"):
        raise ValueError(f"cpu_offload = {needs.cpu_offload!r}: choose none, optimizer or all")
    order = CANDIDATES[::-1] if needs.hf_trainer else CANDIDATES
    problems = {name: (*_refused_by_package(name, needs), *_refused_elsewhere(name, needs)) for name in order}
    possible = [name for name in order if not problems[name]]
    chosen = possible[0] if possible else ""
    left_out = {name: why for name, why in problems.items() if name != chosen and why}
    return EngineChoice(chosen, tuple(_reasons(chosen, needs)) if chosen else (), left_out)


def _refused_by_package(strategy: str, needs: Needs) -> list[str]:
    """Return what this package's configuration says against a strategy."""
    table: dict[str, Any] = {
        "parallel": {"strategy": strategy} | {axis: getattr(needs, axis) for axis in ("tp", "pp", "cp")},
        "train": {"precision": needs.precision},
    }
    if needs.frozen_vision:
        table["model"] = {"freeze": ["vision"]}
    if needs.recomputation:
        table["activations"] = {"language": "full"}
    if needs.nvme or needs.cpu_offload != "none":
        parameters = "cpu" if needs.cpu_offload == "all" else "none"
        place = {"optimizer": "nvme", "nvme_path": "swap"} if needs.nvme else {"optimizer": "cpu"}
        table["offload"] = {**place, "parameters": parameters}
    try:
        parse_config(table)
    except ConfigError as error:
        return list(error.problems)
    return []


def _refused_elsewhere(strategy: str, needs: Needs) -> list[str]:
    """Return what speaks against a strategy outside of this package's configuration."""
    found = []
    if needs.hf_trainer and strategy == "deepspeed-zero3":
        found.append(
            "its engine wants to run backward and the step itself: a loop that is accelerate's starts it through "
            "accelerate (accelerate documentation, 'DeepSpeed')"
        )
    return found


def _reasons(strategy: str, needs: Needs) -> list[str]:
    """Say for each need what the chosen strategy does about it, or what must be known beside it."""
    is_fsdp = strategy == "fsdp"
    said = {
        "nvme": "DeepSpeed alone keeps optimizer state in files (ZeRO-Infinity, Rajbhandari et al. 2021)",
        "cpu_offload": "FSDP2 moves weights, gradients and optimizer state together (CPUOffloadPolicy)"
        if is_fsdp
        else "DeepSpeed moves optimizer state, with weights or without",
        "hf_trainer": "Hugging Face's Trainer takes FSDP2 too (fsdp_config, version 2); here ours runs it"
        if is_fsdp
        else "accelerate starts the same engine from the same ds_config.json; Hugging Face's Trainer takes FSDP2 too "
        "(fsdp_config, version 2), which this package runs under its own Trainer only",
        "tp": "FSDP2 shards what tensor parallelism has cut: both are DTensors on one mesh",
        "pp": "FSDP2 shards each stage of a pipeline of torch.distributed.pipelining",
        "cp": "FSDP2 adds up gradients over samples and parts of sequences alike",
        "frozen_vision": "frozen blocks are gathered for forward only, and need no gradients or optimizer state"
        if is_fsdp
        else "frozen weights need no gradients or optimizer state; they are sharded all the same",
        "torch_compile": "blocks compile one by one under FSDP2 (as in torchtitan); nothing here compiles: measure it"
        if is_fsdp
        else "DeepSpeed has engine.compile(); nothing here compiles, and hooks may break graphs: measure it",
        "precision": "FSDP2 leaves autocast and master copies to this package's Trainer"
        if is_fsdp
        else "fp32 is tested",
        "recomputation": "blocks recompute inside what FSDP2 gathers",
    }
    default = Needs()
    asked = [field.name for field in fields(Needs) if getattr(needs, field.name) != getattr(default, field.name)]
    found = [said[name] for name in asked]
    if not found:
        found.append(
            "nothing decides: FSDP2 comes with PyTorch, its parameters keep names, shapes and gradients, and in fp32 "
            "it makes no second copy of the weights"
        )
    return found
