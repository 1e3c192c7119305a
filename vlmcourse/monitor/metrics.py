"""How fast a run is and how much memory it took at its highest.

Enters: the tokens and seconds of each step, counted over all ranks. Leaves: tokens per second. Tokens per second mean
nothing without the model's size and the sequence length: compare only runs of one model.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class TokenCount:
    """Tokens of one step, padding left out."""

    text: float = 0.0
    """Tokens of text, prompts included."""
    visual: float = 0.0
    """Positions taken by image features."""
    supervised: float = 0.0
    """Labels that the loss counts; a part of `text`."""

    @property
    def total(self) -> float:
        """All positions that the language tower works on: text and visual."""
        return self.text + self.visual

    def __add__(self, other: TokenCount) -> TokenCount:
        return TokenCount(self.text + other.text, self.visual + other.visual, self.supervised + other.supervised)

    def __sub__(self, other: TokenCount) -> TokenCount:
        return TokenCount(self.text - other.text, self.visual - other.visual, self.supervised - other.supervised)

    def per_second(self, seconds: float) -> TokenCount:
        """Return the same counts divided by `seconds`; zero where no time has passed."""
        if seconds <= 0:
            return TokenCount()
        return TokenCount(self.text / seconds, self.visual / seconds, self.supervised / seconds)


class Throughput:
    """Tokens per second over all ranks, the first steps left out.

    The first steps allocate memory, start threads and, under DDP, rebuild buckets: they are not what a long run costs.
    """

    def __init__(self, num_warmup_steps: int = 3) -> None:
        self.num_warmup_steps = num_warmup_steps
        self._num_steps = 0
        self._sum = (TokenCount(), 0.0)
        self._sum_at_warm = self._sum
        self._tokens_at_last_call = TokenCount()

    def add(self, tokens: TokenCount, seconds: float) -> None:
        """Record one optimizer step.

        Args:
            tokens: of all ranks and micro-batches of the step.
            seconds: wall time of the step, evaluation and checkpoints left out.
        """
        self._num_steps += 1
        self._sum = (self._sum[0] + tokens, self._sum[1] + seconds)
        if self._num_steps == self.num_warmup_steps:
            self._sum_at_warm = self._sum

    def counted(self) -> tuple[TokenCount, float]:
        """Return tokens and seconds since the warm-up, or of all steps where there were no more than that."""
        (tokens, seconds), is_warm = self._sum, self._num_steps > self.num_warmup_steps
        return (tokens - self._sum_at_warm[0], seconds - self._sum_at_warm[1]) if is_warm else (tokens, seconds)

    def mean(self) -> TokenCount:
        """Return tokens per second of what is `counted`, by this rank's clock."""
        tokens, seconds = self.counted()
        return tokens.per_second(seconds)

    def take_tokens(self) -> TokenCount:
        """Return the tokens since this was last called."""
        tokens, self._tokens_at_last_call = self._sum[0] - self._tokens_at_last_call, self._sum[0]
        return tokens


def measure_peak_bytes(device: torch.device) -> tuple[int, str]:
    """Return the most memory that this process has used so far, and the name of what was measured.

    Returns:
        On a GPU: bytes in tensors at the highest point (`torch.cuda.max_memory_allocated`), named "CUDA memory
        allocated". On CPU: the highest resident set size of the process, named "resident set size", which includes
        Python, PyTorch's own code and the data: compare differences, not the number itself.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "CUDA memory allocated"
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike getrusage's value, this one does not start at the peak of the process that started us.
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024, "resident set size"
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes, "resident set size"
