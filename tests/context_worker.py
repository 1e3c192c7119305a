"""What four ranks do for `test_parallel_context.py`: attention alone, whole models, bytes, refusals, planted bugs.

Usage: context_worker.py FOLDER. Each rank writes what it found to FOLDER/rank<r>.pt. The four ranks are one group of
cp=4, and two groups of cp=2 that do the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from context_bugs import ATTENTION_BUGS, MODEL_BUGS
from context_parity import (
    DTYPES,
    FROZEN,
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
from vlmcourse.parallel import chunks, context, ulysses
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
    method: str,
    order: str,
    group: Group,
    *,
    num_steps: int = 3,
    precision: str = "fp32",
    recompute: bool = False,
    frozen: Sequence[str] = (),
) -> Run:
    model = apply_context(build(), group, method, order)
    for tower in frozen:
        model.get_submodule(tower).requires_grad_(False)
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
    check_context(model, group.size(), "ring", "zigzag")
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
        "plain model": lambda: check_context(build(), 4, "ring", "zigzag"),
        "one attention put back": lambda: check_context(put_back, 4, "ring", "zigzag"),
        "tiles not shared": lambda: check_context(no_tiles, 4, "ring", "zigzag"),
        "other number of ranks": lambda: check_context(model, 1, "ring", "zigzag"),
    }
    return {name: message_of(action) for name, action in actions.items()}


def bug_in_attention(name: str, group: Group) -> dict[str, float]:
    method, plant = ATTENTION_BUGS[name]
    with plant():
        return attend_alone(method, "zigzag", group, (4, 2), "fp32")[0]


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
        "frozen": {towers: run_model("ring", "zigzag", of_four, num_steps=1, frozen=towers) for towers in FROZEN},
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
