"""Chapter 4's glue: a chain of cheap layers, policies measured side by side, the layer of the 34-byte formula.

Enters: what a cell of the chapter has at hand. Leaves: measurements as plain data. The chain of section 5 and
how times are taken are in `labs.chain`.
"""

from __future__ import annotations

import dataclasses
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
from vlmcourse.labs.chain import FORWARD, Chain, ReluLayer, Repeats, measure_chain, seconds_in_turns, theory_peak
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.monitor.ledger import StepLedger
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.gather import gather_plain_state
from vlmcourse.planner.layer_activations import count_language_layer_bytes, count_vision_layer_bytes
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.recompute import RECOMPUTING_TOWERS, ActivationsConfig, plan_segments
from vlmcourse.train.accumulate import micro_batch_loss_sum
from vlmcourse.train.activations import cover_blocks
from vlmcourse.train.trainer import Trainer
from vlmcourse.values import ConfigError, check_counts

__all__ = ["check_prediction", "flat_gradient", "guess", "print_table", "relative_error"]
__all__ += ["Chain", "ReluLayer", "measure_chain", "theory_peak"]
MAX_SEQ_LEN = 256

# --- A real model, deep enough to show something --------------------------------------------------------------------


def deep_shape(num_layers: int = 4) -> VLMShape:
    """Return the tiny preset with `num_layers` blocks in each tower, 1 or more; ValueError else."""
    check_counts(1, num_layers=num_layers)
    tiny = get_model("tiny")
    vision = dataclasses.replace(tiny.vision, num_layers=num_layers)
    language = dataclasses.replace(tiny.language, num_layers=num_layers)
    return dataclasses.replace(tiny, name="deep", vision=vision, language=language)


def load_deep(num_samples: int = 8, num_layers: int = 4) -> tuple[VLM, Batch]:
    """Return a model of `deep_shape` and a micro-batch of digit pictures with questions.

    Raises:
        ValueError: if a number is below 1.
    """
    check_counts(1, num_samples=num_samples, num_layers=num_layers)
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
    """Carry out a policy in each tower, in the place of what was there.

    Raises:
        ValueError: if there is no such policy, or it would cover no block of its tower.
    """
    config = ActivationsConfig(vision=vision, language=language)
    depths = {"vision": len(model.vision.blocks), "language": len(model.language.blocks)}
    if found := config.problems() or config.uncovered(depths):
        raise ConfigError("set_policies", found)
    for tower, policy in ((model.vision, vision), (model.language, language)):
        cover_blocks(tower, plan_segments(policy, len(tower.blocks)))


@dataclasses.dataclass(frozen=True)
class PolicyResult:
    """What one policy, set in both towers, saves and costs."""

    peak_bytes: int
    """Activations alive at most, made again ones included."""
    time: Repeats
    """Of a forward and backward pass, as multiples of the first policy's least."""
    gradient_error: float
    """Length of the gradient's difference from the first policy's, relative."""


def measure_policies(
    model: VLM, batch: Batch, policies: Sequence[str], num_runs: int = 4
) -> tuple[float, dict[str, PolicyResult]]:
    """Measure policies set in both towers at once.

    Args:
        model: changed and changed back.
        batch: one micro-batch.
        policies: names; the first is what times and gradients are compared with.
        num_runs: of each, taken in turns.

    Returns:
        Forward's share of the first policy's time, and a result by policy.

    Raises:
        ValueError: if there is no run or no policy to measure, or a policy is unknown, before anything runs.
    """
    check_counts(1, num_runs=num_runs, num_policies=len(policies))
    for policy in policies:
        plan_segments(policy, 1)
    peaks, gradients = {}, {}
    for policy in policies:
        set_policies(model, policy, policy)
        peaks[policy] = activation_peak(model, lambda: forward_backward(model, batch))
        gradients[policy] = flat_gradient(model).clone()
    runs = {
        policy: (lambda policy=policy: set_policies(model, policy, policy), lambda: forward_backward(model, batch))
        for policy in policies
    }
    first = policies[0]
    forward = (lambda: set_policies(model, first, first), lambda: micro_batch_loss_sum(model, batch, "fp32"))
    seconds = seconds_in_turns({**runs, FORWARD: forward}, num_runs)
    set_policies(model, "none", "none")
    model.zero_grad()
    unit_s = min(seconds[first])
    results = {
        policy: PolicyResult(
            peaks[policy], Repeats.of(seconds[policy], unit_s), relative_error(gradients[policy], gradients[first])
        )
        for policy in policies
    }
    return min(seconds[FORWARD]) / unit_s, results


def list_kept(run: Callable[[], Any]) -> list[list[int]]:
    """Return the shapes of the tensors that autograd keeps in a run, one for each time it keeps one."""
    shapes: list[list[int]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(list(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return shapes


def activation_peak(model: nn.Module, run: Callable[[], Any]) -> int:
    """Return the most bytes of activations, made again ones included, that are alive at once in a run."""
    model.zero_grad()
    with StepLedger(model) as ledger:
        run()
    owners = ("activations", "recomputed")
    return max(sum(sample.by_owner().get(owner, 0) for owner in owners) for sample in ledger.samples)


# --- The layer of the 34 bytes --------------------------------------------------------------------------------------


class GeluDropoutLayer(nn.Module):
    """The layer that Korthikanti et al. count: a GELU MLP four times as wide, a dropout after each branch.

    With `writes_scores` attention is written out, so that the s x s matrices of each head exist: scores, softmax and a
    dropout of it. Else it is one fused operation without dropout, which keeps none of them.
    """

    def __init__(self, width: int, num_heads: int, *, writes_scores: bool = False) -> None:
        super().__init__()
        self.num_heads, self.writes_scores = num_heads, writes_scores
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply the block; [batch, seq, width] in and out."""
        q, k, v = self.qkv(self.norm1(x_BSD)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attend = self._attend_in_steps if self.writes_scores else F.scaled_dot_product_attention
        mixed_BSD = attend(q, k, v).transpose(1, 2).flatten(2)
        # The operation that a GPU runs, with a mask of one byte an element; nn.Dropout's on a CPU has the input's type.
        x_BSD = x_BSD + torch.native_dropout(self.out(mixed_BSD), 0.1, True)[0]
        return x_BSD + torch.native_dropout(self.down(F.gelu(self.up(self.norm2(x_BSD)))), 0.1, True)[0]

    def _attend_in_steps(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [batch, heads, seq, head width]; softmax keeps its result, dropout a mask, products both sides."""
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return torch.native_dropout(scores.softmax(-1), 0.1, True)[0] @ v


# --- Towers of a real size, by the formula --------------------------------------------------------------------------


COUNTED_POLICIES = ("none", "full")
"""Policies whose bytes `tower_bytes` derives; what others keep depends on how blocks are cut, or on operations."""


def tower_bytes(shape: VLMShape, num_tiles: int, num_text_tokens: int, policies: Mapping[str, str]) -> dict[str, int]:
    """Count what the two towers of a model keep of one sample in 16 bits, by the derived formula.

    Args:
        shape: of the model; its image features take positions in the language tower.
        num_tiles: tiles of the picture.
        num_text_tokens: other positions.
        policies: by tower, full or none; under full one block is whole besides all inputs.

    Returns:
        Bytes by tower at the fullest moment, with norms as a GPU runs them.

    Raises:
        ValueError: if a tower's policy is another or missing, or a count is negative.
    """
    check_counts(0, num_tiles=num_tiles, num_text_tokens=num_text_tokens)
    for tower in RECOMPUTING_TOWERS:
        if policies.get(tower) not in COUNTED_POLICIES:
            raise ValueError(
                f"policies[{tower!r}] = {policies.get(tower)!r}: the formula knows {' and '.join(COUNTED_POLICIES)}; "
                "choose one of them, or measure a model that fits with measure_policies"
            )
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


def as_rows(results: Mapping[str, PolicyResult]) -> list[list[object]]:
    """Return the rows of a table of `measure_policies`."""
    return [
        [
            name,
            f"{r.peak_bytes / 10**6:.2f}",
            f"{r.time.least:.2f}",
            f"{r.time.greatest:.2f}",
            f"{r.gradient_error:.0e}",
        ]
        for name, r in results.items()
    ]


def plan_of(inputs: Sequence[int], inside: Sequence[int], segments: Sequence[tuple[int, int]]) -> Any:
    """Return what `plots.plot_chain_plans` takes of a plan: segments, and bytes alive as backward goes."""
    case = ChainCase(inputs=tuple(inputs), inside=tuple(inside), costs=(1,) * len(inputs), limit=0)
    return list(segments), bytes_alive(case, list(segments))
