"""Pipeline parallelism: the stages of one model on several ranks, through which micro-batches follow each other.

Enters: a plain model, the ranks of one pipeline and the micro-batches of an optimizer step, the same on each of these
ranks. Leaves: gradients in `.grad` of each rank's own stages, and the loss sums on the rank with the last stage.
torch.distributed.pipelining keeps the order of actions and sends activations; this file makes sure that it never waits
for something that does not come: all micro-batches of a step get one shape, another shape gets stages and buffers of
its own, and ranks that disagree about the batches raise before anything is sent. Chapter 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.data.samples import Batch
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.microbatches import StepBatch, check_batches, check_same_batches, stack_batches
from vlmcourse.parallel.phases import phase
from vlmcourse.parallel.stages import EMBEDDING, LossSum, VLMStage, layer_parameters, plain_stage
from vlmcourse.parallel.timeline import Action, OnAction, TimedStage, gather_actions, start_together
from vlmcourse.planner.schedules import SCHEDULES, check_schedule, find_tied_problem, stages_of_rank
from vlmcourse.planner.stages import StageSplit, split_evenly
from vlmcourse.spans import BACKWARD, FORWARD

CLASSES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
MAX_SHAPES = 4
"""Shapes of micro-batches whose receive buffers are kept."""


class Pipeline:
    """One rank's stages of a model, and the schedule that runs them together with those of the other ranks."""

    def __init__(
        self,
        model: VLM,
        group: dist.ProcessGroup,
        schedule: str,
        *,
        loss_sum: LossSum,
        device: torch.device,
        split: StageSplit | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        """Take this rank's stages out of a plain model; drop the model afterwards.

        Args:
            model: the whole model, on any device or on "meta", towers already frozen where wanted. Ranks must have the
                same weights: each keeps its own part of its own model.
            group: the ranks of this pipeline, in the order of their stages.
            schedule: one of `planner.stages.SCHEDULES`.
            loss_sum: makes the sum of token losses of logits [batch, seq, vocab] and labels [batch, seq].
            device: of this rank; the stages are moved there unless they are on "meta".
            split: which layers stand on which stage; by default `split_evenly`.
            wrap: applied to each stage of this rank, first to last: tensor, context and data parallelism. It returns
                the stage itself, changed, or a DDP around it.
            reshard_after_forward: whether FSDP frees gathered weights after forward; schedules that split backward need
                it False, which is then also set.

        Raises:
            ValueError: if schedule, number of ranks, split and wrappers do not fit together.
        """
        pp, self.pp_rank = dist.get_world_size(group), dist.get_rank(group)
        # The number of micro-batches is known with the first batches.
        check_schedule(schedule, pp=pp, num_microbatches=2 * pp)
        self.num_stages = pp * SCHEDULES[schedule].stages_per_rank
        self.schedule, self.pp, self.group, self.device = schedule, pp, group, device
        self.loss_sum, self.wrap, self.reshard_after_forward = loss_sum, wrap, reshard_after_forward
        self.owner = {s: rank for rank in range(pp) for s in stages_of_rank(schedule, pp, rank)}
        """The rank in the group of each stage."""
        self.record = False
        """Whether the next steps write down when each action ran; on a GPU that waits for every action to end."""
        self.actions: list[Action] = []
        """What this rank did in the last step, if it was recorded."""
        self.on_action: OnAction | None = None
        """Runs each action of the next steps, to look at what happens inside; None just lets them run."""
        self.sizes: tuple[int, ...] = ()
        """All that the shapes of the last step's messages depend on, its number of micro-batches first."""
        self._runners: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._loss_scale, self._loss_sums = 1.0, []
        self._started_s = 0.0
        self.cut(model, split or split_evenly(model.shape, self.num_stages), wrap)

    def cut(self, model: VLM, split: StageSplit, wrap: Callable[[nn.Module], nn.Module] | None) -> None:
        """Take this rank's stages out of a plain model, in the place of those that there are.

        Args:
            model: the whole model; dropped afterwards.
            split: which layers stand on which stage.
            wrap: applied to each stage of this rank.

        Raises:
            ValueError: if schedule, split and wrappers do not fit together.
        """
        if split.num_stages != self.num_stages:
            raise ValueError(
                f"the split has {split.num_stages} stages: {self.schedule} on pp={self.pp} ranks needs "
                f"{SCHEDULES[self.schedule].stages_per_rank} a rank, {self.num_stages} together"
            )
        problem = find_tied_problem(self.schedule, split, tied_embeddings=model.shape.language.tied_embeddings)
        if problem is not None:
            raise ValueError(f"This pipeline cannot run: {problem}")
        self.split = split
        self._trained_before = _trained_before(model, split)
        numbers = stages_of_rank(self.schedule, self.pp, self.pp_rank)
        self.stages = [VLMStage(model, split, stage, self.loss_sum) for stage in numbers]
        """This rank's stages, plain."""
        for stage in self.stages:
            if not any(parameter.is_meta for parameter in stage.parameters()):
                stage.to(self.device)
        self.modules: list[nn.Module] = [wrap(stage) if wrap else stage for stage in self.stages]
        """This rank's stages as they run: wrapped where there is a wrapper."""
        self._check_wrappers(self.reshard_after_forward)
        self._runners.clear()  # their buffers are those of the stages before

    def _check_wrappers(self, reshard_after_forward: bool) -> None:
        """Refuse wrappers that this schedule trains wrong under."""
        for module in self.modules:
            plain_stage(module)
            strategy = "single"
            if isinstance(module, DistributedDataParallel):
                strategy = "ddp"
            elif isinstance(module, FSDPModule):
                strategy = "fsdp"
                if not reshard_after_forward:
                    module.set_reshard_after_forward(False)
            check_schedule(
                self.schedule,
                pp=self.pp,
                num_microbatches=2 * self.pp,
                data_strategy=strategy,
                reshard_after_forward=reshard_after_forward,
            )

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's stages."""
        return [parameter for stage in self.stages for parameter in stage.parameters()]

    def forward_backward(
        self,
        batches: Sequence[Batch],
        loss_scale: float = 1.0,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[Tensor]:
        """Add the gradients of one optimizer step to `.grad` of this rank's stages; call `reduce_tied_gradients` then.

        Gradients of micro-batches are added up and not divided by their number. Over FSDP or DDP the data-parallel
        ranks exchange gradients once, after the last micro-batch.

        Args:
            batches: the micro-batches of the step, on CPU or this rank's device; the same on every rank of the group.
                They may differ in all sizes but that of a tile, and be text only.
            loss_scale: what each loss sum is multiplied by before backward.
            precision: makes the context of each stage's forward, such as one of autocast.

        Returns:
            The loss sum of each micro-batch, a detached scalar on the device; zeros where the last stage is elsewhere.

        Raises:
            ValueError: on all ranks, if the schedule cannot run this number of micro-batches, a batch does not fit the
                model, or the ranks have different ones.
        Communicates: one all-gather of 32 bytes a rank over the group; then for each micro-batch and boundary between
            ranks one activation forward and one gradient of the same size back.
        """
        problem = self._find_problem(batches)
        check_same_batches(batches, problem, self.group, self.device)
        step = stack_batches(batches, self.stages[0].shape, self.device)
        self.sizes = step.sizes
        for stage in self.stages:
            stage.precision = precision
        runner = self._runner(step)
        self._loss_scale, self._loss_sums = loss_scale, []
        self.actions.clear()
        if self.record:
            self._started_s = start_together(self.group, self.device)
        first = [step.tiles] if self.stages[0].is_first else []
        runner.step(*first, target=step.fields["labels_BS"], return_outputs=False, **step.fields)
        if not self._loss_sums:
            return [torch.zeros((), device=self.device) for _ in batches]
        return self._loss_sums

    def _find_problem(self, batches: Sequence[Batch]) -> str | None:
        """Return what is wrong with a step's batches, found before anything is sent; None if nothing is."""
        try:
            check_schedule(self.schedule, pp=self.pp, num_microbatches=len(batches))
            check_batches(batches, self.stages[0])
        except ValueError as error:
            return str(error)
        return None

    def _scale_loss(self, loss_sum: Tensor, labels_BS: Tensor) -> Tensor:
        """Keep a loss sum and return what backward starts from; the schedules ask for it in order of micro-batches."""
        self._loss_sums.append(loss_sum.detach().clone())
        return loss_sum * self._loss_scale

    def _runner(self, step: StepBatch) -> Any:
        """Return the schedule for batches of this shape, with stages of its own: torch's keep the first shape."""
        if step.sizes in self._runners:
            self._runners.move_to_end(step.sizes)
            return self._runners[step.sizes]
        stages = [self._build_stage(module, step) for module in self.modules]
        single = SCHEDULES[self.schedule].stages_per_rank == 1
        # Loss sums are not averaged over micro-batches, so neither are gradients.
        runner = CLASSES[self.schedule](
            stages[0] if single else stages, step.num_microbatches, loss_fn=self._scale_loss, scale_grads=False
        )
        self._runners[step.sizes] = runner
        if len(self._runners) > MAX_SHAPES:
            self._runners.popitem(last=False)
        return runner

    def _build_stage(self, module: nn.Module, step: StepBatch) -> PipelineStage:
        """Build torch's stage with all shapes given: nothing is left to be found out by a forward on all ranks."""
        stage = plain_stage(module)

        def example(boundary: int) -> Tensor:
            shape = stage.boundary_shape(boundary, *step.microbatch_sizes)
            is_loss = boundary == self.num_stages - 1
            # The split of backward finds weights by their way to the inputs, so inputs need gradients even where
            # nothing before them is trained.
            trained = self._trained_before[boundary] or SCHEDULES[self.schedule].splits_backward
            dtype = torch.promote_types(stage.dtype, torch.float32) if is_loss else stage.dtype
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)

        inputs = step.tiles_per_microbatch.to("meta") if stage.is_first else example(stage.stage - 1)
        return TimedStage(
            module,
            stage.stage,
            self.num_stages,
            self.device,
            input_args=(inputs,),
            output_args=(example(stage.stage),),
            group=self.group,
            on_action=self._keep_action,
        )

    def _keep_action(self, kind: str, microbatch: int, stage: int, run: Callable[[], Any]) -> Any:
        """Run an action of a stage, and write down when if asked to."""
        if self.on_action is not None:
            run = partial(self.on_action, kind, microbatch, stage, run)
        with phase(FORWARD if kind == "F" else BACKWARD):
            if not self.record:
                return run()
            start_s = Action.now(self.device) - self._started_s
            result = run()
            end_s = Action.now(self.device) - self._started_s
        self.actions.append(Action(self.pp_rank, kind, microbatch, stage, start_s, end_s))
        return result

    def gather_actions(self) -> list[list[Action]]:
        """Return what every rank of the group did in the last step, rank by rank.

        Communicates: one all-gather of objects over the group, about 100 bytes an action.
        """
        return gather_actions(self.actions, self.group)

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The second copy of a tied embedding if it is on this rank: a global norm must count only the first."""
        copies = [stage.get_parameter(EMBEDDING) for stage in self.stages if stage.holds_tied_copy]
        return copies[0] if copies else None

    @torch.no_grad()
    def reduce_tied_gradients(self) -> None:
        """Give both copies of a tied embedding the sum of their gradients; call it after every `forward_backward`.

        Both are then updated alike and stay equal. Does nothing where embedding and output are one parameter.

        Communicates: between the ranks of the first stage with language and of the last stage, the gradient both ways.
        """
        tied = [(stage.stage, stage.get_parameter(EMBEDDING)) for stage in self.stages if stage.is_tied]
        gradients = [local_part(parameter.grad) for _, parameter in tied if parameter.grad is not None]
        if len(gradients) == 2:  # both on this rank
            total = gradients[0] + gradients[1]
            for gradient in gradients:
                gradient.copy_(total)
        elif gradients:
            is_copy = tied[0][0] == self.num_stages - 1
            partner = self.owner[self.split.fusion_stage if is_copy else self.num_stages - 1]
            mine, theirs = gradients[0].contiguous(), torch.empty_like(gradients[0])
            operations = [
                dist.P2POp(dist.isend, mine, group=self.group, group_peer=partner),
                dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=partner),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            gradients[0].add_(theirs)


def _trained_before(model: VLM, split: StageSplit) -> list[bool]:
    """Return for each stage whether anything up to its end is trained, so that gradients must come back to it."""
    trained = [any(p.requires_grad for p in parameters) for parameters in layer_parameters(model)]
    return [any(trained[: split.layers(stage).stop]) for stage in range(split.num_stages)]
