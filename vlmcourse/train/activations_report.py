"""What the towers of a model keep for backward, as a table: which blocks are covered, and how many bytes each keeps.

Enters: a model under any strategy and a function that makes one forward and backward pass. Leaves: a row a tower. The
bytes are measured: `StepLedger`'s count when the forward pass has ended. Chapter 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from vlmcourse.config import TOWERS
from vlmcourse.monitor.ledger import StepLedger
from vlmcourse.parallel.apply import plain_parts
from vlmcourse.train.activations import SegmentedBlocks, covered_blocks


@dataclass(frozen=True)
class TowerActivations:
    """What one tower keeps on this rank."""

    tower: str
    num_blocks: int
    covered: tuple[int, ...]
    """Numbers of the blocks that run again in backward."""
    num_segments: int
    """Segments that these blocks form."""
    kept_bytes: int
    """All that the tower keeps when the forward pass has ended."""
    kept_by_block: tuple[int, ...]
    """Of that what each block keeps; what segments of several blocks keep belongs to the tower."""
    recomputed_bytes: int
    """The most that backward made again at once."""

    def __str__(self) -> str:
        blocks = "none" if not self.covered else ", ".join(map(str, self.covered))
        return f"{self.tower}: {self.num_blocks} blocks, run again: {blocks}; keeps {self.kept_bytes:,} bytes"


def report_activations(model: nn.Module, run: Callable[[], object]) -> list[TowerActivations]:
    """Measure what each tower of this rank keeps.

    Args:
        model: with towers called vision, projector and language; plain, distributed, or a pipeline (of one stage's
            towers only what is on this rank).
        run: makes one forward and one backward pass of the model; all ranks must call it.

    Returns:
        A row for each tower, in the order of data.

    Raises:
        ValueError: if the model has not these towers, before anything runs; if `run` made no backward pass.
    """
    parts = plain_parts(model)
    for part in parts:
        missing = [tower for tower in TOWERS if not isinstance(getattr(part, tower, None), nn.Module)]
        if missing:
            raise ValueError(
                f"{type(part).__name__} has no {', '.join(missing)}: this report has a row for each of the submodules "
                f"{', '.join(TOWERS)}; name yours so, or run it inside StepLedger(model), which takes any model"
            )
    with StepLedger(model) as ledger:
        run()
    kept = ledger.end_of_forward().by_layer("activations")
    return [_report_tower(tower, [part.get_submodule(tower) for part in parts], kept, ledger) for tower in TOWERS]


def _report_tower(name: str, parts: Sequence[nn.Module], kept: dict[str, int], ledger: StepLedger) -> TowerActivations:
    """Return the row of one tower, which a pipeline may have on several stages of a rank."""
    covered, numbers, num_segments = [], [], 0
    for part in parts:
        blocks = getattr(part, "blocks", None)
        if not isinstance(blocks, nn.ModuleList):
            continue
        of_part = covered_blocks(part)
        covered += of_part
        numbers += [number for number, _ in blocks.named_children()]
        num_segments += len(blocks.segments) if isinstance(blocks, SegmentedBlocks) else len(of_part)
    layers = [layer for layer in kept if layer.partition(".")[0] == name]
    made_again = (
        sum(size for layer, size in sample.by_layer("recomputed").items() if layer.partition(".")[0] == name)
        for sample in ledger.samples
    )
    return TowerActivations(
        tower=name,
        num_blocks=len(numbers),
        covered=tuple(covered),
        num_segments=num_segments,
        kept_bytes=sum(kept[layer] for layer in layers),
        kept_by_block=tuple(kept.get(f"{name}.blocks.{number}", 0) for number in numbers),
        recomputed_bytes=max(made_again, default=0),
    )
