"""Is a plan possible for this model on this cluster? Every problem is listed, with a code and what to change.

Enters: a `Plan`, a model shape, a cluster, a workload. Leaves: a `Verdict`. Speed is not judged here.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.batch import describe_batch, nearest_accumulation
from vlmcourse.planner.activations import Workload
from vlmcourse.planner.degrees import find_indivisible
from vlmcourse.planner.hardware import DeviceSpec, get_device
from vlmcourse.planner.memory import GB, RankMemory, estimate_rank_memory
from vlmcourse.planner.plan import Plan
from vlmcourse.presets import Cluster, VLMShape

CODES = (
    "ranks",
    "sharding",
    "heads",
    "kv_heads",
    "hidden",
    "mlp",
    "layers",
    "vision_tp",
    "vision_heads",
    "vision_hidden",
    "vision_mlp",
    "tp_nodes",
    "precision",
    "memory",
    "host_memory",
    "batch",
)
"""Every code that a `Problem` may carry."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One reason why a plan cannot be run."""

    code: str
    """One of `CODES`."""
    message: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `check_plan` found."""

    problems: tuple[Problem, ...]
    memory: RankMemory
    """What the fullest rank needs."""
    available_bytes: int
    """What one device has."""

    @property
    def ok(self) -> bool:
        """Whether the plan can be run."""
        return not self.problems

    def __bool__(self) -> bool:
        """Stand for `ok`: `if check_plan(...)` asks whether the plan can be run."""
        return self.ok

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the problems."""
        return tuple(problem.code for problem in self.problems)

    def __str__(self) -> str:
        """Show the memory of the fullest rank and every problem."""
        used = self.memory.device_total
        head = f"a rank needs {used / GB:.1f} of {self.available_bytes / GB:.1f} GB ({self.memory})"
        if self.ok:
            return f"possible: {head}"
        lines = "\n".join(f"  - [{problem.code}] {problem.message}" for problem in self.problems)
        return f"not possible: {head}\n{lines}"


def check_plan(
    plan: Plan,
    model: VLMShape,
    cluster: Cluster,
    workload: Workload | None = None,
    *,
    grad_accum_steps: int = 1,
    global_batch_size: int = 0,
) -> Verdict:
    """Check a plan against a model and a cluster and list everything that is wrong.

    Args:
        plan: how the ranks share the work.
        model: the model's shape.
        cluster: the machines; its device must be a name in `planner.hardware.DEVICES`.
        workload: tokens and tiles of a sample; the default is 2048 tokens and one tile.
        grad_accum_steps: micro-batches that a rank adds up before a step.
        global_batch_size: samples of one optimizer step that are intended; 0 leaves the batch unchecked.

    Returns:
        The verdict; `verdict.ok` says whether the plan can be run.

    Raises:
        TypeError: if `plan` is not a `Plan`.
        ValueError: if the cluster's device is not known, `grad_accum_steps` is below 1 or `global_batch_size` below 0.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"check_plan needs a Plan, not {type(plan).__name__}: build one with Plan(dp_shard=...)")
    device = get_device(cluster.device)
    memory = estimate_rank_memory(plan, model, workload)
    problems = [
        *find_degree_problems(plan, model, cluster),
        *_precision_problems(plan, device),
        *_memory_problems(plan, memory, cluster, device),
        *_batch_problems(plan, grad_accum_steps, global_batch_size),
    ]
    return Verdict(problems=tuple(problems), memory=memory, available_bytes=device.memory_bytes)


def find_degree_problems(plan: Plan, model: VLMShape, cluster: Cluster, *, cp: int = 1) -> list[Problem]:
    """Check that a plan's degrees fit the ranks and the model, whatever memory there is.

    Args:
        plan: how the ranks share the work.
        model: the model's shape.
        cluster: the machines.
        cp: ranks that share each sequence; they come on top of the plan's, and split state with `dp_shard`.
    """
    return [*_rank_problems(plan, cluster, cp), *_division_problems(plan, model)]


def _rank_problems(plan: Plan, cluster: Cluster, cp: int) -> list[Problem]:
    """Check that the plan uses every rank and splits state where it says it does."""
    found = []
    if plan.num_ranks * cp != cluster.num_devices:
        names, of_cp = (
            ("dp_replicate x dp_shard x cp x tp x pp", f" x {cp}")
            if cp > 1
            else (
                "dp_replicate x dp_shard x tp x pp",
                "",
            )
        )
        product = f"{plan.dp_replicate} x {plan.dp_shard}{of_cp} x {plan.tp} x {plan.pp} = {plan.num_ranks * cp}"
        found.append(
            Problem(
                code="ranks",
                message=f"{names} = {product}, but {cluster.name} has {cluster.num_nodes} x "
                f"{cluster.devices_per_node} = {cluster.num_devices} devices: make the product equal to that",
            )
        )
    if plan.zero_stage == 0 and plan.dp_shard > 1:
        message = f"zero_stage=0 splits nothing, but dp_shard={plan.dp_shard}: raise zero_stage, or use dp_replicate"
        found.append(Problem(code="sharding", message=message))
    if plan.zero_stage > 0 and plan.dp_shard * cp == 1:
        message = f"zero_stage={plan.zero_stage} splits over dp_shard=1 rank, which is nothing: raise dp_shard"
        found.append(Problem(code="sharding", message=message))
    if plan.tp > 1 and cluster.devices_per_node % plan.tp:
        message = (
            f"tp={plan.tp} groups cross nodes of {cluster.devices_per_node} devices: tensor parallelism talks in every "
            "layer, so choose a tp that divides the devices of one node"
        )
        found.append(Problem(code="tp_nodes", message=message))
    return found


def _division_problems(plan: Plan, model: VLMShape) -> list[Problem]:
    """Check that tensor and pipeline degrees divide what they split."""
    indivisible = find_indivisible(model, plan.tp, plan.vision_tp)
    found = [Problem(code=code, message=f"{message}: {advice}") for code, message, advice in indivisible]
    num_blocks = model.vision.num_layers + model.language.num_layers
    if plan.pp > num_blocks:
        message = f"pp={plan.pp} stages for {num_blocks} blocks: each stage needs at least one, so choose a smaller pp"
        found.append(Problem(code="layers", message=message))
    if plan.vision_tp not in (1, plan.tp):
        message = f"vision_tp={plan.vision_tp} with tp={plan.tp}: must be 1 or equal to tp"
        found.append(Problem(code="vision_tp", message=message))
    return found


def _precision_problems(plan: Plan, device: DeviceSpec) -> list[Problem]:
    """Check that the device computes in the plan's dtype."""
    dtype = plan.recipe.compute_dtype
    if device.supports(dtype):
        return []
    message = f"precision={plan.precision!r} computes in {dtype}, which {device.name} does not: use fp16_mixed or fp32"
    return [Problem(code="precision", message=message)]


def _memory_problems(plan: Plan, memory: RankMemory, cluster: Cluster, device: DeviceSpec) -> list[Problem]:
    """Check that the fullest rank fits its device and that offloaded state fits the node."""
    found = []
    if memory.device_total > device.memory_bytes:
        owner = max(memory.by_owner(), key=lambda name: memory.by_owner()[name])
        message = (
            f"does not fit: a rank needs {memory.device_total / GB:.1f} GB and {device.name} has "
            f"{device.memory_bytes / GB:.1f} GB ({memory}): {_advise(plan, owner, cluster)}"
        )
        found.append(Problem(code="memory", message=message))
    node_bytes = memory.host_optimizer * cluster.devices_per_node
    if node_bytes > cluster.host_memory_bytes:
        message = (
            f"offload_optimizer puts {cluster.devices_per_node} x {memory.host_optimizer / GB:.1f} = "
            f"{node_bytes / GB:.1f} GB in a node's main memory, which has {cluster.host_memory_bytes / GB:.1f} GB: "
            f"{_advise(plan, 'host_optimizer', cluster)}"
        )
        found.append(Problem(code="host_memory", message=message))
    return found


def _batch_problems(plan: Plan, grad_accum_steps: int, intended: int) -> list[Problem]:
    """Check that a step takes as many samples as intended: x the data-parallel degree, not x the ranks (F4, F5)."""
    if intended < 0:
        raise ValueError(f"global_batch_size = {intended}: must be 0 (the batch is left unchecked) or greater")
    if plan.global_batch_size(grad_accum_steps) == intended or not intended:
        return []
    num_sharing = plan.num_ranks // plan.dp_degree
    reason = ""
    if num_sharing > 1:
        counted = plan.micro_batch_size * grad_accum_steps * plan.num_ranks == intended
        mistake = f": that would count all {plan.num_ranks} ranks" if counted else ""
        reason = f"{mistake}; tp x pp = {num_sharing} ranks share their samples"
    product = describe_batch(plan.micro_batch_size, grad_accum_steps, plan.dp_degree)
    choices = nearest_accumulation(intended, plan.micro_batch_size, plan.dp_degree)
    ways = " or ".join(f"{choice.accumulation_steps} ({choice.samples} samples)" for choice in choices)
    message = (
        f"micro-batch x accumulation x data-parallel degree = {product} samples a step, not {intended}{reason}; set "
        f"grad_accum_steps to {ways}"
    )
    return [Problem(code="batch", message=message)]


def _advise(plan: Plan, owner: str, cluster: Cluster) -> str:
    """Say what can still be changed in a plan whose largest part, a field of `RankMemory`, is too large."""
    stage, full_size = plan.zero_stage, plan.optimizer == "adamw"
    parts = (plan.dp_shard if stage else 1) * plan.tp * plan.pp
    copies = parts < cluster.num_devices  # some ranks hold the same part of the state
    over_ranks = "over more ranks (a larger dp_shard)"
    ways = {
        "activations": {
            "checkpoint activations": not plan.activation_checkpointing,
            "lower micro_batch_size": plan.micro_batch_size > 1,
            "raise tp": plan.tp < cluster.devices_per_node,
        },
        "weights": {
            "split the weights (zero_stage=3 over dp_shard, tp or pp)": stage < 3 and (copies or plan.dp_shard > 1),
            f"split the weights {over_ranks}": stage == 3 and copies,
        },
        "gradients": {
            "split the gradients (zero_stage of 2 or more over dp_shard)": stage < 2 and (copies or plan.dp_shard > 1),
            f"split the gradients {over_ranks}": stage >= 2 and copies,
        },
        "optimizer": {
            f"split the optimizer state {over_ranks}": copies,
            "split weights and gradients too (zero_stage=3)": stage in (1, 2) and plan.dp_shard > 1,
            "make the optimizer state smaller": full_size,
            "move the optimizer state off the device": True,
        },
        "host_optimizer": {
            f"split the optimizer state {over_ranks}": copies,
            "keep it on the devices" + " in a smaller form" * full_size: True,
        },
    }
    possible = [way for way, helps in ways.get(owner, {}).items() if helps]
    return ", or ".join(possible) or "choose a smaller model, or more or larger devices"
