"""What a row tells beside the loss: how the time was used, MFU and HFU, losses by kind, norms by tower, memory, ranks.

Enters: this rank's steps since the last row, one by one, and the model around the update of the step that the row is
about. Leaves: values by their names in `rows.COLUMNS`, the same on every rank, after one small exchange a row. Times
are means over the steps since the last row and over the ranks; memory is the largest of any rank. Rates, MFU and HFU
are over the seconds in steps of the rank with the most of them: while one is late the others wait in their step, or
are late themselves in another one. `rows` says what is left out of these seconds.

The slowest rank is the one with the longest work of its own. All ranks' steps take equally long, since each waits for
the others; what a rank waits tells who is *not* the slowest, so it is left out. Under tp, cp and pp the ranks' work
differs by design as well. Chapter 6.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import nn

from vlmcourse.config import TOWERS, TrainConfig
from vlmcourse.data.samples import Batch
from vlmcourse.layout import Layout
from vlmcourse.monitor.ledger import measure_ledger
from vlmcourse.monitor.metrics import TokenCount, measure_peak_bytes
from vlmcourse.monitor.peak import Peak, find_run_peak
from vlmcourse.monitor.rank_spread import find_slowest
from vlmcourse.monitor.step_clock import StepTimes
from vlmcourse.monitor.towers import hides_tensors, sum_gradient_squares, sum_update_squares
from vlmcourse.parallel.comm import gather_numbers
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.flops import Work, count_step_flops
from vlmcourse.presets import VLMShape
from vlmcourse.train.kind_losses import KindLosses
from vlmcourse.train.loss import LossRows
from vlmcourse.train.rows import OWNERS, PARTS, TOWER_NAMES, name_token_rates

GIB = 2**30
ABSENT = math.nan
"""What a rank sends for a value that it does not have."""
Numbers = dict[str, float]


@dataclass
class Window:
    """What one rank did since the last row."""

    began_s: float = field(default_factory=time.perf_counter, compare=False)
    seconds: float = 0.0
    """In steps."""
    num_timed: int = 0
    parts_s: Numbers = field(default_factory=lambda: dict.fromkeys(("step", *PARTS), 0.0))
    samples: int = 0
    padding: int = 0
    real: Work = field(default_factory=Work)
    executed: Work = field(default_factory=Work)


class RowMeter:
    """Measures for the rows of one run, on one rank."""

    def __init__(self, config: TrainConfig, shape: VLMShape, layout: Layout, ranks: Ranks) -> None:
        """Begin an empty window.

        Args:
            config: the run.
            shape: of the plain model.
            layout: which ranks share samples.
            ranks: this process's place.
        """
        self.config, self.shape, self.layout, self.ranks = config, shape, layout, ranks
        self.loss_rows = LossRows()
        self.peak: Peak | None = None
        """Of all ranks together, once it was looked for; what MFU and HFU divide by."""
        self._knows_peak = False
        self._process = psutil.Process()
        self._window = Window()
        self._tower_squares: Numbers = {}
        self._kinds: Numbers = {}
        self._answer_kinds = KindLosses()
        self._owners: Numbers = {}

    def restart(self) -> None:
        """Forget the steps so far: a run begins, or goes on, now."""
        self._window = Window()

    def begin(self, *, is_due: bool) -> None:
        """Begin a step; `is_due` if a row will be about it, so that its losses are kept by token."""
        self.loss_rows.is_open, self.loss_rows.found = is_due, []
        self._tower_squares, self._kinds, self._owners = {}, {}, {}

    def see_gradients(self, model: nn.Module, optimizer: Any) -> None:
        """Look at the gradients of a step that is due, after their exchange and before clipping."""
        if self.loss_rows.is_open and not hides_tensors(model):
            squares = sum_gradient_squares(model, optimizer, self.ranks.world_size)
            self._tower_squares |= {f"gradient of {tower}": value for tower, value in squares.items()}

    def see_update(self, model: nn.Module, optimizer: Any) -> None:
        """Look at what the update of a step that is due has changed, and at who holds the memory where asked to."""
        if self.loss_rows.is_open and self.config.logging.memory_owners:
            ledger = measure_ledger(model, optimizer)
            self._owners = {owner: float(getattr(ledger, f"{owner}_bytes")) for owner in OWNERS}
        if self.loss_rows.is_open and not hides_tensors(model):
            updates, weights = sum_update_squares(model, optimizer, self.ranks.world_size)
            self._tower_squares |= {f"update of {tower}": value for tower, value in updates.items()}
            self._tower_squares |= {f"weights of {tower}": value for tower, value in weights.items()}

    def add_step(self, batches: Sequence[Batch], seconds: float) -> None:
        """Count a step's work.

        Args:
            batches: this rank's micro-batches of it, on CPU.
            seconds: its wall time.
        """
        window, real, executed = self._window, *count_work(batches, is_stacked=self.layout.pp > 1)
        window.seconds += seconds
        window.samples += sum(len(batch.sample_ids) for batch in batches if not batch.is_mute)
        window.real, window.executed = window.real + real, window.executed + executed
        window.padding += round(sum(batch.input_ids_BS.numel() for batch in batches) - real.num_positions)
        if self.loss_rows.is_open:
            self._kinds = sum_by_input(batches, self.loss_rows)
            self._answer_kinds.add(batches, self.loss_rows)
            self.loss_rows.is_open, self.loss_rows.found = False, []

    def add_times(self, times: StepTimes) -> None:
        """Count the phases of a step, when they are known."""
        self._window.num_timed += 1
        for name in self._window.parts_s:
            value = getattr(times, f"{name}_s")
            self._window.parts_s[name] += ABSENT if value is None else value

    def find_peak(self) -> Peak | None:
        """Return what MFU and HFU divide by: the peak of all ranks, found once; see `monitor.peak.find_run_peak`.

        Communicates: the first time an all-gather of 40 bytes a rank; all ranks must call this.
        """
        if not self._knows_peak:
            self.peak, self._knows_peak = find_run_peak(self.ranks, self.config.train.precision), True
        return self.peak

    def measure(self, tokens: TokenCount) -> dict[str, float | None]:
        """Return the values of a row and begin a new window; all ranks must call this.

        Args:
            tokens: of all ranks in the steps since the last row.

        Returns:
            By name; None for what is not there.
        Communicates: an all-gather of about 300 bytes a rank, and of 16 more a kind of answer; see `KindLosses.means`.
        """
        peak = self.find_peak()
        mine = self._own_numbers()
        self._window = Window()
        everyone = [dict(zip(mine, row, strict=True)) for row in gather_numbers(list(mine.values()), self.ranks)]
        total = {name: math.fsum(of_rank[name] for of_rank in everyone) for name in mine}
        seconds = max(of_rank["seconds"] for of_rank in everyone)
        return {
            **name_token_rates(tokens, seconds, max(of_rank["wall"] for of_rank in everyone)),
            **self._throughput(total, seconds, peak.flop_per_s if peak is not None else ABSENT),
            **_parts(total),
            **_spread(everyone),
            **_losses(total),
            **self._answer_kinds.means(everyone, self.ranks),
            **_norms(total, [tower for tower in TOWERS if tower not in self.config.model.freeze]),
            **{f"memory/{name}_gib": max(of_rank[name] for of_rank in everyone) / GIB for name in self._memory_names()},
        }

    def _own_numbers(self) -> Numbers:
        """Return what this rank tells the others, by names that are the same on all of them."""
        window = self._window
        numbers = {"seconds": window.seconds, "timed": float(window.num_timed), "samples": float(window.samples)}
        numbers |= {"padding": float(window.padding), "wall": time.perf_counter() - window.began_s}
        numbers |= {f"{name}_s": value for name, value in window.parts_s.items()}
        for name, work in (("real", window.real), ("executed", window.executed)):
            numbers |= {f"{name} {what}": float(value) for what, value in vars(work).items()}
        for what in ("gradient", "update", "weights"):
            numbers |= {f"{what} of {t}": self._tower_squares.get(f"{what} of {t}", ABSENT) for t in TOWERS}
        for what in ("loss", "weight"):
            numbers |= {f"{what} {kind}": self._kinds.get(f"{what} {kind}", ABSENT) for kind in ("vision", "language")}
        return numbers | self._answer_kinds.numbers() | self._memory()

    def _memory(self) -> Numbers:
        found = dict.fromkeys(self._memory_names(), ABSENT)
        if self.ranks.device.type == "cuda":
            found["peak_allocated"] = float(torch.cuda.max_memory_allocated(self.ranks.device))
            found["peak_reserved"] = float(torch.cuda.max_memory_reserved(self.ranks.device))
        else:
            found["peak_rss"] = float(max(measure_peak_bytes(self.ranks.device)[0], self._process.memory_info().rss))
        return found | self._owners

    def _memory_names(self) -> tuple[str, ...]:
        return "peak_allocated", "peak_reserved", "peak_rss", *(OWNERS if self.config.logging.memory_owners else ())

    def _throughput(self, total: Numbers, seconds: float, peak_flop_per_s: float) -> dict[str, float | None]:
        """Return what is a rate over all ranks but for tokens; samples that ranks share count once."""
        num_sharing = self.layout.world_size // self.layout.dp_degree
        if seconds <= 0:
            return {}
        work = {
            name: Work(*(total[f"{name} {what}"] / num_sharing for what in vars(Work())))
            for name in ("real", "executed")
        }
        trained = [tower for tower in TOWERS if tower not in self.config.model.freeze]
        activations = self.config.activations
        policies = {"vision": activations.vision, "language": activations.language}
        possible = seconds * peak_flop_per_s
        return {
            "performance/samples_per_second": total["samples"] / num_sharing / seconds,
            "performance/padding_tokens_per_second": total["padding"] / num_sharing / seconds,
            "performance/mfu": count_step_flops(self.shape, work["real"], trained).model / possible,
            "performance/hfu": count_step_flops(self.shape, work["executed"], trained, policies).hardware / possible,
        }


def count_work(batches: Sequence[Batch], *, is_stacked: bool = False) -> tuple[Work, Work]:
    """Return the work of some micro-batches: of their real tokens, and with padding and blank tiles.

    Args:
        batches: of one step, on CPU; a mute one has work only that is executed.
        is_stacked: whether a pipeline pads all micro-batches of a step to the longest sequence and the most tiles.
    """
    real, executed = Work(), Work()
    longest = max(batch.input_ids_BS.shape[1] for batch in batches)
    most_tiles = max(max(1, sum(batch.tiles_per_sample)) for batch in batches)
    for batch in batches:
        num_rows, length = batch.input_ids_BS.shape
        num_tiles = sum(batch.tiles_per_sample)
        if not batch.is_mute:
            real += Work.of_sequences(batch.attention_mask_BS.sum(dim=1).tolist(), num_tiles)
        # In training a micro-batch without an image runs one blank tile.
        ran = (longest, most_tiles) if is_stacked else (length, max(1, num_tiles))
        executed += Work.of_sequences([ran[0]] * num_rows, ran[1])
    return real, executed


def sum_by_input(batches: Sequence[Batch], rows: LossRows) -> Numbers:
    """Add up this rank's losses and weights of samples with an image (vision) and without (language).

    Args:
        batches: of one step.
        rows: of the same micro-batches in the same order; empty on a stage of a pipeline that sees no loss.
    """
    found = {f"{what} {kind}": 0.0 for what in ("loss", "weight") for kind in ("vision", "language")}
    if not rows.found:
        return found
    losses = torch.cat([row.losses_BS.double().sum(dim=1) for row in rows.found]).tolist()
    weights = torch.cat([row.weights_BS.double().sum(dim=1) for row in rows.found]).tolist()
    tiles = [count for batch in batches for count in batch.tiles_per_sample]
    for loss, weight, num_tiles in zip(losses, weights, tiles, strict=True):
        kind = "vision" if num_tiles else "language"
        found[f"loss {kind}"] += loss
        found[f"weight {kind}"] += weight
    return found


def _parts(total: Numbers) -> dict[str, float | None]:
    if not total["timed"]:
        return {}
    return {f"performance/{name}_seconds": total[f"{name}_s"] / total["timed"] for name in ("step", *PARTS)}


def _spread(everyone: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Name the rank with the longest work of its own, and how much longer it is than the median of the others'."""
    if len(everyone) == 1 or not all(of_rank["timed"] for of_rank in everyone):
        return {}
    own_s = [(of_rank["step_s"] - of_rank["communication_s"]) / of_rank["timed"] for of_rank in everyone]
    if not all(map(math.isfinite, own_s)):
        return {}
    slowest, spread = find_slowest(dict(enumerate(own_s)))
    return {"performance/slowest_rank": slowest, "performance/rank_spread": spread} if spread is not None else {}


def _losses(total: Numbers) -> dict[str, float | None]:
    """Return the mean losses of samples with and without an image.

    Ranks that share samples count them equally often above and below the line.
    """
    kinds = [kind for kind in ("vision", "language") if total[f"weight {kind}"] > 0]
    return {f"loss/{kind}": total[f"loss {kind}"] / total[f"weight {kind}"] for kind in kinds}


def _norms(total: Numbers, trained: Sequence[str]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for tower in trained:
        name, weights = TOWER_NAMES[tower], total[f"weights of {tower}"]
        found[f"gradients/{name}_norm"] = math.sqrt(total[f"gradient of {tower}"])
        found[f"updates/{name}_ratio"] = math.sqrt(total[f"update of {tower}"] / weights) if weights > 0 else None
    return found
