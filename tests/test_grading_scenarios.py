"""The cases of exercise 4.1 are what they say they are: verified against every plan there is."""

from __future__ import annotations

import itertools

import pytest

from vlmcourse.grading.judgement import PROBES
from vlmcourse.grading.kinds import (
    Need,
    divisors,
    fill_fraction,
    kind_of,
    plain_plan,
    plans_of_kind,
    vision_state_bytes,
    zero_plan,
)
from vlmcourse.grading.misconceptions import WRONG_ESTIMATES, decide, explain_choices, explain_same_kind
from vlmcourse.grading.scenarios import GROUPS, Scenario, make_scenarios, would_fit_without
from vlmcourse.grading.state_bytes import (
    GRADIENTS,
    OPTIMIZER,
    RIGHT_STATE,
    WEIGHTS,
    WRONG_BYTES,
    WRONG_STATES,
    explain_split,
    explain_state,
)
from vlmcourse.planner import PRECISIONS, Plan, check_plan, count_params, estimate_rank_memory, get_device
from vlmcourse.presets import CLUSTERS, MODELS

SEED, NUM_CASES = 11, 6


def scenarios_of(group: str, seed: int = SEED) -> list[Scenario]:
    return [scenario for case in make_scenarios(group, seed, NUM_CASES) for scenario in case]


def every_plan(scenario: Scenario):
    """Yield every plan that trains everything with AdamW, by all ways to factor the ranks."""
    num, device = scenario.cluster.num_devices, get_device(scenario.cluster.device)
    precisions = [name for name, recipe in PRECISIONS.items() if device.supports(recipe.compute_dtype)]
    for tp, pp, dp_shard in itertools.product(divisors(num), repeat=3):
        if num % (tp * pp * dp_shard):
            continue
        choices = itertools.product(
            sorted({1, tp}), range(4), ("adamw", "adamw_8bit"), (False, True), precisions, (False, True)
        )
        for vision_tp, stage, optimizer, offload, precision, checkpointing in choices:
            if (stage > 0) == (dp_shard > 1):
                yield Plan(
                    dp_replicate=num // (tp * pp * dp_shard),
                    dp_shard=dp_shard,
                    tp=tp,
                    pp=pp,
                    vision_tp=vision_tp,
                    zero_stage=stage,
                    optimizer=optimizer,
                    offload_optimizer=offload,
                    precision=precision,
                    activation_checkpointing=checkpointing,
                )


@pytest.mark.parametrize("group", GROUPS)
def test_no_plan_at_all_is_cheaper_than_what_a_scenario_needs(group):
    for scenario in scenarios_of(group)[:2]:
        possible = [plan for plan in every_plan(scenario) if check_plan(plan, scenario.model, scenario.cluster).ok]
        cheapest = min((kind_of(plan) for plan in possible), default=Need.IMPOSSIBLE)
        ddp_fits = check_plan(plain_plan(scenario.cluster), scenario.model, scenario.cluster).ok
        if cheapest == Need.PLAIN and not ddp_fits:  # ZeRO-1 or 2: ZeRO-3 is accepted there too
            cheapest = Need.SHARDED
        assert cheapest == scenario.need, str(scenario)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("seed", [1, 2])
def test_right_decision_does_not_hang_on_the_last_per_cent(group, seed):
    for scenario in scenarios_of(group, seed):
        simplest = {
            Need.PLAIN: [plain_plan(scenario.cluster)],
            Need.SHARDED: [zero_plan(scenario.cluster, 3)],
            Need.REMEDY: [
                zero_plan(scenario.cluster, 3, offload_optimizer=True),
                zero_plan(scenario.cluster, 3, optimizer="adamw_8bit"),
            ],
            Need.IMPOSSIBLE: [],
        }[scenario.need]
        fills = [
            fill_fraction(plan, scenario.model, scenario.cluster)
            for plan in simplest
            if check_plan(plan, scenario.model, scenario.cluster).ok
        ]
        if scenario.need != Need.IMPOSSIBLE:
            assert min(fills) <= 0.97, str(scenario)


def test_groups_hold_what_their_names_say():
    needs = {group: {scenario.need for scenario in scenarios_of(group)} for group in GROUPS}
    assert needs["plain"] == {Need.PLAIN}
    assert needs["sharded"] == {Need.SHARDED}
    assert needs["remedy"] == {Need.REMEDY}
    assert all(
        scenario.cluster.num_nodes > 1 or scenario.cluster.devices_per_node == 6 for scenario in scenarios_of("ranks")
    )
    assert not any(get_device(scenario.cluster.device).supports("bf16") for scenario in scenarios_of("precision"))


def test_an_impossible_case_is_paired_with_a_possible_one_of_the_same_model():
    for small, large in make_scenarios("limits", SEED, NUM_CASES):
        assert small.model == large.model
        assert small.need == Need.IMPOSSIBLE
        assert large.need in (Need.SHARDED, Need.REMEDY)
        assert small.cluster.num_devices < large.cluster.num_devices <= 4 * small.cluster.num_devices


def test_exercise_case_comes_first_among_the_remedies():
    (scenario,) = make_scenarios("remedy", SEED, NUM_CASES)[0]
    assert scenario == Scenario(model=MODELS["vlm-13b"], cluster=CLUSTERS["a100-40x4"], need=Need.REMEDY)


def test_remedies_are_not_interchangeable_in_every_case():
    verdicts = []
    for scenario in scenarios_of("remedy"):
        offload = check_plan(zero_plan(scenario.cluster, 3, offload_optimizer=True), scenario.model, scenario.cluster)
        eight = check_plan(zero_plan(scenario.cluster, 3, optimizer="adamw_8bit"), scenario.model, scenario.cluster)
        verdicts.append((offload.ok, eight.ok))
    assert {(True, True), (True, False), (False, True)} <= set(verdicts)


@pytest.mark.parametrize("group", GROUPS)
def test_cases_depend_on_the_seed_and_on_nothing_else(group):
    first = make_scenarios(group, SEED, NUM_CASES)
    make_scenarios.cache_clear()
    assert make_scenarios(group, SEED, NUM_CASES) == first
    assert make_scenarios(group, SEED + 1, NUM_CASES) != first


def test_unknown_group_is_an_error():
    with pytest.raises(ValueError, match="no group 'small'"):
        make_scenarios("small", 1, 1)


def test_kinds_of_plan_follow_the_exercises_table():
    assert kind_of(None) == Need.IMPOSSIBLE
    assert kind_of(Plan(dp_replicate=8)) == kind_of(Plan(dp_shard=8, zero_stage=2)) == Need.PLAIN
    assert {kind_of(Plan(dp_shard=8, zero_stage=3)), kind_of(Plan(tp=2)), kind_of(Plan(pp=2))} == {Need.SHARDED}
    assert kind_of(Plan(offload_optimizer=True)) == kind_of(Plan(optimizer="adamw_8bit")) == Need.REMEDY


def test_plans_tried_for_a_kind_are_of_that_kind_or_cheaper_and_use_every_rank():
    cluster = CLUSTERS["h100x16"]
    for kind in (Need.SHARDED, Need.REMEDY):
        plans = list(plans_of_kind(kind, cluster))
        assert len(plans) == len(set(plans)) > 20
        assert all(kind_of(plan) <= kind and plan.num_ranks == 16 for plan in plans)


# --- Explanations ---------------------------------------------------------------------------------------------------

MIXTURE = [scenario for group in PROBES for scenario in scenarios_of(group)]


def right_plan(scenario: Scenario) -> Plan | None:
    return decide(
        scenario, lambda plan, scenario: estimate_rank_memory(plan, scenario.model).device_total, with_stages=False
    )


def plan_of_kind(kind: Need, scenario: Scenario) -> Plan | None:
    plans = {
        Need.PLAIN: plain_plan(scenario.cluster),
        Need.SHARDED: zero_plan(scenario.cluster, 3),
        Need.REMEDY: zero_plan(scenario.cluster, 3, offload_optimizer=True),
    }
    return plans.get(kind)


def test_right_choices_are_never_explained_by_a_wrong_idea():
    choices = [(scenario, right_plan(scenario)) for scenario in MIXTURE]
    assert explain_choices(choices) == explain_same_kind(choices) == ""


def test_choices_that_follow_no_known_idea_are_not_explained():
    kinds = [Need((scenario.need + 1 + index % 2) % 4) for index, scenario in enumerate(MIXTURE)]
    odd = [(scenario, plan_of_kind(kind, scenario)) for scenario, kind in zip(MIXTURE, kinds, strict=True)]
    assert explain_choices(odd) == explain_same_kind(odd) == ""


@pytest.mark.parametrize("slip", [Need.SHARDED, Need.REMEDY, Need.IMPOSSIBLE])
def test_one_slip_among_right_choices_is_not_called_a_misconception(slip):
    choices = [(scenario, right_plan(scenario)) for scenario in MIXTURE]
    plain = next(index for index, scenario in enumerate(MIXTURE) if scenario.need == Need.PLAIN)
    choices[plain] = (MIXTURE[plain], plan_of_kind(slip, MIXTURE[plain]))
    assert explain_choices(choices) == explain_same_kind(choices) == ""


@pytest.mark.parametrize("with_stages", [True, False])
def test_every_wrong_estimate_is_told_from_the_others(with_stages):
    for wrong in WRONG_ESTIMATES:
        choices = [(scenario, decide(scenario, wrong.needed_bytes, with_stages=with_stages)) for scenario in MIXTURE]
        assert explain_choices(choices) == wrong.sentence


def test_an_estimate_by_which_the_chosen_plans_would_not_fit_explains_nothing():
    # Whoever takes ZeRO-2 for ZeRO-3 chooses the same kinds as one who divides by the world size under DDP.
    world_size = next(wrong for wrong in WRONG_ESTIMATES if "world size" in wrong.sentence)
    plans = [decide(scenario, world_size.needed_bytes, with_stages=False) for scenario in MIXTURE]
    choices = list(zip(MIXTURE, plans, strict=True))
    assert explain_choices(choices) == world_size.sentence
    stage_2 = [
        (case, zero_plan(case.cluster, 2) if kind_of(plan) == Need.PLAIN and case.need != Need.PLAIN else plan)
        for case, plan in choices
    ]
    assert explain_choices(stage_2) == ""


def test_the_same_kind_in_every_case_is_named():
    assert "same kind of plan" in explain_same_kind([(case, plain_plan(case.cluster)) for case in MIXTURE])


@pytest.mark.parametrize(("group", "plan_of"), [("sharded", plain_plan), ("remedy", lambda c: zero_plan(c, 3))])
@pytest.mark.parametrize("seed", [1, SEED])
def test_vision_tower_decides_in_some_cases(group, plan_of, seed):
    deciding = [
        scenario
        for scenario in scenarios_of(group, seed)[:4]
        if would_fit_without(
            vision_state_bytes(plan_of(scenario.cluster), scenario.model),
            plan_of(scenario.cluster),
            scenario.model,
            scenario.cluster,
        )
    ]
    assert deciding
    for scenario in deciding:
        assert not check_plan(plan_of(scenario.cluster), scenario.model, scenario.cluster).ok


def test_state_of_the_vision_tower_is_what_a_model_without_it_would_save():
    model, cluster = MODELS["vlm-13b"], CLUSTERS["a100-40x4"]
    vision = count_params(model).vision
    assert vision_state_bytes(plain_plan(cluster), model) == 16 * vision
    assert vision_state_bytes(zero_plan(cluster, 3), model) == pytest.approx(4 * vision)
    assert vision_state_bytes(zero_plan(cluster, 3, offload_optimizer=True), model) == pytest.approx(vision)


def test_every_wrong_formula_of_state_is_told_from_the_others():
    cases = [(P, N, stage) for P in (7e9, 13e9) for N in (1, 4, 64) for stage in range(4)]
    for formula, sentence in WRONG_STATES:
        assert explain_state([(case, formula(*case)) for case in cases]) == [sentence]
    for formula, sentence in WRONG_BYTES:  # in one stage only
        answers = [(case, (formula if case[2] == 1 else RIGHT_STATE)(*case)) for case in cases]
        assert explain_state(answers) == [sentence]
    assert explain_state([(case, RIGHT_STATE(*case)) for case in cases]) == []
    assert explain_state([(case, 17.0 * case[0] / (case[1] + 3)) for case in cases]) == []


def test_what_was_split_wrongly_in_one_stage_is_told():
    cases = [(P, N, stage) for P in (7e9, 13e9) for N in (1, 4, 64) for stage in range(4)]
    owners = {OPTIMIZER: 12, GRADIENTS: 2, WEIGHTS: 2}
    right = {0: (), 1: (OPTIMIZER,), 2: (OPTIMIZER, GRADIENTS), 3: (OPTIMIZER, GRADIENTS, WEIGHTS)}
    for stage, split in itertools.product(range(4), right.values()):
        answers = [(case, RIGHT_STATE(*case)) for case in cases if case[2] != stage]
        for P, N in ((7e9, 4), (13e9, 64)):
            divided = [size / N if owner in split else size for owner, size in owners.items()]
            answers.append(((P, N, stage), P * sum(divided)))
        expected = [] if split == right[stage] else [explain_split(stage, split)]
        assert explain_state(answers) == expected
        assert bool(explain_split(stage, split)) == (split != right[stage])
    for said in (sentence for _, sentence in WRONG_STATES):
        assert said.startswith("you")  # what the learner did, not what is true
