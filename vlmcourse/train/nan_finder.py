"""Find where a loss or a gradient stopped being a number: the first module and operation, and the samples behind it.

Enters: a model and the micro-batch of a step that failed. Leaves: a `NonFinite`, or None where all is well. It looks in
the order in which numbers flow: what goes in, weights, every operation of forward, loss and backward. Then each sample
runs alone, to find out whose fault it is. It costs as many forward and backward passes as there are samples, so run it
when something is wrong, not in every step. Chapter 3.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from vlmcourse.data.samples import IGNORE_LABEL, Batch
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.monitor.op_dtypes import SHORT, innermost
from vlmcourse.parallel.apply import unwrap
from vlmcourse.parallel.context import without_context
from vlmcourse.parallel.gather import gather_plain_state
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.sync import is_engine
from vlmcourse.train.accumulate import micro_batch_loss_sum, sum_weights
from vlmcourse.train.loss import check_loss
from vlmcourse.train.optimizer import freeze_towers
from vlmcourse.train.precision import prepare_weights

if TYPE_CHECKING:
    from vlmcourse.train.trainer import Trainer

LossOf = Callable[[nn.Module, Batch], Tensor]
"""Model and micro-batch to the scalar that backward starts from."""
HARMLESS = ("empty", "masked_fill", "full", "where", "scalar_tensor", "fill", "new_full", "zeros", "ones")
"""Operations that write an infinity because they were told to (masks), or memory that nobody has written to yet."""


@dataclass(frozen=True)
class NonFinite:
    """The first place where a number was lost."""

    phase: str
    """input, weights, forward, loss or backward."""
    module: str
    """Path of the module, the name of the weight, or the field of the batch; empty in a loss outside of all modules. In
    a backward outside of all, such as that of a cast of the logits: the module that the gradient is on its way to."""
    op: str
    """The operation, such as "mm" or "log"; empty for inputs and weights."""
    what: str
    """What was seen, with its format."""
    samples: tuple[str, ...]
    """Ids of the samples with which alone it happens too; empty where no sample does it alone."""
    num_samples: int
    """Samples of the micro-batch."""

    def __str__(self) -> str:
        """Say it in one sentence."""
        where = f" in {self.module}" if self.module else ""
        operation = f", operation {self.op}" if self.op else ""
        if len(self.samples) == self.num_samples:
            whose = f"with every one of {self.num_samples} samples"
        elif self.samples:
            whose = f"with {', '.join(self.samples[:4])}" + " and more" * (len(self.samples) > 4)
        else:
            whose = "only with the samples together"
        return f"{self.phase}{where}{operation}: {self.what}, {whose}"


def find_nonfinite(
    model: nn.Module, batch: Batch, precision: str = "fp32", *, loss_scale: float = 1.0, loss_of: LossOf | None = None
) -> NonFinite | None:
    """Find the first operation that makes an infinity or NaN out of finite numbers.

    Args:
        model: a plain model, or one in DDP, on the device of `batch`; its gradients stay as they are.
        batch: one micro-batch.
        precision: one of `config.PRECISIONS`.
        loss_scale: what the loss is multiplied by before backward, as a `LossScaler` does it.
        loss_of: the loss to look into; by default the course's sum over supervised tokens.

    Returns:
        Where it happens, or None if loss and all gradients are finite.

    Raises:
        ValueError: if the model or its sequences are distributed in pieces (`find_in_step` is for those), no weight is
            trained, or backward cannot start from what `loss_of` returns.
    """
    plain = unwrap(model)
    if _is_in_pieces(plain):
        raise ValueError("this model is stored in pieces, which no rank can run alone: use find_in_step(trainer)")
    if isinstance(plain, VLM) and plain.language.take_part is not None:
        raise ValueError("each rank has a part of each sequence (cp above 1), so none can run alone: use find_in_step")
    found = _look_at_inputs(plain, batch) or _look_at_weights(plain, batch)
    if found is not None:
        return found
    trained = [p for p in plain.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(f"{type(plain).__name__} has 0 trained parameters: backward needs 1 or more; thaw some")

    def run(part: Batch) -> _Watch:
        watch = _Watch()
        with watch:
            loss = micro_batch_loss_sum(plain, part, precision) if loss_of is None else check_loss(loss_of(plain, part))
            # Not backward(): the wrapper of DDP would see it and wait for the other ranks.
            gradients = torch.autograd.grad(loss * loss_scale, trained, allow_unused=True)
            watch.failed = not all(bool(torch.isfinite(t).all()) for t in (loss, *gradients) if t is not None)
        return watch

    watch = run(batch)
    if not watch.failed:
        return None
    alone = [run(take_sample(batch, row)).failed for row in range(len(batch.sample_ids))]
    guilty = tuple(name for name, failed in zip(batch.sample_ids, alone, strict=True) if failed)
    phase, module, op, what = watch.first or ("loss", "", "", "not finite, though every operation was")
    return NonFinite(phase, module, op, what, guilty, len(batch.sample_ids))


class _Watch(TorchDispatchMode):
    """Remembers the first operation with finite inputs and an output that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first: tuple[str, str, str, str] | None = None
        self.failed = False
        self._modules = ModuleTracker()
        self._made_by: dict[Any, str] = {}
        """Path of the innermost module that returned a tensor, by the tensor's node in the graph of autograd."""

    def __enter__(self) -> _Watch:
        # Before the tracker enters: its own hook takes the module off the list of those that run.
        self._hook = register_module_forward_hook(self._remember)
        self._modules.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.__exit__(*error)
        self._hook.remove()
        self._made_by.clear()

    def _remember(self, module: nn.Module, inputs: Any, output: Any) -> None:
        path = innermost(self._modules)
        for tensor in tree_leaves(output):
            if path and isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self._made_by.setdefault(tensor.grad_fn, path)

    def _nearest(self, node: Any) -> str:
        """Return the module whose result is nearest to a node, on the way that gradients take; "" if there is none."""
        queue, seen = deque([node]), set()
        while queue:
            if (node := queue.popleft()) in self._made_by:
                return self._made_by[node]
            if node not in seen:
                seen.add(node)
                queue.extend(after for after, _ in node.next_functions if after is not None)
        return ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what comes out."""
        before = _first_bad((args, kwargs)) if self.first is None else None
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.first is None and before is None and not name.strip("_").startswith(HARMLESS):
            bad = _first_bad(out)
            if bad is not None:
                node = torch._C._current_autograd_node()  # None outside of backward
                module = innermost(self._modules)
                phase = "forward" if module else "loss"
                if node is not None:
                    phase, module = "backward", module or self._nearest(node)
                kind = "nan" if bool(torch.isnan(bad).any()) else "inf"
                largest = max(
                    (float(t.detach().abs().amax()) for t in _floats((args, kwargs)) if t.numel()), default=0.0
                )
                self.first = phase, module, name, f"{kind} in {SHORT[bad.dtype]} from numbers up to {largest:.3g}"
        return out


def _first_bad(tree: Any) -> Tensor | None:
    """Return the first floating-point tensor that is not finite."""
    return next((leaf for leaf in _floats(tree) if not bool(torch.isfinite(leaf).all())), None)


def _floats(tree: Any) -> list[Tensor]:
    """Return the tensors of floating-point numbers; those of 8 bits were made from others that count."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]
    return [leaf for leaf in leaves if leaf.dtype in SHORT and leaf.itemsize > 1]


def _look_at_inputs(model: nn.Module, batch: Batch) -> NonFinite | None:
    """Find a pixel that is no number, or an id or label that the vocabulary does not have."""
    rows, tiles = len(batch.sample_ids), batch.tiles_per_sample
    owner = [row for row, number in enumerate(tiles) for _ in range(number)]
    bad_tiles = (~torch.isfinite(batch.pixel_values_ICHW)).flatten(1).any(dim=1).nonzero().flatten().tolist()
    if bad_tiles:
        guilty = tuple(dict.fromkeys(batch.sample_ids[owner[tile]] for tile in bad_tiles))
        return NonFinite("input", "pixel_values", "", "a pixel is not finite", guilty, rows)
    if not isinstance(model, VLM):
        return None
    vocab_size = model.shape.language.vocab_size
    for field, ids_BS in (("input_ids", batch.input_ids_BS), ("labels", batch.labels_BS)):
        allowed = (ids_BS >= 0) & (ids_BS < vocab_size)
        wrong_BS = ~(allowed | (ids_BS == IGNORE_LABEL)) if field == "labels" else ~allowed
        if bool(wrong_BS.any()):
            row, position = (int(i) for i in wrong_BS.nonzero()[0])
            value = int(ids_BS[row, position])
            what = f"{value} at position {position} is not in a vocabulary of {vocab_size}"
            guilty = tuple(batch.sample_ids[i] for i in wrong_BS.any(dim=1).nonzero().flatten().tolist())
            return NonFinite("input", field, "", what, guilty, rows)
    return None


def _look_at_weights(model: nn.Module, batch: Batch) -> NonFinite | None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            what = "a weight is not finite before the step begins: an earlier update broke it"
            return NonFinite("weights", name, "", what, batch.sample_ids, len(batch.sample_ids))
    return None


def take_sample(batch: Batch, row: int) -> Batch:
    """Return the micro-batch of one sample of another, padding included."""
    first = sum(batch.tiles_per_sample[:row])
    number = batch.tiles_per_sample[row]
    return dataclasses.replace(
        batch,
        input_ids_BS=batch.input_ids_BS[row : row + 1],
        labels_BS=batch.labels_BS[row : row + 1],
        attention_mask_BS=batch.attention_mask_BS[row : row + 1],
        pixel_values_ICHW=batch.pixel_values_ICHW[first : first + number],
        tiles_per_sample=(number,),
        sample_ids=(batch.sample_ids[row],),
    )


def find_in_step(trainer: Trainer) -> list[str]:
    """Look into the present step of a trainer, under any strategy; all ranks must call this.

    Where weights are in pieces, every rank first gathers a whole copy of them, so this is for models that fit. Under
    context parallelism every rank looks at whole sequences. So all forward passes are a rank's own: ranks need not
    agree on how many to make.

    Args:
        trainer: as it was when the step failed.

    Returns:
        One sentence for each rank that found something, beginning with its number; the same list on every rank.
    Communicates: an all-gather of the weights where they are in pieces, a sum of 8 bytes, and an all-gather of the
        sentences.
    """
    ranks, train = trainer.ranks, trainer.config.train
    model = unwrap(trainer.model)
    alone: AbstractContextManager[object] = nullcontext()
    if is_engine(trainer.model) or _is_in_pieces(model):  # an engine's hooks would exchange what is found here
        model = _copy_whole(trainer)
    elif isinstance(model, VLM) and model.language.take_part is not None:
        alone = without_context(model)
    said, batches = "", trainer.load_step(trainer.step)
    weights = sum_weights(batches, ranks, trainer.place.layout, train.loss_weighting)
    loss_scale = trainer.scaler.scale / (weights or 1.0)
    loss_of = partial(micro_batch_loss_sum, precision=train.precision, weighting=train.loss_weighting)
    with alone:
        for number, batch in enumerate(batches):
            found = find_nonfinite(
                model, batch.to(ranks.device), train.precision, loss_scale=loss_scale, loss_of=loss_of
            )
            if found is not None:
                said = f"rank {ranks.rank}, step {trainer.step}, micro-batch {number}: {found}"
                break
    everyone: list[Any] = [said]
    if ranks.world_size > 1:
        everyone = [None] * ranks.world_size
        dist.all_gather_object(everyone, said)
    return [sentence for sentence in everyone if sentence]


def _is_in_pieces(model: nn.Module) -> bool:
    return isinstance(model, PipelinedModel) or any(isinstance(p, DTensor) for p in model.parameters())


def _copy_whole(trainer: Trainer) -> VLM:
    """Build a plain model with the weights, formats and frozen towers of a trainer's; all ranks must call this."""
    config, device = trainer.config, trainer.ranks.device
    state = gather_plain_state(trainer.model, trainer.shape)
    model = build_model(trainer.shape, device="cpu", seed=config.run.seed)
    freeze_towers(model, config.model.freeze)
    prepare_weights(model, config, device)
    model.load_state_dict(state)
    return model.to(device)
