"""What 'auto' means in a DeepSpeed configuration: the value that the run has, as Hugging Face's Trainer fills it in.

Enters: a run. Leaves: a value for each key that may be 'auto'. Where the Trainer has one number and a run here several
(learning rates, one a tower), it is all of them, by tower. Below stage 3 the keys of stage 3 keep DeepSpeed's default.

Source: transformers 5.24, `HfTrainerDeepSpeedConfig.trainer_config_process` and `trainer_config_finalize`; accelerate
1.15, `DeepSpeedPlugin.__post_init__` and `Accelerator._prepare_deepspeed`, for offload and saving.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmcourse.batch import effective_batch_size
from vlmcourse.config import TOWERS, TrainConfig
from vlmcourse.deepspeed_config.keys import KEYS
from vlmcourse.strategies import DEEPSPEED


@dataclass(frozen=True)
class Run:
    """What a configuration of DeepSpeed is filled in from and compared with."""

    config: TrainConfig
    world_size: int | None = None
    """Ranks; None where that is not known yet, and what depends on it is not compared."""
    hidden_size: int | None = None
    """Of the language tower; None where that is not known yet."""
    file_stage: int | None = None
    """The ZeRO stage by which a file's other keys are filled in; None takes that of the strategy."""

    def for_file(self, written: Mapping[str, Any]) -> Run:
        """Return the same run for a file: DeepSpeed takes the stage that stands there, and 0 where none does.

        Args:
            written: dotted name -> value.
        """
        stage = written.get("zero_optimization.stage", KEYS["zero_optimization.stage"].default)
        return dataclasses.replace(self, file_stage=stage if isinstance(stage, int) else None)

    @property
    def stage(self) -> int:
        """The ZeRO stage that the strategy names; 0 for those that are none of DeepSpeed's."""
        return DEEPSPEED.get(self.config.parallel.strategy, 0)

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step; None where the number of ranks is not known."""
        train = self.config.train
        if self.world_size is None:
            return None
        return effective_batch_size(train.micro_batch_size, train.accumulation_steps, self.world_size)


def _of_hidden_size(name: str, size: Callable[[int], int]) -> Callable[[Run], object]:
    """Return what fills in a size in elements: a function of the hidden size, where the stage reads it."""

    def fill(run: Run) -> object:
        stage = run.stage if run.file_stage is None else run.file_stage
        if name.startswith("stage3_") and stage < 3:
            return KEYS[f"zero_optimization.{name}"].default
        return None if run.hidden_size is None else size(run.hidden_size)

    return fill


def _rates(run: Run) -> object:
    """Return the learning rate, or those of the towers where they differ."""
    rates = {tower: getattr(run.config.optimizer, f"lr_{tower}") for tower in TOWERS}
    return rates["language"] if len(set(rates.values())) == 1 else rates


_ZERO_SIZES: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
"""Names in zero_optimization -> elements, of the hidden size."""
HIDDEN_SIZE_KEYS = tuple(f"zero_optimization.{name}" for name in _ZERO_SIZES)

AUTO: dict[str, Callable[[Run], object]] = {
    "train_micro_batch_size_per_gpu": lambda run: run.config.train.micro_batch_size,
    "gradient_accumulation_steps": lambda run: run.config.train.accumulation_steps,
    "train_batch_size": lambda run: run.global_batch_size,
    "gradient_clipping": lambda run: run.config.train.max_grad_norm,
    "optimizer.params.lr": _rates,
    "optimizer.params.betas": lambda run: [run.config.optimizer.beta1, run.config.optimizer.beta2],
    "optimizer.params.eps": lambda run: run.config.optimizer.eps,
    "optimizer.params.weight_decay": lambda run: run.config.optimizer.weight_decay,
    "scheduler.params.warmup_min_lr": lambda run: 0,
    "scheduler.params.warmup_max_lr": _rates,
    "scheduler.params.warmup_num_steps": lambda run: max(1, run.config.optimizer.warmup_steps),
    "scheduler.params.total_num_steps": lambda run: run.config.train.num_steps,
    "fp16.enabled": lambda run: run.config.train.precision == "fp16",
    "bf16.enabled": lambda run: run.config.train.precision == "bf16",
    "zero_optimization.stage": lambda run: run.stage,
    "zero_optimization.offload_optimizer.device": lambda run: "none",
    "zero_optimization.offload_optimizer.nvme_path": lambda run: None,
    "zero_optimization.offload_param.device": lambda run: "none",
    "zero_optimization.offload_param.nvme_path": lambda run: None,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": lambda run: False,
    **{f"zero_optimization.{name}": _of_hidden_size(name, size) for name, size in _ZERO_SIZES.items()},
}
"""Dotted name -> what fills it in; None where that is not known yet."""

FILLED_IN = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""Keys that a file may leave out: the run's value is taken, and not DeepSpeed's default, for they are the run's."""
