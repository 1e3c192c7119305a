"""Who holds what, as live ranks report it: shares, samples, positions, layers; and what a step costs each of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from holdings_worker import CASES
from ranks import run_worker

from vlmcourse.config import parse_config
from vlmcourse.parallel.holdings import LayerShare, RankHoldings, layer_of, layers_of, tabulate_holdings
from vlmcourse.parallel.timeline import Action, bubble_fraction, makespan_s, mean_costs, replay_actions
from vlmcourse.planner import count_params
from vlmcourse.planner.grid import list_shares
from vlmcourse.planner.schedules import ideal_bubble_fraction
from vlmcourse.presets import get_model

TINY = get_model("tiny")


def start(factory: pytest.TempPathFactory, num_ranks: int) -> list[dict[str, Any]]:
    folder: Path = factory.mktemp(f"holdings{num_ranks}")
    run_worker("holdings_worker.py", str(folder), nproc=num_ranks, timeout_s=200)
    return [json.loads((folder / f"found{rank}.json").read_text(encoding="utf-8")) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start(tmp_path_factory, 2)


def reported(found: list[dict[str, Any]], name: str) -> list[RankHoldings]:
    return [as_holdings(of_rank[name]) for of_rank in found]


def as_holdings(fields: dict[str, Any]) -> RankHoldings:
    layers = {name: LayerShare(**share) for name, share in fields["layers"].items()}
    positions = tuple(map(tuple, fields["positions"]))
    inputs = {name: tuple(size) for name, size in fields["inputs"].items()}
    changed = {"layers": layers, "positions": positions, "inputs": inputs, "sample_ids": tuple(fields["sample_ids"])}
    return RankHoldings(**fields | changed)


def shares(holder: RankHoldings, owner: str) -> set[float]:
    return {round(getattr(share, owner), 2) for share in holder.layers.values()}


def test_every_parameter_belongs_to_a_layer_of_the_model() -> None:
    assert layers_of(TINY) == [
        "patches",
        "vision 0",
        "vision 1",
        "fusion",
        "language 0",
        "language 1",
        "language 2",
        "output",
    ]
    named = ("vision.class_token", "vision.blocks.1.norm1.weight", "projector.norm.weight", "language.embedding.weight")
    assert [layer_of(name) for name in named] == ["patches", "vision 1", "fusion", "fusion"]
    assert {layer_of("language.norm.weight"), layer_of("language.lm_head.weight")} == {"output"}


def test_ddp_ranks_hold_all_state_and_other_samples(found: list[dict[str, Any]]) -> None:
    first, second = reported(found, "ddp")
    for owner in ("tensor", "weights", "gradients", "optimizer"):
        assert shares(first, owner) == {1.0}
    assert len(first.sample_ids) == len(second.sample_ids) == 4
    assert not set(first.sample_ids) & set(second.sample_ids)
    assert first.num_params == count_params(TINY).total == first.num_stored


def test_zero1_ranks_share_out_the_optimizer_alone(found: list[dict[str, Any]]) -> None:
    first, second = reported(found, "zero1")
    assert shares(first, "gradients") == {1.0}
    for name, share in first.layers.items():
        assert share.optimizer + second.layers[name].optimizer == pytest.approx(1)
    assert 0 < first.layers["fusion"].optimizer < 1


def test_fsdp_ranks_hold_half_of_everything(found: list[dict[str, Any]]) -> None:
    first, second = reported(found, "fsdp")
    for owner in ("weights", "gradients", "optimizer"):
        assert {getattr(first.layers[name], owner) for name in ("vision 0", "language 2", "output")} == {0.5}
    assert first.num_stored + second.num_stored == first.num_params
    assert shares(first, "tensor") == {1.0}


def test_tensor_parallel_ranks_hold_parts_of_matrices_and_the_same_samples(found: list[dict[str, Any]]) -> None:
    first, second = reported(found, "tp")
    assert first.sample_ids == second.sample_ids and len(first.sample_ids) == 8
    assert first.layers["language 0"].tensor == pytest.approx(0.5, abs=0.01)
    assert first.layers["patches"].tensor == 1
    assert first.inputs["language 0"] == (8, first.seq_len // 2), "sequence parallel: half of the positions"


def test_context_parallel_ranks_hold_other_positions(found: list[dict[str, Any]]) -> None:
    first, second = reported(found, "cp")
    quarter = first.seq_len // 4
    assert first.positions == ((0, quarter), (3 * quarter, 4 * quarter))
    assert second.positions == ((quarter, 3 * quarter),)
    assert first.sample_ids == second.sample_ids
    assert first.inputs["language 1"] == (8, 2 * quarter) and first.inputs["vision 0"][0] == 4


def test_pipeline_ranks_hold_other_layers(found: list[dict[str, Any]]) -> None:
    first, second = reported(found, "pp")
    assert first.own_layers + second.own_layers == tuple(layers_of(TINY))
    assert first.weights_fraction + second.weights_fraction == pytest.approx(1)
    assert set(first.inputs) == {"vision 0", "vision 1"} and first.inputs["vision 0"][0] == 8


@pytest.mark.parametrize("name", CASES[2])
def test_the_table_made_before_the_start_says_what_ranks_then_hold(found: list[dict[str, Any]], name: str) -> None:
    check_announced(reported(found, name), CASES[2][name][2])


def check_announced(holders: list[RankHoldings], parallel: dict[str, Any]) -> None:
    """Compare live ranks with the words of `list_shares`."""
    config = parse_config({"parallel": parallel}).parallel
    samples = {}
    for share, holder in zip(list_shares(config, len(holders), TINY), holders, strict=True):
        assert (share.rank, share.coordinates) == (holder.rank, holder.coordinates)
        assert samples.setdefault(share.samples, set(holder.sample_ids)) == set(holder.sample_ids)
        named = layers_of(TINY) if share.layers == "all" else spell_out(share.layers)
        assert tuple(named) == holder.own_layers
        block = holder.layers[next(name for name in holder.own_layers if " " in name)]
        assert block.tensor == pytest.approx(1 / config.tp if "of each matrix" in share.weights else 1, abs=0.01)
        fraction = re.search(r"in shards of 1/(\d+)", share.weights)
        assert block.weights == pytest.approx(block.tensor / int(fraction[1] if fraction else 1), abs=0.01)
        chunks = [int(number) for number in re.findall(r"\d+", share.positions)] or [0, 1]
        part = holder.seq_len // chunks[-1]
        expected = {position for chunk in chunks[:-1] for position in range(chunk * part, (chunk + 1) * part)}
        assert {position for first, end in holder.positions for position in range(first, end)} == expected
    assert len({frozenset(of_part) for of_part in samples.values()}) == len(samples)


def spell_out(layers: str) -> list[str]:
    """Return the names in words such as `patches, vision 0-3`."""
    names = {"projector and embedding": "fusion", "norm and output": "output"}
    found = []
    for words in layers.split(", "):
        tower, _, numbers = words.partition(" ")
        first, _, last = numbers.partition("-")
        is_block = first.isdecimal()
        found += [f"{tower} {i}" for i in range(int(first), int(last or first) + 1)] if is_block else [words]
    return [names.get(name) or name for name in found]


def test_shards_of_parts_are_quarters(tmp_path_factory: pytest.TempPathFactory) -> None:
    holders = reported(start(tmp_path_factory, 4), "fsdp x tp")
    check_announced(holders, CASES[4]["fsdp x tp"][2])
    assert {round(holder.layers["language 0"].weights, 2) for holder in holders} == {0.25}
    assert holders[0].sample_ids == holders[1].sample_ids != holders[2].sample_ids
    header, rows = tabulate_holdings(holders)
    assert header[1:5] == ["dp_shard", "tp", "samples", "positions"]
    assert [row[1:4] for row in rows] == [["0", "0", "0-3"], ["0", "1", "0-3"], ["1", "0", "4-7"], ["1", "1", "4-7"]]
    assert rows[0][5] == "P V0 V1 F L0 L1 L2 O"


def test_costs_of_a_step_are_those_of_the_strategy(found: list[dict[str, Any]]) -> None:
    costs = found[0]["costs"]
    weights_bytes = 4 * count_params(TINY).total
    assert costs["ddp"]["state"]["weights_bytes"] == weights_bytes
    assert costs["ddp"]["sent_bytes"] == pytest.approx(weights_bytes, rel=1e-3)
    assert costs["fsdp"]["sent_bytes"] / costs["ddp"]["sent_bytes"] == pytest.approx(1.45, abs=0.05)
    both = [of_rank["costs"]["zero1"]["state"]["optimizer_bytes"] for of_rank in found]
    assert sum(both) == pytest.approx(2 * weights_bytes, rel=1e-3)
    assert all(cost["step_s"] > 0 and cost["activations_bytes"] > 0 for cost in costs.values())


def test_kept_activations_are_counted_once_and_let_go(found: list[dict[str, Any]]) -> None:
    # x for the weight's gradient, the product for the square: two tensors of 8 numbers. The weight is no activation.
    assert found[0]["kept"] == {"forward": 64, "after": 0, "peak": 64}


def test_a_recorded_pipeline_ran_every_action(found: list[dict[str, Any]]) -> None:
    ranks = [[Action(*action) for action in of_rank] for of_rank in found[0]["schedule"]]
    assert {(a.kind, a.microbatch, a.stage) for actions in ranks for a in actions} == {
        (kind, microbatch, stage) for kind in "FB" for microbatch in (0, 1) for stage in (0, 1)
    }
    assert found[0]["schedule kept"] > 0 and makespan_s(ranks) > 0
    assert set(mean_costs(ranks)) == {("F", 0), ("F", 1), ("B", 0), ("B", 1)}


def one_f_one_b(num_microbatches: int, pp: int = 2) -> list[list[Action]]:
    """Return the order of 1F1B on two ranks, without times."""
    ranks = []
    for rank in range(pp):
        warm = pp - rank
        order = [("F", m) for m in range(warm)]
        for m in range(num_microbatches):
            order += [("B", m)] + ([("F", m + warm)] if m + warm < num_microbatches else [])
        ranks.append([Action(rank, kind, m, rank, 0.0, 0.0) for kind, m in order])
    return ranks


def test_a_replay_with_equal_stages_has_the_bubble_of_the_formula() -> None:
    costs = {(kind, stage): seconds for kind, seconds in (("F", 1.0), ("B", 2.0)) for stage in (0, 1)}
    replayed = replay_actions(one_f_one_b(8), costs)
    assert makespan_s(replayed) == 9 * 3
    assert bubble_fraction(replayed) == pytest.approx(ideal_bubble_fraction("1f1b", 2, 8))


def test_a_replay_with_an_unequal_stage_waits_longer() -> None:
    costs = {("F", 0): 0.5, ("B", 0): 1.0, ("F", 1): 1.0, ("B", 1): 2.0}
    assert bubble_fraction(replay_actions(one_f_one_b(8), costs)) > 1.5 * ideal_bubble_fraction("1f1b", 2, 8)


def test_a_replay_refuses_an_order_that_can_never_run() -> None:
    backward_first = [[Action(0, "B", 0, 0, 0, 0), Action(0, "F", 0, 0, 0, 0)]]
    with pytest.raises(ValueError, match="1 ranks wait for actions that are not in this step"):
        replay_actions(backward_first, {("F", 0): 1.0, ("B", 0): 1.0})
