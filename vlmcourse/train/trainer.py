"""The training loop: samples in, a trained model and a `TrainResult` out, the same numbers under every strategy.

One process runs one `Trainer`; with several ranks, all of them run the same lines at the same time. Read `train_step`
for what an optimizer step is and `fit` for what a run is; everything else is set-up. Chapters 1 to 3.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import vlmcourse
from vlmcourse.batch import effective_batch_size
from vlmcourse.config import TrainConfig
from vlmcourse.data import build_dataset
from vlmcourse.data.collate import Collator
from vlmcourse.data.samples import Batch, Sample
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.layout import sequence_multiple
from vlmcourse.models.hf import load_hf_folder
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.parallel.adaptive import AdaptivePipelineScheduler
from vlmcourse.parallel.apply import apply_strategy
from vlmcourse.parallel.comm import wait_for_all
from vlmcourse.parallel.engines import (
    EngineOptimizer,
    build_sharded,
    builds_in_shards,
    splits_weights,
    start_deepspeed,
)
from vlmcourse.parallel.mesh import find_place
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.ranks import Ranks, init_ranks
from vlmcourse.planner.auto import settle_run
from vlmcourse.planner.this_cluster import ON_CPU_CORES
from vlmcourse.presets import get_model
from vlmcourse.strategies import DEEPSPEED, SHARDED
from vlmcourse.train.accumulate import Accumulation, accumulate_gradients, explain_nonfinite
from vlmcourse.train.activations import plan_activations
from vlmcourse.train.batches import build_sampler, load_micro_batches
from vlmcourse.train.checkpoint import check_resumable, load_checkpoint, save_checkpoint
from vlmcourse.train.evaluate import ExactMatch, evaluate_exact_match
from vlmcourse.train.folder import check_steps_left, find_checkpoint, read_meta, run_folder
from vlmcourse.train.loss import TokenLoss
from vlmcourse.train.optimizer import (
    build_optimizer,
    clip_gradients,
    freeze_towers,
    learning_rate_scale,
    set_learning_rates,
)
from vlmcourse.train.precision import build_scaler, check_precision, forbid_tf32, prepare_weights
from vlmcourse.train.profiling import profiled
from vlmcourse.train.report import RunReport, RunTotals, StepReport, TrainResult
from vlmcourse.train.rows import build_row
from vlmcourse.train.run_monitor import RunMonitor
from vlmcourse.train.seed import seed_step
from vlmcourse.train.step_settings import name_changes

logger = logging.getLogger(__name__)
EVAL_BATCH_SIZE = 64
"""Questions that one rank answers at a time; a pipeline answers micro-batches, see `Trainer.evaluate`."""


class Trainer:
    """Trains a model as a `TrainConfig` says, on one process or on all ranks together."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks | None = None,
        *,
        model: VLM | None = None,
        train_data: Sequence[Sample] | None = None,
        eval_data: Sequence[Sample] | None = None,
        show_progress: bool = True,
    ) -> None:
        """Build model, data and optimizer and distribute them over the ranks; switch TF32 off (see `forbid_tf32`).

        Args:
            config: the run.
            ranks: this process's place; by default what `init_ranks` finds in the environment.
            model: train this one instead of building `config.model`; rank 0's weights win.
            train_data: samples to use instead of `config.data`; the same on every rank.
            eval_data: held-out samples to use instead of `config.data`; the same on every rank.
            show_progress: whether rank 0 shows a progress bar on stdout.

        Raises:
            ValueError: if the configuration cannot be used, or not with this number of ranks.
            RuntimeError: if the strategy turned out not to be what its name says.
        Communicates: what `apply_strategy` does.
        """
        self.config = config
        self.ranks = ranks if ranks is not None else init_ranks(config.parallel.timeout_s)
        plain = load_hf_folder(config.model.hf_folder) if model is None and config.model.hf_folder else model
        self.shape = plain.shape if plain is not None else get_model(config.model.preset)
        elsewhere = "" if self.ranks.device.type == "cuda" else ON_CPU_CORES
        self.parallel, reason = settle_run(config, self.ranks.world_size, self.shape, elsewhere=elsewhere)
        check_precision(config.train.precision, self.ranks.device)
        if reason and self.ranks.is_main:
            logger.warning("parallel.strategy = 'auto' chose %s: %s", self.parallel.strategy, reason)
        self.place = find_place(self.parallel, self.ranks, self.shape)
        activations = plan_activations(config, self.parallel, self.shape)
        self.monitor = RunMonitor(config, self.parallel.strategy, self.shape, self.place.layout, self.ranks)
        """What this rank measures of its own steps."""
        forbid_tf32()
        plain = plain if plain is not None else self._build_model()
        self._load_data(train_data, eval_data)
        self._distribute(plain, activations)
        self.step = 0
        """Optimizer steps done."""
        self.before_update: list[Callable[[Trainer], None]] = []
        """Called once a step on every rank, when gradients are exchanged and clipped but weights not yet updated."""
        self.after_step: list[Callable[[Trainer, StepReport], None]] = []
        """Called at the end of every step on every rank."""
        self.scheduler: AdaptivePipelineScheduler | None = None
        """What moves layers between the stages of a pipeline, where `parallel.adaptive` asks for it."""
        if isinstance(self.model, PipelinedModel) and self.parallel.adaptive:
            self.scheduler = AdaptivePipelineScheduler(self.model, self.optimizer)
        self._show_progress = show_progress
        self._is_checked = False
        """Whether a step of several micro-batches has shown that it exchanges gradients with the last one only."""
        self._continues = False
        """Whether the steps done are those of the run in this run's folder."""

    def _load_data(self, train_data: Sequence[Sample] | None, eval_data: Sequence[Sample] | None) -> None:
        """Make what turns samples into micro-batches: tokenizer, collator, the samples themselves, and their order."""
        config = self.config
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        self.collator = self._build_collator()
        self.train_data = train_data if train_data is not None else build_dataset(config, "train")
        self.eval_data = eval_data if eval_data is not None else build_dataset(config, "heldout")
        self.global_batch_size = effective_batch_size(
            config.train.micro_batch_size, config.train.accumulation_steps, self.place.layout.dp_degree
        )
        self.sampler = build_sampler(config, self.parallel, len(self.train_data), self.global_batch_size)

    def _distribute(self, plain: VLM, activations: Callable[[torch.nn.Module], None] | None) -> None:
        """Freeze, cast and distribute the plain model, in this order; then the optimizer, of what this rank holds."""
        config = self.config
        freeze_towers(plain, config.model.freeze)
        prepare_weights(plain, config, self.ranks.device)
        loss_sum = TokenLoss(config.train.loss_weighting, self.monitor.meter.loss_rows)
        options = {"precision": config.train.precision, "seed": config.run.seed}
        self.model: torch.nn.Module
        self.optimizer: Any
        if self.parallel.strategy in DEEPSPEED:  # an engine takes both together
            moved = plain if splits_weights(plain) else plain.to(self.ranks.device)
            optimizer = build_optimizer(moved, config.optimizer, **options)
            self.model, self.optimizer = start_deepspeed(plain, optimizer, config, self.ranks)
        else:
            self.model = apply_strategy(
                plain, self.parallel, self.ranks, self.place, loss_sum, activations, config.offload
            )
            shards_state = self.parallel.strategy == "zero1"
            self.optimizer = build_optimizer(self.model, config.optimizer, shards_state=shards_state, **options)
        self.scaler = build_scaler(config.train.precision, self.ranks, self.place.layout.summed_degree)

    def _build_model(self) -> VLM:
        """Build the plain model; a rank that gets its shards from rank 0 needs no weights of its own."""
        layout = self.place.layout
        if builds_in_shards(self.parallel):
            return build_sharded(self.shape, self.config, self.ranks)
        # Where tp or pp cut the model as well, each rank cuts its part out of whole weights.
        gets_shards = self.parallel.strategy in SHARDED and layout.tp == layout.pp == 1 and not self.ranks.is_main
        # The same seed on every rank: copies start equal.
        return build_model(self.shape, device="meta" if gets_shards else "cpu", seed=self.config.run.seed)

    def _build_collator(self) -> Collator:
        data = self.config.data
        return Collator(
            self.tokenizer,
            self.shape,
            data.max_seq_len,
            max_tiles_per_image=data.max_tiles_per_image,
            pad_multiple=sequence_multiple(self.parallel),
        )

    def load_step(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of optimizer step `step` (from 0), on CPU."""
        return load_micro_batches(
            self.sampler,
            self.collator,
            self.train_data,
            step,
            accumulation_steps=self.config.train.accumulation_steps,
            dp_rank=self.place.dp_rank,
            dp_degree=self.place.layout.dp_degree,
        )

    def train_step(self) -> StepReport:
        """Make one optimizer step.

        Returns:
            What happened, the same numbers on every rank.

        Raises:
            RuntimeError: if the loss or the norm of the gradient is not finite, before any weight changes. A loss
                scaler skips the step instead where gradients overflowed.
        Communicates: see `accumulate_gradients` and `clip_gradients`; with `parallel.adaptive` see `step_done` too.
        """
        with self.monitor.step(self.step + 1):
            report, batches = self._make_step()
        self.monitor.step_done(self.step, batches)
        if self.scheduler is not None:
            report = dataclasses.replace(report, decision=str(self.scheduler.step_done() or ""))
        for after in self.after_step:
            after(self, report)
        return report

    def _make_step(self) -> tuple[StepReport, list[Batch]]:
        """Make a step; return what happened, and this rank's micro-batches."""
        started_s, config, clock = time.perf_counter(), self.config.train, self.monitor.clock
        seed_step(self.config.run.seed, self.step, self.place.dp_rank)
        self.model.train()
        with self.monitor.loading():
            batches = self.load_step(self.step)
        with clock.phase("optimizer"):
            self.optimizer.zero_grad(set_to_none=True)
        scale = self.scaler.scale
        how = Accumulation(
            weighting=config.loss_weighting,
            every=self.parallel.gradient_sync == "every",
            grad_scale=self.scaler.grad_scale,
            check_silence=not self._is_checked,
            rows=self.monitor.meter.loss_rows,
            clock=clock,
        )
        done = accumulate_gradients(self.model, batches, self.ranks, config.precision, self.place.layout, how)
        self._is_checked = self._is_checked or len(batches) > 1
        with clock.phase("optimizer"):
            is_finite = self.scaler.unscale(self.model)
            self.monitor.meter.see_gradients(self.model, self.optimizer)
            grad_norm = clip_gradients(self.model, config.max_grad_norm)
            lr_scale = learning_rate_scale(
                self.step, config.num_steps, self.config.optimizer.warmup_steps, self.config.optimizer.min_lr_fraction
            )
            rates = set_learning_rates(self.optimizer, lr_scale)
        for hook in self.before_update:
            hook(self)
        with clock.phase("optimizer"):
            if is_finite:
                grad_norm = self._update(grad_norm)
                self.monitor.meter.see_update(self.model, self.optimizer)
            self.scaler.update()
        self.step += 1
        seconds = time.perf_counter() - started_s
        report = StepReport(
            self.step, done.loss, grad_norm, rates, done.tokens, seconds, loss_scale=scale, skipped=not is_finite
        )
        return report, batches

    def _update(self, grad_norm: float) -> float:
        """Let the optimizer step if the norm of the gradient is finite; return the norm."""
        engine = self.optimizer if isinstance(self.optimizer, EngineOptimizer) else None
        if engine is not None or math.isfinite(grad_norm):
            self.optimizer.step()
        grad_norm = engine.grad_norm if engine is not None else grad_norm  # an engine measures it, and decides itself
        if not math.isfinite(grad_norm):
            found = f"the loss of this step is finite, but the norm of its gradient is {grad_norm}"
            raise RuntimeError(explain_nonfinite(found, self.ranks, self.config.train.precision))
        return grad_norm

    @profiled
    def fit(self) -> TrainResult:
        """Train from the present step to the last; save, evaluate and log on the way.

        Returns:
            The result, the same on every rank except for `history`, which rank 0 alone has after a resume.

        Raises:
            ValueError: if no step is left to make, or on rank 0 if the run's folder cannot be written to.
        """
        config = self.config.train
        check_steps_left(self.config, self.step)
        peak = self.monitor.meter.find_peak()  # on a CPU it is measured, which is no time of the run
        totals, exact = RunTotals(), ExactMatch(0, 0)
        report = RunReport(
            self.config,
            self.ranks,
            start_step=self.step,
            continues=self._continues,
            show_progress=self._show_progress,
            peak=peak,
        )
        self._continues = True
        wait_for_all(self.ranks)  # no rank may write to the run's folder before rank 0 has made it
        report.keep_energy()
        self.monitor.open(report.folder, self.step)
        try:
            while self.step < config.num_steps:
                step = self.train_step()
                totals.add(step)
                report.show(step.loss, totals.throughput.mean().total)
                if step.decision:
                    report.say(step.decision)
                if self._is_due(config.checkpoint_every):
                    with self.monitor.event("checkpoint", self.step):
                        self.save()  # first: an evaluation that fails must not lose the steps before it
                evaluated = self._is_due(config.eval_every)
                if evaluated:
                    with self.monitor.event("evaluation", self.step):
                        exact = self.evaluate()
                if evaluated or self._is_due(config.log_every):
                    with self.monitor.event("log", self.step):
                        measured = self.monitor.meter.measure(totals.throughput.take_tokens())
                        report.log(build_row(step, totals.seconds, exact.fraction if evaluated else None, measured))
            result = totals.summarise(
                self.config,
                self.ranks,
                self.place.layout,
                strategy=self.parallel.strategy,
                exact=exact,
                global_batch_size=self.global_batch_size,
                history=report.history,
            )
            report.finish(result)
        finally:
            self.monitor.close()
            report.close()
        return result

    def evaluate(self) -> ExactMatch:
        """Answer every held-out question and compare with the right answers; all ranks must call this.

        The distributed model answers as it is: see `evaluate_exact_match`. A pipeline answers `micro_batch_size`
        questions at a time: without a cache of keys each pass holds whole sequences, as many as in training.
        """
        in_pipeline = isinstance(self.model, PipelinedModel)
        return evaluate_exact_match(
            self.model,
            self.eval_data,
            self.collator,
            self.tokenizer,
            self.ranks,
            batch_size=self.config.train.micro_batch_size if in_pipeline else EVAL_BATCH_SIZE,
            precision=self.config.train.precision,
            layout=self.place.layout,
        )

    def save(self) -> Path:
        """Write a checkpoint of the present step; all ranks must call this."""
        meta: dict[str, Any] = {
            "config": dataclasses.asdict(self.config),
            "shape": dataclasses.asdict(self.shape),
            "global_batch_size": self.global_batch_size,
            "world_size": self.ranks.world_size,
            "torch": torch.__version__,
            "vlmcourse": vlmcourse.__version__,
            "scaler": self.scaler.state_dict(),
            "layers_per_stage": self.model.pipeline.split.layers_per_stage
            if isinstance(self.model, PipelinedModel)
            else (),
        }
        folder = run_folder(self.config) / "checkpoints"
        keep = self.config.train.keep_checkpoints
        return save_checkpoint(folder, self.step, self.model, self.optimizer, self.ranks, meta, keep)

    def resume(self, path: str | Path | None = None) -> int:
        """Load weights, optimizer state and step of a checkpoint, so that `fit` goes on from there.

        Args:
            path: a checkpoint's or a run's folder; by default this run's own. From another run's, this run begins a
                folder of its own.

        Returns:
            Optimizer steps done.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            ValueError: if it is of another model, other towers were frozen, or its precision stores other tensors.
        """
        checkpoint = find_checkpoint(Path(path) if path is not None else run_folder(self.config))
        meta = read_meta(checkpoint)
        check_resumable(checkpoint, meta, self.config, self.global_batch_size)
        self.monitor.changed = name_changes(meta["config"], self.config)
        if self.scheduler is not None:
            self.scheduler.start_from(meta.get("layers_per_stage", ()))
        load_checkpoint(checkpoint, self.model, self.optimizer, self.ranks)
        self.scaler.load_state_dict(meta.get("scaler", {}))
        self._continues = checkpoint.resolve().is_relative_to(run_folder(self.config).resolve())
        self.step = int(meta["step"])
        return self.step

    def _is_due(self, every: int) -> bool:
        """Whether something done every so many steps (0: only at the end) is due now; at the end everything is."""
        return self.step == self.config.train.num_steps or (every > 0 and self.step % every == 0)
