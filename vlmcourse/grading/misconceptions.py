"""Which wrong idea explains wrong plans: each is written as an estimate and asked what it would have decided.

Enters: a learner's choices. Leaves: the sentence of the wrong idea that reproduces them, or nothing. A wrong idea is
named only if it explains the answers clearly better than the right formula does, so a right answer is never accused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlmcourse.grading.kinds import fill_fraction, kind_of, plain_plan, vision_state_bytes, zero_plan
from vlmcourse.grading.scenarios import Scenario
from vlmcourse.grading.state_bytes import GB, GIB, GRADIENTS_IN_STAGE_1, ONE_MOMENT, WEIGHTS_IN_STAGE_2
from vlmcourse.planner import OPTIMIZERS, Plan, RankMemory, check_plan, estimate_rank_memory, get_device

LANGUAGE_ONLY = "you counted the language tower only: the vision tower trains too"

Choice = tuple[Scenario, Plan | None]
"""A case and the plan chosen for it; None says that there is none."""


@dataclass(frozen=True, kw_only=True)
class WrongEstimate:
    """A way to get the memory of a rank wrong."""

    needed_bytes: Callable[[Plan, Scenario], float]
    sentence: str


@functools.lru_cache(maxsize=4096)
def _memory(plan: Plan, scenario: Scenario) -> RankMemory:
    return estimate_rank_memory(plan, scenario.model)


@functools.lru_cache(maxsize=512)
def _plans_to_try(scenario: Scenario, with_stages: bool) -> tuple[Plan, ...]:
    """Return a plan of each kind from the cheapest to the dearest, without those that overfill main memory."""
    cluster = scenario.cluster
    stages = [zero_plan(cluster, stage) for stage in (1, 2)] if with_stages else []
    offload = [
        zero_plan(cluster, 3, offload_optimizer=True),
        zero_plan(cluster, 3, optimizer="adamw_8bit", offload_optimizer=True),
    ]
    possible = [plan for plan in offload if "host_memory" not in check_plan(plan, scenario.model, cluster).codes]
    return (
        plain_plan(cluster),
        *stages,
        zero_plan(cluster, 3),
        zero_plan(cluster, 3, optimizer="adamw_8bit"),
        *possible,
    )


def _master_and_moments(plan: Plan, memory: RankMemory) -> tuple[float, float]:
    """Return the optimizer bytes on the device that the fp32 master copy takes, and those that the moments take."""
    sizes = plan.recipe.master_bytes, OPTIMIZERS[plan.optimizer]
    return memory.optimizer * sizes[0] / sum(sizes), memory.optimizer * sizes[1] / sum(sizes)


def _right_estimate(plan: Plan, scenario: Scenario) -> float:
    return _memory(plan, scenario).device_total


def _state_only(plan: Plan, scenario: Scenario) -> float:
    return _memory(plan, scenario).state


def _one_moment(plan: Plan, scenario: Scenario) -> float:
    memory = _memory(plan, scenario)
    return memory.device_total - _master_and_moments(plan, memory)[1] / 2


def _one_moment_state_only(plan: Plan, scenario: Scenario) -> float:
    memory = _memory(plan, scenario)
    return memory.state - _master_and_moments(plan, memory)[1] / 2


def _no_master(plan: Plan, scenario: Scenario) -> float:
    memory = _memory(plan, scenario)
    return memory.device_total - _master_and_moments(plan, memory)[0]


def _language_only(plan: Plan, scenario: Scenario) -> float:
    return _memory(plan, scenario).device_total - vision_state_bytes(plan, scenario.model)


def _language_state_only(plan: Plan, scenario: Scenario) -> float:
    return _memory(plan, scenario).state - vision_state_bytes(plan, scenario.model)


def _no_gradients(plan: Plan, scenario: Scenario) -> float:
    memory = _memory(plan, scenario)
    return memory.device_total - memory.gradients


def _no_optimizer(plan: Plan, scenario: Scenario) -> float:
    memory = _memory(plan, scenario)
    return memory.device_total - memory.optimizer


def _all_ranks_split(plan: Plan, scenario: Scenario) -> float:
    memory = _memory(plan, scenario)
    return memory.device_total - memory.state + memory.state / (plan.dp_replicate if plan.zero_stage == 0 else 1)


def _never_split(plan: Plan, scenario: Scenario) -> float:
    whole = dataclasses.replace(plan, dp_replicate=plan.dp_degree, dp_shard=1, zero_stage=0)
    return _memory(whole, scenario).device_total


def _twenty_bytes(plan: Plan, scenario: Scenario) -> float:
    memory = _memory(plan, scenario)
    return memory.device_total + memory.optimizer / 3


def _gib_of_device(plan: Plan, scenario: Scenario) -> float:
    return _memory(plan, scenario).device_total * GIB / GB


def _gib_of_need(plan: Plan, scenario: Scenario) -> float:
    return _memory(plan, scenario).device_total * GB / GIB


MIN_AGREEMENT = 0.95
"""Share of all choices that a wrong estimate must reproduce to be named. True ones reproduce nearly all, and others
up to 0.9, because every sensible estimate is right about most cases."""
MIN_AGREEMENT_ON_ODD = 0.75
"""Share that it must reproduce of the choices to which the right estimate does not lead, so that it is not named for
agreeing where that is right too."""

SAME_KIND = "you chose the same kind of plan in every case: let the memory that a rank needs decide"

WRONG_ESTIMATES: tuple[WrongEstimate, ...] = (
    WrongEstimate(
        needed_bytes=_state_only,
        sentence="you counted the training state only: activations, the layers that ZeRO-3 gathers and the allowance "
        "need room too",
    ),
    WrongEstimate(needed_bytes=_one_moment, sentence=ONE_MOMENT),
    WrongEstimate(needed_bytes=_one_moment_state_only, sentence=ONE_MOMENT),
    WrongEstimate(needed_bytes=_no_master, sentence=ONE_MOMENT),
    WrongEstimate(needed_bytes=_language_only, sentence=LANGUAGE_ONLY),
    WrongEstimate(needed_bytes=_language_state_only, sentence=LANGUAGE_ONLY),
    WrongEstimate(needed_bytes=_no_gradients, sentence="you left out the gradients, 2 bytes a parameter"),
    WrongEstimate(
        needed_bytes=_no_optimizer,
        sentence="you left out the optimizer state, 12 of the 16 bytes a parameter: this is the memory of inference",
    ),
    WrongEstimate(
        needed_bytes=_all_ranks_split,
        sentence="you divided the state by the world size where it is replicated: only the dp_shard ranks split it, "
        "dp_replicate ranks each hold a copy",
    ),
    WrongEstimate(
        needed_bytes=_twenty_bytes,
        sentence="you counted more than 16 bytes a parameter: the 16 of mixed-precision Adam already hold weights and "
        "gradients",
    ),
    WrongEstimate(
        needed_bytes=_never_split,
        sentence="you compared the whole training state with one device: ZeRO-3 splits all of it over the ranks",
    ),
    WrongEstimate(
        needed_bytes=_gib_of_device,
        sentence="you asked for some 7 % more memory than check_plan does: a GiB is 1.074 GB, so keep both sides in "
        "bytes, and add no allowance, for the estimate holds one",
    ),
    WrongEstimate(
        needed_bytes=_gib_of_need,
        sentence="you let a rank need some 7 % more than its device has: a GiB is 1.074 GB, so keep both sides in "
        "bytes",
    ),
)


def decide(scenario: Scenario, needed_bytes: Callable[[Plan, Scenario], float], *, with_stages: bool) -> Plan | None:
    """Return the plan that a way of estimating leads to, by going from the cheapest plan to the dearest.

    Args:
        scenario: the case.
        needed_bytes: the estimate that the decision rests on.
        with_stages: whether ZeRO-1 and ZeRO-2 are tried between DDP and ZeRO-3.
    """
    plans = _plans_to_try(scenario, with_stages)
    return next((plan for plan in plans if _seems_to_fit(plan, scenario, needed_bytes)), None)


def _seems_to_fit(plan: Plan, scenario: Scenario, needed_bytes: Callable[[Plan, Scenario], float]) -> bool:
    """Tell whether a plan fits by a way of estimating."""
    return needed_bytes(plan, scenario) <= get_device(scenario.cluster.device).memory_bytes


def explain_choices(choices: Sequence[Choice]) -> str:
    """Name the wrong estimate that reproduces the plans which a learner chose.

    Args:
        choices: each case and the plan chosen. They should be of several groups: in one group a wrong estimate and a
            fixed choice can look the same.

    Returns:
        A sentence, or "" if no wrong estimate explains nearly all of the choices and most of the odd ones, which the
        right estimate does not explain. One odd choice is a slip and no misconception.
    """
    odd = set(range(len(choices))) - _reproduced(choices, _right_estimate)
    if len(odd) < 2:
        return ""
    best, sentence = len(choices) * MIN_AGREEMENT, ""
    for wrong in WRONG_ESTIMATES:
        reproduced = _reproduced(choices, wrong.needed_bytes)
        if len(reproduced) >= best and len(reproduced & odd) >= len(odd) * MIN_AGREEMENT_ON_ODD:
            best, sentence = len(reproduced) + 1, wrong.sentence
    return sentence


def _reproduced(choices: Sequence[Choice], needed_bytes: Callable[[Plan, Scenario], float]) -> set[int]:
    """Return the indices of the choices that an estimate leads to, with or without ZeRO-1 and ZeRO-2 to try."""
    return max(
        (
            {index for index, choice in enumerate(choices) if _leads_to(choice, needed_bytes, with_stages=tried)}
            for tried in (False, True)
        ),
        key=len,
    )


def _leads_to(choice: Choice, needed_bytes: Callable[[Plan, Scenario], float], *, with_stages: bool) -> bool:
    """Tell whether an estimate decides for the kind of plan that was chosen, and finds that the chosen plan fits."""
    scenario, plan = choice
    same_kind = kind_of(decide(scenario, needed_bytes, with_stages=with_stages)) == kind_of(plan)
    return same_kind and (plan is None or _seems_to_fit(plan, scenario, needed_bytes))


def explain_same_kind(choices: Sequence[Choice]) -> str:
    """Say so if a learner chose one kind of plan nearly always, although the cases need several."""
    if len(choices) < 3 or len({scenario.need for scenario, _ in choices}) == 1:
        return ""
    most_common = Counter(kind_of(plan) for _, plan in choices).most_common(1)[0][1]
    return SAME_KIND if most_common >= 0.9 * len(choices) else ""


def explain_plan(plan: Plan, scenario: Scenario) -> str:
    """Name the wrong idea behind one plan that does not fit: that its ZeRO stage splits more than it does."""
    if plan.zero_stage not in (1, 2) or fill_fraction(plan, scenario.model, scenario.cluster) <= 1:
        return ""
    higher = dataclasses.replace(plan, zero_stage=plan.zero_stage + 1)
    if fill_fraction(higher, scenario.model, scenario.cluster) > 1:
        return ""
    return GRADIENTS_IN_STAGE_1 if plan.zero_stage == 1 else WEIGHTS_IN_STAGE_2
