"""Moves layers between the stages of pipelines that train, on four ranks. Usage: adaptive_worker.py FOLDER.

Each rank writes what it recorded to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from adaptive_cases import NUM_MICROBATCHES, OPTIMIZER, ROUTES, STEPS, Route, Trip, find_rates, split_into
from combinations import Combination, config_of, divisible_shape
from parity import AwkwardTrainer, awkward_samples, record
from pipeline_cases import LOSS_SCALE, MAX_GRAD_NORM, Case, build_case_model, make_step
from pipeline_worker import gradients, wrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vlmcourse.models.vlm import build_model
from vlmcourse.parallel import moving, parcels
from vlmcourse.parallel.adaptive import AdaptivePipelineScheduler
from vlmcourse.parallel.apply import check_strategy
from vlmcourse.parallel.clipping import clip_over_stages
from vlmcourse.parallel.comm import gather_full, local_part
from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.moving import named_parameters
from vlmcourse.parallel.parcels import WEIGHT, Parcel
from vlmcourse.parallel.pipeline import Pipeline
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.ranks import Ranks, group_timeout_s, init_ranks, shutdown_ranks
from vlmcourse.parallel.timeline import Action, gather_actions
from vlmcourse.parallel.verify import fingerprint
from vlmcourse.planner.stages import StageSplit
from vlmcourse.train.loss import token_loss_sum
from vlmcourse.train.optimizer import build_optimizer
from vlmcourse.train.trainer import Trainer

CPU = torch.device("cpu")
SLEEP_S = 0.02
Wrap = Callable[[nn.Module], nn.Module] | None


def build(case: Case, mesh: DeviceMesh, layers: tuple[int, ...], wrap: Wrap = None) -> tuple[PipelinedModel, Optimizer]:
    pipe = Pipeline(
        build_case_model(case),
        mesh["pp"].get_group(),
        case.schedule,
        loss_sum=token_loss_sum,
        device=CPU,
        split=split_into(layers),
        wrap=wrap or wrapper(case, mesh),
        reshard_after_forward=case.reshard_after_forward,
    )
    model = PipelinedModel(pipe)
    return model, build_optimizer(model, OPTIMIZER)


def snapshot(pipe: Pipeline, optimizer: Optimizer) -> dict[str, int]:
    """Return a hash of each weight and each tensor of optimizer state of the whole model, of shards this rank's.

    The copies of a tied embedding must be equal in all of them.
    """
    mine = []
    for name, tensors in states(pipe, optimizer):
        mine += [(f"{key} of {name}", fingerprint(local_part(tensor))) for key, tensor in tensors.items()]
    everyone: list[Any] = [None] * pipe.pp
    dist.all_gather_object(everyone, mine, group=pipe.group)
    merged: dict[str, int] = {}
    for what, value in (pair for of_rank in everyone for pair in of_rank):
        assert merged.setdefault(what, value) == value, f"the copies of {what} differ"
    return merged


def states(pipe: Pipeline, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield this rank's parameters with their optimizer state, by name."""
    for stage in pipe.stages:
        for name, parameter in stage.named_parameters():
            yield name, {"weight": parameter.detach()} | optimizer.state.get(parameter, {})


def differences(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return what is not the same in every bit."""
    return sorted(what for what in before.keys() | after.keys() if before.get(what) != after.get(what))


def travel(route: Route, mesh: DeviceMesh, exact: bool = True) -> Trip:
    """Train a route; `exact` also compares what there was before a move and after it."""
    trip = Trip()
    try:
        travel_on(trip, route, mesh, exact)
    except ValueError as error:  # on all ranks of the pipeline
        if exact:
            raise
        trip.refused = str(error)
    return trip


def travel_on(trip: Trip, route: Route, mesh: DeviceMesh, exact: bool) -> None:
    case = route.case
    model, optimizer = build(case, mesh, route.splits[0])
    pipe, group = model.pipeline, mesh["pp"].get_group()
    # Without data parallelism the other pipeline is another model.
    everyone = group if case.dp == "single" else None
    scheduler = AdaptivePipelineScheduler(model, optimizer, warmup_steps=99, everyone=everyone)
    dp = mesh["dp"].size() if case.dp == "fsdp" else 1
    offset = mesh["dp"].get_local_rank() * NUM_MICROBATCHES if dp > 1 else 0

    def move(layers: tuple[int, ...]) -> None:
        before = snapshot(pipe, optimizer) if exact else {}
        moved = scheduler.move(split_into(layers))
        trip.sent.append(moved.sent)
        trip.received.append(moved.received)
        trip.gradients_left.append([n for s in pipe.stages for n, p in s.named_parameters() if p.grad is not None])
        trip.differing.append(differences(before, snapshot(pipe, optimizer)) if exact else [])

    for number, step in enumerate(STEPS):
        if number:
            move(route.splits[number])
        optimizer.zero_grad()
        batches = make_step(pipe.stages[0].shape, step, NUM_MICROBATCHES * dp)[offset:][:NUM_MICROBATCHES]
        trip.losses.append([float(loss) for loss in pipe.forward_backward(batches, LOSS_SCALE * dp)])
        pipe.reduce_tied_gradients()
        trip.gradients.append(gradients(pipe))
        trip.held.append([name for stage in pipe.stages for name, _ in stage.named_parameters()])
        trip.grad_norms.append(clip_over_stages(pipe.parameters(), MAX_GRAD_NORM, group, CPU, skip=pipe.tied_copy))
        optimizer.step()
    if exact:
        move(route.splits[-1])
    trip.rates = find_rates([pair for stage in pipe.stages for pair in stage.named_parameters()], optimizer)
    trip.state = {n: {k: gather_full(t) for k, t in ts.items()} for n, ts in states(pipe, optimizer)}


Parcels = dict[str, Parcel]


@contextlib.contextmanager
def after_exchange(spoil: Callable[[Pipeline, Parcels, list[str]], None]) -> Iterator[None]:
    """Spoil what has come from other ranks."""
    real = moving._exchange_tensors

    def exchange(pipe: Pipeline, parcels: Parcels, contents: Parcels, moves: list[moving.Move]) -> int:
        sent_bytes = real(pipe, parcels, contents, moves)
        spoil(pipe, parcels, [move.name for move in moves if move.receiver == pipe.pp_rank])
        return sent_bytes

    with mock.patch.object(moving, "_exchange_tensors", exchange):
        yield


def moments_stay(pipe: Pipeline, parcels: Parcels, received: list[str]) -> None:
    """The moments of moved parameters begin at zero."""
    for name in received:
        for key, tensor in parcels[name].tensors.items():
            if key != WEIGHT:
                tensor.zero_()


def step_lost(pipe: Pipeline, parcels: Parcels, received: list[str]) -> None:
    """Moved parameters count their steps from zero."""
    for name in received:
        parcels[name].values = {key: value._replace(value=0.0) for key, value in parcels[name].values.items()}


def layers_swapped(pipe: Pipeline, parcels: Parcels, received: list[str]) -> None:
    """Two moved blocks come in the wrong order."""
    for name in received:
        other = name.replace("blocks.2.", "blocks.3.")
        if other != name and other in received:
            parcels[name], parcels[other] = parcels[other], parcels[name]


def options_lost(pipe: Pipeline, parcels: Parcels, received: list[str]) -> None:
    """Moved parameters join the first group that there is."""
    here = next(parcel.group for name, parcel in parcels.items() if name not in received)
    for name in received:
        parcels[name].group = here


@contextlib.contextmanager
def optimizer_left_behind() -> Iterator[None]:
    """The optimizer keeps its old parameters."""
    with mock.patch.object(moving, "regroup", lambda *_: None):
        yield


@contextlib.contextmanager
def moments_shared() -> Iterator[None]:
    """Two copies of a tied embedding on one rank share their moments."""
    real = parcels._unpack_state
    with mock.patch.object(parcels, "_unpack_state", lambda p, parcel, copy: real(p, parcel, False)):
        yield


@contextlib.contextmanager
def gradients_kept() -> Iterator[None]:
    """Gradients of the step before stay on what stays."""
    real = moving._cut_and_fill

    def fill(pipe: Pipeline, *args: Any) -> None:
        before = {name: p.grad for stage in pipe.stages for name, p in stage.named_parameters()}
        real(pipe, *args)
        for stage in pipe.stages:
            for name, parameter in stage.named_parameters():
                parameter.grad = before.get(name)

    with mock.patch.object(moving, "_cut_and_fill", fill):
        yield


@contextlib.contextmanager
def old_copy_used() -> Iterator[None]:
    """A tied embedding's second copy is taken from before the training."""
    start = build_case_model(Case("gpipe", tied=True)).language.embedding.weight.detach()

    def spoil(pipe: Pipeline, parcels: Parcels, received: list[str]) -> None:
        if "language.embedding.weight" in received:
            parcels["language.embedding.weight"].tensors[WEIGHT].copy_(start)

    with after_exchange(spoil):
        yield


BUGS: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "moments not moved": ("gpipe, tied", partial(after_exchange, moments_stay)),
    "step lost": ("gpipe, tied", partial(after_exchange, step_lost)),
    "layers in the wrong order": ("dualpipev", partial(after_exchange, layers_swapped)),
    "learning rates lost": ("gpipe, tied", partial(after_exchange, options_lost)),
    "optimizer not told": ("gpipe, tied", optimizer_left_behind),
    "tied copies share moments": ("zbv, tied", moments_shared),
    "old gradients kept": ("gpipe, tied", gradients_kept),
    "old weights for the tied copy": ("gpipe, tied", old_copy_used),
}


class Sleeper:
    """Slows some layers down, wherever they stand; one of them on one data-parallel copy only."""

    def __init__(self, halves: DeviceMesh) -> None:
        self.second_copy = halves["dp"].get_local_rank() == 1
        self.seconds = 0.0
        """Slept so far, as planned."""
        self.is_awake = False
        """Whether what was planned is only counted."""
        self.actions: list[Action] = []
        """What ran under `watch`: from 0 to the seconds that were slept in it."""

    def sleep(self, times: int, *_: Any) -> None:
        self.seconds += SLEEP_S * times
        if not self.is_awake:
            time.sleep(SLEEP_S * times)

    def wrap(self, stage: nn.Module) -> nn.Module:
        parts = dict(stage.named_modules())
        for name, times in (
            ("vision.blocks.0", 1),
            ("vision.blocks.1", 1),
            ("language.blocks.3", 2 * self.second_copy),
        ):
            if name in parts and times:
                parts[name].register_forward_pre_hook(partial(self.sleep, times))
        if "language.blocks.2.mlp" in parts:  # slow in backward alone
            parts["language.blocks.2.mlp"].register_forward_hook(self.slow_backward)
        return stage

    def slow_backward(self, _: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self.sleep, 1))

    def watch(self, kind: str, microbatch: int, stage: int, run: Callable[[], Any]) -> Any:
        before_s = self.seconds
        result = run()
        self.actions.append(Action(dist.get_rank(), kind, microbatch, stage, 0.0, self.seconds - before_s))
        return result


def adapt(halves: DeviceMesh, schedule: str, layers: tuple[int, ...], measure_steps: int) -> dict[str, Any]:
    """Let a pipeline with slow layers decide; then let it hear that its split is the best, or nearly."""
    sleeper = Sleeper(halves)
    model, optimizer = build(Case(schedule), halves, layers, sleeper.wrap)
    pipe = model.pipeline
    scheduler = AdaptivePipelineScheduler(
        model, optimizer, warmup_steps=1, measure_steps=measure_steps, min_gain=0.1, repeat_every=1
    )
    found: dict[str, Any] = {"losses": [], "splits": [], "decided": []}
    for name in STEPS:
        optimizer.zero_grad()
        found["losses"].append(
            [float(x) for x in pipe.forward_backward(make_step(pipe.stages[0].shape, name, 4), 0.02)]
        )
        clip_over_stages(pipe.parameters(), MAX_GRAD_NORM, pipe.group, CPU, skip=pipe.tied_copy)
        optimizer.step()
        decision = scheduler.step_done()
        found["splits"].append(pipe.split.layers_per_stage)
        found["decided"].append(
            None if decision is None else (decision.step, decision.reason, decision.moved is not None)
        )
    first = scheduler.decisions[0]
    found["times"], found["promise"] = first.proposal.times, (first.proposal.before_s, first.proposal.after_s)
    # Where only the output costs something, all splits are as good.
    found["stays"] = decide_by(scheduler, [0.0] * 10 + [1.0], first.proposal.times)
    found["watching"] = pipe.on_action is not None or any(
        len(block._forward_hooks) > 1 for stage in pipe.stages for block in stage.modules()
    )
    if pipe.num_stages == 2:
        # The first stage is too slow by what its last layer costs, 2 % of a stage.
        here, there = pipe.split.layers_per_stage
        costs = [1 / (here - 1)] * (here - 1) + [0.02] + [0.98 / there] * there
        found["little gain"] = decide_by(scheduler, costs, first.proposal.times)
        found["slept"] = sleep_under_every_split(scheduler, sleeper)
    return found


def decide_by(scheduler: AdaptivePipelineScheduler, forward_s: list[float], like: LayerTimes) -> tuple[bool, str, bool]:
    """Let a scheduler decide by other times; return whether its proposal is the present split, and what it did."""
    scheduler.start_measuring()
    times = LayerTimes(tuple(forward_s), (0.0,) * len(forward_s), 1, like.order)
    with mock.patch.object(scheduler, "measure", lambda: times):
        decision = scheduler.decide()
    return decision.proposal.split == decision.proposal.present, decision.reason, decision.moved is None


def sleep_under_every_split(
    scheduler: AdaptivePipelineScheduler, sleeper: Sleeper
) -> dict[tuple[int, ...], list[list[Action]]]:
    """Run a step under every split into two stages; return what each rank did, and was to sleep, by layers a stage."""
    pipe, found = scheduler.pipeline, {}
    sleeper.is_awake = True
    for first in range(1, pipe.split.num_layers):
        scheduler.move(split_into((first, pipe.split.num_layers - first)))
        sleeper.actions = []
        pipe.on_action = sleeper.watch
        pipe.forward_backward(make_step(pipe.stages[0].shape, "text", NUM_MICROBATCHES), 0.02)
        pipe.on_action = None
        actions = [action._replace(rank=pipe.pp_rank) for action in sleeper.actions]
        found[pipe.split.layers_per_stage] = gather_actions(actions, pipe.group)
    return found


def learning_rates_on_the_way(halves: DeviceMesh) -> dict[str, Any]:
    """Move layers under an LR scheduler of torch, made before ours and after it."""

    def halve(step: int) -> float:
        return 0.5**step

    early, early_optimizer = build(Case("gpipe"), halves, (5, 6))
    LambdaLR(early_optimizer, halve)
    refused = say(lambda: AdaptivePipelineScheduler(early, early_optimizer))
    model, optimizer = build(Case("gpipe"), halves, (5, 6))
    scheduler = AdaptivePipelineScheduler(model, optimizer)
    rates, found = LambdaLR(optimizer, halve), []
    for layers in ((10, 1), (1, 10)):
        optimizer.zero_grad()
        model.pipeline.forward_backward(make_step(model.pipeline.stages[0].shape, "text", NUM_MICROBATCHES), LOSS_SCALE)
        optimizer.step()
        scheduler.move(split_into(layers))
        rates.step()
        here = find_rates(named_parameters(model.pipeline.stages), optimizer)
        found.append(({name: lr for name, (lr, _) in here.items()}, len(optimizer.param_groups)))
    return {"refused": refused, "rates": found}


def pipelined(trainer: Trainer) -> PipelinedModel:
    assert isinstance(trainer.model, PipelinedModel)
    return trainer.model


def run_trainer(ranks: Ranks) -> tuple[Any, list[str], list[tuple[int, ...]]]:
    """Train with FSDP over cp under a pipeline through the Trainer's hook, a decision after every step."""
    combination = Combination(4, {"strategy": "fsdp", "pp": 2, "cp": 2}, 4, num_steps=3)
    samples = awkward_samples()
    trainer = AwkwardTrainer(
        config_of(combination),
        ranks,
        model=build_model(divisible_shape(), seed=100 + ranks.rank),
        train_data=samples,
        eval_data=samples[:1],
        show_progress=False,
    )
    scheduler = AdaptivePipelineScheduler(
        pipelined(trainer), trainer.optimizer, warmup_steps=0, measure_steps=1, min_gain=0.0, repeat_every=1
    )
    splits: list[tuple[int, ...]] = []

    def go_elsewhere(trainer: Trainer, _: object) -> None:
        layers = [(2, 5), (5, 2), (3, 4)][trainer.step % 3]
        scheduler.move(StageSplit(num_vision_layers=2, num_language_layers=2, layers_per_stage=layers))
        splits.append(layers)
        check_strategy(trainer.model, trainer.parallel, ranks, trainer.place)

    trainer.after_step += [scheduler, go_elsewhere]
    return record(trainer), [decision.reason for decision in scheduler.decisions], splits


def resume(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Save an adaptive run after its layers have moved; go on, and let another run go on from there."""
    config = config_of(Combination(4, {"strategy": "fsdp", "pp": 2, "cp": 2, "adaptive": True}, 4))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, output_dir=str(folder / "runs")))
    samples = awkward_samples()

    def start(seed: int) -> AwkwardTrainer:
        model = build_model(divisible_shape(), seed=seed)
        return AwkwardTrainer(
            config, ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False
        )

    first, second = start(1), start(2)
    before = pipelined(second).pipeline.split.layers_per_stage
    first.train_step()
    assert first.scheduler is not None
    limits = first.scheduler.max_search_s, group_timeout_s(first.scheduler.everyone)
    first.scheduler.move(StageSplit(num_vision_layers=2, num_language_layers=2, layers_per_stage=(2, 5)))
    path = first.save()
    second.resume(path)
    found: dict[str, Any] = {"before": before, "after": pipelined(second).pipeline.split.layers_per_stage}
    found["limits"] = limits
    assert second.scheduler is not None
    found["other splits"] = [second.scheduler.start_from(layers) for layers in ((), (1, 1, 5), (3, 3), (2, 5))]
    check_strategy(second.model, second.parallel, ranks, second.place)
    return found | {"losses": [[trainer.train_step().loss for _ in range(2)] for trainer in (first, second)]}


def say(action: Callable[[], object]) -> str:
    """Return what an action is refused with."""
    started_s = time.perf_counter()
    try:
        action()
        said = "accepted"
    except ValueError as error:
        said = str(error)
    assert time.perf_counter() - started_s < 5
    return said


def refusals(halves: DeviceMesh, ranks: Ranks) -> dict[str, str]:
    """Collect what is said about moves that cannot be made; all ranks hear of it at once."""
    rank, found = dist.get_rank(), {}
    plain, adamw = build(Case("gpipe"), halves, (5, 6))
    scheduler = AdaptivePipelineScheduler(plain, adamw)
    found["one rank wants another split"] = say(lambda: scheduler.move(split_into((5, 6) if rank else (6, 5))))
    found["other stages"] = say(lambda: scheduler.move(split_into((5, 5, 1))))
    other = StageSplit(num_vision_layers=3, num_language_layers=4, layers_per_stage=(5, 5))
    found["another model"] = say(lambda: scheduler.move(other))
    found["no margin"] = say(lambda: AdaptivePipelineScheduler(plain, adamw, min_gain=1.5))
    for what, numbers in {
        "no step to measure": {"measure_steps": 0},
        "half a step to measure": {"measure_steps": 1.5},
        "no time to search": {"max_search_s": math.nan},
        "all time to search": {"max_search_s": math.inf},
    }.items():
        found[what] = say(partial(AdaptivePipelineScheduler, plain, adamw, **numbers))
    strange = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]) if rank == 3 else adamw
    found["an optimizer of something else"] = say(lambda: AdaptivePipelineScheduler(plain, strange))
    zero = ZeroRedundancyOptimizer(
        plain.parameters(), optimizer_class=torch.optim.AdamW, process_group=halves["dp"].get_group()
    )
    found["zero1"] = say(lambda: AdaptivePipelineScheduler(plain, zero))
    sharded, of_shards = build(Case("gpipe", dp="fsdp"), halves, (5, 6))
    on_shards = AdaptivePipelineScheduler(sharded, of_shards)
    found["fsdp without a block"] = say(lambda: on_shards.move(split_into((10, 1))))
    tied, of_tied = build(Case("zbv", tied=True), halves, (3, 3, 3, 2))
    found["tied, zbv"] = say(lambda: AdaptivePipelineScheduler(tied, of_tied).move(split_into((1, 1, 1, 8))))
    copies, of_copies = build(Case("gpipe", dp="ddp"), halves, (5, 6))
    found["ddp"] = say(lambda: AdaptivePipelineScheduler(copies, of_copies))
    trainer = AwkwardTrainer(
        config_of(Combination(4, {"pp": 2, "tp": 2}, 4)),
        ranks,
        model=build_model(divisible_shape(), seed=1),
        train_data=awkward_samples(),
        eval_data=awkward_samples()[:1],
        show_progress=False,
    )
    found["tp"] = say(lambda: AdaptivePipelineScheduler(pipelined(trainer), trainer.optimizer))
    for model in (plain, sharded):  # what was refused has changed nothing
        losses = model.pipeline.forward_backward(make_step(model.pipeline.stages[0].shape, "mixed", 4))
        assert len(losses) == 4
    return found


def deal_to(half: int, names: list[str]) -> list[str]:
    """Return what one half of the ranks runs: pipelines of two ranks run in pairs, one on each half."""
    alone = [name for name in names if is_on_a_half(name)]
    return alone[half::2] + [name for name in names if name not in alone]


def is_on_a_half(name: str) -> bool:
    """Whether a route, or a bug planted on one, takes two ranks only."""
    route = ROUTES[BUGS[name][0] if name in BUGS else name]
    return route.pp == 2 and route.case.dp == "single"


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=100)
    meshes = {
        pp: init_device_mesh("cpu", (pp, ranks.world_size // pp), mesh_dim_names=("pp", "dp"))
        for pp in (2, ranks.world_size)
    }
    half, found = meshes[2]["dp"].get_local_rank(), {}
    found["trips"] = {name: travel(ROUTES[name], meshes[ROUTES[name].pp]) for name in deal_to(half, list(ROUTES))}
    found["bugs"] = {}
    for name in deal_to(half, list(BUGS)):
        route, plant = BUGS[name]
        with plant():
            found["bugs"][name] = travel(ROUTES[route], meshes[2], exact=False)
    found["adapted"] = {
        "gpipe": adapt(meshes[2], "gpipe", (10, 1), 1),
        "zbv": adapt(meshes[2], "zbv", (1, 1, 8, 1), 2),
    }
    found["learning rates"] = learning_rates_on_the_way(meshes[2])
    found["resumed"] = resume(ranks, folder)
    found["refusals"] = refusals(meshes[2], ranks)
    found["trainer"] = run_trainer(ranks)
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
