"""What four ranks do for `test_parallel_context.py`: attention alone, whole models, bytes, refusals, planted bugs.

Usage: context_worker.py FOLDER. Each rank writes what it found to FOLDER/rank<r>.pt. The four ranks are one group of
cp=4, and two groups of cp=2 that do the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from context_parity import (
    DTYPES,
    HEADS,
    METHODS,
    MODEL_KINDS,
    ORDERS,
    SEQ,
    Run,
    attention_inputs,
    build,
    make_steps,
    reference_attention,
    relative_error,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from vlmcourse.models.cache import KVCache
from vlmcourse.models.generate import generate
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel import attention_block, chunks, context, differentiable, gather_attention, ring, ulysses
from vlmcourse.parallel.comm import gather_full
from vlmcourse.parallel.context import (
    apply_context,
    check_context,
    gather_sequence,
    take_part_of_labels,
    without_context,
)
from vlmcourse.parallel.data import apply_ddp
from vlmcourse.parallel.fsdp import apply_fsdp
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks

Group = dist.ProcessGroup


class BytesSent(TorchDispatchMode):
    """Counts what this rank sends, a collective as a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            largest = max((x.numel() * x.element_size() for x in tensors), default=0)
            group = next(
                Group.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and "Process" in str(x._type())
            )
            ring_share = (group.size() - 1) / group.size()
            shares = {"send": 1.0, "recv_": 0.0}
            self.total += largest * shares.get(name, ring_share)
        return func(*args, **(kwargs or {}))


def attend_alone(
    method: str, order: str, group: Group, heads: tuple[int, int], precision: str
) -> tuple[dict[str, float], tuple[float, float]]:
    """Return by how much output and gradients of one method are off, on this rank's positions, and the bytes sent."""
    part = partial(chunks.take_part, dim=2, rank=group.rank(), cp=group.size(), order=order)
    q, k, v, grad = (part(x).requires_grad_() for x in attention_inputs(*heads, precision))
    attend = context.ContextAttention(group, method, order)
    with BytesSent() as forward:
        out = attend(q, k, v, None, True)
    with BytesSent() as backward:
        out.backward(grad.detach())
    expected = reference_attention(*heads, precision)
    errors = {}
    for name, x in {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
        assert x is not None and x.dtype == DTYPES[precision]
        errors[name] = relative_error(x, part(expected[name]))
    return errors, (forward.total, backward.total)


def sum_over_group(loss: float, model: nn.Module, group: Group) -> tuple[float, dict[str, Tensor]]:
    """Add up losses and gradients, each rank having a part of both."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    everything = torch.cat([torch.tensor([loss]), *(gradient.flatten() for gradient in named.values())])
    dist.all_reduce(everything, group=group)
    parts = everything[1:].split([gradient.numel() for gradient in named.values()])
    for gradient, part in zip(named.values(), parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return everything[0].item(), {name: gradient.clone() for name, gradient in named.items()}


def gather_gradients(loss: float, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """Return the loss that all ranks add up to, and whole gradients, which DDP or FSDP has averaged."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    named = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return total.item() / dist.get_world_size(), {n: gather_full(g) for n, g in named.items() if g is not None}


def run_model(
    method: str, order: str, group: Group, *, num_steps: int = 3, precision: str = "fp32", recompute: bool = False
) -> Run:
    model = apply_context(build(), group, method, order)
    if recompute:
        for block in model.language.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return train(
        model,
        make_steps()[:num_steps],
        take_labels=lambda labels: take_part_of_labels(labels, group, order),
        sum_up=partial(sum_over_group, group=group),
        precision=precision,
    )


def run_sharded(wrap: Callable[[VLM], nn.Module], dp_rank: int, group: Group) -> Run:
    """Train two samples' groups of two ranks each, gradients averaged over all four by DDP or FSDP."""
    model = wrap(apply_context(build(), group))
    scales = [4 / sum(batch.num_supervised_tokens for batch in step) for step in make_steps()]
    return train(
        model,
        [[step[dp_rank]] for step in make_steps()],
        take_labels=lambda labels: take_part_of_labels(labels, group),
        loss_scales=scales,
        sum_up=gather_gradients,
    )


def whole_logits(group: Group) -> tuple[Tensor, Tensor]:
    """Return the logits of a batch put together again, and those of a plain model."""
    batch = make_steps()[0][0]
    model, plain = apply_context(build(), group).eval(), build().eval()
    given = (batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS)
    with torch.no_grad():
        return gather_sequence(model(*given), 1, group), plain(*given)


def generated(group: Group) -> tuple[list[list[int]], list[list[int]], bool]:
    """Return what a context-parallel model writes by itself, what a plain one does, and whether nothing was sent."""
    batch = make_steps()[0][0]
    model, plain = apply_context(build(), group), build()
    prompt, tiles = batch.input_ids_BS[:1, :60], batch.pixel_values_ICHW[:3]
    mask = torch.ones_like(prompt, dtype=torch.bool)
    mask[:, 0] = False  # padding on the left
    with without_context(model), BytesSent() as sent:
        written = generate(model, prompt, tiles, mask, max_new_tokens=4, eos_token_id=0)
    check_context(model, group)
    expected = generate(plain, prompt, tiles, mask, max_new_tokens=4, eos_token_id=0)
    return written.tolist(), expected.tolist(), sent.total == 0


def message_of(action: Callable[[], Any]) -> str:
    """Return what an action is refused with, and fail if it sent anything before."""
    sent = BytesSent()
    try:
        with sent:
            action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__} after {sent.total:g} bytes: {error}"
    return "accepted"


def refusals(group: Group, alone: Group) -> dict[str, str]:
    """Collect what is said about what cannot be done."""
    batch = make_steps()[0][0]
    ids, tiles, mask = batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS
    model = apply_context(build(), group)
    q, k, v, _ = attention_inputs(4, 4, "fp32")
    attend = context.ContextAttention(group, "ring", "zigzag")
    put_back = apply_context(build(), group)
    put_back.language.blocks[1].attention.attend = build().language.blocks[1].attention.attend  # type: ignore[union-attr]
    no_tiles = apply_context(build(), group)
    no_tiles.encode_tiles = build().encode_tiles  # type: ignore[method-assign]
    narrow = build(num_heads=2, num_kv_heads=2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    as_dtensor = partial(DTensor.from_local, device_mesh=mesh, run_check=False)
    actions: dict[str, Callable[[], Any]] = {
        "method": lambda: apply_context(build(), group, "star"),
        "order": lambda: apply_context(build(), group, "ring", "sideways"),
        "one rank": lambda: apply_context(build(), alone),
        "twice": lambda: apply_context(model, group),
        "heads": lambda: apply_context(narrow, group, "ulysses"),
        "heads in attention": lambda: ulysses.ulysses_attention(q[:, :3], k[:, :3], v[:, :3], group, "zigzag"),
        "length": lambda: model(ids[:, :-4], tiles, mask[:, :-4]),
        "labels": lambda: take_part_of_labels(batch.labels_BS[:, :-4], group),
        "left padding": lambda: model(ids, tiles, mask.flip(1)),
        "left padding by name": lambda: model(
            input_ids_BS=ids, pixel_values_ICHW=tiles, attention_mask_BS=mask.flip(1)
        ),
        "cache": lambda: model(ids, tiles, kv_cache=KVCache(300)),
        "last only": lambda: model(ids, tiles, mask, last_only=True),
        "mask": lambda: attend(q, k, v, torch.ones(SEQ, SEQ, dtype=torch.bool), False),
        "not causal": lambda: attend(q, k, v, None, False),
        "more keys": lambda: attend(q[:, :, :4], k, v, None, True),
        "dtensor": lambda: attend(as_dtensor(q), as_dtensor(k), as_dtensor(v), None, True),
        "plain model": lambda: check_context(build(), group),
        "one attention put back": lambda: check_context(put_back, group),
        "tiles not shared": lambda: check_context(no_tiles, group),
        "other group": lambda: check_context(model, alone),
    }
    return {name: message_of(action) for name, action in actions.items()}


# Planted bugs of attention: each name, the method and order it is planted in, and what plants it.


def merged_without_lse(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    return out + block_out, torch.logaddexp(lse, block_lse)


def with_own_lse(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Any:
    return attention_block.attend_block_backward(grad, q, k, v, *attention_block.attend_block(q, k, v, causal), causal)


class OneHopLess(ring.PassedOn):
    """The last message with gradients does not leave."""

    num_sent = 0

    def __init__(self, tensor: Tensor, group: Group, tag: int) -> None:
        self.is_lost = False
        if tag == ring.GRADIENT_TAG:
            OneHopLess.num_sent += 1
            self.is_lost = OneHopLess.num_sent % (group.size() - 1) == 0
        if self.is_lost:
            self.lost = torch.zeros_like(tensor)
        else:
            super().__init__(tensor, group, tag)

    def wait(self) -> Tensor:
        return self.lost if self.is_lost else super().wait()


class MixedUpRing(ring.PassedOn):
    """Gradients of keys and of values change places on the way."""

    def __init__(self, tensor: Tensor, group: Group, tag: int) -> None:
        self.tag = tag
        super().__init__(tensor, group, tag)

    def wait(self) -> Tensor:
        received = super().wait()
        return received.flip(0) if self.tag == ring.GRADIENT_TAG else received


def one_meeting_less(query_rank: int, key_rank: int, cp: int, order: str) -> Iterator[chunks.Meeting]:
    for meeting in chunks.visible_meetings(query_rank, key_rank, cp, order):
        if not (query_rank == key_rank and meeting.query > meeting.key):
            yield meeting


def later_blocks_too(query_rank: int, key_rank: int, cp: int, order: str) -> Iterator[chunks.Meeting]:
    for i, query in enumerate(chunks.chunks_of_rank(query_rank, cp, order)):
        for j, key in enumerate(chunks.chunks_of_rank(key_rank, cp, order)):
            yield chunks.Meeting(i, j, query == key)


def diagonal_not_masked(query_rank: int, key_rank: int, cp: int, order: str) -> Iterator[chunks.Meeting]:
    for meeting in chunks.visible_meetings(query_rank, key_rank, cp, order):
        yield chunks.Meeting(meeting.query, meeting.key, False)


def own_gradient_only(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    return grads[0][ctx.group.rank()].contiguous(), None


def mean_gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    part = grads[0].new_empty(grads[0].shape[1:])
    dist.reduce_scatter_single(part, grads[0].contiguous().flatten(0, 1), group=ctx.group)
    return part / ctx.group.size(), None


def as_is(tensor: Tensor, dim: int, cp: int, order: str) -> Tensor:
    return tensor


Plant = Callable[[], contextlib.AbstractContextManager[Any]]
ATTENTION_BUGS: dict[str, tuple[str, Plant]] = {
    "merged without log-sum-exp": ("ring", lambda: mock.patch.object(ring, "merge_blocks", merged_without_lse)),
    "backward with a block's own log-sum-exp": (
        "ring",
        lambda: mock.patch.object(ring, "attend_block_backward", with_own_lse),
    ),
    "gradients sent one step too few": ("ring", lambda: mock.patch.object(ring, "PassedOn", OneHopLess)),
    "gradients of keys and values mixed up on the way": (
        "ring",
        lambda: mock.patch.object(ring, "PassedOn", MixedUpRing),
    ),
    "an earlier chunk of the same rank left out": (
        "ring",
        lambda: mock.patch.object(ring, "visible_meetings", one_meeting_less),
    ),
    "masked chunks not skipped": ("ring", lambda: mock.patch.object(ring, "visible_meetings", later_blocks_too)),
    "own chunk not masked": ("ring", lambda: mock.patch.object(ring, "visible_meetings", diagonal_not_masked)),
    "gathered keys left in the order of ranks": (
        "allgather",
        lambda: mock.patch.object(gather_attention, "sort_parts", as_is),
    ),
    "gradients of keys not summed": (
        "allgather",
        lambda: mock.patch.object(differentiable._Gather, "backward", staticmethod(own_gradient_only)),
    ),
    "gradients of keys averaged": (
        "allgather",
        lambda: mock.patch.object(differentiable._Gather, "backward", staticmethod(mean_gradient)),
    ),
    "exchanged positions left in the order of ranks": (
        "ulysses",
        lambda: mock.patch.multiple(ulysses, sort_parts=as_is, unsort_parts=as_is),
    ),
    "results not put back in the order of ranks": (
        "ulysses",
        lambda: mock.patch.object(ulysses, "unsort_parts", as_is),
    ),
    "gradients of the exchange not sent back": (
        "ulysses",
        lambda: mock.patch.object(differentiable._Exchange, "backward", staticmethod(lambda ctx, grad: (grad, None))),
    ),
}


def bug_in_attention(name: str, group: Group) -> dict[str, float]:
    method, plant = ATTENTION_BUGS[name]
    with plant():
        return attend_alone(method, "zigzag", group, (4, 2), "fp32")[0]


# Planted bugs of the whole model.


def positions_from_zero(tensor: Tensor, dim: int, *, group: Group, order: str) -> Tensor:
    part = chunks.take_part(tensor, dim, group.rank(), group.size(), order)
    return part if part.is_floating_point() else tensor.narrow(dim, 0, part.shape[dim])


def positions_in_other_order(tensor: Tensor, dim: int, *, group: Group, order: str) -> Tensor:
    kind = order if tensor.is_floating_point() else "contiguous"
    return chunks.take_part(tensor, dim, group.rank(), group.size(), kind)


class _GatherOwnGradient(differentiable._Gather):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return own_gradient_only(ctx, *grads)


def tiles_in_reverse(part: Tensor, group: Group) -> Tensor:
    return differentiable.gather_from_ranks(part, group).flip(0)


def features_detached(part: Tensor, group: Group) -> Tensor:
    return differentiable.gather_from_ranks(part.detach(), group)


def _patched_take_part(function: Callable[..., Tensor]) -> Plant:
    return lambda: mock.patch.object(context, "_take_part_in_group", function)


def _patched_gather(function: Callable[..., Tensor]) -> Plant:
    return lambda: mock.patch.object(context, "gather_from_ranks", function)


MODEL_BUGS: dict[str, Plant] = {
    "positions count from zero on every rank": _patched_take_part(positions_from_zero),
    "positions in the other order": _patched_take_part(positions_in_other_order),
    "gradients of features not summed": _patched_gather(lambda part, group: _GatherOwnGradient.apply(part, group)),
    "gradients of features lost": _patched_gather(features_detached),
    "tiles of other ranks": _patched_gather(tiles_in_reverse),
    "labels in the other order": contextlib.nullcontext,
    "gradients not summed": contextlib.nullcontext,
    "mean of means over ranks": contextlib.nullcontext,
}


def bug_in_model(name: str, group: Group) -> Run:
    def cut(labels: Tensor) -> Tensor:
        order = "contiguous" if name == "labels in the other order" else "zigzag"
        return chunks.take_part(labels, 1, group.rank(), group.size(), order)

    def sum_up(loss: float, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
        own = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        summed = sum_over_group(loss, model, group)
        return (summed[0], own) if name == "gradients not summed" else summed

    steps = make_steps()[:1]
    scales = None
    if name == "mean of means over ranks":
        mine = [sum(int((cut(b.labels_BS) != -100).sum()) for b in step) for step in steps]
        scales = [1 / (group.size() * max(1, count)) for count in mine]
    with MODEL_BUGS[name]():
        return train(apply_context(build(), group), steps, take_labels=cut, loss_scales=scales, sum_up=sum_up)


def main(folder: Path) -> None:
    ranks: Ranks = init_ranks(timeout_s=60)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    of_two, of_four = mesh["cp"].get_group(), dist.group.WORLD
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp_shard", "cp"))["cp"].get_group()
    assert of_four is not None
    groups: dict[int, Group] = {2: of_two, 4: of_four}
    kinds = [(cp, method, order) for cp in groups for method in METHODS for order in ORDERS]
    found: dict[str, Any] = {
        "attention": {
            (cp, method, order, heads, precision): attend_alone(method, order, groups[cp], heads, precision)
            for cp, method, order in kinds
            for heads in HEADS
            for precision in DTYPES
        },
        "models": {kind: run_model(kind[1], kind[2], groups[kind[0]]) for kind in MODEL_KINDS},
        "bf16": {method: run_model(method, "zigzag", of_two, num_steps=2, precision="bf16") for method in METHODS},
        "recompute": {method: run_model(method, "zigzag", of_two, num_steps=1, recompute=True) for method in METHODS},
        "fsdp": run_sharded(lambda model: apply_fsdp(model, ranks), ranks.rank // 2, of_two),
        "ddp": run_sharded(lambda model: apply_ddp(model, ranks), ranks.rank // 2, of_two),
        "logits": {cp: whole_logits(group) for cp, group in groups.items()},
        "generated": generated(of_four),
        "refusals": refusals(of_four, alone),
        "attention bugs": {name: bug_in_attention(name, of_four) for name in ATTENTION_BUGS},
        "model bugs": {name: bug_in_model(name, of_four) for name in MODEL_BUGS},
    }
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
