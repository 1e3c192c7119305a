"""What one answer to `choose_strategy` is worth, and which misconception the wrong answers of a group come from.

Enters: a learner's function and scenarios. Leaves: a `Judgement` of each answer and one sentence, or none. What a plan
shows by itself is told from `check_plan`'s codes; what only many answers show is left to `misconceptions.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vlmcourse.grading.checks import call
from vlmcourse.grading.kinds import Need, kind_of
from vlmcourse.grading.misconceptions import Choice, explain_choices, explain_plan, explain_same_kind
from vlmcourse.grading.scenarios import Scenario, make_scenarios
from vlmcourse.planner import Plan, check_plan, get_device
from vlmcourse.presets import Cluster

TOO_DEAR = {
    Need.PLAIN: "pays more than it must: DDP fits here. ZeRO-3, tensor and pipeline parallelism send more than DDP, "
    "offloading makes steps slower, and 8-bit Adam is less exact",
    Need.SHARDED: "pays more than it must: splitting the state over the ranks is enough here; offloading makes steps "
    "slower, and 8-bit Adam is less exact",
}

HINTS = {
    "ranks": "you did not count the ranks of all nodes: the product of the degrees must be "
    "num_nodes x devices_per_node",
    "sharding": "you set dp_shard without a zero_stage, or a zero_stage without dp_shard: one says over how many "
    "ranks, the other what is split",
    "precision": "you computed in bf16 on a device that has none: older ones need precision='fp16_mixed' or 'fp32'",
    "vision_heads": "you split the vision tower like the language tower: 25 heads divide by neither 2 nor 4",
    "heads": "you chose a tp that does not divide the heads: every rank of a tp group needs equally many",
    "kv_heads": "you chose a tp that divides the query heads only: it has to divide the fewer key/value heads too",
    "tp_nodes": "you let a tensor-parallel group cross nodes",
    "host_memory": "you forgot that an offloaded optimizer needs room too, in the node's main memory",
}
"""The misconception behind a problem of `check_plan`, by its code; the first that applies is named."""

ALL_DEVICES = "you left devices out: the product of the degrees must be num_nodes x devices_per_node"
FROZEN = "you made it fit by training less than was asked"
NODE_SHARDS = (
    "you split the state inside each node only: dp_shard may span nodes (dp_shard=cluster.num_devices), which leaves "
    "each rank a smaller part"
)
WHOLE_WEIGHTS = (
    "you never split the weights: ZeRO-3 (zero_stage=3) leaves a rank less than ZeRO-2 does, and is to be tried before "
    "a remedy"
)
NEVER_NONE = "you never answer None: where check_plan refuses every plan, say so"

PROBES = ("plain", "sharded", "remedy", "limits", "ranks", "edges")
PROBE_SEED = 4
"""Cases that a function with wrong answers is asked besides, only to find out why."""


# --- What an answer is worth ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one answer to one scenario is worth."""

    scenario: Scenario
    right: bool
    why: str = ""
    answered: bool = False
    """Whether a plan or None was returned."""
    plan: Plan | None = None
    hint: str = ""
    """The misconception behind this one answer, where its problems tell."""
    stage_hint: str = ""
    """The misconception that its ZeRO stage suggests."""
    unsolved: bool = False
    timed_out: bool = False
    printed: str = ""
    """The beginning of what the function printed."""

    @property
    def gave_up(self) -> bool:
        """Whether None was returned although there is a plan."""
        return self.answered and self.plan is None and not self.right


def ask(function: Any, scenarios: Iterable[Scenario]) -> list[Judgement]:
    """Judge the answers to some scenarios, up to the first that takes too long: the others would take as long."""
    judged: list[Judgement] = []
    for scenario in scenarios:
        judged.append(judge(function, scenario))
        if judged[-1].timed_out:
            break
    return judged


def judge(function: Any, scenario: Scenario) -> Judgement:
    """Ask a learner's function about one scenario and judge the answer.

    A plan is right if it trains everything with AdamW, passes `check_plan`, and is of no dearer kind than the scenario
    needs. `None` is right where no plan is possible.
    """
    outcome = call(function, scenario.model, scenario.cluster)
    if outcome.error:
        return Judgement(
            scenario=scenario,
            right=False,
            why=outcome.error,
            unsolved=outcome.unsolved,
            timed_out=outcome.timed_out,
            printed=outcome.printed,
        )
    plan = outcome.value
    if plan is not None and not isinstance(plan, Plan):
        why = f"return a Plan or None, not {type(plan).__name__}"
        return Judgement(scenario=scenario, right=False, why=why, printed=outcome.printed)
    why = _find_fault(plan, scenario)
    return Judgement(
        scenario=scenario,
        right=not why,
        why=why,
        answered=True,
        plan=plan,
        hint=_find_hint(plan, scenario) if plan else "",
        stage_hint=explain_plan(plan, scenario) if plan else "",
        printed=outcome.printed,
    )


def _find_fault(plan: Plan | None, scenario: Scenario) -> str:
    """Say why an answer is wrong; "" if it is right."""
    if plan is None:
        remedy = ": take one from the remedy row of the task's table" if scenario.need == Need.REMEDY else ""
        return "" if scenario.need == Need.IMPOSSIBLE else f"you returned None, but there is a plan{remedy}"
    if plan.frozen:
        return f"the plan freezes {', '.join(plan.frozen)}: the task is to train every tower"
    if plan.optimizer == "sgd_momentum":
        return "the task is to train with AdamW (8-bit if it must be)"
    verdict = check_plan(plan, scenario.model, scenario.cluster)
    if not verdict.ok:
        return f"{plan} " + "; ".join(problem.message for problem in verdict.problems)
    return f"{plan} {TOO_DEAR[scenario.need]}" if kind_of(plan) > scenario.need else ""


# --- The misconception behind the answers ---------------------------------------------------------------------------


def _find_hint(plan: Plan, scenario: Scenario) -> str:
    """Return the misconception that the problems of one plan show, or "".

    Problems that prove none are left out: where nothing is possible, main memory overflows whatever one knows of it,
    and on one node no node was left out, but devices.
    """
    if plan.frozen:
        return FROZEN
    if plan.optimizer == "sgd_momentum":
        return ""
    codes = set(check_plan(plan, scenario.model, scenario.cluster).codes)
    if scenario.need == Need.IMPOSSIBLE:
        codes.discard("host_memory")
    if scenario.cluster.num_nodes == 1 and "ranks" in codes:
        return ALL_DEVICES
    return next((sentence for code, sentence in HINTS.items() if code in codes), "")


def explain(function: Any, judged: Sequence[Judgement]) -> str:
    """Return the misconception that explains the wrong answers of one group, or "".

    What a third of the wrong plans show by themselves comes first (ranks left out, bf16 where there is none). All else
    needs a look at other cases too, for which a mixture of the groups is asked; the first explanation found is given.
    Last comes what fewer of the wrong plans show.
    """
    wrong = [judgement for judgement in judged if not judgement.right]
    hints = [judgement.hint for judgement in wrong]
    hint = _most_common(hints)
    if hint or any(judgement.timed_out for judgement in wrong):
        return hint
    mixture = [scenario for group in PROBES for case in make_scenarios(group, PROBE_SEED, 6) for scenario in case]
    probed = [*judged, *ask(function, mixture)]
    return (
        _explain_ranks(wrong, probed)
        or _explain_node_shards(wrong, probed)
        or _explain_old_devices(wrong, probed)
        or _explain_estimate(wrong, probed)
        or _explain_stages(wrong, probed)
        or explain_same_kind(_choices(probed))
        or _most_common(hints, min_share=0)
    )


def _most_common(hints: list[str], min_share: float = 1 / 3) -> str:
    """Return the sentence that most wrong answers give; "" if less than `min_share` of them give one."""
    counts = Counter(hint for hint in hints if hint).most_common(1)
    return counts[0][0] if counts and counts[0][1] >= len(hints) * min_share else ""


def _plans_across_nodes(probed: Sequence[Judgement]) -> list[tuple[Plan, Cluster]]:
    """Return the plans that use every rank of several nodes, with their clusters."""
    plans = [(judgement.plan, judgement.scenario.cluster) for judgement in probed if judgement.plan]
    return [
        (plan, cluster) for plan, cluster in plans if cluster.num_nodes > 1 and plan.num_ranks == cluster.num_devices
    ]


def _explain_ranks(wrong: Sequence[Judgement], probed: Sequence[Judgement]) -> str:
    """Say that ranks were left out if None came back on several nodes, only there, and no plan used all of theirs."""
    given_up = {judgement.scenario.cluster.num_nodes > 1 for judgement in probed if judgement.gave_up}
    concerned = given_up == {True} and any(judgement.gave_up for judgement in wrong)
    return HINTS["ranks"] if concerned and not _plans_across_nodes(probed) else ""


def _explain_node_shards(wrong: Sequence[Judgement], probed: Sequence[Judgement]) -> str:
    """Say that state can be split across nodes if every plan for several nodes splits it inside each only."""
    concerned = any(
        judgement.scenario.cluster.num_nodes > 1 and judgement.scenario.need in (Need.SHARDED, Need.REMEDY)
        for judgement in wrong
    )
    across = _plans_across_nodes(probed)
    in_node = all(plan.tp == plan.pp == 1 and plan.dp_shard <= cluster.devices_per_node for plan, cluster in across)
    return NODE_SHARDS if concerned and in_node and any(plan.dp_shard > 1 for plan, _ in across) else ""


def _explain_old_devices(wrong: Sequence[Judgement], probed: Sequence[Judgement]) -> str:
    """Say so if None came back for every device without bf16, and wrongly only there."""
    old = [judgement for judgement in probed if not _has_bf16(judgement)]
    none_on_old = all(judgement.answered and judgement.plan is None for judgement in old)
    only_there = not any(judgement.gave_up and _has_bf16(judgement) for judgement in probed)
    return HINTS["precision"] if none_on_old and only_there and any(judgement.gave_up for judgement in wrong) else ""


def _has_bf16(judgement: Judgement) -> bool:
    return get_device(judgement.scenario.cluster.device).supports("bf16")


def _explain_estimate(wrong: Sequence[Judgement], probed: Sequence[Judgement]) -> str:
    """Name the wrong estimate that the choices follow, or say that None never came back.

    Where None never did, a plan for an impossible case tells of no estimate, and those for the others are looked at.
    """
    choices = _choices(probed)
    sentence = explain_choices(choices)
    if sentence or not all(judgement.plan for judgement in probed):
        return sentence
    if all(judgement.scenario.need == Need.IMPOSSIBLE for judgement in wrong):
        return NEVER_NONE
    return explain_choices([choice for choice in choices if choice[0].need != Need.IMPOSSIBLE])


def _choices(probed: Sequence[Judgement]) -> list[Choice]:
    return [(judgement.scenario, judgement.plan) for judgement in probed if judgement.answered]


def _explain_stages(wrong: Sequence[Judgement], probed: Sequence[Judgement]) -> str:
    """Say what the ZeRO stages suggest: that one splits more than it does, or that no plan goes beyond stage 2.

    Who chooses the next stage too knows what the one before leaves whole; a remedy's stage tells nothing of that.
    """
    plans = [judgement.plan for judgement in probed if judgement.plan]
    used = {plan.zero_stage for plan in plans if kind_of(plan) != Need.REMEDY}
    hints = [
        judgement.stage_hint if judgement.plan and judgement.plan.zero_stage + 1 not in used else ""
        for judgement in wrong
    ]
    sentence = _most_common(hints)
    if sentence or not any(judgement.scenario.need in (Need.SHARDED, Need.REMEDY) for judgement in wrong):
        return sentence
    all_whole = all(plan.zero_stage < 3 and plan.tp == plan.pp == 1 for plan in plans)
    return WHOLE_WEIGHTS if all_whole and any(plan.zero_stage for plan in plans) else ""
