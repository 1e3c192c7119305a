"""The most memory that a rank of a decoder's published run has allocated: by owner, at each moment, for each stage.

Enters: a `DecoderRun`. Leaves: `Peak`s. Bytes of layers come from `layer_kept.py`, moments from `rank_peak.py`; here is
what a framework keeps beside them, which is in the run's `Software`. Text only: `run_peak.py` has this package's runs
of vision-language models. Chapter 7.

Source: Narayanan et al. 2021 (arXiv:2104.04473) for micro-batches in flight; nanotron's tensor-parallel functions, loss
and gradient accumulator for what they keep.
"""

from __future__ import annotations

from vlmcourse.planner.decoder_run import DecoderRun
from vlmcourse.planner.layer_kept import LayerBytes, Lying, language_layer
from vlmcourse.planner.rank_peak import Peak, RankLoad, StageLoad, TowerLoad, find_peak
from vlmcourse.planner.rank_peak import list_moments as list_moments_of
from vlmcourse.planner.state_bytes import estimate_recipe_bytes


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
    return max((find_peak(build_load(run, each)) for each in stages), key=lambda peak: peak.total_bytes)


def list_moments(run: DecoderRun, stage: int) -> list[Peak]:
    """Return what a rank of a stage has allocated at each moment of a step where it may be most."""
    return list_moments_of(build_load(run, stage))


def build_load(run: DecoderRun, stage: int) -> RankLoad:
    """Return what a rank of a stage holds and keeps."""
    software, num_layers, layer = run.software, run.layers_of_stages()[stage], layer_of(run)
    stored = num_layers * kept_of_layer(run, layer)
    temporary = 0.0
    if num_layers:
        temporary = layer.backward + (0.0 if run.recompute == "none" else layer.whole - kept_of_layer(run, layer))
    logits = software.head_bytes * run.num_tokens * run.shape.vocab_size / run.tp if stage == run.pp - 1 else 0.0
    state = estimate_state(run, stage)
    return RankLoad(
        stage=stage,
        weights=state["weights"],
        gradients=state["gradients"],
        optimizer=state["optimizer"],
        stages=(
            StageLoad(
                towers=(TowerLoad(name="language", stored=stored, temporary=temporary),),
                ends=layer.input,
                head_temporary=logits,
            ),
        ),
        in_flight=((run.micro_batches_in_flight(stage),),),
        gathered=state["gathered"],
        gathered_at_step=state["gathered"],
        buffers=state["buckets"] + _buffer_bytes(run),
        late_gradients=0 if state["buckets"] else software.late_gradient_bytes * stage_params(run, stage),
        fixed=software.fixed_bytes,
    )


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
    """Return bytes of weights, gradients and optimizer state that a rank keeps, of what is gathered, and of buckets.

    Gathered under ZeRO-3 are two layers' weights (one at work, one fetched ahead) or the output matrix's, and a layer's
    or that matrix's whole gradient, in 16 bits.
    """
    num_params, shards = stage_params(run, stage), run.dp * run.cp
    state = estimate_recipe_bytes(num_params, run.precision, zero_stage=run.zero_stage, shard_degree=shards)
    gathered = 0
    if run.zero_stage == 3 and shards > 1:
        units = max(2 * run.layer_params, run.layer_params + run.vocab_params)
        gathered = 2 * ((units + max(run.layer_params, run.vocab_params)) // run.tp)
    return {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "gathered": gathered,
        "buckets": num_params * run.software.bucket_bytes if shards > 1 else 0,
    }


def layer_of(run: DecoderRun) -> LayerBytes:
    """Return the bytes of one layer and one micro-batch on one rank."""
    lying = Lying(
        attention_tp=run.tp,
        mlp_tp=run.tp,
        sequence_parallel=run.sequence_parallel,
        keeps_gathered=run.software.keeps_gathered,
    )
    return language_layer(
        run.shape, 1, run.num_tokens, run.precision.compute_bytes, lying, gated=run.mlp == "swiglu", rotations=False
    )


def layer_bytes(run: DecoderRun) -> float:
    """Bytes that one layer keeps of one micro-batch on one rank without recomputation."""
    return layer_of(run).whole + _packed_bytes(run)


def kept_of_layer(run: DecoderRun, layer: LayerBytes) -> float:
    """Bytes that a layer keeps of a micro-batch under the run's `recompute`.

    selective: the layer's input, attention's output, and every second product: queries, values, the gate, and the
    MLP's output, as torchtitan keeps them. full: the input only.
    """
    if run.recompute == "none":
        return layer.whole + _packed_bytes(run)
    if run.recompute == "full":
        return layer.input
    width, element = run.shape.hidden_size, run.precision.compute_bytes
    products = (2 * width + _kv_width(run) + run.shape.mlp_size) * element + 4 * run.shape.num_heads
    return 2 * layer.input + run.num_tokens * products / run.tp


def _kv_width(run: DecoderRun) -> int:
    return run.shape.hidden_size // run.shape.num_heads * run.shape.num_kv_heads


def _packed_bytes(run: DecoderRun) -> float:
    """Bytes of the keys and values that live on in the packed product of a layer, where the software has one."""
    if not run.software.packed_qkv:
        return 0.0
    return 2 * run.num_tokens * _kv_width(run) * run.precision.compute_bytes / run.tp


def _buffer_bytes(run: DecoderRun) -> int:
    """Bytes of buffers that sequence parallelism gathers into."""
    if run.tp == 1 or not run.sequence_parallel:
        return 0
    return run.software.gather_buffers * run.num_tokens * run.shape.hidden_size * run.precision.compute_bytes
