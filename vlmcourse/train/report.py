"""What a run tells people and keeps on disk: progress bar, log files, the rows of its history, its result.

Only rank 0 shows and writes anything. Files of a run, in `output_dir/name`: `config.json`, `run.json` (hardware and
versions), what the loggers of `config.logging` write (`log.csv`, `log.jsonl`), `result.json`, `checkpoints/`, and
`energy/` with a file of every rank. A new
run never overwrites an earlier one of the same name: that is moved aside.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vlmcourse.config import TOWERS, TrainConfig
from vlmcourse.monitor.gpu import watch_hardware
from vlmcourse.monitor.hardware import describe_hardware
from vlmcourse.monitor.loggers import RunInfo, RunLoggers, build_loggers, read_rows
from vlmcourse.monitor.metrics import TokenCount
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.folder import check_run_folder, move_aside, run_folder

COLUMNS = (
    "step",
    "loss",
    "grad_norm",
    *(f"lr_{tower}" for tower in TOWERS),
    "tokens_per_s",
    "text_tokens_per_s",
    "visual_tokens_per_s",
    "supervised_tokens_per_s",
    "exact_match",
    "seconds",
)


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
    """Text and visual tokens of all ranks, without warm-up steps, evaluation and checkpoints."""
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


class RunReport:
    """Progress bar, logs and history of one run; on ranks other than 0 it only keeps the history."""

    def __init__(
        self, config: TrainConfig, ranks: Ranks, *, start_step: int, continues: bool, show_progress: bool
    ) -> None:
        """Open the run's folder: the run's own, or a new one.

        Args:
            config: the run.
            ranks: this process's place.
            start_step: optimizer steps done.
            continues: whether these were steps of the run in this folder; what another run left there is moved aside.
            show_progress: whether rank 0 shows a progress bar.

        Raises:
            ValueError: on rank 0, if the folder cannot be written to.
        """
        self.folder = run_folder(config)
        self.history: list[dict[str, Any]] = []
        self._ranks, self._is_main = ranks, ranks.is_main
        self._loggers = RunLoggers([], self.say)
        self._bar: tqdm[Any] | None = None
        if self._is_main:
            self._open(config, start_step, continues=continues)
            if show_progress:
                # On stdout: anything on stderr fails a graded notebook cell.
                self._bar = tqdm(
                    total=config.train.num_steps, initial=start_step, unit="step", file=sys.stdout, mininterval=0.5
                )
        every_s = config.logging.hardware_every_s
        self._sampler = watch_hardware(ranks, self.folder, every_s, self.say, continues=continues)

    def _open(self, config: TrainConfig, start_step: int, *, continues: bool) -> None:
        """Make the run's folder, and start what is written to it."""
        check_run_folder(config, is_resumed=continues)
        if not continues:
            move_aside(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        whole_config, hardware = dataclasses.asdict(config), describe_hardware(self._ranks)
        _write_json(self.folder / "config.json", whole_config)
        _write_json(self.folder / "run.json", {"hardware": hardware})
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

    def show(self, loss: float, tokens_per_s: float) -> None:
        """Move the progress bar by one step."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            self._bar.update()

    def say(self, text: str) -> None:
        """Print a line above the progress bar; rank 0 only."""
        if self._is_main:
            tqdm.write(text, file=sys.stdout)

    def log(self, step: StepReport, rate: TokenCount, exact_match: float | None, seconds: float) -> None:
        """Add one row to the history and the log files.

        Args:
            step: the step it describes.
            rate: tokens per second since the last row.
            exact_match: 0 to 1, or None where this step was not evaluated.
            seconds: wall time since the run (or its resumed part) began.
        """
        # A step that was skipped because gradients overflowed has no norm; JSON has no infinity.
        norm = step.grad_norm if math.isfinite(step.grad_norm) else None
        row: dict[str, Any] = {"step": step.step, "loss": step.loss, "grad_norm": norm}
        row |= {f"lr_{tower}": rate_of for tower, rate_of in step.learning_rates.items()}
        row |= {"tokens_per_s": rate.total, "text_tokens_per_s": rate.text, "visual_tokens_per_s": rate.visual}
        row |= {"supervised_tokens_per_s": rate.supervised, "exact_match": exact_match, "seconds": seconds}
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
