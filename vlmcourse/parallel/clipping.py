"""Clipping by the global norm where each rank holds only some of the parameters.

Enters: the parameters of one rank's stages, after backward. Leaves: their gradients, scaled by the norm over all
stages.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlmcourse.parallel.comm import local_part


@torch.no_grad()
def clip_over_stages(
    parameters: Iterable[Tensor],
    max_norm: float,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    skip: Tensor | None = None,
) -> float:
    """Scale all gradients down so that the norm over the stages of all ranks is at most `max_norm`.

    Args:
        parameters: of this rank's stages; plain, or `DTensor`s of any meshes.
        max_norm: the limit; 0 measures only.
        group: the ranks of the pipeline, all of which must call this.
        device: of this rank.
        skip: a parameter that is scaled but not counted: the second copy of a tied embedding.

    Returns:
        The L2 norm of the whole model's gradient before clipping, equal on every rank of the group.
    Communicates: an all-reduce of 8 bytes over the group; where gradients are shards, more of 4 bytes over theirs.
    """
    trained = [p for p in parameters if p.grad is not None]
    squares = sum(norm**2 for norm in _norms_by_mesh([p.grad for p in trained if p is not skip and p.grad is not None]))
    total = torch.tensor(squares, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    norm = math.sqrt(float(total))
    if max_norm > 0 and trained:
        scale = min(1.0, max_norm / (norm + 1e-6))  # as torch's own clipping
        multiply_local_parts([p.grad for p in trained if p.grad is not None], scale)
    return norm


def multiply_local_parts(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place, each rank the parts that it holds.

    As `DTensor`s they would come to the same, but for PyTorch asking at the first step how to place hundreds of them
    at a time: half a second for the tiny model, on every rank.
    """
    if tensors:
        torch._foreach_mul_([local_part(tensor) for tensor in tensors], factor)


def _norms_by_mesh(gradients: list[Tensor]) -> list[float]:
    """Return the whole norms of gradients that share a mesh; norms over two meshes cannot be computed in one call."""
    by_mesh: dict[object, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    return [float(total_norm(of_mesh)) for of_mesh in by_mesh.values()]


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm over all gradients of one mesh, equal on every rank.

    Communicates: where gradients are shards, an all-reduce of 4 bytes over each axis of their mesh.
    """
    if not gradients:
        return torch.zeros(())
    # torch warns that it reduces the norm over one axis after the other; for 4 bytes a step nobody needs to know.
    torch_logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = torch_logger.level
    torch_logger.setLevel(logging.ERROR)
    try:
        # bf16 gradients: their squares would be added up with 8 significant bits. The type is asked for rather than
        # made before: fp32 copies of all gradients at once would be the peak of a step's memory.
        is_double = any(gradient.dtype == torch.float64 for gradient in gradients)
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64 if is_double else torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    finally:
        torch_logger.setLevel(level)
