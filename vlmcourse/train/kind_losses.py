"""Mean loss by kind of answer (`loss/<kind>` of a row), over all ranks.

Enters: the micro-batches of a step that a row will be about, and the token losses that `loss.LossRows` kept of them.
Leaves: the mean for every kind that the step has tokens of; nothing where no answer has a kind. A mean is over the
supervised tokens of the kind, weighted where `train.loss_weighting` weighs them, so that those of all kinds together
make `loss/total` where every answer has a kind.

Ranks need not know the kinds beforehand. The sums of kinds that all ranks know travel with the row's other numbers; a
rank that meets a new one says so with them, and only then names are exchanged. Chapter 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from vlmcourse.data.samples import Batch
from vlmcourse.parallel.comm import gather_numbers, gather_texts
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.loss import LossRows, RowLosses

Sums = dict[str, tuple[float, float]]
"""Kind -> sum of token losses, and of their weights."""
NEW = "new kinds"
"""Among a rank's numbers: 1 where it has kinds that not all ranks know yet."""


class KindLosses:
    """The losses by kind of one rank, and the names of kinds that all ranks know."""

    def __init__(self) -> None:
        self._known: tuple[str, ...] = ()
        self._mine: Sums = {}

    def add(self, batches: Sequence[Batch], rows: LossRows) -> None:
        """Add up the losses of a step, in the place of those of the step before.

        Args:
            batches: of the step, on CPU.
            rows: of the same micro-batches in the same order; empty on a stage of a pipeline that sees no loss.
        """
        self._mine = sum_by_kind(batches, rows) if rows.found else {}

    def numbers(self) -> dict[str, float]:
        """Return what this rank tells the others; the names are the same on all of them."""
        sums = [(kind, self._mine.get(kind, (0.0, 0.0))) for kind in self._known]
        told = {f"{what} of kind {kind}": pair[i] for kind, pair in sums for i, what in enumerate(("loss", "weight"))}
        return {NEW: float(not self._mine.keys() <= set(self._known)), **told}

    def means(self, everyone: Sequence[Mapping[str, float]], ranks: Ranks) -> dict[str, float | None]:
        """Return the mean loss of each kind, by the name of a row's value; all ranks must call this.

        Ranks that share samples count them equally often above and below the line.

        Args:
            everyone: what `numbers` returned, rank by rank.
            ranks: this process's place.
        Communicates: nothing, or where a rank has a new kind the names of all, and once more their numbers.
        """
        if any(theirs[NEW] for theirs in everyone):
            named = gather_texts([*self._known, *self._mine], ranks)
            self._known = tuple(sorted({kind for names in named for kind in names}))
            mine = self.numbers()
            gathered = gather_numbers(list(mine.values()), ranks)
            everyone = [dict(zip(mine, theirs, strict=True)) for theirs in gathered]
        found: dict[str, float | None] = {}
        for kind in self._known:
            loss, weight = (math.fsum(of[f"{what} of kind {kind}"] for of in everyone) for what in ("loss", "weight"))
            if weight > 0:
                found[f"loss/{kind}"] = loss / weight
        return found


def sum_by_kind(batches: Sequence[Batch], rows: LossRows) -> Sums:
    """Add up token losses and weights by the kinds of this rank's answers.

    Args:
        batches: of one step, on CPU.
        rows: of the same micro-batches in the same order.
    """
    kinds = sorted({span.kind for batch in batches for span in batch.kind_spans})
    totals = torch.zeros(2, len(kinds) + 1, dtype=torch.float64)
    for batch, found in zip(batches, rows.found, strict=True):
        if batch.kind_spans:
            ids = _kind_ids(batch, found, kinds).flatten()
            for i, values_BS in enumerate((found.losses_BS, found.weights_BS)):
                values = values_BS.to("cpu", torch.float64).flatten()
                totals[i] += torch.bincount(ids, values, minlength=len(kinds) + 1)
    losses, weights = totals.tolist()
    return {kind: (losses[i], weights[i]) for i, kind in enumerate(kinds, start=1)}


def _kind_ids(batch: Batch, found: RowLosses, kinds: Sequence[str]) -> torch.Tensor:
    """Return the number of the kind at each position that this rank has, from 1 on; 0 is none. int64, on CPU.

    A pipeline may have padded the micro-batch further to the right, where no answer is.
    """
    num_rows, length = found.losses_BS.shape
    positions_S = torch.arange(length) if found.positions_S is None else found.positions_S.cpu()
    whole = max(batch.input_ids_BS.shape[1], int(positions_S.max()) + 1)
    ids_BS = torch.zeros(num_rows, whole, dtype=torch.int64)
    for span in batch.kind_spans:
        ids_BS[span.row, span.start : span.end] = kinds.index(span.kind) + 1
    return ids_BS[:, positions_S]
