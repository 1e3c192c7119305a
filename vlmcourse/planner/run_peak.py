"""Peak bytes of a rank of this package's runs, by owner and moment: both towers, the projector, any `ParallelConfig`.

Enters: a `Job`. Leaves: a `RankLoad` for each rank of the pipeline, and the fullest `Peak`. Ranks that differ in other
axes hold the same, but for shards that do not come out even. Chapter 7.

Assumed: backward of a pipeline that splits it keeps a micro-batch's graph until its gradients of weights are done (in
PyTorch 2.13 the last stage keeps most of it to the end of the step, see bench/planner_vs_ledger.md). The fused
optimizer's step needs nothing more; that of 16-bit weights needs fp32 copies of the largest tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from vlmcourse.planner.job import Job
from vlmcourse.planner.layer_kept import LayerBytes, Lying, keep_tower, language_layer, vision_layer
from vlmcourse.planner.pipeline_held import list_fullest
from vlmcourse.planner.rank_peak import Peak, RankLoad, StageLoad, TowerLoad, find_peak
from vlmcourse.planner.schedules import stages_of_rank
from vlmcourse.planner.stage_ends import count_ends, pixel_bytes
from vlmcourse.planner.stage_params import Unit, degree_of, list_units, unit_sizes
from vlmcourse.planner.state_bytes import StateBytes, estimate_recipe_bytes

STEP_COPIES = 4
"""fp32 copies that the update of 16-bit weights makes of a tensor: gradient, weight and both moments."""


def estimate_run_peak(job: Job, pp_rank: int | None = None) -> Peak:
    """Return the fullest moment of a rank of the pipeline, or of the rank that needs most.

    Args:
        job: the run.
        pp_rank: of the pipeline, from 0; by default all are looked at.

    Raises:
        ValueError: if there is no such rank.
    """
    if pp_rank is not None and not 0 <= pp_rank < job.layout.pp:
        raise ValueError(f"pp_rank = {pp_rank}: must be 0 to {job.layout.pp - 1}, or leave it out")
    ranks, layers = range(job.layout.pp) if pp_rank is None else (pp_rank,), count_layers(job)
    return max((find_peak(build_run_load(job, rank, layers)) for rank in ranks), key=lambda peak: peak.total_bytes)


def build_run_load(job: Job, pp_rank: int, layers: Mapping[str, LayerBytes] | None = None) -> RankLoad:
    """Return what a rank of the pipeline holds and keeps; `layers` is what `count_layers` returns, if it is known."""
    layers = layers or count_layers(job)
    pp, tp = job.layout.pp, job.layout.tp
    numbers = stages_of_rank(job.schedule, pp, pp_rank) if pp > 1 else (0,)
    units = [list_units(job.shape, job.split, number, job.vision_plan) for number in numbers]
    held = [(unit.tower, unit.number * unit.on_rank(degree_of(unit, tp, job.vision_tp))) for of in units for unit in of]
    state = state_of_towers(job, held)
    whole_gradients = sum(size * _gradient_bytes(job, tower) for tower, size in held)
    gathered, late = 0.0, 0.0
    if job.zero_stage == 3 and job.shard_degree > 1:
        gathered, late = _gathered(job, units, held)
        gathered += whole_gradients if job.whole_gradients else 0.0
    most = list_fullest(job.schedule, pp, job.grad_accum_steps, pp_rank)
    # When all micro-batches are held none has left gradients; with one less, all are there.
    fewer = [tuple(count - 1 for count in held) for held in most if max(held) == job.grad_accum_steps > 1]
    pictures = job.grad_accum_steps * pixel_bytes(job, count_tiles(job)) if pp > 1 else 0.0
    kept_pictures = pictures if pp_rank == 0 and "vision" not in job.frozen else 0.0
    largest = max((unit.on_rank(degree_of(unit, tp, job.vision_tp)) for of in units for unit in of), default=0)
    return RankLoad(
        stage=pp_rank,
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        stages=tuple(_build_stage(job, number, of, layers) for number, of in zip(numbers, units, strict=True)),
        in_flight=(*most, *fewer) if not job.gradients_stay else most,
        num_microbatches=job.grad_accum_steps if pp > 1 else 1,
        gradients_stay=job.gradients_stay,
        gradients_last=job.whole_gradients,
        always_stored=kept_pictures,
        gathered=gathered,
        late_gradients=late,
        step_temporary=_step_temporary(job, largest),
        # Every rank of a pipeline has the pictures of all micro-batches, whole and cut.
        buffers=_message_bytes(job, numbers) + 2 * pictures - kept_pictures if pp > 1 else 0.0,
        fixed=job.fixed_bytes,
    )


def _step_temporary(job: Job, largest: int) -> float:
    """Return what the update needs for a moment; `largest` is the parameters of the largest unit."""
    return 0.0 if job.recipe.gradient_bytes == 4 else 4.0 * STEP_COPIES * largest / job.shard_degree


def state_of_towers(job: Job, held: list[tuple[str, int]]) -> StateBytes:
    """Return the state of a rank that has so many parameters of each tower before sharding."""
    trained = sum(size for tower, size in held if tower not in job.frozen)
    frozen = sum(size for tower, size in held if tower in job.frozen)
    count = functools.partial(
        estimate_recipe_bytes, recipe=job.recipe, zero_stage=job.zero_stage, shard_degree=job.shard_degree
    )
    return count(trained) + count(frozen, trainable=False)


def _gradient_bytes(job: Job, tower: str) -> int:
    return 0 if tower in job.frozen else job.recipe.gradient_bytes


def _gathered(job: Job, units: list[tuple[Unit, ...]], held: list[tuple[str, int]]) -> tuple[float, float]:
    """Return what stays whole from forward to backward, and what the embedding needs whole at the end of backward."""
    weight, tied = job.recipe.weight_bytes, job.shape.language.tied_embeddings
    late = sum(
        unit.on_rank(job.layout.tp) * _gradient_bytes(job, "language") * job.gradient_copies
        for of in units
        for unit in of
        if unit.kind == "embedding"
    )
    if job.whole_weights:
        return float(weight * sum(size for _, size in held)), float(late)
    root = 0.0
    for of in units:
        for tower, size in unit_sizes(of, job.layout.tp, job.vision_tp, tied_embeddings=tied)[0]:
            root += size * weight
            late += size * _gradient_bytes(job, tower)
    return root, float(late)


def _unit_bytes(job: Job, unit: Unit, *, after: bool = False) -> float:
    """Return what is whole while a unit goes backward: weights, those fetched ahead, and its gradient.

    After it the gradient is exchanged, which FSDP2 does from a copy.
    """
    if job.zero_stage < 3 or job.shard_degree == 1:
        return 0.0
    size = unit.on_rank(degree_of(unit, job.layout.tp, job.vision_tp))
    copies = 0 if job.whole_weights else 1 + job.prefetch
    of_gradient = (job.gradient_copies if after else 1) * _gradient_bytes(job, unit.tower)
    return float(size * (copies * job.recipe.weight_bytes + of_gradient))


def count_layers(job: Job) -> dict[str, LayerBytes]:
    """Return the bytes of one layer of each tower, vision and language, and one micro-batch, on one rank."""
    tp = job.layout.tp
    language = language_layer(
        job.shape.language,
        job.micro_batch_size,
        -(-job.workload.seq_len // job.layout.cp),
        job.recipe.compute_bytes,
        Lying(attention_tp=tp, mlp_tp=tp, sequence_parallel=job.sequence_parallel),
        fused_norms=job.fused_norms,
        autocast=job.autocast,
        trained="language" not in job.frozen,
        cp=job.layout.cp,
        cp_method=job.cp_method,
    )
    vision = vision_layer(
        job.shape.vision,
        count_tiles(job),
        job.recipe.compute_bytes,
        Lying(attention_tp=1 if job.vision_plan == "mlp_only" else job.vision_tp, mlp_tp=job.vision_tp),
        fused_norms=job.fused_norms,
        autocast=job.autocast,
    )
    return {"language": language, "vision": vision}


def count_tiles(job: Job) -> int:
    """Return the tiles of a micro-batch that one rank encodes: a blank one where there are none."""
    return max(1, -(-job.micro_batch_size * job.workload.tiles_per_sample // job.layout.cp))


def _build_stage(job: Job, number: int, units: tuple[Unit, ...], layers: Mapping[str, LayerBytes]) -> StageLoad:
    split, towers = job.split, list[TowerLoad]()
    of_kind = {(unit.tower, unit.kind): unit for unit in units}
    for name, blocks in (("language", split.language_blocks(number)), ("vision", split.vision_blocks(number))):
        if not blocks:
            continue
        unit, layer = of_kind[name, "layer"], layers[name]
        kept = keep_tower(job.recompute(name), len(blocks), layer, blocks[0])
        # No gradient comes to a frozen vision tower; its layers need as much for a moment on their way forward.
        passes = name == "language" or "vision" not in job.frozen
        size = unit.number * unit.on_rank(degree_of(unit, job.layout.tp, job.vision_tp))
        towers.append(
            TowerLoad(
                name=name,
                stored=kept.stored if passes else 0.0,
                temporary=layer.backward + (kept.again if passes else 0.0),
                unit=_unit_bytes(job, unit),
                unit_after=_unit_bytes(job, unit, after=True),
                share=kept.longest / len(blocks),
                gradients=size * _gradient_bytes(job, name) / (job.shard_degree if job.zero_stage >= 2 else 1),
            )
        )
    output = of_kind.get(("language", "output"))
    ends = count_ends(job, {f"{unit.tower} {unit.kind}" for unit in units}, count_tiles(job))
    return StageLoad(
        towers=tuple(towers),
        ends=ends.kept,
        head_kept=ends.loss_kept,
        head_temporary=ends.logits,
        head_unit=_unit_bytes(job, output) if output is not None else 0.0,
    )


def _message_bytes(job: Job, numbers: tuple[int, ...]) -> float:
    """Return what a rank receives activations and gradients in: PyTorch keeps a buffer for each micro-batch."""
    total, element = 0.0, job.recipe.compute_bytes
    text = job.micro_batch_size * -(-job.workload.seq_len // job.layout.cp) * job.shape.language.hidden_size * element
    positions = count_tiles(job) * (1 + job.shape.vision.num_patches)
    picture = positions * job.shape.vision.hidden_size * element
    for number in numbers:
        for boundary in (number - 1, number):  # what comes before the stage, and what follows it
            if 0 <= boundary < job.split.num_stages - 1:
                is_text = boundary >= job.split.fusion_stage
                has_block = any(job.split.language_blocks(earlier) for earlier in range(boundary + 1))
                parts = job.layout.tp if job.sequence_parallel and has_block else 1
                total += text / parts if is_text else picture
    return job.grad_accum_steps * total
