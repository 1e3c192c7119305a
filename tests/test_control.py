"""The simulated cluster: prices are the planner's, worlds are their seed's, and nothing is had for nothing."""

from __future__ import annotations

import dataclasses
import itertools
from statistics import fmean
from typing import Any

import pytest

from vlmcourse.control.actions import ACTIONS, Place, Settings, read_actions
from vlmcourse.control.controller import ReferenceController
from vlmcourse.control.dealing import deal_by_work, deal_in_order
from vlmcourse.control.episodes import find_bounds, make_episodes, run_episode, score_speed
from vlmcourse.control.prices import Load, estimate_peak_bytes, pipeline_s, price_step
from vlmcourse.control.rates import Job, balanced_layers, checkpoint_s, find_rates, restart_s
from vlmcourse.control.simulation import (
    DATA_PARALLEL,
    NEW_MACHINE_S,
    PIPELINED,
    SETTLE_S,
    Simulation,
    do_nothing,
    first_settings,
)
from vlmcourse.control.world import CALM_TEXT, CALM_TILES, HORIZON_S, KINDS, Event, World, make_world
from vlmcourse.planner.activations import Workload, estimate_activation_bytes
from vlmcourse.planner.flops import Work, count_step_flops
from vlmcourse.planner.hardware import get_device
from vlmcourse.planner.memory import estimate_rank_memory
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.schedules import ideal_bubble_fraction
from vlmcourse.planner.stages import find_split, split_evenly
from vlmcourse.presets import get_model

QUIET = World(3, ("quiet",), 8, ())
PLACE = Place(global_batch_size=64, dp_degree=8, num_ranks=8)
HEALTHY = [1.0] * 8


def even_price(job: Job, settings: Settings, load: Load, link: float = 1.0) -> Any:
    return price_step(job, settings, [[load] * settings.accumulation_steps] * job.dp_degree, HEALTHY, link, 0.0)


# --- Prices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [DATA_PARALLEL, PIPELINED], ids=["data parallel", "pipelined"])
@pytest.mark.parametrize("policies", [*itertools.product(("none", "full"), repeat=2)])
def test_seconds_are_the_planners_flops_at_the_devices_pace(job: Job, policies: tuple[str, str]) -> None:
    model, work = get_model(job.model), Work(7, 3000, 2_500_000)
    layers = first_settings(job).layers_per_stage
    stages = find_rates(job, 1, *policies, False, layers)
    counted = count_step_flops(model, work, recompute=dict(zip(("vision", "language"), policies, strict=True)))
    amounts = (work.num_tiles, work.num_positions, work.num_pairs)
    pace = 0.5 * get_device(job.device).peak_flop_per_s("bf16")
    for name, expected in (("forward_s", counted.forward), ("backward_s", counted.hardware - counted.forward)):
        found = sum(
            rate * amount for stage in stages for rate, amount in zip(getattr(stage, name), amounts, strict=True)
        )
        assert found * pace == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("policies", [*itertools.product(("none", "full"), repeat=2)])
def test_a_peak_is_the_planners_memory_of_the_same_plan(policies: tuple[str, str]) -> None:
    for job, zero_stage in itertools.product((DATA_PARALLEL, PIPELINED), (1, 2, 3)):
        model, layers = get_model(job.model), first_settings(job).layers_per_stage
        plan = Plan(
            dp_shard=job.dp_degree,
            pp=job.pp,
            layers_per_stage=layers,
            zero_stage=zero_stage,
            recompute_vision=policies[0],
            recompute_language=policies[1],
        )
        rates = find_rates(job, zero_stage, *policies, False, layers)
        for tokens, tiles in ((4000, 12), (1000, 40), (9000, 0), (20, 1)):
            peaks = [estimate_peak_bytes(one, Load(tiles, tokens, 0), 0.0) for one in rates]
            workload = Workload(seq_len=tokens, tiles_per_sample=tiles)
            assert max(peaks) == pytest.approx(estimate_rank_memory(plan, model, workload).device_total, rel=1e-9)
            activations = estimate_activation_bytes(plan, model, workload, 0)
            more = estimate_peak_bytes(rates[0], Load(tiles, tokens, 0), 0.1) - peaks[0]
            assert more == pytest.approx(0.1 * activations, rel=1e-6)


def test_a_pipeline_of_equal_stages_has_the_ideal_bubble() -> None:
    for stages, count in ((2, 8), (4, 16), (8, 8)):
        step_s = pipeline_s([3.0] * stages, count)
        assert 1 - 3.0 / step_s == pytest.approx(ideal_bubble_fraction("1f1b", stages, count))
    assert pipeline_s([1.0, 2.0], 10) > pipeline_s([1.5, 1.5], 10)


def test_what_each_setting_costs_and_brings() -> None:
    settings, load = first_settings(DATA_PARALLEL), Load(10, 5000, 6_000_000)
    usual = even_price(DATA_PARALLEL, settings, load)
    slow_link = even_price(DATA_PARALLEL, settings, load, 0.2)
    assert slow_link.exposed_s > 3 * usual.exposed_s and slow_link.forward_s == usual.forward_s
    compressed = dataclasses.replace(settings, compress=True)
    assert even_price(DATA_PARALLEL, compressed, load, 0.2).step_s < slow_link.step_s
    assert even_price(DATA_PARALLEL, compressed, load).step_s > usual.step_s
    recomputed = even_price(DATA_PARALLEL, dataclasses.replace(settings, recompute_language="full"), load)
    assert recomputed.step_s > usual.step_s and max(recomputed.peak_bytes) < 0.75 * max(usual.peak_bytes)
    by_stage = [even_price(DATA_PARALLEL, dataclasses.replace(settings, zero_stage=stage), load) for stage in (1, 2, 3)]
    peaks = [max(price.peak_bytes) for price in by_stage]
    assert peaks[0] > peaks[1] > peaks[2]
    small = dataclasses.replace(settings, micro_batch_size=2, accumulation_steps=4)
    halves = even_price(DATA_PARALLEL, small, Load(5, 2500, 3_000_000))
    assert halves.step_s > usual.step_s and max(halves.peak_bytes) < max(usual.peak_bytes)
    slowed = price_step(DATA_PARALLEL, settings, [[load] * 2] * 8, [1.0] * 7 + [1.5], 1.0, 0.0)
    assert slowed.step_s - slowed.exposed_s == pytest.approx(1.5 * (usual.step_s - usual.exposed_s), rel=0.01)


def test_an_uneven_split_moves_work_and_memory_between_stages() -> None:
    layers = first_settings(PIPELINED).layers_per_stage
    assert sum(layers) == PIPELINED.num_layers and layers == balanced_layers(
        PIPELINED, CALM_TILES, CALM_TILES * 256 + CALM_TEXT
    )
    plan = Plan(pp=4, layers_per_stage=layers)
    assert find_split(plan, get_model(PIPELINED.model)).layers_per_stage == layers
    even = split_evenly(get_model(PIPELINED.model), 4).layers_per_stage
    load = Load(3, 1200, 1_440_000)
    found = {
        split: even_price(PIPELINED, dataclasses.replace(first_settings(PIPELINED), layers_per_stage=split), load)
        for split in (layers, even)
    }
    assert found[layers].step_s < found[even].step_s
    assert sum(found[layers].forward_s) == pytest.approx(sum(found[even].forward_s), rel=1e-9)
    with pytest.raises(ValueError, match="layers_per_stage"):
        Plan(pp=2, layers_per_stage=(3, 4, 5))
    with pytest.raises(ValueError, match="together they must be"):
        find_split(Plan(pp=2, layers_per_stage=(3, 4)), get_model("tiny"))


# --- Dealing --------------------------------------------------------------------------------------------------------


def test_samples_are_dealt_each_once_and_evenly() -> None:
    assert deal_in_order(8, 2, 2, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert deal_by_work([5, 4, 3, 3, 1], [1, 1], 1) == [[[0, 3]], [[1, 2, 4]]]
    work = [float(1 + number * 7 % 11) for number in range(64)]
    for shares in ([1.0] * 8, [1.0] * 7 + [0.5]):
        dealt = deal_by_work(work, shares, 2)
        places = [place for of_rank in dealt for places in of_rank for place in places]
        assert sorted(places) == list(range(64))
        loads = [sum(work[place] for places in of_rank for place in places) for of_rank in dealt]
        assert max(load / share for load, share in zip(loads, shares, strict=True)) < 1.06 * sum(work) / sum(shares)
    with pytest.raises(ValueError, match="are not 2 ranks x 1 micro-batches x 3"):
        deal_in_order(8, 2, 3, 1)
    with pytest.raises(ValueError, match="need a share above 0"):
        deal_by_work([1.0], [1.0, 0.0], 1)


# --- Actions --------------------------------------------------------------------------------------------------------


def test_actions_change_settings_and_their_neighbours_count_where_one_is_refused() -> None:
    change = read_actions(
        [
            {"action": "micro_batch", "micro_batch_size": 2, "accumulation_steps": 4},
            {"action": "recompute", "tower": "language", "policy": "full"},
            {"action": "balance", "by": "tokens", "shares": [2] + [1] * 7},
            {"action": "fly"},
            {"action": "save"},
            {"action": "replace", "rank": 3},
        ],
        Settings(),
        PLACE,
    )
    assert change.save and change.replace == (3,) and change.settings.recompute_language == "full"
    assert change.settings.shares[0] == pytest.approx(2 / 9) and sum(change.settings.shares) == pytest.approx(1)
    assert len(change.refused) == 1 and change.refused[0].startswith("fly: there is no such action")
    assert read_actions(None, Settings(), PLACE) == read_actions([], Settings(), PLACE)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"action": "micro_batch", "micro_batch_size": 2, "accumulation_steps": 2}, "= 32, but the global batch is 64"),
        ({"action": "micro_batch", "micro_batch_size": 2.0, "accumulation_steps": 4}, "must be a whole number"),
        ({"action": "recompute", "tower": "projector", "policy": "full"}, "must be one of 'vision', 'language'"),
        ({"action": "balance", "by": "tokens", "shares": [0.5, 0.5]}, "give 8 numbers above 0"),
        ({"action": "balance", "by": "luck"}, "must be one of 'samples', 'tokens'"),
        ({"action": "compress", "on": 1}, "must be True or False"),
        ({"action": "shard", "zero_stage": 0}, "must be one of 1, 2, 3"),
        ({"action": "move_layers", "layers_per_stage": [1, 2]}, "this run has no pipeline"),
        ({"action": "replace", "rank": 8}, "must be a whole number from 0 to 7"),
        ({"action": "save_every", "steps": -1}, "must be a whole number of 0 or more"),
        ("save", "give a dict"),
        ({}, "give a dict whose 'action' is one of"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_and_changes_nothing(action: Any, words: str) -> None:
    change = read_actions([action], Settings(), PLACE)
    assert change.settings == Settings() and len(change.refused) == 1 and words in change.refused[0]


def test_layers_must_add_up_and_an_action_may_be_one_that_a_run_cannot_do() -> None:
    place = Place(global_batch_size=64, dp_degree=2, num_ranks=8, num_stages=2, num_layers=9)
    wrong = read_actions([{"action": "move_layers", "layers_per_stage": [4, 4]}], Settings(), place)
    assert "together 9" in wrong.refused[0]
    right = read_actions([{"action": "move_layers", "layers_per_stage": [4, 5]}], Settings(), place)
    assert right.settings.layers_per_stage == (4, 5)
    never = dataclasses.replace(PLACE, allowed=dict.fromkeys(ACTIONS, "") | {"save": "no disk"})
    assert read_actions([{"action": "save"}], Settings(), never).refused == ("save: no disk",)


# --- World and simulation -------------------------------------------------------------------------------------------


def test_a_world_is_its_seeds_and_each_kind_shows_in_its_own_place() -> None:
    calm = QUIET.conditions(900, 0.0, (0.0,) * 8)
    for kind in KINDS:
        world = make_world(11, (kind,))
        assert world == make_world(11, (kind,)) and (kind == "quiet" or world != make_world(12, (kind,)))
        seen = [world.conditions(at_s, 0.0, (0.0,) * 8) for at_s in range(0, int(HORIZON_S), 20)]
        changed = {name for name in vars(calm) if any(getattr(one, name) != getattr(calm, name) for one in seen)}
        assert changed == {
            "images": {"mean_tiles", "tile_spread"},
            "memory": {"mean_text", "fragmentation"},
            "slow_rank": {"slowness"},
            "link": {"link_fraction"},
        }.get(kind, set())
    assert QUIET.samples(5, calm, 64) == QUIET.samples(5, calm, 64) != QUIET.samples(6, calm, 64)
    with pytest.raises(ValueError, match="'rain' must be one of"):
        make_world(1, ("rain",))


def test_a_new_machine_is_not_slow_any_more_and_a_restart_takes_fragments_away() -> None:
    events = (Event(kind="slow_rank", start_s=10, size=0.5, rank=2), Event(kind="memory", start_s=10, size=1.0))
    world = World(1, ("slow_rank", "memory"), 8, events)
    old = world.conditions(500, 0.0, (0.0,) * 8)
    new = world.conditions(500, 490.0, (0.0, 0.0, 490.0) + (0.0,) * 5)
    assert old.slowness[2] == 1.5 and new.slowness[2] == 1.0 and new.fragmentation < old.fragmentation


def run_with(actions: dict[int, list[dict[str, Any]]], events: tuple[Event, ...] = (), horizon_s: float = 400) -> Any:
    """Run with these actions after these steps."""
    world = World(3, ("quiet",), 8, events, horizon_s)
    simulation = Simulation(world)
    asked = dict(actions)
    return simulation, simulation.run(lambda metrics: asked.pop(metrics["step"], []))


def test_the_wall_time_of_a_run_is_what_its_parts_cost() -> None:
    never = {"action": "save_every", "steps": 0}
    _, plain = run_with({1: [never]})
    assert plain.end_s == pytest.approx(sum(row.step_s for row in plain.rows))
    assert plain.useful_samples == 64 * len(plain.rows)
    for action, price_s in (
        ({"action": "save"}, checkpoint_s(DATA_PARALLEL)),
        ({"action": "recompute", "tower": "language", "policy": "full"}, SETTLE_S),
        ({"action": "compress", "on": True}, 0.0),
        ({"action": "shard", "zero_stage": 3}, checkpoint_s(DATA_PARALLEL) + restart_s(DATA_PARALLEL)),
        (
            {"action": "replace", "rank": 1},
            checkpoint_s(DATA_PARALLEL) + restart_s(DATA_PARALLEL) + NEW_MACHINE_S,
        ),
    ):
        _, log = run_with({1: [never], 20: [action]})
        assert log.end_s - sum(row.step_s for row in log.rows) == pytest.approx(price_s), action
        assert not log.refused and log.lost_samples == 0


def test_an_eviction_loses_what_was_not_saved_and_an_announced_one_can_be_met() -> None:
    events = (Event(kind="eviction", start_s=200, rank=4, announced=True),)
    never = {"action": "save_every", "steps": 0}
    _, lost = run_with({1: [never]}, events)
    before = [row for row in lost.rows if row.now_s < 200]
    assert lost.num_evicted == 1 and lost.lost_samples == 64 * (len(before) - 1) and before[-1].stopped == "eviction"
    assert lost.useful_samples == 64 * (len(lost.rows) - len(before)) and lost.lost_announced == lost.lost_samples
    notices: list[float] = []

    def saves(metrics: dict[str, Any]) -> list[dict[str, Any]]:
        if metrics["notice_s"] is None:
            return [never] if metrics["step"] == 1 else []
        notices.append(metrics["notice_s"])
        return [{"action": "save"}] if metrics["notice_s"] < 30 and metrics["steps_since_save"] > 5 else []

    saved = Simulation(World(3, ("eviction",), 8, events, 400)).run(saves)
    assert 100 < notices[0] <= 120 and saved.num_saves == 1 and saved.lost_samples <= 5 * 64


def test_a_step_out_of_memory_stops_the_run_and_is_seen() -> None:
    larger = [{"action": "micro_batch", "micro_batch_size": 8, "accumulation_steps": 1}]
    seen: list[dict[str, Any]] = []
    simulation = Simulation(World(3, ("quiet",), 8, (), 200))

    def observe(metrics: dict[str, Any]) -> list[dict[str, Any]]:
        seen.append(metrics)
        return larger if metrics["step"] == 10 and len(seen) == 10 else []

    log = simulation.run(observe)
    stop = seen[10]["events"][0]
    assert log.num_oom >= 1 and stop["reason"] == "out of memory" and stop["lost_steps"] == 10
    assert log.lost_samples == 640 and max(seen[10]["peak_bytes"]) == seen[10]["device_bytes"]


@pytest.mark.parametrize("job", [DATA_PARALLEL, PIPELINED], ids=["data parallel", "pipelined"])
def test_metrics_are_those_of_a_monitor_and_their_parts_add_up(job: Job) -> None:
    metrics = Simulation(QUIET, job).step()
    phases = ("data_wait_s", "forward_s", "backward_s", "communication_s", "optimizer_s")
    for rank in range(8):
        assert sum(metrics[name][rank] for name in phases) == pytest.approx(metrics["step_s"])
    assert sum(metrics["samples"]) == 64 * job.pp and metrics["dp_degree"] == job.dp_degree
    assert all(peak > state for peak, state in zip(metrics["peak_bytes"], metrics["state_bytes"], strict=True))
    assert not {"slowness", "link_fraction", "fragmentation"} & metrics.keys()


def test_a_run_is_the_same_twice() -> None:
    episode = make_episodes(4, 10)[9]
    first, second = (episode.simulation().run(ReferenceController().observe) for _ in range(2))
    assert first == second


# --- Controllers ----------------------------------------------------------------------------------------------------


def test_the_oracle_and_the_courses_controller_beat_doing_nothing_in_every_kind_of_trouble() -> None:
    results = [run_episode(one, lambda: ReferenceController().observe) for one in make_episodes(7, 6)]
    for result in results:
        assert result.oracle.num_oom == 0 and not result.oracle.refused and not result.log.refused
        assert result.oracle.samples_per_s > result.baseline.samples_per_s
        assert result.log.samples_per_s > 0.99 * result.baseline.samples_per_s, result.episode
        assert result.log.num_oom == 0 or result.baseline.num_oom > 0
    assert 0.4 < score_speed(results) < 1
    assert find_bounds(results[0].episode) is find_bounds(results[0].episode)
    nothing = [dataclasses.replace(result, log=result.baseline) for result in results]
    assert score_speed(nothing) == pytest.approx(0)
    assert fmean(result.log.num_oom for result in results) < 0.1 * fmean(result.baseline.num_oom for result in results)


def test_a_simulation_wants_a_world_of_its_own_number_of_ranks() -> None:
    with pytest.raises(ValueError, match="num_ranks = 4 of the world, 8 of the job"):
        Simulation(make_world(1, ("quiet",), 4))
    assert Simulation(QUIET).run(do_nothing).num_oom == 0
