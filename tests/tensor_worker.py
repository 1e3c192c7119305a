"""Trains every split variant of the tensor-parallel tests, and every planted bug, on the ranks it is started on.

Usage: tensor_worker.py FOLDER, on 2 ranks (one `tp` axis) or on 4 (`tp` of 4, and FSDP2 x `tp` of 2 x 2). Each rank
writes what it saw to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parity import Recording
from tensor_cases import CASES, QK_NORM, WEIGHT_SEED, Case, build_case, load_batches, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import RowwiseParallel

from vlmcourse.models.generate import generate
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel import padding, tensor, tensor_styles, vocabulary
from vlmcourse.parallel.comm import gather_full
from vlmcourse.parallel.fsdp import find_units
from vlmcourse.parallel.gather import gather_plain_state
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks
from vlmcourse.parallel.tensor import apply_tensor, check_tensor, describe_tensor_plan
from vlmcourse.parallel.tensor_styles import Branch, SplitSequence
from vlmcourse.train.loss import token_loss_sum


def split(case: Case, mesh: DeviceMesh) -> VLM:
    """Build the model of a case from other weights on each rank of the axis, and split it."""
    return apply_tensor(build_case(case, WEIGHT_SEED + mesh.get_local_rank()), mesh, **case.plan)


def run(case: Case, mesh: DeviceMesh, num_steps: int = 3) -> tuple[Recording, dict[str, Any]]:
    """Train a case on one axis; also return what padding held at the end, and the plan."""
    model = split(case, mesh)
    recording = train(
        model, case, lambda gradients: gather_plain_state(model, model.shape, gradients=gradients), num_steps=num_steps
    )
    check_tensor(model, **case.plan)
    return recording, {"padding": size_of_padding(model), "plan": describe_tensor_plan(model)}


def run_fsdp(case: Case, mesh: DeviceMesh) -> tuple[Recording, dict[str, Any]]:
    """Train a case on FSDP2 x tensor parallelism; each rank of `dp_shard` has its own half of the samples."""
    dp_rank, dp_mesh = mesh["dp_shard"].get_local_rank(), mesh["dp_shard"]
    model = split(case, mesh["tp"])
    for unit in find_units(model):
        fully_shard(unit, mesh=dp_mesh)
    fully_shard(model, mesh=dp_mesh)
    check_tensor(model, **case.plan)
    rows = slice(2 * dp_rank, 2 * dp_rank + 2)
    recording = train(
        model,
        case,
        lambda gradients: gather_plain_state(model, model.shape, gradients=gradients),
        rows=rows,
        num_parts=2,
    )
    losses = torch.tensor(recording.losses, dtype=torch.float64)
    dist.all_reduce(losses, group=dp_mesh.get_group())
    recording.losses = losses.tolist()
    return recording, {"padding": size_of_padding(model), "plan": describe_tensor_plan(model)}


def size_of_padding(model: VLM) -> dict[str, tuple[float, float]]:
    """Return the largest weight and gradient inside the zeros that were added, by parameter."""
    sizes, found = padding.plain_sizes(model.shape), {}
    for name, parameter in model.named_parameters():
        if parameter.shape != sizes[name]:
            inside = tuple(slice(0, length) for length in sizes[name])
            largest = []
            for whole in (
                gather_full(parameter),
                gather_full(parameter.grad if parameter.grad is not None else parameter),
            ):
                whole[inside] = 0
                largest.append(whole.abs().max().item())
            found[name] = (largest[0], largest[1])
    return found


@contextlib.contextmanager
def bias_on_every_rank() -> Iterator[None]:
    """Each rank adds the whole bias of the projector's row layer to its part of the sum."""

    class EveryRank(RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, mesh: Any) -> Any:
            outputs = outputs.redistribute(placements=output_layouts).to_local()
            return outputs + (mesh.size() - 1) * mod.bias.to_local()

    real = tensor.plan_styles
    with mock.patch.object(tensor, "plan_styles", lambda *args: real(*args) | {"projector.down_proj": EveryRank()}):
        yield


@contextlib.contextmanager
def norm_of_the_local_width() -> Iterator[None]:
    """Queries and keys are normalised over this rank's heads only."""
    with mock.patch.object(tensor_styles.SumOverRanks, "apply", staticmethod(lambda part, group: 2 * part)):
        yield


@contextlib.contextmanager
def norm_without_exchange_backward() -> Iterator[None]:
    """The gradient of the sum of squares stays on its rank."""
    with mock.patch.object(tensor_styles.SumOverRanks, "backward", staticmethod(lambda ctx, grad: (grad, None))):
        yield


@contextlib.contextmanager
def no_sum_after_rows() -> Iterator[None]:
    """A branch returns its rank's partial sum."""

    def apply(self: Branch, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:])

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda _, args, y: y.to_local())
        return module

    with mock.patch.object(Branch, "_apply", apply):
        yield


@contextlib.contextmanager
def gradient_of_the_part_only() -> Iterator[None]:
    """The sequence is cut by a plain slice, so that what comes before gets the gradient of this rank's part only."""

    def apply(self: SplitSequence, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0].chunk(mesh.size(), dim=1)[mesh.get_local_rank()], *args[1:])

        module.register_forward_pre_hook(enter)
        return module

    with mock.patch.object(SplitSequence, "_apply", apply):
        yield


@contextlib.contextmanager
def parts_in_the_wrong_order() -> Iterator[None]:
    """Rank 0 takes the last part of the sequence and rank 1 the first."""

    def apply(self: SplitSequence, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x_BSD, *others = args
            whole_BSD = DTensor.from_local(x_BSD.roll(x_BSD.shape[1] // 2, dims=1), mesh, [Replicate()])
            return (whole_BSD.redistribute(placements=[self.layout.placement]).to_local(), *others)

        module.register_forward_pre_hook(enter)
        return module

    with mock.patch.object(SplitSequence, "_apply", apply):
        yield


@contextlib.contextmanager
def norm_gradients_not_summed() -> Iterator[None]:
    """The weight of a norm gets the gradient of its rank's positions only."""
    real = tensor_styles._local
    with mock.patch.object(tensor_styles, "_local", lambda weight, summed: real(weight, False)):
        yield


@contextlib.contextmanager
def loss_of_the_local_vocabulary() -> Iterator[None]:
    """The sums of the softmax stay on their rank."""

    def only_max(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.MAX:
            dist.all_reduce(tensor, op=op, group=group)

    with mock.patch.object(vocabulary, "dist", SimpleNamespace(all_reduce=only_max, ReduceOp=dist.ReduceOp)):
        yield


@contextlib.contextmanager
def loss_counted_by_every_rank() -> Iterator[None]:
    """Each rank's gradient is that of the sum of all ranks' losses."""
    real = vocabulary.vocabulary_losses

    def twice(*args: Any) -> Tensor:
        loss = real(*args)
        return 2 * loss - loss.detach()

    with mock.patch("vlmcourse.train.loss.vocabulary_losses", twice):
        yield


@contextlib.contextmanager
def vocabulary_in_the_wrong_order() -> Iterator[None]:
    """Rank 0 looks for its labels among the last rows of the vocabulary."""
    real = vocabulary._first_row
    with mock.patch.object(vocabulary, "_first_row", lambda logits: logits.shape[-1] // 2 - real(logits)):
        yield


@contextlib.contextmanager
def weights_not_shared() -> Iterator[None]:
    """Each rank keeps its own part of its own weights."""
    real = tensor.parallelize_module
    own = mock.patch.object(
        tensor, "parallelize_module", lambda model, mesh, plan: real(model, mesh, plan, src_data_rank=None)
    )
    with own:
        yield


@contextlib.contextmanager
def heads_of_noise() -> Iterator[None]:
    """Heads are added with weights that are not zero."""
    real = torch.Tensor.new_zeros
    with mock.patch.object(torch.Tensor, "new_zeros", lambda self, size: real(self, size).fill_(0.1)):
        yield


@contextlib.contextmanager
def padding_in_the_softmax() -> Iterator[None]:
    """Logits of padded rows are 0, not minus infinity."""
    with mock.patch.object(vocabulary, "hide_padding", lambda logits, vocab_size: logits):
        yield


@contextlib.contextmanager
def mlp_not_split() -> Iterator[None]:
    """The plan leaves the MLPs whole on every rank."""
    real = tensor.plan_styles

    def plan_without(*args: Any) -> Any:
        plan = real(*args)
        return {
            name: tensor_styles.Replicated() if name.endswith(("mlp.up_proj", "mlp.down_proj")) else style
            for name, style in plan.items()
            if not name.endswith("mlp")
        }

    with mock.patch.object(tensor, "plan_styles", plan_without):
        yield


@contextlib.contextmanager
def smallest_logit_subtracted() -> Iterator[None]:
    """The softmax is shifted by the smallest of the ranks' largest logits, not by the largest."""

    def other(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN if op == dist.ReduceOp.MAX else op, group=group)

    with mock.patch.object(vocabulary, "dist", SimpleNamespace(all_reduce=other, ReduceOp=dist.ReduceOp)):
        yield


def far_logits() -> tuple[Tensor, Tensor]:
    """Return logits [1, 4, 8] whose halves are 400 apart, and labels on either side."""
    logits_BSV = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    logits_BSV[:, ::2] += torch.tensor(200.0).repeat(8).where(torch.arange(8) < 4, -200.0)
    logits_BSV[:, 1::2] += torch.tensor(-200.0).repeat(8).where(torch.arange(8) < 4, 200.0)
    return logits_BSV, torch.tensor([[1, 2, 6, 7]])


def far_loss(mesh: DeviceMesh) -> tuple[float, Tensor]:
    """Return the split loss of `far_logits` and this rank's part of its gradient."""
    logits_BSV, labels_BS = far_logits()
    part_BSV = logits_BSV.chunk(2, dim=-1)[mesh.get_local_rank()].clone().requires_grad_()
    loss = token_loss_sum(DTensor.from_local(part_BSV, mesh, [Shard(2)]), labels_BS)
    loss.backward()
    assert part_BSV.grad is not None
    return loss.item(), part_BSV.grad


def far_losses(mesh: DeviceMesh) -> dict[str, tuple[float, Tensor]]:
    """Compute the loss of `far_logits` as it is, and with a bug."""
    with smallest_logit_subtracted():
        planted = far_loss(mesh)
    return {"real": far_loss(mesh), "smallest logit subtracted": planted}


BUGS: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "row bias added by every rank": ("split", bias_on_every_rank),
    "norm over the local width": ("split, norms of queries and keys", norm_of_the_local_width),
    "norm without exchange backward": ("split, norms of queries and keys", norm_without_exchange_backward),
    "no sum after the row layer": ("split, whole sequence", no_sum_after_rows),
    "sequence cut without gathering its gradient": ("split", gradient_of_the_part_only),
    "parts of the sequence in the wrong order": ("split", parts_in_the_wrong_order),
    "gradients of norms not summed": ("split", norm_gradients_not_summed),
    "loss of the local vocabulary": ("split", loss_of_the_local_vocabulary),
    "loss counted by every rank": ("split", loss_counted_by_every_rank),
    "vocabulary in the wrong order": ("split", vocabulary_in_the_wrong_order),
    "weights not shared": ("split", weights_not_shared),
    "added heads are not zero": ("pad_heads, 3 heads, norms", heads_of_noise),
    "padding takes part in the softmax": ("padded vocabulary, tied", padding_in_the_softmax),
    "MLP not split": ("split", mlp_not_split),
}


def run_bug(name: str, mesh: DeviceMesh) -> Recording | str:
    """Train with a bug; return what happened, or what was refused."""
    case, plant = BUGS[name]
    with plant():
        try:
            return run(CASES[case], mesh, num_steps=1)[0]
        except RuntimeError as error:
            return str(error)


def refusal(action: Callable[[], Any]) -> str:
    """Return the error of an action that must be refused before anything is sent."""
    with CommDebugMode() as sent:
        try:
            action()
        except ValueError as error:
            return f"{error} [{sent.get_total_counts()} collectives]"
    return "it ran"


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """Return what is said to models and batches that cannot be split."""
    batch = load_batches()[0]
    model = split(CASES["split"], mesh)
    ids = batch.input_ids_BS[:, :33]
    return {
        "3 vision heads": refusal(lambda: split(Case(vision={"num_heads": 3}), mesh)),
        "1 key/value head": refusal(lambda: split(Case(language={"num_kv_heads": 1}), mesh)),
        "odd widths": refusal(lambda: split(Case(vision={"mlp_size": 31}, language={"mlp_size": 45}), mesh)),
        "no such plan": refusal(lambda: split(Case({"vision": "half"}), mesh)),
        "33 positions": refusal(lambda: model(ids, batch.pixel_values_ICHW)),
    }


def generate_ids(name: str, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Answer two prompts with the plain and the split model of a case."""
    case = CASES[name]
    batch = load_batches()[0]
    ids_BS, tiles = batch.input_ids_BS[:2, :25], batch.tiles_per_sample
    ids_BS = ids_BS.where(ids_BS != build_case(case).shape.image_token_id, 5)
    mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    mask_BS[1, :7] = False
    answers = {}
    for kind, model in (("plain", build_case(case)), ("split", split(case, mesh))):
        model.eval()
        answers[kind] = generate(model, ids_BS, None, mask_BS, max_new_tokens=6, eos_token_id=-1)
        with torch.no_grad():
            answers[f"{kind} logits"] = model(ids_BS, None, mask_BS, last_only=True)
    assert tiles
    return answers


def count_collectives(case: Case, mesh: DeviceMesh) -> dict[str, int]:
    """Return how many collectives one step makes, by kind."""
    model, batch = split(case, mesh), load_batches()[0]
    with CommDebugMode() as sent:
        logits = model(batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS)
        token_loss_sum(logits, batch.labels_BS).backward()
    counts: dict[str, int] = {}
    for op, count in sent.get_comm_counts().items():
        kind = str(op).rpartition(".")[2].replace("_", "")  # all_reduce and allreduce_ are the same
        counts[kind] = counts.get(kind, 0) + count
    return counts


def on_two_ranks() -> dict[str, Any]:
    """Run every case and bug on one axis of two."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return {
        "runs": {name: run(CASES[name], mesh) for name in ON_TWO},
        "bugs": {name: run_bug(name, mesh) for name in BUGS},
        "far losses": far_losses(mesh),
        "refusals": refusals(mesh),
        "generated": {name: generate_ids(name, mesh) for name in ("split", "padded vocabulary, tied")},
        "collectives": {name: count_collectives(CASES[name], mesh) for name in ("split", "split, whole sequence")},
    }


ON_TWO = [name for name in CASES if "FSDP" not in name]
FOUR = {
    "tp=4, norms, padded heads": Case(
        {"vision": "pad_heads"}, {"num_heads": 3, **QK_NORM}, {"num_kv_heads": 4, "vocab_size": 257}
    ),
}
TWO_BY_TWO = (
    "split, whole sequence",
    "pad_heads, 3 heads, norms",
    "padded vocabulary, tied",
    "vision frozen",
    "shards of unequal size under FSDP",
)


def on_four_ranks() -> dict[str, Any]:
    """Run `tp` of 4, and FSDP2 x `tp` of 2 x 2."""
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    runs = {name: run(case, line) for name, case in FOUR.items()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fsdp = {name: run_fsdp(CASES[name], square) for name in TWO_BY_TWO}
    return {"runs": runs, "fsdp": fsdp, "warnings": [str(warning.message) for warning in warned]}


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    seen = on_two_ranks() if ranks.world_size == 2 else on_four_ranks()
    torch.save(seen, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
