"""A pipeline that measures its layers while it trains, finds the best split of them and moves to it.

Enters: a pipeline and its optimizer, with any split. Leaves: the same two with the split whose step is shortest by the
measured times, where that is better by a stated margin; and a record of what was decided and why. A pipeline keeps the
pace of its busiest rank, and that one is hard to guess for a vision-language model: it depends on how many tiles and
how much text the batches hold. Chapter 1.

Ranks are taken to be equally fast, and messages to cost the same wherever the cuts are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from vlmcourse.parallel.best_split import find_best_split
from vlmcourse.parallel.decision import Decision, Proposal
from vlmcourse.parallel.layer_times import LayerTimer, LayerTimes
from vlmcourse.parallel.moving import Moved, find_move_problem, move_layers
from vlmcourse.parallel.parcels import share_groups
from vlmcourse.parallel.pipeline import Pipeline
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.played_step import step_s
from vlmcourse.parallel.ranks import group_timeout_s
from vlmcourse.planner.schedules import SCHEDULES
from vlmcourse.planner.stages import StageSplit

SEARCH_SHARE = 0.25
"""The most that a search may take of the time limit of a collective: the other ranks wait for it in one."""


class AdaptivePipelineScheduler:
    """Balances a pipeline once some steps have shown what its layers cost."""

    def __init__(
        self,
        pipeline: Pipeline | PipelinedModel,
        optimizer: Optimizer,
        *,
        warmup_steps: int = 2,
        measure_steps: int = 3,
        min_gain: float = 0.05,
        repeat_every: int = 0,
        max_search_s: float = 15.0,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        """Check that layers can be moved; call `step_done` after every optimizer step from now on.

        Args:
            pipeline: changed in place when layers move.
            optimizer: this rank's; changed in place too, first of all by `share_groups`: make an LR scheduler after
                this one.
            warmup_steps: steps before the measured ones; the first of a run also allocates.
            measure_steps: steps to measure.
            min_gain: by which share of its time a step must become shorter for layers to move, 0 to 1.
            repeat_every: steps from one decision to the beginning of the next measurement; 0 decides once.
            max_search_s: seconds to look for the best split; a decision then says how far from it the one found can be.
                At most `SEARCH_SHARE` of the time limit of `everyone` is taken, whatever this is.
            everyone: all ranks that have stages of the model; None is all ranks there are. All of them must make such a
                scheduler with the same numbers.

        Raises:
            ValueError: if a number is out of range (all ranks must give the same ones); on all ranks, if what stands on
                the stages cannot be moved.
        Communicates: two all-gathers of objects over `everyone`.
        """
        for name, value, least in (
            ("warmup_steps", warmup_steps, 0),
            ("measure_steps", measure_steps, 1),
            ("repeat_every", repeat_every, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}, a whole number")
        if not 0 < max_search_s < math.inf:
            raise ValueError(f"max_search_s = {max_search_s}: must be greater than 0 seconds, and finite")
        if not 0 <= min_gain < 1:
            raise ValueError(f"min_gain = {min_gain}: it is a share of a step's time, from 0 to below 1")
        self.model = pipeline if isinstance(pipeline, PipelinedModel) else None
        self.pipeline = pipeline.pipeline if isinstance(pipeline, PipelinedModel) else pipeline
        self.optimizer, self.everyone = optimizer, everyone
        self.measure_steps, self.min_gain, self.repeat_every = measure_steps, min_gain, repeat_every
        self.max_search_s = max_search_s
        self.decisions: list[Decision] = []
        """What was decided so far, oldest first."""
        self.num_steps = 0
        """Steps seen."""
        self._check()
        self._timer: LayerTimer | None = None
        self._starts_at: int | None = warmup_steps
        self._start_when_due()

    def _check(self) -> None:
        problem = find_move_problem(self.pipeline, self.optimizer)
        found: list[str | None] = [None] * dist.get_world_size(self.everyone)
        dist.all_gather_object(found, problem, group=self.everyone)
        refused = [said for said in found if said is not None]
        if refused:
            raise ValueError(f"rank {dist.get_rank()}: the layers of this pipeline cannot be moved: {refused[0]}")
        share_groups(self.optimizer, self.everyone)

    def step_done(self) -> Decision | None:
        """Note that an optimizer step has ended; measure the next one, or decide, when the time has come.

        Returns:
            The decision, in the one step that made it.
        Communicates: at a decision, what `measured` and `move` do; otherwise nothing.
        """
        self.num_steps += 1
        timer = self._timer
        if timer is None:
            self._start_when_due()
            return None
        timer.close_step()
        if timer.num_steps < self.measure_steps:
            return None
        return self.decide()

    def __call__(self, *_: object) -> None:
        """Do `step_done` as a member of `Trainer.after_step`."""
        self.step_done()

    def _start_when_due(self) -> None:
        if self._starts_at is not None and self.num_steps >= self._starts_at:
            self.start_measuring()

    def start_measuring(self) -> None:
        """Measure the next steps, whatever the plan was."""
        self._stop_measuring()
        self._timer, self._starts_at = LayerTimer(self.pipeline), None
        self._timer.start()

    def _stop_measuring(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    def measure(self) -> LayerTimes:
        """Return what the layers took in the steps measured so far, of several copies the slowest; all ranks call this.

        Raises:
            RuntimeError: if no step was measured.
        Communicates: see `LayerTimer.share`.
        """
        if self._timer is None:
            raise RuntimeError(
                f"rank {dist.get_rank()}: nothing is being measured: call start_measuring, train a step, call step_done"
            )
        return self._timer.share(self.everyone)

    def propose(self, times: LayerTimes) -> Proposal:
        """Find the split with the shortest step, in `max_search_s` and `SEARCH_SHARE` of the group's time limit.

        Args:
            times: what `measure` returned.

        Raises:
            ValueError: if the times have no order.
        """
        pipeline, shape = self.pipeline, self.pipeline.stages[0].shape
        best = find_best_split(
            shape,
            times,
            pipeline.schedule,
            pipeline.split,
            block_each=any(isinstance(module, FSDPModule) for module in pipeline.modules),
            output_apart=shape.language.tied_embeddings and SCHEDULES[pipeline.schedule].splits_backward,
            # Asked now: a cell of a notebook's session may have another limit than the one before.
            max_search_s=min(self.max_search_s, SEARCH_SHARE * group_timeout_s(self.everyone)),
        )
        before_s = step_s(times, pipeline.split)
        return Proposal(pipeline.split, best.split, times, before_s, best.step_s, best.least_s)

    def decide(self) -> Decision:
        """Propose a split from what was measured, and move to it if the gain is large enough; all ranks call this.

        The first rank searches for all: unlike processors may round otherwise and then choose another of two good ones.

        Raises:
            ValueError: on all ranks, if the first one cannot propose.
        Communicates: see `measure` and `move`; between them a broadcast of one object to `everyone`.
        """
        times = self.measure()
        found: list[Any] = [None]
        if dist.get_rank(self.everyone) == 0:
            try:
                found = [self.propose(times)]
            except ValueError as error:
                found = [error]
        dist.broadcast_object_list(found, group=self.everyone, group_src=0)
        proposal = found[0]
        if isinstance(proposal, ValueError):
            raise ValueError(f"rank {dist.get_rank()}: {proposal}")
        self._stop_measuring()
        moved = None
        if proposal.split == proposal.present or proposal.gain_fraction <= 0:
            beats = "beats" if proposal.is_exact else "was found that beats"
            reason = f"layers stay: no split {beats} {list(proposal.present.layers_per_stage)} ({proposal})"
        elif proposal.gain_fraction < self.min_gain:
            reason = (
                f"layers stay: {list(proposal.split.layers_per_stage)} would be better, but by less than min_gain = "
                f"{100 * self.min_gain:.3g} % ({proposal})"
            )
        else:
            moved = self.move(proposal.split)
            reason = (
                f"layers move: {list(proposal.present.layers_per_stage)} -> {list(proposal.split.layers_per_stage)} "
                f"layers a stage ({proposal})"
            )
        decision = Decision(self.num_steps, proposal, moved, reason)
        self.decisions.append(decision)
        self._starts_at = self.num_steps + self.repeat_every if self.repeat_every else None
        return decision

    def move(self, split: StageSplit) -> Moved:
        """Move to a split at once, between two steps; see `move_layers`. What is being measured starts over.

        Raises:
            ValueError: on all ranks, before any tensor is sent, if it cannot be done.
        Communicates: see `move_layers`.
        """
        measuring = self._timer is not None
        self._stop_measuring()
        try:
            moved = move_layers(self.pipeline, self.optimizer, split, self.everyone)
            if self.model is not None:
                self.model.take_stages()
        finally:
            if measuring:
                self.start_measuring()
        return moved

    def start_from(self, layers_per_stage: Sequence[int]) -> bool:
        """Move to the split that an earlier run came to, if it is one for this pipeline; all ranks call this alike.

        Args:
            layers_per_stage: of that run, first stage first; empty if it had no pipeline.

        Returns:
            Whether the pipeline has that split now.
        Communicates: see `move_layers`, if layers move.
        """
        present = self.pipeline.split
        if len(layers_per_stage) != present.num_stages or sum(layers_per_stage) != present.num_layers:
            return False
        split = dataclasses.replace(present, layers_per_stage=tuple(layers_per_stage))
        if split == present:
            return True
        if find_move_problem(self.pipeline, self.optimizer, split) is not None:
            return False
        self.move(split)
        return True
