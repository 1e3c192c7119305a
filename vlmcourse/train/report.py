"""What a run tells people and keeps on disk: progress bar, log files, the rows of its history, its result.

Only rank 0 shows and writes anything here. Files of a run, in `output_dir/name`: `config.json`, `run.json` (hardware,
versions, the peak and the formulas of MFU and HFU, a mark of rank 0's process), what the loggers of `config.logging`
write (`log.csv`, `log.jsonl`), `result.json` and `checkpoints/`; every rank has a file of its own in `steps/`
(see `run_monitor.py`) and in `energy/`.
A new run never overwrites an earlier one of the same name: that is moved aside.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vlmcourse.config import TrainConfig
from vlmcourse.layout import Layout
from vlmcourse.monitor.gpu import watch_hardware
from vlmcourse.monitor.hardware import describe_hardware
from vlmcourse.monitor.loggers import RunInfo, RunLoggers, build_loggers, read_rows
from vlmcourse.monitor.metrics import Throughput, TokenCount, measure_peak_bytes
from vlmcourse.monitor.peak import FORMULAS, Peak, describe_peak
from vlmcourse.monitor.run_process import describe_process
from vlmcourse.parallel.comm import max_over_ranks
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.evaluate import ExactMatch
from vlmcourse.train.folder import check_run_folder, move_aside, run_folder
from vlmcourse.train.rows import COLUMNS


@dataclass(frozen=True)
class StepReport:
    """One optimizer step; every number is the same on every rank."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Mean over all supervised tokens of the step, before the update."""
    grad_norm: float
    """Before clipping."""
    learning_rates: dict[str, float]
    """By trained tower."""
    tokens: TokenCount
    seconds: float
    decision: str = ""
    """Of `parallel.adaptive`, in a step that made one: which layers moved where, or why none did."""
    loss_scale: float = 1.0
    """What the loss was multiplied by before backward; 1 without a loss scaler."""
    skipped: bool = False
    """Whether a gradient overflowed, so that no weight was changed."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    loss_first: float
    """Of the first step that this call to `fit` made."""
    loss_last: float
    exact_match: float
    """Part of the held-out questions answered right, 0 to 1."""
    tokens_per_s: float
    """Text and visual tokens of all ranks over the seconds in steps of the rank with the most: without warm-up steps
    and what comes between steps, as evaluation, checkpoints and callbacks."""
    peak_bytes: int
    """Most memory on any rank; what was measured is in `peak_is`."""
    strategy: str
    layout: str
    """The degrees above 1, such as "dp_shard 2 x tp 2"."""
    world_size: int
    seconds: float
    """Wall time of `fit`, evaluation and checkpoints included."""
    peak_is: str
    """CUDA memory allocated, or resident set size."""
    train_seconds: float
    """The part of `seconds` spent in optimizer steps."""
    num_steps: int
    global_batch_size: int
    """Samples of one optimizer step: micro-batch x accumulation x data-parallel degree."""
    num_questions: int
    output_dir: str
    losses: list[float] = field(repr=False)
    """Loss of every step that this call to `fit` made."""
    history: list[dict[str, Any]] = field(repr=False)
    """The logged rows of the whole run, those from before a resume included."""

    def summary(self) -> dict[str, Any]:
        """Return everything but the long lists, ready for JSON."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in ("losses", "history")}


class RunTotals:
    """What the steps of one call to `fit` add up to."""

    def __init__(self) -> None:
        """Begin now."""
        self.losses: list[float] = []
        self.throughput = Throughput()
        self._train_seconds, self._num_steps, self._started_s = 0.0, 0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time since the beginning."""
        return time.perf_counter() - self._started_s

    def add(self, step: StepReport) -> None:
        """Count one step."""
        self.losses.append(step.loss)
        self.throughput.add(step.tokens, step.seconds)
        self._train_seconds, self._num_steps = self._train_seconds + step.seconds, step.step

    def summarise(
        self,
        config: TrainConfig,
        ranks: Ranks,
        layout: Layout,
        *,
        strategy: str,
        exact: ExactMatch,
        global_batch_size: int,
        history: list[dict[str, Any]],
    ) -> TrainResult:
        """Return what a run of one step or more came to; all ranks must call this.

        Args:
            config: the run.
            ranks: this process's place.
            layout: the degrees of the run.
            strategy: as it was settled.
            exact: of the last evaluation.
            global_batch_size: samples of one optimizer step.
            history: the logged rows.
        Communicates: an all-reduce of 16 bytes.
        """
        seconds = self.seconds
        tokens, own_s = self.throughput.counted()
        own_bytes, peak_is = measure_peak_bytes(ranks.device)
        peak_bytes, slowest_s = max_over_ranks([own_bytes, own_s], ranks)
        return TrainResult(
            loss_first=self.losses[0],
            loss_last=self.losses[-1],
            exact_match=exact.fraction,
            tokens_per_s=tokens.per_second(slowest_s).total,
            peak_bytes=round(peak_bytes),
            peak_is=peak_is,
            strategy=strategy,
            layout=str(layout),
            world_size=ranks.world_size,
            seconds=seconds,
            train_seconds=self._train_seconds,
            num_steps=self._num_steps,
            global_batch_size=global_batch_size,
            num_questions=exact.num_questions,
            output_dir=str(run_folder(config)),
            losses=self.losses,
            history=history,
        )


class RunReport:
    """Progress bar, logs and history of one run; on ranks other than 0 it only keeps the history."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        *,
        start_step: int,
        continues: bool,
        show_progress: bool,
        peak: Peak | None = None,
    ) -> None:
        """Open the run's folder: the run's own, or a new one.

        Args:
            config: the run.
            ranks: this process's place.
            start_step: optimizer steps done.
            continues: whether these were steps of the run in this folder; what another run left there is moved aside.
            show_progress: whether rank 0 shows a progress bar.
            peak: what MFU and HFU of the rows divide by; None where it is not known.

        Raises:
            ValueError: on rank 0, if the folder cannot be written to.
        """
        self.folder = run_folder(config)
        self.history: list[dict[str, Any]] = []
        self._ranks, self._is_main = ranks, ranks.is_main
        self._loggers = RunLoggers([], self.say)
        self._bar: tqdm[Any] | None = None
        if self._is_main:
            self._open(config, start_step, continues=continues, peak=peak)
            if show_progress:
                # On stdout: anything on stderr fails a graded notebook cell.
                self._bar = tqdm(
                    total=config.train.num_steps, initial=start_step, unit="step", file=sys.stdout, mininterval=0.5
                )
        every_s = config.logging.hardware_every_s
        self._sampler = watch_hardware(ranks, self.folder, every_s, self.say, continues=continues)

    def _open(self, config: TrainConfig, start_step: int, *, continues: bool, peak: Peak | None) -> None:
        """Make the run's folder, and start what is written to it."""
        check_run_folder(config, is_resumed=continues)
        if not continues:
            move_aside(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        whole_config, hardware = dataclasses.asdict(config), describe_hardware(self._ranks) | describe_peak(peak)
        _write_json(self.folder / "config.json", whole_config)
        about = {"hardware": hardware, "formulas": FORMULAS, "process": describe_process()}
        _write_json(self.folder / "run.json", about)
        self.history = read_rows(self.folder, start_step)
        info = RunInfo(
            name=config.run.name,
            folder=self.folder,
            config=whole_config,
            hardware=hardware,
            keep_until_step=start_step or None,
        )
        self._loggers = build_loggers(config.logging, COLUMNS, self.say)
        self._loggers.start(info)

    def keep_energy(self) -> None:
        """Write this rank's energy so far to the run's folder from now on; rank 0 must have made it."""
        if self._sampler is not None:
            self._sampler.keep_in(self.folder, self._ranks.rank)

    def show(self, loss: float, tokens_per_s: float) -> None:
        """Move the progress bar by one step."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            self._bar.update()

    def say(self, text: str) -> None:
        """Print a line above the progress bar; rank 0 only."""
        if self._is_main:
            tqdm.write(text, file=sys.stdout)

    def log(self, row: dict[str, Any]) -> None:
        """Add one row, as `rows.build_row` returns it, and what the hardware did, to the history and the log files."""
        if self._sampler is not None:
            row = row | self._sampler.take_row()
        self.history.append(row)
        self._loggers.log(row)

    def finish(self, result: TrainResult) -> None:
        """Write the result."""
        if self._is_main:
            _write_json(self.folder / "result.json", result.summary())

    def close(self) -> None:
        """Close files and progress bar; safe to call twice."""
        if self._bar is not None:
            self._bar.close()
        if self._sampler is not None:
            sampler, self._sampler = self._sampler, None
            if problem := sampler.finish(self.folder, self._ranks.rank):
                self.say(problem)
        self._loggers.close()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
