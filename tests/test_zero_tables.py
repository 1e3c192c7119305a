"""State and traffic of every stage of ZeRO: what is measured is the formula with the stated differences."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from parity import load
from ranks import run_worker
from zero_tables_worker import OFFLOADED, OTHERS, STRATEGIES

from vlmcourse.labs import zero_stages
from vlmcourse.labs.engine_table import PAIR, EngineTable, compare_engines
from vlmcourse.labs.zero_stages import FREES, STAGES, find_groups, find_unit_shapes, tiny_config
from vlmcourse.machine import describe_machine
from vlmcourse.monitor.state_table import StateRow, StateTable, build_row, estimate_by_deepspeed
from vlmcourse.monitor.traffic_table import TrafficRow, TrafficTable, Units, estimate_fp32_traffic, explain_traffic
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.network import estimate_step_traffic
from vlmcourse.planner.state_layout import ZERO_STAGES, count_params, estimate_fp32_state, explain_state
from vlmcourse.presets import get_model

pytestmark = pytest.mark.timeout(450)
TINY = 485_664
"""Parameters of the tiny model; `test_presets` counts them."""
ODD = [[(5, 7), (3, 5)], [(5,), (3,)]]
"""58 parameters that neither 2 nor 4 ranks divide tensor by tensor."""


def run(factory: pytest.TempPathFactory, nproc: int) -> list[dict[str, Any]]:
    folder = factory.mktemp(f"zero_tables{nproc}")
    run_worker("zero_tables_worker.py", str(folder), nproc=nproc, timeout_s=400)
    return [load(folder / f"rank{rank}.pt") for rank in range(nproc)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory, 4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory, 1)


def tables_of(of_rank: dict[str, Any]) -> tuple[StateTable, TrafficTable]:
    return of_rank["tables"]


def by_name(pair: list[dict[str, Any]], rank: int = 0) -> dict[str, StateRow]:
    rows = tables_of(pair[0])[0].rows
    return {row.strategy: row for row in rows if row.rank == rank and row.strategy not in OFFLOADED}


# --- Arithmetic -----------------------------------------------------------------------------------------------------


def sums(strategy: str, num_ranks: int, rank: int, *, offloads: bool = False) -> dict[str, int]:
    found: dict[str, int] = {}
    for difference in explain_state(ODD, strategy, num_ranks, rank, offloads=offloads):
        found[difference.owner] = found.get(difference.owner, 0) + difference.num_bytes
    return found


def test_differences_of_a_model_of_58_parameters_worked_by_hand() -> None:
    # Greedy: 35 and 5 on rank 0, 15 and 3 on rank 1 (18 are fewer than 35: the 5 too) -> 35 and 23 elements.
    assert sums("zero1", 2, 0) == {"optimizer": 8 * (35 - 29) + 4 * 1}
    assert sums("zero1", 2, 1) == {"optimizer": 8 * (23 - 29) + 4 * 3}
    # Rows of 2 ranks: 3 of 5 and 2 of 3 (x 7, 5, 1, 1): 21 + 10 + 3 + 2 = 36 on rank 0; rank 1 has 14 + 5 + 2 + 1 = 22.
    assert sums("fsdp", 2, 0) == {"weights": 4 * 7, "gradients": 4 * 7, "optimizer": 8 * 7 + 16}
    assert sums("fsdp", 2, 1) == {"weights": -4 * 7, "gradients": -4 * 7, "optimizer": 8 * (22 - 29) + 16}
    assert sums("zero2", 2, 0)["weights"] == 4 * (36 - 58)
    # Groups of 50 and 8 become 52 and 8: parts of 26 and 4, 30 in all. The border cuts the 35 and the 5.
    assert sums("deepspeed-zero2", 2, 0) == {"weights": 8, "gradients": 4 * (35 + 5 - 29), "optimizer": 120 + 8 + 8}
    # Rank 1 also has the 15 and the 3, and two zeros.
    kept = 35 + 15 + 2 + 5 + 3
    assert sums("deepspeed-zero2", 2, 1)["gradients"] == 4 * (kept - 29)
    assert sums("deepspeed-zero1", 2, 1)["gradients"] == 4 * (kept - 58)
    # Each parameter alone: 18 + 8 + 3 + 2 = 31.
    of_three = sums("deepspeed-zero3", 2, 0)
    assert of_three == {"weights": 8, "gradients": 8, "optimizer": 4 * 31 + 8 * 2 + 8, "buffers": 2 * 10**9}
    assert sums("ddp", 2, 1) == {"optimizer": 16}
    # Offloaded: gradients of exactly the parts, 30; two buffers for the largest gradient; a second copy under ZeRO-3.
    offloaded = {stage: sums(f"deepspeed-zero{stage}", 2, 0, offloads=True) for stage in (2, 3)}
    assert offloaded[2] == {"weights": 8, "gradients": 4, "buffers": 4 * (30 + 2 * 35), "optimizer": 120 + 8 + 8}
    assert offloaded[3] == of_three | {"gradients": 8 + 4 * 31}


def test_what_the_arithmetic_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy = 'hsdp': the formula knows single, ddp"):
        explain_state(ODD, "hsdp", 2, 0)
    with pytest.raises(ValueError, match="rank = 2 with num_ranks = 2: must be from 0 to 1"):
        explain_state(ODD, "fsdp", 2, 2)


def test_deepspeeds_estimator_counts_20_bytes_that_shrink_to_2_or_to_the_largest_layer() -> None:
    assert estimate_by_deepspeed(1000, 100, "deepspeed-zero2", 2) == 2000 + 9000
    assert estimate_by_deepspeed(1000, 100, "deepspeed-zero3", 2) == 400 + 9000
    assert estimate_by_deepspeed(1000, 100, "deepspeed-zero1", 2) is None
    assert estimate_by_deepspeed(1000, 100, "fsdp", 2) is None


def test_differences_of_traffic_worked_by_hand() -> None:
    units = Units(root=[(3,)], others=[[(5, 7)], [(4, 2)]], groups=[[(5, 7)], [(4, 2), (3,)]])
    # 46 parameters; FSDP2 fills rows to 4, 6 and 4: 54; ZeRO-1 and 2 groups of 35 and 11 to 36 and 12; ZeRO-3 35 and 3.
    once = 4 * 46 / 2
    assert [d.sent_bytes for d in explain_traffic(units, "deepspeed-zero2", 2)] == [once, 4 * 2 / 2]
    assert [d.sent_bytes for d in explain_traffic(units, "deepspeed-zero3", 2)] == [3 * 4 * 2 / 2, -once - 4 * 2 / 2]
    assert [d.sent_bytes for d in explain_traffic(units, "deepspeed-zero3", 2, frees=True)] == [3 * 4 * 2 / 2]
    [*_, kept_whole] = explain_traffic(units, "deepspeed-zero3", 2)
    assert all(f"stage3_{key}" in kept_whole.reason for key in ("max_live_parameters", "max_reuse_distance"))
    assert explain_traffic(units, "ddp", 2) == []
    assert [d.sent_bytes for d in explain_traffic(units, "fsdp", 2)] == [3 * 4 * 8 / 2, -4 * 4 / 2]


def test_the_tiny_model_is_counted_whole_by_both_arithmetics() -> None:
    config = tiny_config("ddp")
    groups, largest = find_groups(config, get_model(config.model.preset))
    assert count_params(groups) == find_unit_shapes(get_model(config.model.preset)).num_params() == TINY
    assert largest == 176_640 or largest < TINY


def test_one_process_holds_16_bytes_a_parameter_and_the_table_says_why_no_other_strategy_is_run(capsys: Any) -> None:
    import torch

    ranks = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
    states, traffic = zero_stages.measure_stages(("zero1", "deepspeed-zero2", FREES), ranks, with_peaks=False)
    assert "running single, 1 of 4" in capsys.readouterr().out
    [row], [sent] = states.rows, traffic.rows
    assert row.strategy == sent.name == "single" and row.formula.total == 16 * TINY and sent.sent_bytes == 0
    assert states.problems(0) == traffic.problems(0) == []
    assert [(row.strategy, row.formula_bytes) for row in states.not_run] == [
        ("zero1", 16 * TINY),
        ("deepspeed-zero2", 16 * TINY),
    ]
    for table in (states, traffic):
        of_torch, of_engine = str(table).splitlines()[2:4]
        assert of_torch.startswith("zero1 ") and "there is nothing to share, and it would be 'single'" in of_torch
        assert of_engine.startswith("deepspeed-zero2 ") and of_engine.endswith("start it with %%torchrun -n 1")
    assert (states + states).not_run == 2 * states.not_run


# --- Measured -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_hold_and_send_what_the_formulas_and_their_differences_say_to_the_byte(
    num_ranks: int, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue({1: "alone", 2: "pair", 4: "four"}[num_ranks])
    states = tables_of(found[0])[0]
    names = (*(["single"] if num_ranks == 1 else []), *STRATEGIES[num_ranks])
    left_out = {row.strategy for row in states.not_run}
    assert left_out == ({"ddp", "accelerate-ddp", "zero1", "zero2", "fsdp"} & set(names) if num_ranks == 1 else set())
    run_here = [name for name in names if name not in left_out]
    assert [row.strategy for row in states.rows] == [n for n in run_here if n != FREES for _ in range(num_ranks)]
    assert states.problems(0) == []
    groups = find_groups(tiny_config("ddp"), get_model("tiny"))[0]
    for row in states.rows:
        assert row.formula == estimate_fp32_state(groups, row.strategy.removesuffix("+cpu"), num_ranks)
    for of_rank in found:
        traffic = tables_of(of_rank)[1]
        assert [row.name for row in traffic.rows] == [name for name in run_here if name not in OFFLOADED]
        assert traffic.problems(0) == []
        for row in traffic.rows:  # one number a parameter at most; the largest is FSDP2's norm
            assert row.numbers_bytes < 2 * 4 * 80 and (row.sent_bytes == 0) == (num_ranks == 1)


@pytest.mark.slow
def test_an_engine_on_one_rank_holds_an_fp32_copy_more_than_single(alone: list[dict[str, Any]]) -> None:
    states = tables_of(alone[0])[0]
    held = {row.strategy: row.measured.total_bytes for row in states.fullest()}
    single = held["single"]
    assert held["deepspeed-zero0"] == single
    for name in ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3", "deepspeed-zero2+cpu"):
        assert held[name] - single == pytest.approx(4 * TINY, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_of_odd_sizes_does_too_and_engines_forget_gradients_in_their_step(
    num_ranks: int, request: pytest.FixtureRequest
) -> None:
    units = Units([], ODD, ODD)
    for of_rank in request.getfixturevalue({2: "pair", 4: "four"}[num_ranks]):
        for stage, (row, after, sent_bytes) in of_rank["odd"].items():
            assert row.problems(0) == []
            assert (after.gradients_bytes == 0) == (stage < 3)
            assert after.optimizer_bytes == row.measured.optimizer_bytes
            differences = explain_traffic(units, f"deepspeed-zero{stage}", num_ranks)
            expected = estimate_fp32_traffic(units, f"deepspeed-zero{stage}", num_ranks).total
            assert sent_bytes == expected + sum(difference.sent_bytes for difference in differences)
            assert any("filled up" in difference.reason for difference in differences)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ZERO_STAGES)
def test_a_stage_taken_for_another_is_seen(pair: list[dict[str, Any]], asked: str) -> None:
    config = tiny_config("ddp")
    groups, largest = find_groups(config, get_model(config.model.preset))
    same = {"deepspeed-zero1", "deepspeed-zero2", "accelerate-deepspeed-zero1", "accelerate-deepspeed-zero2"}
    whole = {"single", "ddp", "accelerate-ddp", "deepspeed-zero0"}
    for got, row in by_name(pair).items():
        alike = [{"zero2", "fsdp"}, same, whole, {"deepspeed-zero3", "accelerate-deepspeed-zero3"}, {"zero1"}]
        taken = build_row((row.measured, row.peaks), groups, asked, 2, row.rank, largest)
        assert bool(taken.problems()) != any({asked, got} <= names for names in alike), got


@pytest.mark.slow
def test_stages_that_hold_the_same_before_the_update_differ_within_the_step(pair: list[dict[str, Any]]) -> None:
    rows = by_name(pair)
    peaks = {name: row.peaks for name, row in rows.items() if row.peaks is not None}
    assert set(peaks) == set(STAGES)
    assert rows["deepspeed-zero1"].measured == rows["deepspeed-zero2"].measured
    # ZeRO-1 reduces at the end of backward, when all gradients are whole (the step's scratch padding aside).
    assert peaks["deepspeed-zero1"].gradients_bytes > peaks["deepspeed-zero2"].gradients_bytes
    assert peaks["deepspeed-zero1"].gradients_bytes == pytest.approx(4 * TINY, rel=0.001)
    assert peaks["zero2"].gathered_bytes >= 4 * TINY > 3 * peaks["fsdp"].gathered_bytes
    assert peaks["deepspeed-zero3"].gathered_bytes == 4 * TINY  # a small model stays gathered
    for name in ("ddp", "zero1", "deepspeed-zero1", "deepspeed-zero2"):
        assert peaks[name].gathered_bytes == 0


@pytest.mark.slow
def test_the_table_shows_the_fullest_rank_and_says_why(pair: list[dict[str, Any]]) -> None:
    table = tables_of(pair[0])[0]
    lines = str(table).splitlines()
    names = {*STAGES, *OFFLOADED, *OTHERS}
    assert len(lines) == 1 + len(names)
    assert lines[1].split()[:7] == ["ddp", "2", "1.943", "1.943", "3.886", "7.771", "7.771"]
    assert "an fp32 copy of its part" in table.reasons("deepspeed-zero3", 2)
    with pytest.raises(ValueError, match="num_ranks = 3: choose one of"):
        table.reasons("ddp", 3)
    assert (table + table).problems() == [] and set(table.ledgers(2)) == set(table.formulas(2)) == names


@pytest.mark.slow
def test_the_collectives_of_two_ranks_are_those_of_their_stages(pair: list[dict[str, Any]]) -> None:
    for of_rank in pair:
        table = tables_of(of_rank)[1]
        rows = {row.name: row for row in table.rows}
        whole = 4 * TINY
        for stage in (1, 2):
            row = rows[f"deepspeed-zero{stage}"]
            assert "reduce-scatter" not in row.backward and row.backward["all-reduce"].payload_bytes >= whole
            assert row.update["all-gather"].payload_bytes == whole
        assert rows[FREES].backward["all-gather"].payload_bytes == 2 * whole
        assert rows["deepspeed-zero3"].backward["reduce-scatter"].payload_bytes == whole
        assert rows["deepspeed-zero3"].start["broadcast"].payload_bytes == pytest.approx(2 * whole, rel=0.01)
        assert FREES in str(table)


@pytest.mark.slow
def test_what_zero3_keeps_whole_is_counted_beside_its_shard(pair: list[dict[str, Any]]) -> None:
    shards = 4 * (18 + 8 + 3 + 2)
    for of_rank in pair:  # backward needs the bias of 5 alone; the update gathers 5 + 3 in one buffer of 2 x (3 + 2)
        assert of_rank["kept whole"] == [(shards, 0), (shards + 4 * 5, 5), (shards + 4 * 10, 8)]


@pytest.mark.slow
def test_traffic_of_another_stage_is_seen(pair: list[dict[str, Any]]) -> None:
    rows: dict[str, TrafficRow] = {row.name: row for row in tables_of(pair[0])[1].rows}

    def taken(measured: str, asked: str) -> list[str]:
        return dataclasses.replace(rows[asked], sent_bytes=rows[measured].sent_bytes).problems()

    for measured, asked in (
        ("ddp", "zero1"),
        ("fsdp", "zero2"),
        ("deepspeed-zero3", FREES),
        ("deepspeed-zero2", "ddp"),
    ):
        [said] = taken(measured, asked)
        assert said.startswith(f"{asked} on 2 ranks: ") and "should be, within 0.5 %" in said
    paper = estimate_step_traffic(TINY, 2, 2, weight_bytes=4, gradient_bytes=4)
    assert rows["deepspeed-zero2"].formula == paper and paper.total == 4 * TINY


# --- Two engines side by side ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_engines_train_the_same_model_in_turns_and_the_table_says_where(pair: list[dict[str, Any]]) -> None:
    for of_rank in pair:
        table: EngineTable = of_rank["engines"]
        assert table.loss_gap < 1e-5 and table.num_params == TINY
        assert [len(times) for times in table.seconds.values()] == [3, 3] and table.ratio > 0
        text = str(table)
        assert describe_machine() in text and "3 rounds in turns" in text and "2 ranks" in text
        facts = table.facts
        assert facts["can be offloaded (optimizer / parameters)"]["fsdp"] == "cpu / cpu"
        assert "nvme / nvme" in facts["can be offloaded (optimizer / parameters)"]["deepspeed-zero3"]
        assert facts["p.shape is that of the plain model"] == {"deepspeed-zero3": "0/76", "fsdp": "76/76"}
        assert facts["p.grad is there before the update"] == {"deepspeed-zero3": "0/76", "fsdp": "76/76"}
        for saved in PAIR:
            assert facts[f"goes on from a checkpoint of {saved}"][saved] == "yes"


def test_a_comparison_shows_on_rank_0_what_it_is_at(pair: list[dict[str, Any]]) -> None:
    first, second = pair
    said = [text.rpartition(" (")[0].strip() for text in first["shown"].split("\r")]
    assert {f"{name} has made step {step}" for name in PAIR for step in range(1, 6)} <= set(said)
    both = [f"going on from a checkpoint of {name}, {number} of 2" for number, name in enumerate(PAIR, 1)]
    assert {"starting fsdp", *both} <= set(said) and not second["shown"]


def test_a_comparison_needs_a_round_and_two_engines() -> None:
    for wrong in ({"num_rounds": 0}, {"strategies": ("fsdp", "fsdp")}):
        with pytest.raises(ValueError, match="need 1 or more rounds, and 2 or more strategies to compare"):
            compare_engines(**wrong)  # type: ignore[arg-type]


def test_the_ratio_is_the_median_over_rounds_not_of_medians() -> None:
    seconds = {"a": (1.0, 4.0, 9.0), "b": (1.0, 2.0, 10.0)}
    table = EngineTable("here", 2, 10, ("a", "b"), seconds, {"line": {"a": "x", "b": "y"}}, 0.0)
    assert table.ratio == 1.0
    assert "a takes 1.00 x the time of b (rounds from 0.90 to 2.00)" in str(table)
