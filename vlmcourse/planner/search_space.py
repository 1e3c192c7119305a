"""All plans that a search looks at, and which of them break a rule whatever memory and time they take.

Enters: a `Task`, a `SearchSpace`. Leaves: `Candidates`: groups of choices that differ in recomputation alone, and how
many broke which rule, each counted under the first that it breaks. Imports no torch. Chapter 7.

The rules are those of the rest of the package, asked here and written there: `validate.find_degree_problems` (degrees
and heads, nodes, shards), `schedules.find_schedule_problems`, `layout.sequence_multiple`, and, where the plan is to be
trained with this package, `ParallelConfig.problems` and `degrees.find_shape_problems`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from vlmcourse.layout import GRADIENT_SYNCS, find_layout, sequence_multiple
from vlmcourse.planner.choice import Choice, Task, strategy_of, to_config
from vlmcourse.planner.degrees import find_shape_problems
from vlmcourse.planner.schedules import SCHEDULES, find_schedule_problems, find_tied_problem
from vlmcourse.planner.validate import find_degree_problems
from vlmcourse.recompute import SPLIT_BACKWARD, find_policy_problem, plan_segments

RULES = ("batch", "sequence", "stages", "schedule", "offload", "package")
"""Rules beside those of `validate.CODES`; memory, host_memory and slower are found later, in `search.py`."""
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may be varied; the product of all of it is searched."""

    recompute_vision: tuple[str, ...] = ("none", "selective", "full", "every:2")
    """Policies of the section [activations]; a frozen vision tower keeps nothing and has "none" alone."""
    recompute_language: tuple[str, ...] = ("none", "selective", "full", "every:2")
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    vision_stages: tuple[int, ...] = (0, 1)
    """Stages for the vision tower alone; 0 lets it share stages with language layers."""
    zero_stages: tuple[int, ...] = ZERO_STAGES
    gradient_syncs: tuple[str, ...] = ("every", "last")
    """With which micro-batches ZeRO-2 and 3 may scatter gradients; a pipeline does with the last alone."""
    micro_batch_sizes: tuple[int, ...] = ()
    """Empty: all that divide a rank's samples."""
    grad_accum_steps: tuple[int, ...] = ()
    """Only without a global batch: micro-batches of a step."""
    max_cp: int = 0
    """0 is no limit, here and below."""
    max_pp: int = 0
    offload: bool = False
    """Whether the optimizer may live in main memory."""
    runnable: bool = False
    """Only what this package's Trainer can run."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} = {policy!r}: {problem}"
            for name in ("recompute_vision", "recompute_language")
            for policy in getattr(self, name)
            if (problem := find_policy_problem(policy))
        ]
        known_names = (
            ("schedules", tuple(SCHEDULES)),
            ("zero_stages", ZERO_STAGES),
            ("gradient_syncs", GRADIENT_SYNCS),
        )
        for name, known in known_names:
            wrong += [f"{name}: {one!r} is not one of {known}" for one in getattr(self, name) if one not in known]
        needed = ("recompute_vision", "recompute_language", *(name for name, _ in known_names), "vision_stages")
        wrong += [f"{name} is empty: nothing is left to search" for name in needed if not getattr(self, name)]
        for name, least in (("micro_batch_sizes", 1), ("grad_accum_steps", 1), ("vision_stages", 0)):
            wrong += [f"{name}: {n!r} must be {least} or more" for n in getattr(self, name) if n < least]
        wrong += [f"{name} = {n}: must be 0 or more" for name in ("max_cp", "max_pp") if (n := getattr(self, name)) < 0]
        if wrong:
            raise ValueError("This space cannot be searched: " + "; ".join(wrong))

    def policies(self, task: Task) -> tuple[tuple[str, str], ...]:
        """Return recomputation of vision and language, in all combinations that do something."""
        blocks = {"vision": task.model.vision.num_layers, "language": task.model.language.num_layers}
        found = [
            tuple(policy for policy in given if policy == "none" or plan_segments(policy, blocks[tower])) or ("none",)
            for tower, given in (("vision", self.recompute_vision), ("language", self.recompute_language))
        ]
        return tuple(product(("none",) if "vision" in task.frozen else found[0], found[1]))


@dataclass
class Candidates:
    """What is left to look at, and what broke a rule."""

    groups: list[tuple[Choice, tuple[tuple[str, str], ...]]] = field(
        default_factory=list[tuple[Choice, tuple[tuple[str, str], ...]]]
    )
    """A choice without recomputation, and the policies that it may have."""
    broken: Counter[str] = field(default_factory=Counter[str])
    """Rule -> plans."""
    examples: dict[str, str] = field(default_factory=dict[str, str])
    """Rule -> what is wrong with the first of them."""

    def reject(self, rule: str, num_plans: int, example: str) -> None:
        """Count plans under a rule."""
        if num_plans:
            self.broken[rule] += num_plans
            self.examples.setdefault(rule, example)


def list_candidates(task: Task, space: SearchSpace) -> Candidates:
    """Return every choice of a space that breaks no rule, in groups.

    Raises:
        ValueError: if the space names micro-batches and accumulation beside a global batch, or neither.
    """
    if bool(task.global_batch_size) == bool(space.grad_accum_steps):
        raise ValueError(
            f"global_batch_size = {task.global_batch_size} with grad_accum_steps = {space.grad_accum_steps}: give one "
            "of the two; the other follows from it"
        )
    found, policies = Candidates(), space.policies(task)
    for layout in _list_layouts(task, space):
        _add_layout(found, task, space, policies, layout)
    return found


def _list_layouts(task: Task, space: SearchSpace) -> Iterator[Choice]:
    """Yield all products of five degrees that use every rank."""
    num_ranks = task.cluster.num_devices
    for tp, vision_tp in ((degree, vision) for degree in _divisors(num_ranks) for vision in sorted({1, degree})):
        for pp in _divisors(num_ranks // tp):
            for cp in _divisors(num_ranks // tp // pp):
                if (space.max_pp and pp > space.max_pp) or (space.max_cp and cp > space.max_cp):
                    continue
                left = num_ranks // tp // pp // cp
                for dp_replicate in _divisors(left):
                    yield Choice(dp_replicate, left // dp_replicate, cp, tp, pp, vision_tp)


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def _add_layout(
    found: Candidates, task: Task, space: SearchSpace, policies: tuple[tuple[str, str], ...], layout: Choice
) -> None:
    """Add the groups of one grid of ranks, rule by rule."""
    pipelines = [("1f1b", 0)] if layout.pp == 1 else list(product(space.schedules, space.vision_stages))
    offloads = (False, True) if space.offload else (False,)
    each = len(pipelines) * len(offloads) * len(policies)
    batches, problem = _list_batches(task, space, layout.dp_degree)
    if problem:
        found.reject("batch", len(space.zero_stages) * each, problem)
        return
    for zero_stage in space.zero_stages:
        choice = layout._replace(zero_stage=zero_stage)
        syncs = {accumulation: _list_syncs(choice, accumulation, space) for _, accumulation in batches}
        num_batches = sum(len(syncs[accumulation]) for _, accumulation in batches)
        if broken := _find_layout_problem(task, space, choice):
            found.reject(broken[0], num_batches * each, broken[1])
            continue
        for (schedule, vision_stages), (size, accumulation) in product(pipelines, batches):
            choice = layout._replace(
                zero_stage=zero_stage,
                schedule=schedule,
                vision_stages=vision_stages,
                micro_batch_size=size,
                grad_accum_steps=accumulation,
            )
            if broken := _find_pipeline_problem(task, space, choice):
                found.reject(broken[0], len(syncs[accumulation]) * len(offloads) * len(policies), broken[1])
                continue
            for sync, offload in product(syncs[accumulation], offloads):
                _add_group(found, task, policies, choice._replace(gradient_sync=sync, offload_optimizer=offload))


def _list_batches(task: Task, space: SearchSpace, dp_degree: int) -> tuple[list[tuple[int, int]], str]:
    """Return micro-batch sizes with their accumulation, or why there are none."""
    if not task.global_batch_size:
        return list(product(space.micro_batch_sizes or (1,), space.grad_accum_steps)), ""
    samples, rest = divmod(task.global_batch_size, dp_degree)
    if rest:
        return [], (
            f"global_batch_size = {task.global_batch_size} over {dp_degree} data-parallel ranks leaves {rest} samples "
            f"over: choose a multiple of {dp_degree}"
        )
    sizes = [size for size in space.micro_batch_sizes or _divisors(samples) if samples % size == 0]
    if not sizes:
        return [], f"no micro-batch of {space.micro_batch_sizes} divides the {samples} samples of a rank"
    return [(size, samples // size) for size in sizes], ""


def _list_syncs(choice: Choice, accumulation: int, space: SearchSpace) -> tuple[str, ...]:
    """Return when gradients may be exchanged; it matters to shards alone, and a pipeline exchanges at the end."""
    if choice.zero_stage < 2 or accumulation == 1:
        return ("every",)
    return tuple(sync for sync in space.gradient_syncs if sync == "last" or choice.pp == 1)


def _find_layout_problem(task: Task, space: SearchSpace, choice: Choice) -> tuple[str, str] | None:
    """Return the first rule that a grid of ranks breaks with a stage of ZeRO, and a sentence."""
    if problems := find_degree_problems(task.plan(choice), task.model, task.cluster, cp=choice.cp):
        return problems[0].code, problems[0].message
    chosen_multiple = 2 * choice.cp * choice.tp if choice.cp > 1 else choice.tp
    if task.workload.seq_len % chosen_multiple:
        return "sequence", (
            f"seq_len = {task.workload.seq_len} with cp={choice.cp}, tp={choice.tp}: its ranks split it into parts, "
            f"two for each cp rank; pad it to a multiple of {chosen_multiple}"
        )
    if space.runnable and not strategy_of(choice):
        return "package", (
            f"ZeRO-{choice.zero_stage} in {choice.dp_replicate} copies of {choice.dp_shard} shards: this package "
            "keeps copies of ZeRO-3 alone (hsdp)"
        )
    return None


def _find_pipeline_problem(task: Task, space: SearchSpace, choice: Choice) -> tuple[str, str] | None:
    """Return the first rule that stages, schedule and micro-batches break, and a sentence."""
    if choice.pp > 1:
        strategy = "single" if choice.dp_degree * choice.cp == 1 else "fsdp" if choice.zero_stage >= 2 else "ddp"
        if problems := _schedule_problems(
            choice.schedule, choice.pp, choice.grad_accum_steps, strategy, choice.zero_stage == 3
        ):
            return "schedule", problems[0]
        try:
            split = task.split(choice)
        except ValueError as error:
            return "stages", f"{error}; lower pp = {choice.pp}"
        tied = task.model.language.tied_embeddings
        if problem := find_tied_problem(choice.schedule, split, tied_embeddings=tied):
            return "schedule", problem
    if space.runnable:
        problems = _package_problems(task, choice)
        if problems:
            return "package", problems[0]
    return None


@lru_cache(maxsize=8192)
def _schedule_problems(schedule: str, pp: int, num: int, strategy: str, reshards: bool) -> tuple[str, ...]:
    return tuple(
        find_schedule_problems(
            schedule, pp=pp, num_microbatches=num, data_strategy=strategy, reshard_after_forward=reshards
        )
    )


def _package_problems(task: Task, choice: Choice) -> list[str]:
    """Return what this package's configuration says against a choice."""
    config = to_config(choice)
    if problems := config.problems() or find_shape_problems(config, task.model):
        return problems
    try:
        find_layout(config, task.cluster.num_devices)
    except ValueError as error:
        return [str(error)]
    multiple = sequence_multiple(config)
    rest = task.workload.seq_len % multiple
    return [f"seq_len = {task.workload.seq_len} is padded to a multiple of {multiple}"] if rest else []


def _add_group(found: Candidates, task: Task, policies: Iterable[tuple[str, str]], choice: Choice) -> None:
    """Add a group with those policies that its schedule can run."""
    if choice.offload_optimizer and (choice.pp > 1 or choice.cp > 1):
        problem = f"pp={choice.pp}, cp={choice.cp}: the time of an offloaded optimizer is described without them"
        found.reject("offload", len(tuple(policies)), problem)
        return
    allowed = tuple(policies)
    if choice.pp > 1 and choice.schedule in SPLIT_BACKWARD:
        allowed = tuple(pair for pair in policies if "selective" not in pair)
        num = len(tuple(policies)) - len(allowed)
        found.reject("schedule", num, f"{choice.schedule} runs backward in two parts: 'selective' cannot be used")
    if allowed:
        found.groups.append((choice, allowed))
