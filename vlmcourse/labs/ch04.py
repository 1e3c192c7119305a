"""Chapter 4's glue: a chain of cheap layers, policies measured side by side, the layer of the 34-byte formula.

Enters: what a cell of the chapter has at hand. Leaves: measurements as plain data. Times are the processor seconds of
this process on a CPU, which other programs do not stretch, and seconds on a GPU; the least of several runs.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from vlmcourse.config import TrainConfig
from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import Batch
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.grading.chains import ChainCase, bytes_alive
from vlmcourse.labs.ch01 import check_prediction, flat_gradient, guess, print_table, relative_error
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.monitor.ledger import StepLedger
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.gather import gather_plain_state
from vlmcourse.planner.layer_activations import count_language_layer_bytes, count_vision_layer_bytes
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.recompute import plan_segments, split_segments
from vlmcourse.train.accumulate import micro_batch_loss_sum
from vlmcourse.train.activations import cover_blocks
from vlmcourse.train.trainer import Trainer

__all__ = ["check_prediction", "flat_gradient", "guess", "print_table", "relative_error"]
MAX_SEQ_LEN = 256

# --- A real model, deep enough to show something --------------------------------------------------------------------


def deep_shape(num_layers: int = 4) -> VLMShape:
    """Return the tiny preset with `num_layers` blocks in each tower."""
    tiny = get_model("tiny")
    vision = dataclasses.replace(tiny.vision, num_layers=num_layers)
    language = dataclasses.replace(tiny.language, num_layers=num_layers)
    return dataclasses.replace(tiny, name="deep", vision=vision, language=language)


def load_deep(num_samples: int = 8, num_layers: int = 4) -> tuple[VLM, Batch]:
    """Return a model of `deep_shape` and a micro-batch of digit pictures with questions."""
    shape = deep_shape(num_layers)
    samples = DigitsDataset(num_samples, 0, "train")
    batch = Collator(load_tokenizer("builtin"), shape, MAX_SEQ_LEN)([samples[i] for i in range(num_samples)])
    return build_model(shape, seed=0), batch


def forward_backward(model: nn.Module, batch: Batch) -> float:
    """Make one forward and backward pass; return the mean loss of the supervised tokens."""
    loss = micro_batch_loss_sum(model, batch, "fp32") / batch.num_supervised_tokens
    loss.backward()
    return float(loss.detach())


def set_policies(model: VLM, vision: str, language: str) -> None:
    """Carry out a policy in each tower, in the place of what was there."""
    for tower, policy in ((model.vision, vision), (model.language, language)):
        cover_blocks(tower, plan_segments(policy, len(tower.blocks)))


def measure_policies(
    model: VLM, batch: Batch, policies: Sequence[str], num_runs: int = 4
) -> dict[str, tuple[float, float, float]]:
    """Measure policies set in both towers at once.

    Args:
        model: changed and changed back.
        batch: one micro-batch.
        policies: names; the first is what times and gradients are compared with.
        num_runs: of each, taken in turns; the least time counts.

    Returns:
        By policy: activations alive at most, made again ones included (bytes); time of a forward and backward pass as a
        multiple of the first policy's; and the length of the gradient's difference from its, relative.
    """
    peaks, gradients, times = {}, {}, dict.fromkeys(policies, math.inf)
    for policy in policies:
        set_policies(model, policy, policy)
        peaks[policy] = activation_peak(model, lambda: forward_backward(model, batch))
        gradients[policy] = flat_gradient(model).clone()
    for _ in range(num_runs):
        for policy in policies:
            set_policies(model, policy, policy)
            times[policy] = min(times[policy], seconds_of(lambda: forward_backward(model, batch)))
    set_policies(model, "none", "none")
    model.zero_grad()
    first = policies[0]
    return {
        policy: (peaks[policy], times[policy] / times[first], relative_error(gradients[policy], gradients[first]))
        for policy in policies
    }


def list_kept(run: Callable[[], Any]) -> list[list[int]]:
    """Return the shapes of the tensors that autograd keeps in a run, one for each time it keeps one."""
    shapes: list[list[int]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(list(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return shapes


def bytes_kept_with_repeats(run: Callable[[], Any]) -> int:
    """Return the bytes of all tensors that autograd keeps, weights among them, counted each time they are kept."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(sizes)


def activation_peak(model: nn.Module, run: Callable[[], Any]) -> int:
    """Return the most bytes of activations, made again ones included, that are alive at once in a run."""
    model.zero_grad()
    with StepLedger(model) as ledger:
        run()
    owners = ("activations", "recomputed")
    return max(sum(sample.by_owner().get(owner, 0) for owner in owners) for sample in ledger.samples)


def seconds_of(run: Callable[[], Any]) -> float:
    """Return how long a run takes: processor seconds on a CPU, seconds until the GPU is done where there is one."""
    clock = time.process_time
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        clock = time.perf_counter
    gc.collect()
    gc.disable()
    started_s = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = clock() - started_s
    gc.enable()
    return seconds


# --- The chain of section 5 -----------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Equal layers, each of which keeps one tensor as large as its input: what the square-root rule assumes."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(ReluLayer(width, generator) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for block in self.blocks:
            x = block(x)
        return x


class ReluLayer(nn.Module):
    """relu(x W): backward needs x for the weight, and the result, which is the next layer's x."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) * math.sqrt(2 / width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, width]."""
        return torch.relu(x @ self.weight)


@dataclasses.dataclass(frozen=True)
class ChainResult:
    """What one length of segments costs."""

    length: int
    kept: float
    """Inputs kept when forward has ended, in units of one layer's activation."""
    peak: float
    """Activations alive at most, in the same unit."""
    time: float
    """Of a forward and backward pass, as a multiple of the plain one's."""


@dataclasses.dataclass(frozen=True)
class PlainChain:
    """The chain with nothing recomputed."""

    peak: float
    """Activations alive at most, in units of one layer's."""
    forward_share: float
    """Of the time of a forward and backward pass."""


def measure_chain(
    lengths: Sequence[int], num_layers: int, num_rows: int = 640, width: int = 224, num_runs: int = 3
) -> tuple[PlainChain, list[ChainResult]]:
    """Measure a chain under segments of several lengths.

    Args:
        lengths: layers in a segment.
        num_layers: of the chain.
        num_rows: rows of its input.
        width: of its layers.
        num_runs: of each length, taken in turns; the least time counts.

    Returns:
        What the plain chain takes, and a result for each length.
    """
    chain, x = Chain(num_layers, width), torch.randn(num_rows, width)
    plans = {0: [], **{length: split_segments(num_layers, length) for length in lengths}}
    peaks, kept, times = {}, {}, dict.fromkeys(plans, math.inf)

    def run() -> None:
        chain(x).sum().backward()

    for length, plan in plans.items():
        cover_blocks(chain, plan)
        chain.zero_grad()
        with StepLedger(chain) as ledger:
            run()
        of_sample = [s.by_owner().get("activations", 0) + s.by_owner().get("recomputed", 0) for s in ledger.samples]
        peaks[length] = max(of_sample) / x.nbytes
        kept[length] = ledger.end_of_forward().by_owner().get("activations", 0) / x.nbytes
    forward_s = math.inf
    for _ in range(num_runs):
        for length, plan in plans.items():
            cover_blocks(chain, plan)
            times[length] = min(times[length], seconds_of(run))
        cover_blocks(chain, [])
        forward_s = min(forward_s, seconds_of(lambda: chain(x).sum()))
    results = [ChainResult(n, kept[n], peaks[n], times[n] / times[0]) for n in lengths]
    return PlainChain(peaks[0], forward_s / times[0]), results


def theory_peak(num_layers: int, length: int) -> float:
    """Return inputs kept and one segment alive, in layers: L / k + k.

    Source: Chen et al. 2016 (arXiv:1604.06174), section 4.
    """
    return num_layers / length + length


# --- The layer of the 34 bytes --------------------------------------------------------------------------------------


class GeluDropoutLayer(nn.Module):
    """The layer that Korthikanti et al. count: a GELU MLP four times as wide, a dropout after each branch."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply the block; [batch, seq, width] in and out."""
        q, k, v = self.qkv(self.norm1(x_BSD)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed_BSD = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        # The operation that a GPU runs, with a mask of one byte an element; nn.Dropout's on a CPU has the input's type.
        x_BSD = x_BSD + torch.native_dropout(self.out(mixed_BSD), 0.1, True)[0]
        return x_BSD + torch.native_dropout(self.down(F.gelu(self.up(self.norm2(x_BSD)))), 0.1, True)[0]


# --- Towers of a real size, by the formula --------------------------------------------------------------------------


def tower_bytes(shape: VLMShape, num_tiles: int, num_text_tokens: int, policies: Mapping[str, str]) -> dict[str, int]:
    """Count what the two towers of a model keep of one sample in 16 bits, by the derived formula.

    Args:
        shape: of the model; its image features take positions in the language tower.
        num_tiles: tiles of the picture.
        num_text_tokens: other positions.
        policies: by tower, full or none; under full one block is whole besides all inputs.

    Returns:
        Bytes by tower at the fullest moment, with norms as a GPU runs them.
    """
    vision, language = shape.vision, shape.language
    positions = num_text_tokens + num_tiles * shape.num_visual_tokens_per_tile
    blocks = {
        "vision": count_vision_layer_bytes(vision, num_tiles, 1 + vision.num_patches, 2, fused_norms=True),
        "language": count_language_layer_bytes(language, 1, positions, 2, fused_norms=True),
    }
    found = {}
    for tower, kept in blocks.items():
        num_layers, whole = getattr(shape, tower).num_layers, sum(kept.values())
        covered = policies[tower] == "full"
        found[tower] = num_layers * kept["norm1 input"] + whole if covered else num_layers * whole
    return found


# --- Ranks ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RankResult:
    """One step of one rank under a strategy and a policy."""

    kept_bytes: int
    """Activations that autograd kept at most."""
    num_collectives: int
    """Of forward and backward."""
    gradient: Tensor
    """Of all parameters, whole, in one vector."""
    loss: float


def step_under(config: TrainConfig) -> RankResult:
    """Make one optimizer step as a configuration says and measure it; all ranks must call this."""
    trainer = Trainer(config, show_progress=False)
    kept: list[tuple[int, Tensor]] = []
    with ActivationMeter() as meter, CollectiveCounter() as counter:

        def keep(trainer: Trainer) -> None:
            num_calls = len(counter.calls)
            whole = gather_plain_state(trainer.model, trainer.shape, gradients=True)
            kept.append((num_calls, torch.cat([whole[name].flatten() for name in sorted(whole)] or [torch.zeros(0)])))

        trainer.before_update.append(keep)
        loss = trainer.train_step().loss
    return RankResult(meter.peak_bytes, *kept[0], loss)


# --- Tables ---------------------------------------------------------------------------------------------------------


def as_rows(results: Mapping[str, tuple[float, float, float]]) -> list[list[object]]:
    """Return the rows of a table of `measure_policies`."""
    return [
        [name, f"{size / 10**6:.2f}", f"{ratio:.2f}", f"{error:.0e}"] for name, (size, ratio, error) in results.items()
    ]


def plan_of(inputs: Sequence[int], inside: Sequence[int], segments: Sequence[tuple[int, int]]) -> Any:
    """Return what `plots.plot_chain_plans` takes of a plan: segments, and bytes alive as backward goes."""
    case = ChainCase(inputs=tuple(inputs), inside=tuple(inside), costs=(1,) * len(inputs), limit=0)
    return list(segments), bytes_alive(case, list(segments))
