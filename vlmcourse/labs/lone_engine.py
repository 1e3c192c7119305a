"""A DeepSpeed engine on one rank, for tables that begin there: a `Trainer` refuses it, since there is nothing to share.

Enters: the run of an engine, and one rank with a process group. Leaves: what makes its steps, on the same samples and
with the same first weights as a `Trainer` under 'single'. Chapter 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.parallel.engines import start_deepspeed
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.accumulate import accumulate_gradients
from vlmcourse.train.optimizer import build_optimizer
from vlmcourse.train.trainer import Trainer


class LoneEngine:
    """Stands where a table has a `Trainer`: a model, an optimizer, and `train_step`."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        """Start the engine.

        Args:
            config: of the tiny model in fp32; its strategy is one of `strategies.DEEPSPEED`.
            ranks: the only rank, in a process group that exists.
        """
        train = {"num_steps": config.train.num_steps, "micro_batch_size": config.train.micro_batch_size}
        self._plain = Trainer(parse_config({"train": train}), ranks, show_progress=False)
        self._ranks = ranks
        self._step = 0
        self.shape = self._plain.shape
        self.before_update: list[Callable[[Any], None]] = []
        """Called once a step, between backward and update."""
        optimizer = build_optimizer(self._plain.model, config.optimizer)
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = start_deepspeed(self._plain.model, optimizer, config, ranks)

    def train_step(self) -> float:
        """Make one optimizer step; return its loss.

        Communicates: what the engine does among one rank.
        """
        batches = self._plain.load_step(self._step)
        done = accumulate_gradients(self.model, batches, self._ranks, "fp32", self._plain.place.layout)
        for hook in self.before_update:
            hook(self)
        self.optimizer.step()
        self._step += 1
        return done.loss
