"""What two ranks do for the tests of communication, part by part. Usage: communication_worker.py FOLDER."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from parity import build_trainer, parity_config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.config import ParallelConfig
from vlmcourse.data.samples import Batch, Message, Sample
from vlmcourse.parallel import compression, links, overlap
from vlmcourse.parallel.apply import apply_strategy, unwrap
from vlmcourse.parallel.counting import CollectiveCounter, sum_traffic
from vlmcourse.parallel.differentiable import exchange_with_ranks, gather_from_ranks, sum_over_group
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.parallel.verify import check_equal_weights

WIDTH, NUM_BLOCKS = 64, 3
SIZES = (4096, 65536, 1 << 20)


class Stack(nn.Module):
    """Blocks of square matrices, and nothing else: what the formulas count."""

    def __init__(self, width: int = WIDTH, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return a scalar that every parameter has a gradient of."""
        for block in self.blocks:
            x = block(x).relu()
        return x.sum()


def counted(step: Callable[[], object]) -> dict[str, Any]:
    """Run one step; return what was counted."""
    with CollectiveCounter() as counter:
        step()
    return {
        "counts": {kind: (count.calls, count.payload_bytes) for kind, count in counter.counts.items()},
        "traffic": vars(sum_traffic(counter.calls)),
        "sent": counter.sent_bytes,
    }


def build_step(strategy: str, ranks: Ranks) -> tuple[nn.Module, Callable[[], None], Tensor]:
    model = apply_strategy(Stack(), ParallelConfig(strategy=strategy), ranks)
    x = torch.ones(2, WIDTH, requires_grad=True)

    def step() -> None:
        model(x).backward()

    return model, step, x


def count_strategies(ranks: Ranks) -> dict[str, Any]:
    found = {}
    for name in ("ddp", "fsdp", "fsdp kept"):
        model, step, _ = build_step(name.split()[0], ranks)
        if name == "fsdp kept":
            cast(FSDPModule, model).set_reshard_after_forward(False)
        step()  # DDP arranges its buckets in the first
        step()
        found[name] = counted(step)
    model, step, _ = build_step("ddp", ranks)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)

    def step_and_update() -> None:
        step()
        optimizer.step()

    step_and_update()
    step_and_update()
    found["zero-1 of torch"] = counted(step_and_update)
    return found


def count_tensor_parallel(ranks: Ranks) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    pair = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    parallelize_module(pair, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.ones(5, WIDTH, requires_grad=True)
    with CollectiveCounter() as counter:
        y = pair(x)
        forward = len(counter.calls)
        y.sum().backward()
    tp = counter.in_group(mesh["tp"].get_group().group_name)
    rows = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    with CollectiveCounter() as inside:
        rows.softmax(0)
    return {
        "inside an operation": [(call.kind, call.payload_bytes) for call in inside.calls],
        "forward": [(call.kind, call.payload_bytes) for call in tp[:forward]],
        "backward": [(call.kind, call.payload_bytes) for call in tp[forward:]],
        "others": len(counter.calls) - len(tp),
    }


def count_functional(ranks: Ranks) -> list[tuple[str, int]]:
    x = torch.arange(6.0).reshape(6, 1).requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    with CollectiveCounter() as counter:
        functional.all_reduce(x.detach(), "sum", group)
        functional.broadcast(x.detach(), 0, group)
        gathered = functional.all_gather_tensor_autograd(x, 0, group)
        scattered = functional.reduce_scatter_tensor_autograd(gathered, "sum", 0, group)
        swapped = functional.all_to_all_single_autograd(scattered, [3, 3], [3, 3], group)
        swapped.sum().backward()
    return [(call.kind, call.payload_bytes) for call in counter.calls]


def count_plain(ranks: Ranks) -> list[tuple[str, int, int]]:
    x, parts = torch.ones(4), [torch.ones(2), torch.ones(2)]
    other, alone = 1 - ranks.rank, dist.new_group([0])
    mine = ranks.rank == 0
    with CollectiveCounter() as counter:
        dist.all_gather([torch.empty(4), torch.empty(4)], x)
        dist.reduce_scatter(torch.empty(2), parts)
        dist.all_to_all_single(torch.empty(4), x)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.gather(x, [torch.empty(4), torch.empty(4)] if mine else None)
        dist.scatter(torch.empty(2), parts if mine else None)
        dist.barrier()
        if mine:
            dist.all_reduce(x, group=alone)
        sent = dist.isend(x, other) if mine else dist.irecv(x, other)
        assert sent is not None
        sent.wait()
        operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(4), other)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    dist.all_reduce(x)  # after: not counted
    return [(call.kind, call.payload_bytes, call.num_ranks) for call in counter.calls]


def count_marked(ranks: Ranks) -> dict[str, list[tuple[str, bool]]]:
    """Return kind and mark of what activations move by themselves, and of what DDP sends around a layer."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(2, 4, requires_grad=True)
    found = {}
    for move in (gather_from_ranks, exchange_with_ranks, sum_over_group):
        with CollectiveCounter() as counter:
            move(x, group).sum().backward()
        found[move.__name__] = [(call.kind, call.of_activations) for call in counter.calls]
    model = DistributedDataParallel(Stack())
    with CollectiveCounter() as counter:
        model(sum_over_group(torch.ones(2, WIDTH), group)).backward()
    return found | {"ddp": [(call.kind, call.of_activations) for call in counter.calls]}


def check_counting(ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {
        "strategies": count_strategies(ranks),
        "tensor parallel": count_tensor_parallel(ranks),
        "functional": count_functional(ranks),
        "plain": count_plain(ranks),
        "marked": count_marked(ranks),
    }
    # A hook whose second all-reduce is called when the first has arrived, on a thread of gloo.
    model = DistributedDataParallel(Stack())

    def hook(state: None, bucket: dist.GradBucket):
        first = dist.all_reduce(bucket.buffer(), async_op=True)
        assert first is not None

        def again(future: torch.futures.Future) -> Tensor:
            dist.all_reduce(torch.ones(5))
            return future.value()[0]

        return first.get_future().then(again)

    hook.__annotations__.clear()  # DDP compares them with types, and these are texts
    model.register_comm_hook(None, hook)
    x = torch.ones(2, WIDTH)
    model(x).backward()
    model(x).backward()
    found["hook"] = [counted(lambda: model(x).backward())["counts"] for _ in range(5)]
    return found


def check_links(ranks: Ranks) -> dict[str, Any]:
    fits = links.measure_links(ranks, sizes=SIZES, num_repeats=5)
    both = cast(dist.ProcessGroup, dist.new_group([0, 1]))
    pair = links.measure_links(ranks, ["all-reduce"], [1, 8192], num_repeats=2, group=both)
    return {
        "fits": {
            kind: {
                "samples": [(sample.payload_bytes, sample.seconds) for sample in fit.samples],
                "latency_s": fit.link.latency_s,
                "bytes_per_s": fit.link.bytes_per_s,
                "residual_fraction": fit.residual_fraction,
                "predicted_s": fit.predict_s(SIZES[-1]),
                "text": str(fit),
            }
            for kind, fit in fits.items()
        },
        "pair": [sample.payload_bytes for sample in pair["all-reduce"].samples],
    }


def check_overlap(ranks: Ranks) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {}
    x = torch.ones(128, 512)
    model = DistributedDataParallel(Stack(512, 8), bucket_cap_mb=1, gradient_as_bucket_view=True)

    def in_backward() -> None:
        model(x).backward()

    def after_backward() -> None:
        with model.no_sync():
            model(x).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    for name, step in {"in backward": in_backward, "after backward": after_backward}.items():
        step()
        step()
        traces = [overlap.trace_step(step, ranks.device) for _ in range(3)]
        found[name] = [
            {
                "fraction": trace.overlapped_fraction,
                "communication_s": trace.communication_s,
                "seconds": trace.seconds,
                "compute": trace.compute,
                "communication": [(part.name, part.start_s, part.end_s) for part in trace.communication],
            }
            for trace in traces
        ]
    return found


TEXT_ONLY_STEP = compression.FIRST_POWERSGD_STEP
"""A step in which no rank has a picture: the vision tower has gradients of 0, and no error of an earlier step yet."""


def train(kind: str, ranks: Ranks, num_steps: int = 8, **settings: int) -> dict[str, Any]:
    """Train the small model with compressed gradients; return its losses and what was sent in the last step."""
    config = parity_config("ddp", 1, ranks.world_size, "all towers")
    trainer = build_trainer(config, ranks, seed=0)
    if kind != "none":
        compression.compress_gradients(trainer.model, kind, **settings)
    load_step: Callable[[int], list[Batch]] = trainer.load_step

    def load_some_text(step: int) -> list[Batch]:
        if step != TEXT_ONLY_STEP:
            return load_step(step)
        turns = (Message("user", "what is it?"), Message("assistant", "seven " * (ranks.rank + 1)))
        return [trainer.collator([Sample(f"text-{i}", (), turns) for i in range(4)])]

    trainer.load_step = load_some_text  # type: ignore[method-assign]
    named = unwrap(trainer.model).named_parameters()
    vision = [p for name, p in named if name.startswith("vision.blocks") and p.dim() == 2]
    losses, with_gradient = [], []
    for _ in range(num_steps):
        with CollectiveCounter() as counter:
            losses.append(trainer.train_step().loss)
        with_gradient.append(sum(p.grad is not None and bool(p.grad.any()) for p in vision))
    check_equal_weights(unwrap(trainer.model), ranks)
    return {
        "losses": losses,
        "sent": [call.payload_bytes for call in counter.calls if call.kind == "all-reduce"],
        "vision matrices with a gradient": with_gradient,
        "num_params": sum(p.numel() for p in trainer.model.parameters()),
    }


def average_gradient(kind: str, ranks: Ranks, num_steps: int = 120) -> float:
    """Return how far the mean of the exchanged gradients is from the true one, which is the same in every step."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(2, 24, 40, generator=generator)
    layer = nn.Linear(40, 24, bias=False)
    model = DistributedDataParallel(layer)
    compression.compress_gradients(model, kind)
    total = torch.zeros_like(both[0])
    for step in range(num_steps):
        layer.weight.grad = None
        # The gradient of each output's weights is the input: one output at a time, all of this rank's matrix.
        (model(torch.eye(40)).T * both[ranks.rank]).sum().backward()
        if step >= compression.FIRST_POWERSGD_STEP:  # the steps before are exact
            assert layer.weight.grad is not None
            total += layer.weight.grad
    mean, true = total / (num_steps - compression.FIRST_POWERSGD_STEP), both.mean(0)
    return float((mean - true).norm() / true.norm())


def order_of_buckets(ranks: Ranks) -> list[list[int]]:
    """Return the payloads of each rank's all-reduces in a step of several buckets, where rank 1 is slow to compute."""
    torch.manual_seed(0)
    stack = Stack(width=256, num_blocks=10)
    model = DistributedDataParallel(stack, bucket_cap_mb=0.6)  # of 256 kB a matrix
    compression.compress_gradients(model, "powersgd", powersgd_rank=2)
    if ranks.rank == 1:
        for block in stack.blocks:
            block.register_full_backward_hook(lambda *_: time.sleep(0.02))
    for _ in range(compression.FIRST_POWERSGD_STEP + 3):
        with CollectiveCounter() as counter:
            model(torch.ones(4, 256)).backward()
    found: list[list[int]] = [[], []]
    dist.all_gather_object(found, [call.payload_bytes for call in counter.calls])
    return found


def check_compression(ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {kind: train(kind, ranks) for kind in ("none", *compression.COMPRESSIONS)}

    def message_of(model: nn.Module, kind: str, **settings: int) -> str:
        try:
            compression.compress_gradients(model, kind, **settings)
        except ValueError as error:
            return str(error)
        return "accepted"

    found["order of buckets"] = order_of_buckets(ranks)
    found["mean gradient is off by"] = {kind: average_gradient(kind, ranks) for kind in compression.COMPRESSIONS}
    ddp = apply_strategy(Stack(), ParallelConfig(strategy="ddp"), ranks)
    fsdp = apply_strategy(Stack(), ParallelConfig(strategy="fsdp"), ranks)
    found["refusals"] = {
        "fsdp": message_of(fsdp, "bf16"),
        "plain": message_of(Stack(), "bf16"),
        "unknown": message_of(ddp, "bf61"),
        "quantized": message_of(ddp, "quantize_per_tensor"),
        "powersgd start": message_of(ddp, "powersgd", powersgd_start_step=1),
        "first": message_of(ddp, "bf16"),
        "second": message_of(ddp, "fp16"),
    }
    return found


def main(folder: Path) -> None:
    """Write what this rank found to `found<rank>.json`."""
    ranks = init_ranks(timeout_s=60)
    found = {
        "counting": check_counting(ranks),
        "links": check_links(ranks),
        "overlap": check_overlap(ranks),
        "compression": check_compression(ranks),
    }
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
