"""Trains every pipeline of `pipeline_cases.py` on the ranks it is started on. Usage: pipeline_worker.py FOLDER.

Each rank writes what it recorded to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pipeline_cases import (
    CASES_OF_2,
    CASES_OF_4,
    LOSS_SCALE,
    MAX_GRAD_NORM,
    STEPS,
    Case,
    Recording,
    build_adamw,
    build_case_model,
    make_batch,
    make_step,
    pipeline_shape,
    split_of,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.data.samples import Batch
from vlmcourse.parallel import microbatches, pipeline, stages
from vlmcourse.parallel.clipping import clip_over_stages
from vlmcourse.parallel.comm import gather_full
from vlmcourse.parallel.fsdp import find_units
from vlmcourse.parallel.pipeline import Pipeline
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks
from vlmcourse.planner.schedules import SCHEDULES
from vlmcourse.planner.stages import StageSplit
from vlmcourse.train.loss import token_loss_sum

CPU = torch.device("cpu")


def wrapper(case: Case, mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module] | None:
    def shard(stage: nn.Module) -> nn.Module:
        for unit in find_units(stage):
            fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=case.reshard_after_forward)
        fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=case.reshard_after_forward)
        return stage

    def replicate(stage: nn.Module) -> nn.Module:
        trained = any(p.requires_grad for p in stage.parameters())
        return DistributedDataParallel(stage, process_group=mesh["dp"].get_group()) if trained else stage

    return {"single": None, "fsdp": shard, "ddp": replicate}[case.dp]


def build_pipeline(case: Case, mesh: DeviceMesh, **kwargs: Any) -> Pipeline:
    pp = mesh["pp"].size()
    split = split_of(case, pp * SCHEDULES[case.schedule].stages_per_rank)
    return Pipeline(
        build_case_model(case),
        mesh["pp"].get_group(),
        case.schedule,
        loss_sum=token_loss_sum,
        device=CPU,
        split=split,
        wrap=wrapper(case, mesh),
        reshard_after_forward=case.reshard_after_forward,
        **kwargs,
    )


def gradients(pipe: Pipeline) -> dict[str, torch.Tensor]:
    found = {}
    for stage in pipe.stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                key = "tied copy" if parameter is pipe.tied_copy else name
                assert key not in found, f"{key} is on two stages"
                found[key] = gather_full(parameter.grad)
    return found


def train(case: Case, mesh: DeviceMesh, num_steps: int = len(STEPS)) -> Recording:
    """Train a case; ranks with another data-parallel coordinate have other micro-batches."""
    pipe, recording = build_pipeline(case, mesh), Recording()
    optimizer = build_adamw(pipe.parameters())
    dp, dp_rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    per_rank = 8 // dp
    for step in STEPS[:num_steps]:
        optimizer.zero_grad()
        batches = make_step(pipe.stages[0].shape, step, 8)[dp_rank * per_rank :][:per_rank]
        losses = pipe.forward_backward(batches, LOSS_SCALE * dp)
        pipe.reduce_tied_gradients()
        recording.losses.append([float(loss) for loss in losses])
        recording.gradients.append(gradients(pipe))
        norm = clip_over_stages(pipe.parameters(), MAX_GRAD_NORM, mesh["pp"].get_group(), CPU, skip=pipe.tied_copy)
        recording.grad_norms.append(norm)
        optimizer.step()
    for stage in pipe.stages:
        for name, parameter in stage.named_parameters():
            key = "tied copy" if parameter is pipe.tied_copy else name
            recording.weights[key] = gather_full(parameter)
    return recording


@contextlib.contextmanager
def scaled_by_microbatches() -> Iterator[None]:
    """Gradients are divided by the number of micro-batches, as torch does by default."""
    real = pipeline.CLASSES["gpipe"]

    def build(stage: Any, number: int, **kwargs: Any) -> Any:
        return real(stage, number, **(kwargs | {"scale_grads": True}))

    with mock.patch.dict(pipeline.CLASSES, gpipe=build):
        yield


@contextlib.contextmanager
def blocks_swapped() -> Iterator[None]:
    """The stages run each other's language blocks."""
    real = StageSplit.language_blocks

    def mirrored(self: StageSplit, stage: int) -> range:
        own, size = real(self, stage), self.num_language_layers
        return range(size - own.stop, size - own.start)

    with mock.patch.object(StageSplit, "language_blocks", mirrored):
        yield


@contextlib.contextmanager
def tied_not_summed() -> Iterator[None]:
    """Each copy of a tied embedding keeps its own gradient."""
    with mock.patch.object(Pipeline, "reduce_tied_gradients", lambda self: None):
        yield


@contextlib.contextmanager
def tied_counted_twice() -> Iterator[None]:
    """The global norm counts both copies."""
    real = clip_over_stages
    with mock.patch.dict(globals(), clip_over_stages=lambda *args, skip: real(*args)):
        yield


@contextlib.contextmanager
def blank_tiles_first() -> Iterator[None]:
    """The features of blank tiles take the places of real ones."""
    real = microbatches.stack_batches

    def stack(batches: list[Batch], *args: Any) -> Any:
        step = real(batches, *args)
        tiles = step.tiles.unflatten(0, (step.num_microbatches, step.num_tiles))
        for of_batch, batch in zip(tiles, batches, strict=True):
            of_batch.copy_(of_batch.roll(step.num_tiles - batch.pixel_values_ICHW.shape[0], 0))
        return step

    with mock.patch.object(pipeline, "stack_batches", stack):
        yield


@contextlib.contextmanager
def padding_supervised() -> Iterator[None]:
    """The model is taught what follows padding."""
    with mock.patch.object(microbatches, "IGNORE_LABEL", 0):
        yield


@contextlib.contextmanager
def last_microbatch_only() -> Iterator[None]:
    """Only the last micro-batch counts."""
    real = Pipeline._scale_loss

    def scale(self: Pipeline, loss_sum: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return real(self, loss_sum, labels) * (len(self._loss_sums) == 8)

    with mock.patch.object(Pipeline, "_scale_loss", scale):
        yield


@contextlib.contextmanager
def features_off_by_one() -> Iterator[None]:
    """Patches keep the class token's place: features come from the wrong positions."""
    real = stages.VLMStage._fuse

    def fuse(self: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return real(self, x.roll(1, 1), *args)

    with mock.patch.object(stages.VLMStage, "_fuse", fuse):
        yield


BUGS: dict[str, tuple[Case, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "gradients divided by the micro-batches": (Case("gpipe"), scaled_by_microbatches),
    "stages swapped": (Case("interleaved"), blocks_swapped),
    "stages swapped (zbv)": (Case("zbv"), blocks_swapped),
    "tied gradients not summed": (Case("gpipe", "early fusion", tied=True), tied_not_summed),
    "tied gradients not summed (zbv)": (Case("zbv", "vision apart", tied=True), tied_not_summed),
    "tied embedding counted twice": (Case("1f1b", "early fusion", tied=True), tied_counted_twice),
    "features of blank tiles placed": (Case("1f1b"), blank_tiles_first),
    "padding supervised": (Case("1f1b"), padding_supervised),
    "only the last micro-batch": (Case("zbv"), last_microbatch_only),
    "features one position off": (Case("gpipe", "vision apart"), features_off_by_one),
}


@contextlib.contextmanager
def not_refused() -> Iterator[None]:
    """A wrapper that the schedule trains wrong under is accepted."""
    with mock.patch.object(Pipeline, "_check_wrappers", lambda self, reshard_after_forward: None):
        yield


WRONG_IN_SILENCE: dict[str, tuple[Case, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "zbv over fsdp, weights freed": (Case("zbv", dp="fsdp"), not_refused),
    "dualpipev over ddp": (Case("dualpipev", dp="ddp"), not_refused),
}
"""What torch runs without a word, and to wrong gradients; `Pipeline` refuses it."""


def wrapper_refusals(mesh: DeviceMesh) -> dict[str, str]:
    """Collect what is said when the pipelines of `WRONG_IN_SILENCE` are built."""
    found = {}
    for name, (case, _) in WRONG_IN_SILENCE.items():
        try:
            build_pipeline(case, mesh)
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    return found


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """Collect what is said about steps that cannot run, and that all ranks hear of it at once."""
    rank, shape = dist.get_rank(), pipeline_shape(False)
    good = make_step(shape, "mixed", 4)
    short = make_batch(shape, 1, (1,), 24)
    short.input_ids_BS[0, 1] = 5  # an image token is missing
    small = make_batch(shape, 2, (1,), 24)
    small.pixel_values_ICHW = F.interpolate(small.pixel_values_ICHW, scale_factor=2)
    small.input_ids_BS[:] = shape.image_token_id
    supervised = [dataclasses.replace(b, labels_BS=b.labels_BS.clamp(max=4)) for b in good]
    masked = [dataclasses.replace(b, attention_mask_BS=~b.attention_mask_BS) for b in good]
    assert any(not torch.equal(a.labels_BS, b.labels_BS) for a, b in zip(good, supervised, strict=True))
    steps = {
        "too few micro-batches": ("dualpipev", good[:3]),
        "no micro-batch": ("gpipe", []),
        "uneven rounds": ("interleaved", [*good, good[0]]),
        "an image token is missing on rank 1": ("gpipe", [*good[:3], short if rank else good[3]]),
        "other samples on rank 1": ("1f1b", good[::-1] if rank else good),
        "fewer micro-batches on rank 1": ("1f1b", good[:2] if rank else good),
        "other labels on rank 1": ("gpipe", supervised if rank else good),
        "another mask on rank 1": ("gpipe", masked if rank else good),
        "tiles of two sizes": ("gpipe", [*good, small]),
    }
    found = {}
    for name, (schedule, batches) in steps.items():
        pipe = build_pipeline(Case(schedule), mesh)
        started_s = time.perf_counter()
        try:
            pipe.forward_backward(batches)
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
        assert time.perf_counter() - started_s < 5, name
        losses = pipe.forward_backward(good)  # the pipeline still works
        assert len(losses) == 4
    return found


def note_type(seen: list[tuple[int, str]], stage: int, _: nn.Module, __: Any, output: torch.Tensor) -> None:
    seen.append((stage, str(output.dtype)))


def precisions(mesh: DeviceMesh) -> dict[str, Any]:
    """Run a step in fp32, one under autocast and one in fp32 again; return in which type the blocks of a rank computed.

    One schedule has two stages a rank.
    """
    found: dict[str, Any] = {}
    for schedule in ("gpipe", "interleaved"):
        pipe = build_pipeline(Case(schedule), mesh)
        step = make_step(pipe.stages[0].shape, "pictures", 4)
        seen: list[tuple[int, str]] = []
        for stage in pipe.stages:
            for block in [*stage.vision.blocks, *stage.language.blocks]:
                linear = next(module for module in block.modules() if isinstance(module, nn.Linear))
                linear.register_forward_hook(partial(note_type, seen, stage.stage))
        for precision in (
            contextlib.nullcontext,
            partial(torch.autocast, "cpu", torch.bfloat16),
            contextlib.nullcontext,
        ):
            pipe.forward_backward(step, precision=precision)
            found.setdefault(schedule, []).append(sorted(set(seen)))
            seen.clear()
    return found


def timelines(mesh: DeviceMesh) -> dict[str, Any]:
    """Record one step of each schedule."""
    found = {}
    for schedule in SCHEDULES:
        pipe = build_pipeline(Case(schedule), mesh)
        step = make_step(pipe.stages[0].shape, "pictures", 8)
        pipe.forward_backward(step)
        assert not pipe.actions
        pipe.record = True
        pipe.forward_backward(step)
        found[schedule] = pipe.gather_actions()
    return found


def shapes_kept(mesh: DeviceMesh) -> int:
    """Run more shapes than are kept."""
    pipe = build_pipeline(Case("gpipe"), mesh)
    shape = pipe.stages[0].shape
    for seq_len in (8, 16, 24, 32, 40, 48, 8):
        pipe.forward_backward([make_batch(shape, 1, (0,), seq_len), make_batch(shape, 2, (0, 0), 8)])
    return len(pipe._runners)


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    found: dict[str, Any] = {"bugs": {}}
    everyone = init_device_mesh("cpu", (ranks.world_size, 1), mesh_dim_names=("pp", "dp"))
    halves = init_device_mesh("cpu", (ranks.world_size // 2, 2), mesh_dim_names=("pp", "dp"))
    cases = CASES_OF_2 if ranks.world_size == 2 else CASES_OF_4
    found["runs"] = {name: train(case, everyone if case.dp == "single" else halves) for name, case in cases.items()}
    for name, (case, plant) in BUGS.items() if ranks.world_size == 2 else WRONG_IN_SILENCE.items():
        with plant():
            found["bugs"][name] = train(case, everyone if case.dp == "single" else halves, num_steps=2)
    if ranks.world_size == 2:
        found["refusals"] = refusals(everyone)
        found["precisions"] = precisions(everyone)
        found["shapes kept"] = shapes_kept(everyone)
    found["wrappers"] = wrapper_refusals(halves) if ranks.world_size == 4 else {}
    found["timelines"] = timelines(everyone)
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
