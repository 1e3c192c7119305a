"""Who holds what: samples, positions, layers and shares of the training state of every rank, read from a live run.

Enters: a distributed model, its optimizer and the batches of a step. Leaves: one `RankHoldings` a rank, plain numbers
that travel to a notebook, and a table of them. Nothing is derived from the strategy's name: shares are sizes of the
tensors that a rank stores, samples and positions those of the batch and of what entered its blocks. Chapter 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vlmcourse.data.samples import Batch
from vlmcourse.layout import ParallelConfig
from vlmcourse.parallel.apply import named_plain_parameters, plain_parts
from vlmcourse.parallel.chunks import chunks_of_rank, count_chunks
from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.mesh import Place
from vlmcourse.parallel.padding import plain_sizes
from vlmcourse.presets import VLMShape

Inputs = dict[str, tuple[int, int]]
"""By layer: samples (or tiles) of all micro-batches, and positions, of what entered the layer on this rank."""
BLOCK = re.compile(r"(vision|language)\.blocks\.(\d+)")


@dataclass(frozen=True)
class LayerShare:
    """How much of one layer a rank stores: 1 is all of the plain model's layer."""

    tensor: float = 0.0
    """Of every matrix's elements, the share of this rank's tensor-parallel position: 1 where nothing is split so."""
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Of Adam's first moment."""


@dataclass(frozen=True)
class RankHoldings:
    """What one rank holds in one optimizer step."""

    rank: int
    coordinates: dict[str, int]
    """On every axis of the grid."""
    sample_ids: tuple[str, ...]
    """Of all micro-batches of the step."""
    seq_len: int
    """Positions of the longest micro-batch's sequences, padding included."""
    positions: tuple[tuple[int, int], ...]
    """Ranges of positions that this rank computes between attention layers: first, and one past the last."""
    layers: dict[str, LayerShare]
    """All layers of the plain model in order, those that are elsewhere too."""
    inputs: Inputs
    num_params: int
    """Of the plain model."""
    num_stored: int
    """Elements of weights that this rank stores."""

    @property
    def weights_fraction(self) -> float:
        """Share of the model's weights that this rank stores."""
        return self.num_stored / self.num_params

    @property
    def own_layers(self) -> tuple[str, ...]:
        """Layers of which this rank stores anything."""
        return tuple(name for name, share in self.layers.items() if share.weights)


def layer_of(parameter_name: str) -> str:
    """Return the layer of a parameter, by the names that `planner.stages` counts: patches, vision 0, fusion, ..."""
    block = BLOCK.search(parameter_name)
    if block:
        return f"{block[1]} {block[2]}"
    if parameter_name.startswith("vision."):
        return "patches"
    return "fusion" if parameter_name.startswith(("projector.", "language.embedding")) else "output"


def layers_of(shape: VLMShape) -> list[str]:
    """Return the names of all layers in the order in which data meets them."""
    vision = [f"vision {i}" for i in range(shape.vision.num_layers)]
    language = [f"language {i}" for i in range(shape.language.num_layers)]
    return ["patches", *vision, "fusion", *language, "output"]


@contextmanager
def watch_inputs(model: nn.Module) -> Iterator[Inputs]:
    """Note the size of what enters every block of both towers on this rank.

    Args:
        model: under any strategy.

    Returns:
        Samples or tiles, added up over the micro-batches that run meanwhile, and positions, by layer.
    """
    inputs: Inputs = {}

    def note(layer: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            num_rows, num_positions = local_part(args[0]).shape[:2]
            inputs[layer] = inputs.get(layer, (0, 0))[0] + num_rows, num_positions

        return hook

    modules = [named for part in plain_parts(model) for named in part.named_modules()]
    handles = [m.register_forward_pre_hook(note(layer_of(name))) for name, m in modules if BLOCK.fullmatch(name)]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def measure_holdings(
    model: nn.Module,
    optimizer: Optimizer,
    shape: VLMShape,
    place: Place,
    config: ParallelConfig,
    batches: Sequence[Batch],
    inputs: Inputs,
) -> RankHoldings:
    """Return what this rank holds; call it after an optimizer step, when gradients and moments exist.

    Args:
        model: under any strategy.
        optimizer: AdamW over its parameters, sharded (zero1) or not.
        shape: of the plain model.
        place: this rank's position.
        config: the degrees; only the order of context-parallel chunks is read.
        batches: this rank's micro-batches of the step.
        inputs: from `watch_inputs` around the step.
    """
    sizes = {name: size.numel() for name, size in plain_sizes(shape).items()}
    whole = dict.fromkeys(layers_of(shape), 0)
    for name, size in sizes.items():
        whole[layer_of(name)] += size
    stored = {layer: dict.fromkeys((field.name for field in fields(LayerShare)), 0.0) for layer in whole}
    state = getattr(optimizer, "optim", optimizer).state  # zero1: this rank's own part
    num_stored = 0
    for name, parameter in named_plain_parameters(model):
        counts = stored[layer_of(name)]
        num_local = local_part(parameter).numel()
        num_stored += num_local
        counts["tensor"] += parameter.numel() / tensor_degree(parameter)
        counts["weights"] += num_local
        counts["gradients"] += local_part(parameter.grad).numel() if parameter.grad is not None else 0
        moment = state[parameter]["exp_avg"] if parameter in state else None
        counts["optimizer"] += local_part(moment).numel() if moment is not None else 0
    seq_len = max(batch.input_ids_BS.shape[1] for batch in batches)
    return RankHoldings(
        rank=place.rank,
        coordinates=place.layout.coordinates(place.rank),
        sample_ids=tuple(sample_id for batch in batches for sample_id in batch.sample_ids),
        seq_len=seq_len,
        positions=positions_of(place, config, seq_len),
        layers={
            layer: LayerShare(**{owner: count / whole[layer] for owner, count in counts.items()})
            for layer, counts in stored.items()
        },
        inputs=dict(inputs),
        num_params=sum(sizes.values()),
        num_stored=num_stored,
    )


def positions_of(place: Place, config: ParallelConfig, seq_len: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a sequence that a rank of a context-parallel group works on, neighbouring ones joined."""
    if place.layout.cp == 1:
        return ((0, seq_len),)
    length = seq_len // count_chunks(place.layout.cp, config.cp_order)
    joined: list[tuple[int, int]] = []
    for chunk in chunks_of_rank(place.cp_rank, place.layout.cp, config.cp_order):
        start, end = chunk * length, (chunk + 1) * length
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return tuple(joined)


def tensor_degree(parameter: Tensor) -> int:
    """Return into how many pieces tensor parallelism cuts a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    return next((size for name, size, placement in axes if name == "tp" and not placement.is_replicate()), 1)


def tabulate_holdings(ranks: Sequence[RankHoldings]) -> tuple[list[str], list[list[object]]]:
    """Return a header and a row a rank: coordinates, samples, positions, layers, share of the weights.

    Args:
        ranks: what every rank of a run reported. Samples are numbered in the order in which the ranks name them, layers
            by their abbreviations: P patches, V vision block, F projector and embedding, L language block, O output.
    """
    axes = [axis for axis in ranks[0].coordinates if any(rank.coordinates[axis] for rank in ranks)]
    numbers = number_samples(ranks)
    rows: list[list[object]] = []
    for holder in ranks:
        mine = sorted(numbers[sample_id] for sample_id in holder.sample_ids)
        positions = ", ".join(f"{start}-{end - 1}" for start, end in holder.positions)
        layers = " ".join(map(abbreviate, holder.own_layers))
        coordinates = [str(holder.coordinates[axis]) for axis in axes]
        share = f"{100 * holder.weights_fraction:.1f} %"
        rows.append([f"rank {holder.rank}", *coordinates, _as_ranges(mine), positions, layers, share])
    return ["", *axes, "samples", "positions", "layers", "weights"], rows


def number_samples(ranks: Sequence[RankHoldings]) -> Mapping[str, int]:
    """Number the samples of a step from 0, in the order in which the ranks name them."""
    ids = dict.fromkeys(sample_id for holder in ranks for sample_id in holder.sample_ids)
    return {sample_id: number for number, sample_id in enumerate(ids)}


def abbreviate(layer: str) -> str:
    """Return a layer's short name: vision 0 becomes V0."""
    tower, _, number = layer.partition(" ")
    return tower[0].upper() + number


def _as_ranges(numbers: Sequence[int]) -> str:
    """Write rising numbers as 0-3, 8-11."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
