"""One training run of a decoder as published tables describe it: shape, degrees, recipe, and what the software keeps.

Enters: numbers from a paper, a benchmark's table or a person. Leaves: a `DecoderRun`, which `peak.py` turns into bytes
and `roofline.py` into seconds. A `Plan` says how this package trains a vision-language model; a run describes what
others trained, with sequence and context parallelism, a schedule, and the habits of their framework.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.recipes import Precision
from vlmcourse.planner.shapes import count_language_layer_params
from vlmcourse.presets import LanguageShape
from vlmcourse.values import check_counts

MLP_KINDS = ("swiglu", "gelu")
MAX_LAYERS = 10_000
RECOMPUTE_KINDS = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a framework keeps beside the state and the activations of textbooks."""

    name: str
    head_bytes: float
    """Most bytes for one token and one word of the vocabulary at once, from the output matrix to its gradient."""
    packed_qkv: bool = False
    """Whether queries stay in the packed product, so that its keys and values live on beside their rotated copies."""
    bucket_bytes: int = 0
    """For one parameter, of the 16-bit buckets in which data-parallel ranks add up gradients; kept all the time."""
    late_gradient_bytes: int = 0
    """For one parameter, of whole 16-bit gradients at the end of backward where there are no buckets."""
    gather_buffers: int = 0
    """Buffers of a whole micro-batch's tokens by the width, two bytes each, that sequence parallelism gathers into."""
    keeps_gathered: bool = False
    """Whether the two column-parallel products of a layer keep their gathered input, not their own part of it."""
    fixed_bytes: int = 0
    """Workspaces that do not grow with the run."""
    layer_s: float = 0.0005
    """Seconds of a layer, forward and backward, that no size makes less: kernels launched from Python."""
    micro_batch_s: float = 0.0
    """Seconds of each micro-batch, at every stage, that no size and no degree makes less."""


@dataclass(frozen=True, kw_only=True)
class DecoderRun:
    """A decoder, and how ranks share its training; `dp * cp * tp * pp` is the number of ranks."""

    shape: LanguageShape
    precision: Precision
    software: Software
    seq_len: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    """Sequences in one forward pass of one data-parallel group."""
    grad_accum_steps: int = 1
    """Micro-batches of one optimizer step; those of a pipeline too."""
    sequence_parallel: bool = False
    """Whether norms and residuals are split over `tp` along the sequence."""
    mlp: str = "swiglu"
    """One of `MLP_KINDS`."""
    recompute: str = "none"
    """One of `RECOMPUTE_KINDS`; selective keeps attention's output and every second product, as torchtitan does."""
    schedule: str = "1f1b"
    """Of the pipeline: 1f1b or gpipe."""

    def __post_init__(self) -> None:
        names = ("seq_len", "dp", "tp", "pp", "cp", "micro_batch_size", "grad_accum_steps")
        check_counts(1, **{name: getattr(self, name) for name in names})
        wrong = [
            f"{name} = {getattr(self, name)!r}: choose one of {', '.join(map(str, known))}"
            for name, known in (
                ("mlp", MLP_KINDS),
                ("recompute", RECOMPUTE_KINDS),
                ("schedule", ("1f1b", "gpipe")),
                ("zero_stage", range(4)),
            )
            if getattr(self, name) not in known
        ]
        if self.shape.num_layers > MAX_LAYERS:
            wrong.append(
                f"num_layers = {self.shape.num_layers}: must be at most {MAX_LAYERS}, far more than any model has"
            )
        if self.pp > self.shape.num_layers:
            wrong.append(f"pp = {self.pp}: at most num_layers = {self.shape.num_layers} stages have a layer")
        if self.shape.num_heads % self.tp:
            wrong.append(f"tp = {self.tp}: must divide num_heads = {self.shape.num_heads}")
        if self.shape.hidden_size % self.shape.num_heads or self.shape.num_heads % self.shape.num_kv_heads:
            wrong.append(
                f"num_heads = {self.shape.num_heads}: must divide hidden_size = {self.shape.hidden_size} and be a "
                f"multiple of num_kv_heads = {self.shape.num_kv_heads}"
            )
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch that one rank of a context-parallel group has."""
        return self.micro_batch_size * self.seq_len // self.cp

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step, all ranks together."""
        return self.dp * self.micro_batch_size * self.seq_len * self.grad_accum_steps

    @property
    def layer_params(self) -> int:
        """Weights of a layer, before tensor parallelism; a GELU MLP has two matrices, a SwiGLU one three."""
        gate = 0 if self.mlp == "swiglu" else self.shape.hidden_size * self.shape.mlp_size
        return count_language_layer_params(self.shape) - gate

    @property
    def vocab_params(self) -> int:
        """Weights of the embedding, or of the output matrix."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def num_params(self) -> int:
        """Weights of the whole model."""
        copies = 1 if self.shape.tied_embeddings else 2
        return self.shape.num_layers * self.layer_params + copies * self.vocab_params

    def layers_of_stages(self) -> tuple[int, ...]:
        """Layers of each stage, where stages are cut by the cost of their products, the output matrix counted.

        A stage takes layers until the cost so far reaches its share; late ones may have none. With one stage, all.
        Source: nanotron's `models/base.py` cuts so (a layer's products against the output matrix's).
        """
        total = self.shape.num_layers * self.layer_params + self.vocab_params
        counts, spent = [0] * self.pp, 0
        stage = 0
        for _ in range(self.shape.num_layers):
            counts[stage] += 1
            spent += self.layer_params
            while stage < self.pp - 1 and spent * self.pp >= total * (stage + 1):
                stage += 1
        return tuple(counts)

    def micro_batches_in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once."""
        return self.grad_accum_steps if self.schedule == "gpipe" else min(self.grad_accum_steps, self.pp - stage)
