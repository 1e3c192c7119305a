"""The most memory that a rank of a decoder's run has allocated: by owner, at each moment of a step, for each stage.

Enters: a `DecoderRun`. Leaves: `Peak`s. Memory is highest at one of these moments: when the output matrix's gradient
is computed (all activations are kept, logits too), when the last layer goes backward, at the end of backward (all
16-bit gradients), in the optimizer's step. The maximum over them and over the stages is what a device must have beside
its CUDA context. Bytes of layers are derived tensor by tensor; what a framework keeps beside them is in `Software`.
Text only: of a vision-language plan `memory.estimate_rank_memory` counts both towers, in less detail. Chapter 7.

Source: Korthikanti et al. 2022 (arXiv:2205.05198) for the way of counting; Narayanan et al. 2021 (arXiv:2104.04473)
for micro-batches in flight; nanotron's tensor-parallel functions, loss and gradient accumulator for what they keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.decoder_run import DecoderRun

LOGSUMEXP_BYTES = 4
"""Of one head and token: attention's fused kernel keeps it in fp32."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What one rank has allocated at the fullest moment of a step."""

    stage: int
    moment: str
    """head, layer, gradients or step."""
    owners: dict[str, int]
    """Bytes by owner: weights, gradients, optimizer, activations, logits, buffers, temporary, fixed."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.owners.values())


def estimate_peak(run: DecoderRun, stage: int | None = None) -> Peak:
    """Return the fullest moment of one pipeline stage, or of the stage that needs most.

    Args:
        run: the training run.
        stage: of the pipeline, from 0; by default all are looked at.

    Raises:
        ValueError: if there is no such stage.
    """
    if stage is not None and not 0 <= stage < run.pp:
        raise ValueError(f"stage = {stage}: must be 0 to {run.pp - 1}, since pp = {run.pp}; or leave it out")
    stages = range(run.pp) if stage is None else (stage,)
    return max((peak for each in stages for peak in list_moments(run, each)), key=lambda peak: peak.total_bytes)


def list_moments(run: DecoderRun, stage: int) -> list[Peak]:
    """Return what a rank of a stage has allocated at each moment of a step where it may be most."""
    num_layers, has_head = run.layers_of_stages()[stage], stage == run.pp - 1
    state = estimate_state(run, stage)
    kept, gathered = kept_bytes(run, num_layers, stage)
    buckets = state.pop("buckets")
    buffers = {"buffers": buckets + _buffer_bytes(run), "fixed": run.software.fixed_bytes}
    logits = int(run.software.head_bytes * run.num_tokens * run.shape.vocab_size / run.tp) if has_head else 0
    held = {"activations": int(kept + gathered)}
    late = 0 if buckets else run.software.late_gradient_bytes * stage_params(run, stage)
    moments = {
        "head": held | {"logits": logits},
        "layer": held | {"temporary": int(_backward_bytes(run)) if num_layers else 0},
        "gradients": {"temporary": late},
        "step": {},  # a fused update writes in place: nothing but the state is there
    }
    return [Peak(stage=stage, moment=moment, owners=state | buffers | owners) for moment, owners in moments.items()]


def stage_params(run: DecoderRun, stage: int) -> int:
    """Parameters of a stage that one tensor-parallel rank has, before any sharding over data-parallel ranks.

    A tied output matrix on another stage than the embedding is a copy.
    """
    held = run.layers_of_stages()[stage] * run.layer_params
    if stage == 0:
        held += run.vocab_params
    if stage == run.pp - 1 and (stage > 0 or not run.shape.tied_embeddings):
        held += run.vocab_params
    return -(-held // run.tp)


def estimate_state(run: DecoderRun, stage: int) -> dict[str, int]:
    """Return bytes of weights, gradients and optimizer state that a rank keeps, and of gradient buckets.

    Under ZeRO-3 the bytes of what is gathered are among the gradients and weights: two layers' weights (one at work,
    one fetched ahead) or the output matrix's, and a layer's whole gradient, in 16 bits.
    """
    num_params, precision, shards = stage_params(run, stage), run.precision, run.dp * run.cp
    split = [-(-num_params // (shards if run.zero_stage >= at_least else 1)) for at_least in (3, 2, 1)]
    state = {
        "weights": split[0] * precision.weight_bytes,
        "gradients": split[1] * precision.gradient_bytes,
        "optimizer": split[2] * (precision.master_bytes + precision.moment_bytes),
        "buckets": num_params * run.software.bucket_bytes if shards > 1 else 0,
    }
    if run.zero_stage == 3 and shards > 1:
        unit = max(2 * run.layer_params, run.layer_params + run.vocab_params) // run.tp
        state["weights"] += unit * 2
        state["gradients"] += max(run.layer_params, run.vocab_params) // run.tp * 2
    return state


def layer_bytes(run: DecoderRun) -> float:
    """Bytes that one layer keeps of one micro-batch on one rank without recomputation, gathered inputs apart.

    For each token: the inputs of both norms and their outputs (split where sequence parallel); queries, keys, values
    and attention's output with its log-sum-exps; the gate before and after its activation, the value and their product
    (or, with GELU, the hidden layer before and after). All 16-bit activations have two bytes.
    """
    width, element = run.shape.hidden_size, run.precision.compute_bytes
    kv_width = width // run.shape.num_heads * run.shape.num_kv_heads
    streams = 4 * width * element / (run.tp if run.sequence_parallel else 1)
    attention = (2 * width + 2 * kv_width) * element + LOGSUMEXP_BYTES * run.shape.num_heads
    if run.software.packed_qkv:
        attention += 2 * kv_width * element
    mlp = (4 if run.mlp == "swiglu" else 2) * run.shape.mlp_size * element
    return run.num_tokens * (streams + (attention + mlp) / run.tp)


def selected_bytes(run: DecoderRun) -> float:
    """Bytes that a layer keeps of a micro-batch under `recompute`, gathered inputs apart.

    selective: the layer's input, attention's output, and every second product: queries, values, the gate, and the
    MLP's output. full: the input only.
    """
    if run.recompute == "none":
        return layer_bytes(run)
    width, element = run.shape.hidden_size, run.precision.compute_bytes
    stream = width * element / (run.tp if run.sequence_parallel else 1)
    if run.recompute == "full":
        return run.num_tokens * stream
    kv_width = width // run.shape.num_heads * run.shape.num_kv_heads
    products = (2 * width + kv_width + run.shape.mlp_size) * element + LOGSUMEXP_BYTES * run.shape.num_heads
    return run.num_tokens * (2 * stream + products / run.tp)


def kept_bytes(run: DecoderRun, num_layers: int, stage: int) -> tuple[float, float]:
    """Bytes of the activations that a stage keeps at its fullest: its own, and gathered inputs of products."""
    in_flight = run.micro_batches_in_flight(stage)
    width, element = run.shape.hidden_size, run.precision.compute_bytes
    stream = run.num_tokens * width * element / (run.tp if run.sequence_parallel else 1)
    own = num_layers * selected_bytes(run) + stream
    if not (run.software.keeps_gathered and run.sequence_parallel) or run.recompute != "none":
        return in_flight * own, 0.0
    gathered = 2 * run.num_tokens * width * element * (1 - 1 / run.tp)
    return in_flight * own, in_flight * num_layers * gathered


def _buffer_bytes(run: DecoderRun) -> int:
    """Bytes of buffers that sequence parallelism gathers into."""
    if run.tp == 1 or not run.sequence_parallel:
        return 0
    return run.software.gather_buffers * run.num_tokens * run.shape.hidden_size * run.precision.compute_bytes


def _backward_bytes(run: DecoderRun) -> float:
    """Bytes that exist only while a layer goes backward: its recomputed activations, and gradients beside them.

    Those are the gradients of the MLP's product, gate and value (or hidden layer twice), and of a whole input.
    """
    element, hidden = run.precision.compute_bytes, run.shape.mlp_size / run.tp
    gradients = (3 if run.mlp == "swiglu" else 2) * hidden + run.shape.hidden_size
    again = 0.0 if run.recompute == "none" else layer_bytes(run) - selected_bytes(run)
    return again + run.num_tokens * gradients * element
