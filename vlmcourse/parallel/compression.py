"""Send gradients in fewer bytes under DDP: half-precision numbers, or a low-rank approximation (PowerSGD).

Enters: a model in `DistributedDataParallel`. Leaves: the same model, whose reducer hands every bucket of gradients to a
hook instead of all-reducing it in fp32. Weights and optimizer stay in fp32; what is lost is precision of the averaged
gradient. FSDP has no such hooks: there `MixedPrecisionPolicy(reduce_dtype=...)` chooses the type that travels.

Error feedback of PowerSGD is state of a rank that checkpoints do not hold: a resumed run starts with none. Chapter 1.

Source: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization".
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with types.
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.layout import COMPRESSIONS
from vlmcourse.values import suggest_choice

NOT_OFFERED = {
    "batched_powersgd": "torch's batched_powerSGD_hook fails on gloo",
    "quantize_per_tensor": "torch's quantization hooks fail on gloo",
    "quantize_per_channel": "torch's quantization hooks fail on gloo",
}
"""Hooks that torch has and that are left out, and why."""
FIRST_POWERSGD_STEP = 2
"""DDP arranges its buckets anew after the first step; errors kept for other buckets would be added to wrong weights."""
ORTHOGONALIZATION_EPSILON = 1e-8
"""Added to the length of a factor before it is divided by it: the gradient of a tower that no sample of the first
compressed step reaches is 0, and 0 / 0 would make its weights NaN. Far below the length of any other factor in fp32."""


def compress_gradients(
    model: nn.Module, kind: str, *, powersgd_rank: int = 1, powersgd_start_step: int = FIRST_POWERSGD_STEP
) -> None:
    """Make DDP exchange compressed gradients from the next backward on.

    Args:
        model: in `DistributedDataParallel`, without a hook so far.
        kind: `fp16` (11 significant bits; sums above 65504 overflow to infinity), `bf16` (8 bits, the range of fp32),
            or `powersgd` (a matrix of n x m travels as n + m numbers for each of `powersgd_rank`; what is lost is
            added to the next step's gradient; vectors and small matrices travel whole).
        powersgd_rank: columns of the approximation, 1 or more.
        powersgd_start_step: steps that exchange whole gradients before, 2 or more; the first steps of a training have
            the largest gradients.

    Raises:
        ValueError: on every rank alike, before anything is exchanged: if the kind or a number cannot be used, or the
            model is not in DDP or has a hook already.
    Communicates: nothing now; in every backward one all-reduce of each bucket in 2 bytes a number (`fp16`, `bf16`), or
        three smaller ones in fp32 (`powersgd`: what is not compressed, and the two factors).
    """
    check_compression(model, kind)
    ddp_model = cast(DistributedDataParallel, model)
    group = ddp_model.process_group
    if kind == "powersgd":
        if powersgd_rank < 1 or powersgd_start_step < FIRST_POWERSGD_STEP:
            raise ValueError(
                f"powersgd_rank = {powersgd_rank}, powersgd_start_step = {powersgd_start_step}: must be at least 1 and "
                f"{FIRST_POWERSGD_STEP}; DDP arranges its buckets anew after its first step"
            )
        state = OneBucketAtATime(
            group,
            matrix_approximation_rank=powersgd_rank,
            start_powerSGD_iter=powersgd_start_step,
            orthogonalization_epsilon=ORTHOGONALIZATION_EPSILON,  # type: ignore[arg-type] # torch's default is the int 0
        )
        ddp_model.register_comm_hook(state, HOOKS[kind])
    else:
        ddp_model.register_comm_hook(group, HOOKS[kind])


def check_compression(model: nn.Module, kind: str) -> None:
    """Refuse a kind of compression, or a model that it would not reach.

    Raises:
        ValueError: saying what to choose instead.
    """
    if kind in NOT_OFFERED:
        raise ValueError(f"gradient compression {kind!r}: {NOT_OFFERED[kind]}; choose one of {', '.join(COMPRESSIONS)}")
    if kind not in COMPRESSIONS:
        raise ValueError(f"gradient compression {kind!r}: {suggest_choice(kind, COMPRESSIONS)}")
    if isinstance(model, FSDPModule):
        raise ValueError(
            f"gradient compression {kind!r}: FSDP shards this model and reduce-scatters its gradients without DDP's "
            "hooks; give fully_shard a MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), or use ddp"
        )
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"gradient compression {kind!r}: the model is a {type(model).__name__}, not a DistributedDataParallel: "
            "nothing exchanges its gradients; apply the strategy ddp first"
        )
    if model._comm_hooks:
        names = ", ".join(hook.__name__ for hook, _ in model._comm_hooks)
        raise ValueError(f"gradient compression {kind!r}: the model has a hook already ({names}): DDP takes one")


def bf16_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients in bf16; torch's own hook of this kind refuses every backend but NCCL.

    Each rank divides before it sends: sums of many ranks stay in the range where they were.

    Args:
        group: the ranks that average.
        bucket: flat gradients, fp32, this rank's; overwritten.

    Returns:
        The averaged bucket [elements], fp32, when it is there.
    Communicates: one all-reduce, 2 bytes an element.
    """
    gradients = bucket.buffer()
    halved = gradients.to(torch.bfloat16).div_(group.size())
    work = dist.all_reduce(halved, group=group, async_op=True)
    assert work is not None

    def widen(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(future.value()[0])

    return work.get_future().then(widen)


class OneBucketAtATime(PowerSGDState):
    """PowerSGD's state, and the exchange that is under way.

    Of the three all-reduces of a bucket the later two are called from the thread that finished the one before. With two
    buckets under way their order is a matter of luck, and differs between ranks.
    """

    under_way: torch.futures.Future[Tensor] | None = None


def powersgd_hook(state: OneBucketAtATime, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients by torch's PowerSGD, which starts each step from the last one's right factor.

    A matrix of zeros (the gradient of the vision tower in a step without pictures, where no error is fed back yet)
    leaves a factor of 0 behind. Every product with it is 0: that matrix would never be updated again. Such a bucket
    starts from random factors instead, as at first; the factors are equal on all ranks, so all do.

    The bucket before is waited for (on a GPU by the stream alone), see `OneBucketAtATime`.

    Args:
        state: of all buckets, with the errors to feed back.
        bucket: flat gradients, fp32, this rank's; overwritten.

    Returns:
        The averaged bucket [elements], fp32, when it is there.
    Communicates: three all-reduces: what is not compressed, the left factors and the right factors.
    """
    if state.under_way is not None:
        state.under_way.wait()
    factors = state.q_memory_dict.get(bucket.index())
    if factors is not None and not bool(factors.all()):
        del state.p_memory_dict[bucket.index()]
    state.under_way = powerSGD_hook(state, bucket)
    return state.under_way


HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_hook, "powersgd": powersgd_hook}


def find_compression(model: nn.Module) -> str:
    """Return how a model's gradients are compressed: a key of `HOOKS`, "none", or the name of another hook."""
    hooks = [hook for hook, _ in model._comm_hooks] if isinstance(model, DistributedDataParallel) else []
    if not hooks:
        return "none"
    return next((kind for kind, hook in HOOKS.items() if hook is hooks[0]), hooks[0].__name__)
