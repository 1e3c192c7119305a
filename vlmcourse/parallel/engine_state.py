"""What a rank of a DeepSpeed engine holds, by the names and sizes of the plain model: any strategy can load it.

Enters: an engine of any ZeRO stage. Leaves: its fp32 weights, Adam's moments and step counts as tensors of the plain
model: whole ones where the rank holds them whole, `FlatShard`s where DeepSpeed cut them. They are views of what the
engine uses, so a checkpoint is written from them without a copy and read into them in place. Afterwards
`EngineState.use_loaded` hands the new weights to the model that runs. Chapter 5.

Where DeepSpeed keeps them:

- ZeRO-1 and 2: each group of parameters is flattened into one line, of which every rank keeps an equal piece, in fp32
  (`single_partition_of_fp32_groups`); a parameter may lie in two pieces. The model's own weights are whole.
- ZeRO-3: each parameter is flattened and cut into equal pieces; the pieces of a group are one line
  (`fp32_partitioned_groups_flat`). The model's weights, frozen ones too, are pieces as well (`ds_tensor`).

Source: DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py` and `utils/tensor_fragment.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlmcourse.parallel.flat_shard import FlatShard

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this rank updates of one parameter."""

    line: Tensor
    """The group's line in fp32, under which the optimizer keeps its state, [elements of this rank]."""
    position: int
    """Where the piece begins in the line."""
    start: int
    """Where it begins in the flattened parameter."""
    num_elements: int
    """0 where this rank has nothing of the parameter."""


class EngineState:
    """Tensors of the plain model as a DeepSpeed engine holds them on this rank."""

    weights: dict[str, Tensor]
    """By name; in fp32 where the engine updates them, frozen ones as the model has them."""
    moments: dict[str, dict[str, Tensor]]
    """Of the trainable ones by name: exp_avg, exp_avg_sq, and step, of no dims."""

    def __init__(self, engine: Any) -> None:
        """Find them.

        Args:
            engine: a DeepSpeed engine of ZeRO-1, 2 or 3 whose optimizer keeps Adam's state.

        Raises:
            RuntimeError: if this rank's weights or moments are not in memory.
        """
        self._engine = engine
        self._steps: list[tuple[dict[str, Any], Tensor]] = []
        stage = engine.zero_optimization_stage()
        find = find_pieces_of_weights if stage == 3 else find_pieces_of_groups
        pieces = find(engine)
        names = {parameter: name for name, parameter in engine.module.named_parameters()}
        of_lines = {id(piece.line): self._state_of(piece.line) for piece in pieces.values()}
        self.weights, self.moments = {}, {}
        for name, tensor in engine.module.state_dict(keep_vars=True).items():
            if tensor not in pieces:
                self.weights[name] = _frozen_part(tensor)
        for parameter, piece in pieces.items():
            name, size = names[parameter], _whole_size(parameter)
            state, step = of_lines[id(piece.line)]
            self.weights[name] = _shard(piece.line, piece, size)
            self.moments[name] = {key: _shard(state[key], piece, size) for key in MOMENTS} | {"step": step}

    def _state_of(self, line: Tensor) -> tuple[dict[str, Any], Tensor]:
        """Return the optimizer's state of a line, zeros before the first step, and its step count as a tensor."""
        optimizer = self._engine.optimizer.optimizer
        state = optimizer.state[line]
        if not state:
            # PyTorch's optimizers count in a tensor, DeepSpeed's own in a number.
            is_torch = type(optimizer).__module__.startswith("torch.")
            state["step"] = torch.zeros((), dtype=torch.float32, device=line.device) if is_torch else 0
            state |= {key: torch.zeros_like(line) for key in MOMENTS}
        missing = [key for key in ("step", *MOMENTS) if key not in state]
        if missing or line.numel() != state["exp_avg"].numel():
            raise RuntimeError(
                f"rank {dist.get_rank()}: the engine's {type(optimizer).__name__} keeps {sorted(map(str, state))} of "
                f"{state.get('exp_avg', line).numel():,} elements beside {line.numel():,} weights: a checkpoint is "
                "written of Adam's moments, in memory beside their weights; choose AdamW, and no offload to NVMe"
            )
        step = torch.as_tensor(state["step"], dtype=torch.float32)
        self._steps.append((state, step))
        return state, step

    @torch.no_grad()
    def use_loaded(self) -> None:
        """Take what has been loaded into these tensors into use; all ranks must call this.

        Communicates: under ZeRO-1 and 2 an all-gather of all weights.
        """
        for state, step in self._steps:
            if not isinstance(state["step"], Tensor):
                state["step"] = int(step)
            elif state["step"] is not step:
                state["step"].copy_(step)
        if self._engine.zero_optimization_stage() < 3:
            self._engine.optimizer.update_lp_params()
            return
        for parameter, piece in find_pieces_of_weights(self._engine).items():
            held: Any = parameter
            held.ds_tensor.view(-1)[: piece.num_elements].copy_(
                piece.line[piece.position : piece.position + piece.num_elements]
            )


def find_nvme(engine: Any) -> str:
    """Return which key of the configuration keeps a part of this engine in files; empty where all is in memory."""
    if engine.zero_nvme_offload_optimizer():
        return "offload.optimizer"
    return "offload.parameters" if getattr(engine.optimizer, "params_in_nvme_and_cpu", False) else ""


def collect_weights(engine: Any) -> dict[str, Tensor]:
    """Return this rank's part of every weight by name, of a ZeRO-3 engine that keeps some in files; all ranks.

    Communicates: an all-gather of each weight, one after the other; each rank keeps copies of its parts.
    """
    import deepspeed

    weights: dict[str, Tensor] = {}
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        if not hasattr(tensor, "ds_tensor"):
            weights[name] = tensor.detach()
            continue
        start, num_elements = _stretch_of_rank(tensor)
        with deepspeed.zero.GatheredParameters([tensor]):
            part = tensor.detach().flatten()[start : start + num_elements].to("cpu", copy=True)
        weights[name] = FlatShard(part, start, tensor.ds_shape)
    return weights


@contextmanager
def at_rest(engine: Any) -> Iterator[None]:
    """Free the whole weights that a ZeRO-3 engine may still hold, so that its pieces are all there is; all ranks.

    Communicates: afterwards an all-gather of those that the engine keeps whole, if its settings name such.
    """
    sleeps = hasattr(engine.optimizer, "checkpoint_event_prologue")
    if sleeps:
        engine.optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        if sleeps:
            engine.optimizer.checkpoint_event_epilogue()


def find_pieces_of_groups(engine: Any) -> dict[nn.Parameter, Piece]:
    """Return what this rank updates under ZeRO-1 or 2, by parameter; an empty piece of what others update.

    Raises:
        RuntimeError: if a piece holds other numbers than the weight that it should be a piece of.
    """
    zero = engine.optimizer
    pieces = {}
    for line, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        for parameter in group:
            found = parameter._hp_mapping
            if found is None:
                pieces[parameter] = Piece(line=line, position=0, start=0, num_elements=0)
                continue
            here, whole = found.hp_fragment_address, found.lp_fragment_address
            piece = Piece(line=line, position=here.start, start=whole.start, num_elements=whole.numel)
            _check_piece(parameter, piece)
            pieces[parameter] = piece
    return pieces


@torch.no_grad()
def _check_piece(parameter: nn.Parameter, piece: Piece) -> None:
    """Refuse a map that does not show where weights lie: a checkpoint would be written without a word, and be wrong."""
    expected = parameter.flatten()[piece.start : piece.start + piece.num_elements]
    found = piece.line[piece.position : piece.position + piece.num_elements]
    if not torch.equal(found.to(expected), expected):
        raise RuntimeError(
            f"rank {dist.get_rank()}: DeepSpeed says that elements {piece.start} to {piece.start + piece.num_elements} "
            f"of a weight of {list(parameter.shape)} are at {piece.position} of its group, and other numbers are "
            "there: its checkpoints cannot be trusted; leave round_robin_gradients out of its settings"
        )


def find_pieces_of_weights(engine: Any) -> dict[nn.Parameter, Piece]:
    """Return what this rank updates under ZeRO-3, by parameter, without what fills pieces up to equal lengths.

    Raises:
        RuntimeError: if weights are on NVMe.
    """
    zero = engine.optimizer
    pieces = {}
    for line, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        position = 0
        for parameter in group:
            start, num_elements = _stretch_of_rank(parameter)
            pieces[parameter] = Piece(line=line, position=position, start=start, num_elements=num_elements)
            position += parameter.partition_numel()
        if line.numel() < position:
            raise RuntimeError(
                f"rank {dist.get_rank()}: a group of {position:,} weights has {line.numel():,} in memory: those on "
                "NVMe are not written to checkpoints; offload to the CPU, or not at all"
            )
    return pieces


def _frozen_part(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor that is not trained: a buffer, or a weight, whole or a piece."""
    if not hasattr(tensor, "ds_tensor"):
        return tensor.detach()
    start, num_elements = _stretch_of_rank(tensor)
    return FlatShard(tensor.ds_tensor.detach().view(-1)[:num_elements], start, tensor.ds_shape)


def _stretch_of_rank(parameter: Any) -> tuple[int, int]:
    """Return where this rank's piece of a ZeRO-3 weight begins, and its elements without the filling."""
    length = parameter.partition_numel()
    start = min(parameter.ds_zero_partition_rank * length, parameter.ds_numel)
    return start, min(length, parameter.ds_numel - start)


def _whole_size(parameter: Any) -> torch.Size:
    """Return the size of a parameter in the plain model."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _shard(line: Tensor, piece: Piece, size: torch.Size) -> FlatShard:
    part = line.detach()[piece.position : piece.position + piece.num_elements]
    return FlatShard(part, piece.start, size)
