"""A plan: how the ranks of a cluster share the training of one model.

Enters: numbers that a person chose. Leaves: a `Plan`, checked only for being a plan at all; whether it fits a model
and a cluster is `validate.check_plan`'s question. Sequence and context parallelism are left to a later chapter.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from vlmcourse.batch import effective_batch_size
from vlmcourse.config import TOWERS
from vlmcourse.planner.recipes import OPTIMIZERS, PRECISIONS, Precision
from vlmcourse.recompute import find_policy_problem


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How ranks, memory and precision are used; `dp_replicate * dp_shard * tp * pp` is the number of ranks."""

    dp_replicate: int = 1
    """Groups of ranks that each hold a whole copy of the training state."""
    dp_shard: int = 1
    """Ranks that split one copy of the training state between them, as far as `zero_stage` says."""
    tp: int = 1
    """Tensor-parallel degree of the language tower."""
    pp: int = 1
    """Pipeline stages, each with as many blocks of the two towers as any other, or one fewer (`split_evenly`)."""
    layers_per_stage: tuple[int, ...] = ()
    """Another split: how many layers each of the `pp` stages has, as in `stages.StageSplit`; empty: the even one."""
    vision_tp: int = 1
    """Tensor-parallel degree of the vision tower: 1 (each rank of a tp group holds all of it) or equal to `tp`."""
    zero_stage: int = 0
    """What `dp_shard` splits: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too (FSDP's full shard)."""
    optimizer: str = "adamw"
    """A name in `OPTIMIZERS`: adamw, adamw_8bit, sgd_momentum."""
    offload_optimizer: bool = False
    """Keep optimizer state and master weights in the node's main memory and step there."""
    precision: str = "bf16_mixed"
    """A name in `PRECISIONS`: fp32, bf16_autocast, bf16_mixed, bf16_fp32_grads, fp16_mixed."""
    frozen: tuple[str, ...] = ()
    """Towers that are not trained: any of vision, projector, language."""
    activation_checkpointing: bool = True
    """Keep the input of each layer only, and recompute the rest in the backward pass."""
    recompute_vision: str = ""
    """A policy of the section [activations] for the vision tower, such as "every:2"; "" is what
    `activation_checkpointing` says, full or none."""
    recompute_language: str = ""
    """As `recompute_vision`, for the language tower."""
    micro_batch_size: int = 1
    """Samples in one forward pass of one rank."""

    def __post_init__(self) -> None:
        found = []
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "vision_tp", "micro_batch_size"):
            found += _count_problems(name, getattr(self, name), smallest=1)
        found += _count_problems("zero_stage", self.zero_stage, smallest=0, largest=3)
        if self.layers_per_stage and (len(self.layers_per_stage) != self.pp or min(self.layers_per_stage) < 1):
            found.append(
                f"layers_per_stage = {self.layers_per_stage}: give each of the pp = {self.pp} stages a layer or more"
            )
        for name in ("offload_optimizer", "activation_checkpointing"):
            if not isinstance(getattr(self, name), bool):
                found.append(f"{name} = {getattr(self, name)!r}: must be True or False")
        if self.optimizer not in OPTIMIZERS:
            found.append(f"optimizer = {self.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
        if self.precision not in PRECISIONS:
            found.append(f"precision = {self.precision!r}: choose one of {', '.join(PRECISIONS)}")
        for name in ("recompute_vision", "recompute_language"):
            problem = getattr(self, name) != "" and find_policy_problem(getattr(self, name))
            if problem:
                found.append(f"{name} = {getattr(self, name)!r}: {problem}")
        found += self._frozen_problems()
        if found:
            raise ValueError("This is not a plan:\n" + "\n".join(f"  - {problem}" for problem in found))

    def _frozen_problems(self) -> list[str]:
        if not isinstance(self.frozen, (tuple, list, set, frozenset)):
            return [f"frozen = {self.frozen!r}: must be a tuple of tower names, such as ('vision',)"]
        known = tuple(tower for tower in TOWERS if tower in self.frozen)
        unknown = tuple(tower for tower in self.frozen if tower not in TOWERS)
        object.__setattr__(self, "frozen", known)  # one order, so that equal plans compare equal
        found = [f"frozen names {tower!r}: choose from {', '.join(TOWERS)}" for tower in unknown]
        if set(TOWERS) <= set(self.frozen):
            found.append("frozen names every tower: nothing would train; leave one out")
        return found

    def recompute(self, tower: str) -> str:
        """Return the policy for the activations of a tower, vision or language."""
        chosen = self.recompute_vision if tower == "vision" else self.recompute_language
        return chosen or ("full" if self.activation_checkpointing else "none")

    @property
    def num_ranks(self) -> int:
        """Ranks that the plan uses."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp

    @property
    def dp_degree(self) -> int:
        """Ranks that see different samples. Ranks of one tp or pp group share a sample and do not count (F4)."""
        return self.dp_replicate * self.dp_shard

    @property
    def recipe(self) -> Precision:
        """The precision recipe that `precision` names."""
        return PRECISIONS[self.precision]

    def global_batch_size(self, grad_accum_steps: int = 1) -> int:
        """Return the samples of one optimizer step: micro-batch x accumulation x data-parallel degree.

        Args:
            grad_accum_steps: micro-batches that a rank adds up before a step.

        Raises:
            ValueError: if `grad_accum_steps` is below 1.
        """
        if grad_accum_steps < 1:
            raise ValueError(f"grad_accum_steps = {grad_accum_steps}: must be 1 or greater")
        return effective_batch_size(self.micro_batch_size, grad_accum_steps, self.dp_degree)

    def __str__(self) -> str:
        """Show the fields that differ from their defaults."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Plan({', '.join(changed)})"


def _count_problems(name: str, value: object, smallest: int, largest: int | None = None) -> list[str]:
    """Return a sentence if `value` is not a whole number within the limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        hint = " (use // to divide whole numbers)" if isinstance(value, float) else ""
        return [f"{name} = {value!r}: must be a whole number{hint}"]
    if value < smallest or (largest is not None and value > largest):
        limits = f"{smallest} or greater" if largest is None else f"from {smallest} to {largest}"
        return [f"{name} = {value}: must be {limits}"]
    return []
