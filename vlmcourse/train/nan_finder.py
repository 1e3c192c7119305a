"""Find where a loss or a gradient stopped being a number: the first module and operation, and the samples behind it.

Enters: a model and the micro-batch of a step that failed. Leaves: a `NonFinite`, or None where all is well. It looks in
the order in which numbers flow: what goes in, weights, every operation of forward, loss and backward. Then each sample
runs alone, to find out whose fault it is. It costs as many forward and backward passes as there are samples, so run it
when something is wrong, not in every step. Chapter 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmcourse.data.samples import IGNORE_LABEL, Batch
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.parallel.apply import unwrap
from vlmcourse.parallel.context import without_context
from vlmcourse.parallel.gather import gather_plain_state
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.sync import is_engine
from vlmcourse.train.accumulate import micro_batch_loss_sum, sum_weights
from vlmcourse.train.loss import check_loss
from vlmcourse.train.nan_watch import NonFiniteWatch
from vlmcourse.train.optimizer import freeze_towers
from vlmcourse.train.precision import prepare_weights

if TYPE_CHECKING:
    from vlmcourse.train.trainer import Trainer

LossOf = Callable[[nn.Module, Batch], Tensor]
"""Model and micro-batch to the scalar that backward starts from."""


@dataclass(frozen=True)
class NonFinite:
    """The first place where a number was lost."""

    phase: str
    """input, weights, forward, loss or backward."""
    module: str
    """Path of the module, the name of the weight, or the field of the batch; empty in a loss outside of all modules. In
    a backward outside of all, such as that of a cast of the logits: the module that the gradient is on its way to."""
    op: str
    """The operation, such as "mm" or "log"; empty for inputs and weights, and where no operation was seen to do it."""
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
    """Find the first operation that makes an infinity or NaN out of numbers that were none.

    Infinities that masks write on purpose are numbers here: a row of attention scores that are all -inf is found in the
    softmax that makes NaN of it.

    Args:
        model: a plain model, or one in DDP, on the device of `batch`; its gradients stay as they are.
        batch: one micro-batch.
        precision: one of `precision_rules.PRECISIONS`.
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
    trained = {f"the gradient of {name}": p for name, p in plain.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(plain).__name__} has 0 trained parameters: backward needs 1 or more; thaw some")

    def run(part: Batch) -> NonFiniteWatch:
        watch = NonFiniteWatch()
        with watch:
            loss = micro_batch_loss_sum(plain, part, precision) if loss_of is None else check_loss(loss_of(plain, part))
            # Not backward(): the wrapper of DDP would see it and wait for the other ranks.
            gradients = torch.autograd.grad(loss * loss_scale, list(trained.values()), allow_unused=True)
            ends = zip(("the loss", *trained), (loss, *gradients), strict=True)
            watch.failed = [name for name, t in ends if t is not None and not bool(torch.isfinite(t).all())]
        return watch

    watch = run(batch)
    if not watch.failed:
        return None
    alone = [bool(run(take_sample(batch, row)).failed) for row in range(len(batch.sample_ids))]
    guilty = tuple(name for name, failed in zip(batch.sample_ids, alone, strict=True) if failed)
    return NonFinite(*(watch.first or watch.say_what_failed()), guilty, len(batch.sample_ids))


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
        One sentence for each rank that found something, beginning with its number; the same list on every rank. Empty
        where every micro-batch alone is finite, in loss and gradients: their sum, or a hook, was not.
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
    loss_scale = trainer.scaler.grad_scale * trainer.place.layout.summed_degree / (weights or 1.0)  # as in the step
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
