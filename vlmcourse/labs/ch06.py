"""Thin glue of chapter 6: samples with and without pictures, a second model, and what a waiting process looks like.

Enters: what the notebook's cells name. Leaves: values to print and draw there. What a model, a monitor or a trainer
does is the package's; this only puts it together.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import Message, Sample
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.step_clock import StepTimes
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.flops import TOWERS, Work
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.train.activations import plan_activations
from vlmcourse.train.optimizer import freeze_towers
from vlmcourse.train.row_meter import count_work
from vlmcourse.train.trainer import Trainer

OUTPUT_DIR = "runs/ch06"
EVERY_TEXT_ONLY = 3
"""One sample of so many has no picture."""


# --- Runs -------------------------------------------------------------------------------------------------------------


def monitored_config(name: str, num_steps: int, **settings: object) -> TrainConfig:
    """Return a short run of the tiny model under DDP, in fp32 and in `runs/ch06`, with a row every fifth step.

    Args:
        name: of the run.
        num_steps: optimizer steps.
        settings: further keys of a configuration, with "__" for the dot, such as `logging__loggers`.
    """
    values: dict[str, object] = {
        "run.output_dir": OUTPUT_DIR,
        "run.name": name,
        "parallel.strategy": "ddp",
        "train.num_steps": num_steps,
        "train.micro_batch_size": 8,
        "train.log_every": 5,
        "optimizer.lr_vision": 1e-3,
        "optimizer.lr_projector": 4e-3,
        "optimizer.lr_language": 2e-3,
        "optimizer.warmup_steps": 15,
        "data.num_eval_samples": 16,
    }
    return parse_config({}, values | {key.replace("__", "."): value for key, value in settings.items()})


def mixed_samples(num_samples: int = 512, seed: int = 0) -> list[Sample]:
    """Return questions about pictures of digits, and between them short sums as text alone; the same on every rank."""
    pictures = DigitsDataset(num_samples, seed, "train")
    return [_sum_in_words(i) if i % EVERY_TEXT_ONLY == 2 else pictures[i] for i in range(num_samples)]


def _sum_in_words(number: int) -> Sample:
    """Return a sample of one to three additions without a picture: their lengths differ, so batches have padding."""
    messages: list[Message] = []
    for turn in range(1 + number // EVERY_TEXT_ONLY % 3):
        first, second = (number * 7 + turn * 3) % 10, (number * 3 + turn) % 10
        messages += [Message("user", f"{first} + {second}?"), Message("assistant", str(first + second))]
    return Sample(f"sum-{number}", (), tuple(messages))


# --- Two models on one machine ----------------------------------------------------------------------------------------


def wide_shape() -> VLMShape:
    """Return the tiny model with a language tower of four times the width."""
    tiny = get_model("tiny")
    wider = dataclasses.replace(tiny.language, hidden_size=384, mlp_size=1024)
    return dataclasses.replace(tiny, name="wide", language=wider, source="made for chapter 6")


def train_shape(shape: VLMShape, ranks: Ranks, samples: Sequence[Sample], num_steps: int) -> list[dict[str, float]]:
    """Train a model of this shape under DDP and return the rows of its run, one every fifth step.

    Communicates: what a training does.
    """
    config = monitored_config(shape.name, num_steps)
    model = build_model(shape, seed=0)
    trainer = Trainer(config, ranks, model=model, train_data=samples, show_progress=False)
    return trainer.fit().history


def time_steps(trainer: Trainer, num_steps: int) -> list[StepTimes]:
    """Make two steps that do not count and `num_steps` that do, and return this rank's times of these.

    On a GPU times are known one step late, so that they may be of the steps from the second on.

    Communicates: what the steps do.
    """
    found = []
    for _ in range(2 + num_steps):
        trainer.train_step()
        if trainer.ranks.device.type == "cuda":
            torch.cuda.synchronize(trainer.ranks.device)
        found.append(trainer.monitor.last_times)
    return [times for times in found[2:] if times is not None]


def work_of_steps(trainer: Trainer, steps: Iterable[int]) -> tuple[Work, Work]:
    """Return the work of some steps on all ranks: of real tokens, and with padding and blank tiles.

    Args:
        trainer: of a run without tensor, context or pipeline parallelism, whose ranks have different samples.
        steps: counted from 1.
    Communicates: a gather of a few bytes.
    """
    mine = [count_work(trainer.load_step(step - 1)) for step in steps]
    everyone: list[list[tuple[Work, Work]]] = [[] for _ in range(trainer.ranks.world_size)]
    dist.all_gather_object(everyone, mine)
    pairs = [pair for of_rank in everyone for pair in of_rank]
    return sum((real for real, _ in pairs), Work()), sum((executed for _, executed in pairs), Work())


# --- FLOPs by PyTorch's own counter -----------------------------------------------------------------------------------


def count_by_torch(
    shape: VLMShape,
    lengths: Sequence[int],
    trained: Collection[str] = TOWERS,
    recompute: Mapping[str, str] | None = None,
    *,
    sees_attention: bool = True,
) -> int:
    """Run forward and backward of sequences that begin with a picture of one tile; return FLOPs as torch counts them.

    Args:
        shape: the model.
        lengths: of the sequences, image tokens included; all alike, since the counter counts padding too.
        trained: towers whose weights get gradients.
        recompute: activation policy by tower, vision and language.
        sees_attention: run attention as single products, which the counter sees; the CPU's fused kernel it does not.
    """
    frozen = [tower for tower in TOWERS if tower not in trained]
    model = build_model(shape, seed=0)
    freeze_towers(model, frozen)
    config = parse_config({"model": {"freeze": frozen}, "activations": dict(recompute or {})})
    if (cover := plan_activations(config, config.parallel, shape)) is not None:
        cover(model)
    ids_BS = torch.full((len(lengths), max(lengths)), 5)
    ids_BS[:, : shape.num_visual_tokens_per_tile] = shape.image_token_id
    side_px = shape.vision.image_size_px
    pixels = torch.zeros(len(lengths), 3, side_px, side_px)
    backends = [SDPBackend.MATH] if sees_attention else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends), FlopCounterMode(display=False) as counter:
        model(ids_BS, pixels).sum().backward()
    return counter.get_total_flops()


# --- What a waiting process looks like --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Occupation:
    """How busy a process looked, and how much it computed."""

    what: str
    cpu_percent: float
    """Of one core, as `top` shows it."""
    flop_per_s: float


def watch_process(what: str, work: Callable[[], float]) -> Occupation:
    """Run something that returns the FLOPs it has computed, and return how busy this process was meanwhile."""
    process = psutil.Process()
    before, began_s = process.cpu_times(), time.perf_counter()
    flops = work()
    seconds, after = time.perf_counter() - began_s, process.cpu_times()
    busy_s = after.user - before.user + after.system - before.system
    return Occupation(what, 100 * busy_s / seconds, flops / seconds)


def compare_waiting(ranks: Ranks, seconds: float = 1.5) -> list[list[Occupation]]:
    """Let rank 0 compute while the others wait for it, once blocked and once asking again and again.

    All of it on the CPU and over gloo, with GPUs too: NCCL's waiting is a kernel, which keeps the GPU busy by itself.

    Args:
        ranks: this process's place, one of 2 or more.
        seconds: that rank 0 computes in each of the two rounds.

    Returns:
        By rank, what each round looked like; the same on every rank.
    Communicates: an all-reduce of 4 bytes a round, and a gather of what was seen.
    """
    group: Any = None if ranks.backend == "gloo" else dist.new_group(backend="gloo")
    found = []
    for polls in (False, True):
        if ranks.is_main:
            found.append(watch_process("computes", partial(_multiply_for, seconds)))
            _wait(group, polls=False)
        else:
            what = "waits by polling" if polls else "waits blocked"
            found.append(watch_process(what, partial(_wait, group, polls=polls)))
    everyone: list[list[Occupation]] = [[] for _ in range(ranks.world_size)]
    dist.all_gather_object(everyone, found, group=group)
    return everyone


def _multiply_for(seconds: float, side: int = 384) -> float:
    a, flops, began_s = torch.ones(side, side), 0.0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        torch.mm(a, a)
        flops += 2 * side**3
    return flops


def _wait(group: dist.ProcessGroup | None, *, polls: bool) -> float:
    work = dist.all_reduce(torch.ones(1), async_op=True, group=group)
    assert work is not None
    while polls and not work.is_completed():
        pass
    work.wait()
    return 0.0


# --- Sums over a run --------------------------------------------------------------------------------------------------


def rates_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return a row's positions a second by what is in them: text, image and padding."""
    return {kind: row[f"performance/{kind}_tokens_per_second"] for kind in ("text", "image", "padding")}
