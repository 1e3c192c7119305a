"""Count the bytes of training state that this rank stores, by owner: weights, gradients, optimizer.

Enters: a model (plain, DDP or FSDP2) and its optimizer, between two steps. Leaves: a `Ledger`. Only this rank's shards
count. Left out on purpose: activations, buffers, communication buffers and what the allocator keeps in reserve; they
are not state and other tools show them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from vlmcourse.parallel.comm import local_part


@dataclass(frozen=True)
class Ledger:
    """Bytes of training state on one rank."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    """Everything in `optimizer.state`: Adam's two moments and a step counter a parameter."""

    @property
    def total_bytes(self) -> int:
        """Weights, gradients and optimizer together."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def measure_ledger(model: nn.Module, optimizer: Optimizer | None = None) -> Ledger:
    """Count the bytes of weights, gradients and optimizer state that this rank stores.

    Args:
        model: plain, wrapped in DDP, or sharded by FSDP2. Call it after backward to see gradients, and after the first
            optimizer step to see optimizer state: neither exists earlier.
        optimizer: the model's optimizer, or None to leave its bytes 0.

    Returns:
        Bytes of this rank alone. Shared (tied) tensors count once; frozen weights count as weights only.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = optimizer.state.values() if optimizer is not None else ()
    return Ledger(
        weights_bytes=_num_bytes(parameters),
        gradients_bytes=_num_bytes(gradients),
        optimizer_bytes=_num_bytes(value for values in state for value in values.values() if isinstance(value, Tensor)),
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor).numel() * tensor.element_size() for tensor in tensors)
