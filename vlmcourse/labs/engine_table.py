"""ZeRO-3 of DeepSpeed against FSDP2 on the machine at hand: the same model and data, in turns, and a table of facts.

Enters: a number of rounds, on ranks that have met. Leaves: an `EngineTable`: speed, state by owner, what can be
offloaded, which checkpoint resumes under which, and what a person sees of the model when debugging. Every line is
measured, tried or read from the running objects; none is an opinion. Chapter 5.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.labs.zero_stages import close, in_turn, open_trainer, show_running, tiny_config
from vlmcourse.layout import align
from vlmcourse.machine import describe_machine
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.state_table import MB, watch_peaks, watch_state
from vlmcourse.monitor.step_cost import measure_step_costs
from vlmcourse.parallel.apply import unwrap
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.engines import build_deepspeed_settings
from vlmcourse.parallel.fsdp import find_units
from vlmcourse.parallel.ranks import Ranks, init_ranks
from vlmcourse.parallel.sync import is_engine
from vlmcourse.state_offload import PLACES
from vlmcourse.strategies import DEEPSPEED
from vlmcourse.train.trainer import Trainer

PAIR = ("deepspeed-zero3", "fsdp")


@dataclass(frozen=True)
class EngineTable:
    """Facts by engine, as one rank saw them."""

    machine: str
    num_ranks: int
    num_params: int
    strategies: tuple[str, ...]
    seconds: dict[str, tuple[float, ...]]
    """Of each timed step, by strategy; the same position is the same round."""
    facts: dict[str, dict[str, str]]
    """Line of the table -> strategy -> what was found."""
    loss_gap: float
    """Largest difference between the losses of a step: both train the same model."""

    @property
    def ratio(self) -> float:
        """Seconds of the first strategy over those of the second: the median over the rounds."""
        first, second = (self.seconds[name] for name in self.strategies[:2])
        return statistics.median(a / b for a, b in zip(first, second, strict=True))

    def __str__(self) -> str:
        """Show the machine, and a line a fact."""
        first, second = self.strategies[:2]
        ratios = sorted(a / b for a, b in zip(self.seconds[first], self.seconds[second], strict=True))
        rows = [["", *self.strategies]]
        rows.append(
            ["seconds a step (median)", *(f"{statistics.median(self.seconds[n]):.3f}" for n in self.strategies)]
        )
        rows += [[fact, *(of[name] for name in self.strategies)] for fact, of in self.facts.items()]
        head = f"{self.machine}\n{self.num_ranks} ranks, {self.num_params:,} parameters, {len(ratios)} rounds in turns"
        speed = (
            f"{first} takes {self.ratio:.2f} x the time of {second} (rounds from {ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
        return f"{head}\n{speed}; losses differ by {self.loss_gap:.0e} at most\n\n{align(rows)}"


def compare_engines(
    num_rounds: int = 9, strategies: Sequence[str] = PAIR, ranks: Ranks | None = None, config: TrainConfig | None = None
) -> EngineTable:
    """Train the same model under several engines in turns and compare them; all ranks must call this.

    Args:
        num_rounds: timed steps of each, 1 or more, after two that do not count.
        strategies: 2 or more to compare.
        ranks: this process's place, one of 2 or more; by default what `init_ranks` finds.
        config: the run, whose strategy is replaced; by default the tiny model in fp32.

    Returns:
        The table, as this rank saw it.

    Raises:
        ValueError: if there is no round, or fewer than two strategies.
    Communicates: what the runs do.
    """
    if num_rounds < 1 or len(set(strategies)) < 2:
        raise ValueError(
            f"num_rounds = {num_rounds}, strategies = {tuple(strategies)}: need 1 or more rounds, and 2 or more "
            "strategies to compare"
        )
    ranks = ranks or init_ranks(timeout_s=120)
    base = config or tiny_config(strategies[0])
    with ExitStack() as stack:
        trainers: dict[str, Trainer] = {}
        losses: dict[str, list[float]] = {name: [] for name in strategies}
        show = stack.enter_context(show_running(ranks))

        def note(name: str, loss: float) -> None:
            losses[name].append(loss)
            show(f"{name} has made step {len(losses[name])}")

        for name in strategies:
            show(f"starting {name}")
            of = replace(base, parallel=replace(base.parallel, strategy=name))
            trainers[name] = trainer = stack.enter_context(open_trainer(of, ranks))
            trainer.after_step.append(lambda _, report, name=name: note(name, report.loss))
        costs = measure_step_costs(trainers, num_timed=num_rounds)
        facts = _collect_facts(trainers, ranks)
        num_params = sum(
            p.numel() for p in build_model(next(iter(trainers.values())).shape, device="meta").parameters()
        )
    gaps = [max(step) - min(step) for step in zip(*losses.values(), strict=True)]
    facts |= try_resuming(base, strategies, ranks)
    seconds = {name: cost.seconds for name, cost in costs.items()}
    return EngineTable(name_machine(ranks), ranks.world_size, num_params, tuple(strategies), seconds, facts, max(gaps))


def name_machine(ranks: Ranks) -> str:
    """Name the machine, its accelerator where ranks use one, what carries their messages, and the versions."""
    device = f"{torch.cuda.get_device_name(ranks.device)}, " if ranks.device.type == "cuda" else ""
    return f"{device}{describe_machine()}, torch {torch.__version__}, {ranks.backend}"


# --- Facts that a running model shows -------------------------------------------------------------------------------


def _collect_facts(trainers: dict[str, Trainer], ranks: Ranks) -> dict[str, dict[str, str]]:
    """Return the lines of the table that are read from the trainers, by line and strategy; it makes some steps."""
    by_strategy = {name: _facts_of(trainer, ranks) for name, trainer in trainers.items()}
    lines = next(iter(by_strategy.values()))
    return {line: {name: facts[line] for name, facts in by_strategy.items()} for line in lines}


def _facts_of(trainer: Trainer, ranks: Ranks) -> dict[str, str]:
    ledger, peaks = watch_state(trainer), watch_peaks(trainer)
    seen = _look_inside(trainer)
    with CollectiveCounter() as counter:
        trainer.train_step()
    sizes = [ledger.weights_bytes, ledger.gradients_bytes, ledger.optimizer_bytes]
    plain = build_model(trainer.shape, device="meta")
    names = {name for name, _ in plain.named_parameters()}
    num_named = sum(name in names for name, _ in trainer.model.named_parameters())
    return {
        "weights, gradients, optimizer (MB)": ", ".join(f"{size / MB:.3f}" for size in sizes),
        "buffers (MB)": f"{ledger.buffers_bytes / MB:,.0f}",
        "whole weights at most in a step (MB)": f"{peaks.gathered_bytes / MB:.3f}",
        "collectives a step, bytes sent (MB)": f"{len(counter.calls)}, {counter.sent_bytes / MB:.3f}",
        "settings it is started with": _count_settings(trainer, plain),
        "can be offloaded (optimizer / parameters)": ", ".join(list_offload(trainer.config)) or "nothing",
        "class of the model": type(trainer.model).__name__,
        "parameters named without a prefix": f"{num_named}/{len(names)}",
        **{line: f"{count}/{len(names)}" for line, count in seen.items()},
        "who runs backward and the update": "the engine" if is_engine(trainer.model) else "PyTorch",
    }


def _look_inside(trainer: Trainer) -> dict[str, int]:
    """Count the parameters that a debugger finds as they would be in a plain model, between backward and update."""
    whole = dict(build_model(trainer.shape, device="meta").named_parameters())
    seen: dict[str, int] = {}

    def look(_: Any) -> None:
        named = list(unwrap(trainer.model).named_parameters())
        seen["p.shape is that of the plain model"] = sum(p.shape == whole[name].shape for name, p in named)
        seen["p.grad is there before the update"] = sum(p.grad is not None for _, p in named)
        seen["p.full_tensor() gives the whole weight"] = sum(isinstance(p, DTensor) for _, p in named)

    trainer.before_update.append(look)
    trainer.train_step()
    trainer.before_update.remove(look)
    return seen


def _count_settings(trainer: Trainer, plain: nn.Module) -> str:
    """Count what must be said to the engine: keys of its JSON file, or calls that shard."""
    if trainer.parallel.strategy in DEEPSPEED:
        return f"{_count_keys(build_deepspeed_settings(trainer.config))} keys of ds_config.json"
    if trainer.parallel.strategy in ("zero2", "fsdp"):
        return f"{len(find_units(plain)) + 1} calls of fully_shard"
    return "1 call"


def _count_keys(settings: dict[str, Any]) -> int:
    return sum(_count_keys(value) if isinstance(value, dict) else 1 for value in settings.values())


def list_offload(config: TrainConfig) -> list[str]:
    """Return the places that this package's configuration accepts for a strategy: optimizer / parameters.

    Args:
        config: the run; only its strategy is read.
    """
    found = []
    for optimizer in PLACES:
        for parameters in PLACES:
            offload = {"optimizer": optimizer, "parameters": parameters}
            offload |= {"nvme_path": "files"} if "nvme" in (optimizer, parameters) else {}
            try:
                parse_config({"parallel": {"strategy": config.parallel.strategy}, "offload": offload})
            except ValueError:
                continue
            if (optimizer, parameters) != ("none", "none"):
                found.append(f"{optimizer} / {parameters}")
    return found


# --- Checkpoints ----------------------------------------------------------------------------------------------------


def try_resuming(base: TrainConfig, strategies: Sequence[str], ranks: Ranks) -> dict[str, dict[str, str]]:
    """Save a checkpoint under each strategy and try to go on from it under each; all ranks must call this.

    Args:
        base: the run; strategy and folder are replaced. The folder is a temporary one that all ranks of this machine
            see.
        strategies: to save under, and to load under.
        ranks: this process's place.

    Returns:
        A line a strategy that saved -> strategy that loads -> yes, or the class of the error that refuses.
    """
    folder: list[Any] = [tempfile.mkdtemp() if ranks.is_main else None]
    dist.broadcast_object_list(folder)
    root = Path(folder[0])

    def build(name: str, saved: str) -> Trainer:
        run = replace(base.run, output_dir=str(root), name=saved)
        return Trainer(
            replace(base, run=run, parallel=replace(base.parallel, strategy=name)), ranks, show_progress=False
        )

    found: dict[str, dict[str, str]] = {}
    try:
        for saved in in_turn(strategies, ranks, "going on from a checkpoint of"):
            first = build(saved, saved)
            first.train_step()
            first.save()
            close(first)
            line = found.setdefault(f"goes on from a checkpoint of {saved}", {})
            for name in strategies:
                line[name] = _try_one(lambda name=name, saved=saved: build(name, saved))
    finally:
        dist.barrier()
        if ranks.is_main:
            shutil.rmtree(root, ignore_errors=True)
    return found


def _try_one(build: Callable[[], Trainer]) -> str:
    trainer = build()
    try:
        return "yes" if trainer.resume() == 1 else "no: not at its step"
    except ValueError as error:
        return f"no: {type(error).__name__}"
    finally:
        close(trainer)
