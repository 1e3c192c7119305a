"""The search over plans: nothing is lost by pruning, rules are said, and what it finds is what a person would."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from vlmcourse.config import parse_config
from vlmcourse.planner.choice import Choice, Task, strategy_of, to_config
from vlmcourse.planner.choice_cost import Costs, split_seconds
from vlmcourse.planner.image_imbalance import expect_fullest
from vlmcourse.planner.job import describe_config
from vlmcourse.planner.pareto import best_within, find_front
from vlmcourse.planner.search import Search, find_remedy, search_plans
from vlmcourse.planner.search_reasons import RULE_WORDS, as_json, drop_alike, say_miss, say_search, say_why_faster
from vlmcourse.planner.search_space import RULES, SearchSpace, list_candidates
from vlmcourse.planner.shapes import count_params
from vlmcourse.planner.validate import CODES
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import Cluster, get_cluster, get_model

GB = 10**9
H100X4 = replace(get_cluster("h100x8"), name="h100x4", devices_per_node=4)
TWO_NODES = replace(get_cluster("h100x16"), name="2 x 2 h100", devices_per_node=2)
LONG = Workload(seq_len=4096, tiles_per_sample=6)


def task_of(model: str = "internvl2-8b", cluster: Cluster = H100X4, batch: int = 8, **fields: object) -> Task:
    arguments = {"model": get_model(model), "cluster": cluster, "global_batch_size": batch, "workload": LONG}
    return Task(**{**arguments, **fields})  # type: ignore[arg-type]


SPACES = {
    "frozen vision": (
        task_of(frozen=("vision",)),
        SearchSpace(recompute_language=("none", "full", "every:2"), schedules=("zbv",), zero_stages=(0, 2)),
    ),
    "all towers, offload, uneven pictures": (
        task_of(tile_counts=(1, 2, 12), batch=4),
        SearchSpace(
            schedules=("interleaved",), recompute_vision=("none", "full"), recompute_language=("full",), offload=True
        ),
    ),
    "two machines, fp32": (
        task_of("internvl2-2b", TWO_NODES, batch=4, precision="fp32"),
        SearchSpace(
            schedules=("gpipe", "dualpipev"), recompute_vision=("full",), recompute_language=("selective", "full")
        ),
    ),
}


# --- Nothing is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPACES)
def test_pruning_loses_nothing(name: str) -> None:
    task, space = SPACES[name]
    top = 40 if name == "frozen vision" else 6  # far down the list bounds that are taken for the best lose some
    pruned, whole = search_plans(task, space, top=top), search_plans(task, space, top=top, prune=False)
    assert [cost.choice for cost in pruned.best] == [cost.choice for cost in whole.best]
    assert pruned.num_plans == whole.num_plans and len(whole.best) == top
    assert pruned.num_costed < 0.8 * whole.num_costed
    found_early = {rule: number for rule, number in whole.rejected.items() if rule not in ("slower", "memory")}
    assert found_early.items() <= pruned.rejected.items()
    # A plan may be left out as too slow before it is known that it does not fit, and the other way round.
    assert sum(pruned.rejected.values()) == sum(whole.rejected.values())


@pytest.mark.parametrize("name", SPACES)
def test_bounds_are_never_above_what_they_bound(name: str) -> None:
    task, space = SPACES[name]
    costs = Costs(task)
    for choice, policies in list_candidates(task, space).groups[::7]:
        for vision, language in policies:
            leaf = choice._replace(recompute_vision=vision, recompute_language=language)
            seconds, peak = costs.find_cost(leaf).rank_key[0], costs.find_peak(leaf)[0].total_bytes
            assert costs.bound_s(leaf) <= costs.bound_stages_s(leaf) * (1 + 1e-9), leaf
            assert costs.bound_stages_s(leaf) <= seconds, leaf
            assert costs.bound_bytes(leaf) <= peak, leaf
            lean = leaf._replace(recompute_vision="none" if "vision" in task.frozen else "full")
            lean = lean._replace(recompute_language="full")
            assert costs.find_peak(lean)[0].total_bytes <= peak, leaf


def test_the_front_is_that_of_all_plans_and_holds_the_best_of_every_device() -> None:
    task, space = SPACES["frozen vision"]
    front, whole = find_front(task, space), find_front(task, space, prune=False)
    assert [(c.peak_bytes, c.rank_key[0]) for c in front] == [(c.peak_bytes, c.rank_key[0]) for c in whole]
    speeds = [cost.samples_per_s for cost in front]
    assert speeds == sorted(speeds) and len(front) > 3
    for memory in (50 * GB, 80 * GB, 141 * GB):
        device = replace(task.used_device, memory_bytes=memory)
        best = search_plans(replace(task, device=device), space, top=1).best
        found = best_within(front, memory)
        assert found is not None and found.rank_key[0] == best[0].rank_key[0]
    assert best_within(front, GB) is None
    with pytest.raises(ValueError, match="offload = True"):
        find_front(task, replace(space, offload=True))


def test_every_product_of_degrees_is_looked_at_once() -> None:
    task = task_of("tiny", replace(H100X4, devices_per_node=2), batch=4, workload=Workload(seq_len=64))
    space = SearchSpace(
        recompute_vision=("none",), recompute_language=("none",), schedules=("gpipe",), vision_stages=(0,)
    )
    found = Counter(choice for choice, _ in list_candidates(task, space).groups)
    by_hand = Counter[Choice]()
    for copies, shards, cp, tp, pp, zero, size in product(*[(1, 2)] * 5, range(4), (1, 2, 4)):
        samples = 4 // (copies * shards)
        if (
            copies * shards * cp * tp * pp != 2
            or samples % size
            or (zero == 0) != (shards * cp == 1)
            and (zero or shards > 1)
        ):
            continue
        num = samples // size
        for vision_tp in {1, tp}:
            made = Choice(copies, shards, cp, tp, pp, vision_tp, zero, "gpipe" if pp > 1 else "1f1b", 0, size, num)
            syncs = ("every",) if zero < 2 or num == 1 else ("last",) if pp > 1 else ("every", "last")
            by_hand.update(made._replace(gradient_sync=sync) for sync in syncs)
    assert found == by_hand


# --- What is found --------------------------------------------------------------------------------------------------


def test_a_small_model_on_one_node_is_trained_by_data_parallel_ranks_alone() -> None:
    task = task_of("internvl2-1b", batch=64, workload=Workload(seq_len=1024, tiles_per_sample=1))
    best = search_plans(task, SearchSpace(max_cp=1)).best[0]
    assert (best.choice.dp_degree, best.choice.tp, best.choice.pp) == (4, 1, 1)
    assert (best.choice.recompute_vision, best.choice.recompute_language) == ("none", "none")
    assert best.choice.micro_batch_size * best.choice.grad_accum_steps * 4 == 64 == best.step.num_samples


def test_the_state_of_13b_does_not_fit_four_a100_and_the_nearest_miss_says_by_how_much() -> None:
    search = search_plans(task_of("vlm-13b", get_cluster("a100-40x4"), batch=64))
    assert not search.best and search.misses
    miss = search.misses[0]
    assert miss.needed_bytes == miss.cost.peak_bytes > miss.available_bytes == 40 * GB  # F13: 52 GB of state alone
    assert miss.cost.peak.owners["optimizer"] + miss.cost.peak.owners["weights"] > 40 * GB
    assert f"needs {miss.needed_bytes / 1e9:.1f} of 40.0 GB" in say_miss(miss)
    assert "none can be run; the nearest:" in say_search(search)
    assert miss.remedy is None and "no single change" in say_miss(miss)
    kept = Choice(dp_shard=4, zero_stage=3, micro_batch_size=2, grad_accum_steps=8)
    assert find_remedy(Costs(search.task), kept) is None  # recomputation and smaller micro-batches are not enough
    assert [m.excess_bytes for m in search.misses] == sorted(m.excess_bytes for m in search.misses)


def test_a_miss_that_would_be_faster_is_shown_with_what_makes_it_fit() -> None:
    search = search_plans(task_of(batch=8), SearchSpace(max_cp=1, max_pp=1))
    assert search.misses
    for miss in search.misses:
        assert miss.cost.samples_per_s > search.best[0].samples_per_s and miss.excess_bytes > 0
        if miss.remedy is not None:
            assert Costs(search.task).find_peak(miss.remedy)[0].total_bytes <= miss.available_bytes
            assert miss.remedy.dp_degree * miss.remedy.micro_batch_size * miss.remedy.grad_accum_steps == 8
            assert "would fit" in say_miss(miss)


def test_more_memory_never_gives_a_worse_best_and_a_faster_link_never_a_slower_one() -> None:
    task, space = SPACES["two machines, fp32"]

    def best_s(**changed: object) -> float:
        return search_plans(replace(task, **changed), space, top=1).best[0].rank_key[0]  # type: ignore[arg-type]

    by_memory = [best_s(device=replace(task.used_device, memory_bytes=gb * GB)) for gb in (40, 60, 80, 200)]
    assert by_memory == sorted(by_memory, reverse=True) and by_memory[0] > by_memory[-1]
    node, network = task.used_fabric.node, task.used_fabric.network
    assert network is not None
    by_link = [
        best_s(
            fabric=replace(
                task.used_fabric,
                node=replace(node, bytes_per_s=node.bytes_per_s * factor),
                network=replace(network, bytes_per_s=network.bytes_per_s * factor),
            )
        )
        for factor in (0.1, 0.5, 1, 4)
    ]
    assert by_link == sorted(by_link, reverse=True) and by_link[0] > by_link[-1]


def test_a_slow_network_keeps_what_is_exchanged_most_inside_a_node() -> None:
    slow = replace(TWO_NODES, network_bytes_per_s=1e9)
    best = search_plans(task_of(cluster=slow, batch=16, frozen=("vision",)), SearchSpace(max_cp=2)).best[0].choice
    assert best.pp == 2 or best.dp_replicate == 2 or best.zero_stage == 1, best


def test_ranked_times_add_up_and_differences_are_explained_whole() -> None:
    search = search_plans(task_of(batch=16), SearchSpace(zero_stages=(1, 3), schedules=("1f1b",)), top=40)
    for cost in search.best:
        assert sum(split_seconds(cost).values()) == pytest.approx(cost.seconds)
        assert sum(cost.peak.owners.values()) == cost.peak_bytes <= 80 * GB
        assert cost.tokens_per_s == pytest.approx(16 * 4096 / cost.seconds)
    times = [cost.seconds for cost in search.best]
    assert times == sorted(times)
    first, last = search.best[0], search.best[-1]
    assert "faster: " in say_why_faster(first, last) and " less " in say_why_faster(first, last)
    assert "as fast as the next" in say_why_faster(first, first)
    shown = drop_alike(search.best)
    assert shown[0] is first and 1 < len(shown) < len(search.best)
    told = as_json(search)
    assert told["best"][0]["plan"]["micro_batch_size"] == first.choice.micro_batch_size
    assert sum(told["rejected"].values()) + len(told["best"]) == told["num_plans"]


def test_each_rule_that_is_counted_has_words_and_an_example() -> None:
    task = task_of(
        "internvl2-26b", get_cluster("h100x16"), batch=24, workload=Workload(seq_len=4100, tiles_per_sample=1)
    )
    search = search_plans(task, SearchSpace(runnable=True), top=1)
    assert set(search.rejected) <= {*CODES, *RULES, "slower"} <= {*RULE_WORDS, "ranks", "precision"}
    assert {"batch", "vision_heads", "sequence", "schedule", "sharding", "tp_nodes", "package"} <= set(search.rejected)
    assert all(search.examples[rule] for rule in search.rejected if rule not in ("slower", "memory"))
    assert "25 vision heads" in search.examples["vision_heads"] and "multiple of" in search.examples["batch"]


def test_sequences_that_tensor_or_context_ranks_cannot_split_evenly_are_refused() -> None:
    def degrees(seq_len: int) -> set[tuple[int, int]]:
        space = SearchSpace(schedules=("1f1b",), recompute_language=("none",))
        task = task_of(workload=Workload(seq_len=seq_len, tiles_per_sample=1))
        return {(choice.tp, choice.cp) for choice, _ in list_candidates(task, space).groups}

    assert degrees(4096) == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert degrees(4098) == {(1, 1), (2, 1)} and degrees(4100) == {(1, 1), (1, 2), (2, 1), (4, 1)}


def test_a_schedule_that_splits_backward_goes_without_selective_recomputation() -> None:
    groups = list_candidates(task_of(), SearchSpace(schedules=("zbv", "1f1b"))).groups
    allowed = {choice.schedule: {*policies} for choice, policies in groups if choice.pp > 1}
    assert ("selective", "full") in allowed["1f1b"] and ("full", "full") in allowed["zbv"]
    assert not any("selective" in pair for pair in allowed["zbv"])


def test_an_offloaded_optimizer_must_fit_the_main_memory_of_all_ranks_of_a_node() -> None:
    choice = Choice(
        dp_shard=4, zero_stage=3, offload_optimizer=True, recompute_vision="full", recompute_language="full"
    )
    costs = Costs(task_of())
    peak, host_bytes = costs.find_peak(choice)
    assert host_bytes == pytest.approx(
        12 * count_params(costs.task.model).total / 4, rel=0.01
    )  # fp32 copy, two moments
    assert peak.owners["optimizer"] == 0 and costs.find_excess(choice) == ("", 0.0)
    small = replace(H100X4, host_memory_bytes=3 * host_bytes)
    assert Costs(task_of(cluster=small)).find_excess(choice) == ("host_memory", host_bytes)


# --- Pictures of unequal size ---------------------------------------------------------------------------------------


def test_the_expected_fullest_rank_is_that_of_all_draws() -> None:
    counts, ranks = (0, 1, 5), 3
    draws = [sum(pair) for pair in product(counts, repeat=2)]
    by_hand = math.fsum(max(row) for row in product(draws, repeat=ranks)) / len(draws) ** ranks
    assert expect_fullest(counts, 2, ranks) == pytest.approx(by_hand)
    assert expect_fullest(counts, 7, 1) == pytest.approx(14)  # one rank has the mean
    assert expect_fullest((3,), 5, 100) == pytest.approx(15)
    assert expect_fullest(counts, 2, 8) > expect_fullest(counts, 2, 2)
    with pytest.raises(ValueError, match="num_samples = 0"):
        expect_fullest(counts, 0, 2)


def test_unequal_pictures_cost_most_where_ranks_wait_with_every_micro_batch() -> None:
    counts = (1, 1, 1, 13)
    task = task_of(batch=32, tile_counts=counts)
    assert task.workload.tiles_per_sample == 4 and task.fullest.tiles_per_sample == 13
    costs, each = Costs(task), Choice(dp_shard=4, zero_stage=3, micro_batch_size=1, grad_accum_steps=8)
    once = each._replace(zero_stage=1)
    assert costs.find_cost(each).imbalance_s > 2 * costs.find_cost(once).imbalance_s > 0
    assert costs.find_cost(Choice(tp=4, micro_batch_size=1, grad_accum_steps=32)).imbalance_s == 0  # samples are shared
    equal = Costs(task_of(batch=32, workload=replace(LONG, tiles_per_sample=4)))
    largest = Costs(task_of(batch=32, workload=replace(LONG, tiles_per_sample=13)))
    assert costs.find_peak(each) == largest.find_peak(each) != equal.find_peak(each)  # memory must do for any of them
    assert equal.find_cost(each).imbalance_s == 0
    # By hand: what a tile costs, from steps of 8 micro-batches with 4 tiles and with none.
    text = Costs(task_of(batch=32, workload=replace(LONG, tiles_per_sample=0))).find_cost(each).step.parts
    less = equal.find_cost(each).step.parts
    tile_s = sum(less[name] - text[name] for name in ("forward", "backward", "recompute")) / (8 * 4)
    expected = 8 * (expect_fullest(counts, 1, 4) - 4) * tile_s
    assert costs.find_cost(each).imbalance_s == pytest.approx(expected)


# --- What this package can run --------------------------------------------------------------------------------------


def test_what_is_runnable_is_accepted_and_its_bytes_are_those_of_the_configuration() -> None:
    task = task_of("internvl2-2b", get_cluster("h100x8"), batch=32, precision="bf16_autocast")
    candidates = list_candidates(
        task, SearchSpace(runnable=True, recompute_vision=("full",), recompute_language=("every:2",))
    )
    assert candidates.broken["package"] > 0 and len(candidates.groups) > 500
    for choice, _ in candidates.groups[::9]:
        leaf = choice._replace(recompute_vision="full", recompute_language="every:2")
        parallel = to_config(leaf)
        assert parallel.problems() == [], leaf
        config = parse_config(
            {
                "model": {"preset": "internvl2-2b"},
                "train": {
                    "precision": "bf16",
                    "micro_batch_size": leaf.micro_batch_size,
                    "accumulation_steps": leaf.grad_accum_steps,
                },
                "activations": {"vision": "full", "language": "every:2"},
            }
        )
        of_config = describe_config(
            replace(config, parallel=parallel), 8, task.model, LONG, fixed_bytes=task.fixed_bytes
        )
        assert task.job(leaf) == of_config, leaf


def test_what_no_strategy_here_does_is_refused_by_name() -> None:
    assert strategy_of(Choice(dp_shard=4, zero_stage=2)) == "zero2" and strategy_of(Choice(tp=4)) == "single"
    assert strategy_of(Choice(dp_replicate=2, dp_shard=2, zero_stage=3)) == "hsdp"
    with pytest.raises(ValueError, match="no strategy for it; search in SearchSpace.runnable=True"):
        to_config(Choice(dp_replicate=2, dp_shard=2, zero_stage=1))
    with pytest.raises(ValueError, match="no strategy for it"):
        to_config(Choice(dp_shard=4, zero_stage=1, offload_optimizer=True))


# --- Nonsense -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch": -1}, "global_batch_size = -1"),
        ({"batch": 2.5}, "global_batch_size = 2.5: must be a whole number"),
        ({"tile_counts": (-1, 2)}, "tile_counts from -1 to 2"),
        ({"tile_counts": (0, 0)}, "some 1 or more"),
        ({"frozen": ("eyes",)}, "frozen names 'eyes'"),
        ({"precision": "fp4"}, "precision = 'fp4'"),
        ({"cluster": get_cluster("v100-32x8")}, "for which v100-32 has no hardware"),
    ],
)
def test_a_task_that_cannot_be_says_what_to_change(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        task_of(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedules": ("2f2b",)}, "schedules: '2f2b' is not one of"),
        ({"zero_stages": ()}, "zero_stages is empty"),
        ({"recompute_vision": ("half",)}, "recompute_vision = 'half'"),
        ({"micro_batch_sizes": (0,)}, "micro_batch_sizes: 0 must be 1 or more"),
        ({"max_pp": -2}, "max_pp = -2"),
    ],
)
def test_a_space_that_cannot_be_says_what_to_change(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchSpace(**fields)  # type: ignore[arg-type]


def test_a_search_that_cannot_be_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="top = 0"):
        search_plans(task_of(), top=0)
    with pytest.raises(ValueError, match="give one of the two"):
        search_plans(task_of(batch=0))
    with pytest.raises(ValueError, match="give one of the two"):
        search_plans(task_of(), SearchSpace(grad_accum_steps=(2,)))
    with pytest.raises(ValueError, match="2 nodes and no network"):
        search_plans(task_of(cluster=replace(TWO_NODES, network_bytes_per_s=0.0)))
    nothing = search_plans(task_of(batch=3), SearchSpace(micro_batch_sizes=(2,)))
    assert isinstance(nothing, Search) and not nothing.best and not nothing.misses
    assert "none can be run" in say_search(nothing)
