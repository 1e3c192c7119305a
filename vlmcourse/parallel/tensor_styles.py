"""How one module computes when its weights are split over the tensor-parallel ranks.

Enters: a plain module and the `tp` mesh. Leaves: the same module, its own parameters `DTensor`s. `ColwiseParallel` and
`RowwiseParallel` come from torch; here are the styles that torch lacks: a branch that gathers the sequence at its
beginning and scatters it at its end, weights that stay whole, and a norm over a width that is split. Activations
between modules are plain tensors. Chapter 1.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models" (arXiv:2205.05198), section 4.2.2 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from vlmcourse.parallel.comm import at_least_fp32

SEQUENCE_DIM = 1


class SequenceLayout:
    """How x_BSD lies on the ranks between the branches of language blocks; all styles of a model share one."""

    def __init__(self, sequence_parallel: bool) -> None:
        """Choose the layout of training.

        Args:
            sequence_parallel: each rank holds its own 1 / tp of the positions; else every rank holds all of them.
        """
        self.placement: Placement = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()

    @property
    def is_split(self) -> bool:
        """Whether each rank holds its own part of the positions."""
        return self.placement.is_shard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold all positions on every rank for a while: a single new token of a generation cannot be split."""
        before, self.placement = self.placement, Replicate()
        try:
            yield
        finally:
            self.placement = before


def check_sequence(num_positions: int, tp_degree: int) -> None:
    """Refuse a sequence that sequence parallelism would cut into unequal parts.

    Raises:
        ValueError: if `tp_degree` does not divide `num_positions`.
    """
    if num_positions % tp_degree:
        raise ValueError(
            f"tp={tp_degree} does not divide a sequence of {num_positions} positions: sequence parallelism gives every "
            f"rank equally many; pad batches to a multiple of {tp_degree} (of tp x cp with context parallelism), or "
            "set sequence_parallel=False"
        )


class SplitSequence(ParallelStyle):
    """Hands the first block its rank's part of the positions.

    Communicates: nothing forward, an all-gather of [batch, seq, width] backward: what comes before works on all
    positions on every rank.
    """

    def __init__(self, layout: SequenceLayout) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not self.layout.is_split:
                return None
            x_BSD, *others = args
            check_sequence(x_BSD.shape[SEQUENCE_DIM], device_mesh.size())
            whole_BSD = DTensor.from_local(x_BSD, device_mesh, [Replicate()], run_check=False)
            return (whole_BSD.redistribute(placements=[self.layout.placement]).to_local(), *others)

        module.register_forward_pre_hook(enter)
        return module


class Branch(ParallelStyle):
    """The beginning and end of a residual branch (attention, MLP) around its column and row layers.

    Communicates: forward, with the sequence split, an all-gather of [batch, seq, width] at the beginning and a
    reduce-scatter at the end, and the same backward; with the sequence whole, an all-reduce at the end forward and one
    at the beginning backward.
    """

    def __init__(self, layout: SequenceLayout) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x_BSD, *others = args
            part_BSD = DTensor.from_local(x_BSD, device_mesh, [self.layout.placement], run_check=False)
            # It stays a DTensor: the gradients that come back from q, k and v are then added up before one exchange,
            # not exchanged one by one.
            return (part_BSD.redistribute(placements=[Replicate()]), *others)

        def leave(_: nn.Module, args: tuple[Any, ...], y_BSD: DTensor) -> Tensor:
            return y_BSD.redistribute(placements=[self.layout.placement]).to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


class Replicated(ParallelStyle):
    """Weights that every rank holds whole and computes with alike; children are left alone.

    With a layout they belong to a norm that sees this rank's positions only while the sequence is split: the gradient
    of the weight is then the sum over ranks. Communicates: in that case an all-reduce of each weight's gradient.
    """

    def __init__(self, layout: SequenceLayout | None = None, method: str = "forward") -> None:
        """Choose what reads the weights.

        Args:
            layout: of the sequence that a norm works on.
            method: of the module, the one that reads its own weights.
        """
        self.layout, self.method = layout, method

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_own(module, device_mesh, Replicate(), self.src_data_rank)
        read = getattr(module, self.method)

        def run(*args: Any, **kwargs: Any) -> Any:
            with _local_weights(module, summed=self.layout is not None and self.layout.is_split):
                return read(*args, **kwargs)

        setattr(module, self.method, run)
        return module


class VocabularyEmbedding(ParallelStyle):
    """An embedding whose rows are split over the ranks: each looks up the tokens that it has, the sum is complete.

    PyTorch's own RowwiseParallel computes the same, but leaves every rank the gradient of the whole vocabulary.
    Communicates: an all-reduce of [batch, seq, width] forward.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        distribute_own(module, device_mesh, Shard(0), self.src_data_rank)

        def run(input: Tensor) -> Tensor:
            ids_BS = input
            rows_VD = cast(DTensor, module.weight).to_local()
            own_ids_BS = ids_BS - device_mesh.get_local_rank() * rows_VD.shape[0]
            is_elsewhere_BS = (own_ids_BS < 0) | (own_ids_BS >= rows_VD.shape[0])
            found_BSD = nn.functional.embedding(own_ids_BS.masked_fill(is_elsewhere_BS, 0), rows_VD)
            part_BSD = found_BSD.masked_fill(is_elsewhere_BS[..., None], 0)
            # Not by DTensor, whose `to_local` is a view: FSDP2 warns of one, lest it be written into.
            return cast(Tensor, SumForward.apply(part_BSD, device_mesh.get_group()))

        module.forward = run
        return module


class WholeWidthNorm(ParallelStyle):
    """An RMSNorm over a width that is split over the ranks, as that of queries and keys under split heads.

    Communicates: an all-reduce of [tiles, positions, 1] forward and one backward.
    """

    def __init__(self, width: int) -> None:
        """Set what the squares are averaged over.

        Args:
            width: channels of the plain model on all ranks together; heads of zeros do not count.
        """
        self.width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm) and module.eps is not None
        distribute_own(module, device_mesh, Shard(0), self.src_data_rank)
        group, eps = device_mesh.get_group(), module.eps

        def run(x: Tensor) -> Tensor:
            x_IPD = at_least_fp32(x)
            squares_IP1 = x_IPD.square().sum(dim=-1, keepdim=True)
            mean_IP1 = cast(Tensor, SumOverRanks.apply(squares_IP1, group)) / self.width
            weight_D = cast(DTensor, module.weight).to_local()
            return (x_IPD * torch.rsqrt(mean_IP1 + eps) * weight_D).to(x.dtype)

        module.forward = run
        return module


class SumOverRanks(torch.autograd.Function):
    """Adds up tensors over ranks that each go on with the sum in a way of their own.

    Since every rank's result depends on the sum, the gradient is the sum over ranks too.
    Communicates: an all-reduce of the tensor forward, and one backward.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of all ranks' `part`."""
        ctx.group = group
        return _all_reduced(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients."""
        return _all_reduced(grads[0], ctx.group), None


class SumForward(torch.autograd.Function):
    """The sum of a tensor over ranks, in its own memory, where all ranks go on alike with it.

    Communicates: an all-reduce of the tensor forward, nothing backward.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Turn `part` into the sum of all ranks' parts."""
        ctx.mark_dirty(part)
        dist.all_reduce(part, group=group)
        return part

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient, which all ranks have alike."""
        return grads[0], None


def _all_reduced(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def distribute_own(module: nn.Module, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None) -> None:
    """Replace the parameters that `module` itself holds by `DTensor`s of one placement, frozen ones staying frozen.

    Communicates: a broadcast (Replicate) or scatter (Shard) of each from rank 0 of the mesh.
    """
    for name, weight in list(module.named_parameters(recurse=False)):
        spread = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=src_data_rank)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=weight.requires_grad))


@contextmanager
def _local_weights(module: nn.Module, *, summed: bool) -> Iterator[None]:
    """Let a module see its own parameters as plain tensors; gradients reach the `DTensor`s.

    Args:
        module: one whose own parameters are replicated.
        summed: whether the ranks' gradients are parts to be added up; else they are equal already.
    """
    weights = {name: weight for name, weight in module._parameters.items() if weight is not None}
    # `_parameters` also takes plain tensors, which attribute access then finds; names and hooks stay as they are.
    slots = cast(dict[str, Any], module._parameters)
    slots.update({name: _local(cast(DTensor, weight), summed) for name, weight in weights.items()})
    try:
        yield
    finally:
        slots.update(weights)


def _local(weight: DTensor, summed: bool) -> Tensor:
    if not summed:
        local = weight.to_local()
        if local.requires_grad:
            # The gradient may be a view of another's (a sum over one tile is none), and the DTensor would keep it as it
            # is: what scales all gradients in place, as clipping does, would scale this one twice.
            local.register_hook(torch.clone)
        return local
    # The redistribution moves nothing forward; backward it turns the partial gradient into the sum at once, so that
    # every `.grad` lies as its parameter does.
    return weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
