"""A rank that takes longer for the same work: a machine with a failing fan, a neighbour, a slower card.

Enters: the model of one rank. Leaves: the same, waiting once in every forward pass. Chapter 6; chapter 8 has ranks that
stop altogether.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def slow_forward(model: nn.Module, seconds: float) -> Iterator[None]:
    """Let this rank sleep in each forward pass in training.

    Args:
        model: of this rank, whatever it is wrapped in.
        seconds: of one pass.
    """

    def sleep(module: nn.Module, _: Any) -> None:
        if module.training:
            time.sleep(seconds)

    handle = model.register_forward_pre_hook(sleep)
    try:
        yield
    finally:
        handle.remove()
