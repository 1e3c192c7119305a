"""How many times a step of exercise 4.2 exchanges its gradient, whatever the collective.

Enters: the collectives that run inside `with RecordExchanges()`. Leaves: the number of exchanges, 1.0 for the whole
gradient once; smaller messages, such as counts and losses, add little. Left out: what ranks tell each other by files.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from vlmcourse.grading.pair_worker import RecordCollectives, handed_in

WHOLE = ("allreduce", "alltoall")
"""Collectives after which every rank has the sum, or all that it needs for it; names without underscores."""
TO_ONE = ("reduce", "gather", "send")
"""Those that bring parts together; what is not named brings results to all."""
BYTES_A_NUMBER = 4


class RecordExchanges(RecordCollectives):
    """Adds up what is handed to collectives. Set `phase` where another micro-batch begins."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self._num_parameters = num_parameters
        self._numbers: Counter[str] = Counter()
        """Handed in, by the collective's kind."""
        self._bytes: Counter[tuple[str, str]] = Counter()
        """Of pickled objects, by kind and phase."""

    def note(self, name: str, args: Any) -> None:
        """Add one call."""
        super().note(name, args)
        kind = _kind_of(name)
        for tensor in handed_in(args):
            if tensor.dtype == torch.uint8:
                self._bytes[kind, self.phase] += tensor.numel()
            else:
                self._numbers[kind] += tensor.numel()

    @property
    def num_exchanges(self) -> float:
        """Times that the gradient was exchanged; bringing parts together and sending the sum back is one exchange.

        Pickled objects are larger than their numbers, by how much depends on how they are cut: those of one
        micro-batch count as one exchange at most.
        """
        times = {kind: numbers / self._num_parameters for kind, numbers in self._numbers.items()}
        for (kind, _), num_bytes in self._bytes.items():
            share = num_bytes / BYTES_A_NUMBER / self._num_parameters
            times[kind] = times.get(kind, 0.0) + min(1.0, share)
        return times.get("whole", 0.0) + max(times.get("to one", 0.0), times.get("to all", 0.0))


def _kind_of(name: str) -> str:
    plain = name.replace("_", "")
    return "whole" if plain.startswith(WHOLE) else "to one" if plain.startswith(TO_ONE) else "to all"
