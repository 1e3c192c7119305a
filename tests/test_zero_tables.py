"""State and traffic of every stage of ZeRO: what is measured is the formula with the stated differences."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from parity import load
from ranks import run_worker
from zero_tables_worker import OFFLOADED

from vlmcourse.labs import zero_stages
from vlmcourse.labs.engine_table import PAIR, EngineTable, compare_engines
from vlmcourse.labs.zero_stages import FREES, STAGES, find_groups, find_unit_shapes, tiny_config
from vlmcourse.machine import describe_machine
from vlmcourse.monitor.state_table import StateRow, StateTable, build_row, estimate_by_deepspeed
from vlmcourse.monitor.traffic_table import TrafficRow, TrafficTable, Units, explain_traffic
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
def four(tmp_path_factory: pytest.TempPathFactory) -> StateTable:
    return run(tmp_path_factory, 4)[0]["states"]


def by_name(pair: list[dict[str, Any]], rank: int = 0) -> dict[str, StateRow]:
    rows = pair[0]["states"].rows
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
    units = Units(root=[(3,)], others=[[(5, 7)], [(4, 2)]])  # 46 parameters; rows filled to 4, 6 and 4: 54
    once = 4 * 46 / 2
    assert [d.sent_bytes for d in explain_traffic(units, "deepspeed-zero2", 2)] == [once]
    assert [d.sent_bytes for d in explain_traffic(units, "deepspeed-zero3", 2)] == [-once]
    assert explain_traffic(units, "deepspeed-zero3", 2, frees=True) == explain_traffic(units, "ddp", 2) == []
    assert [d.sent_bytes for d in explain_traffic(units, "fsdp", 2)] == [3 * 4 * 8 / 2, -4 * 4 / 2]


def test_the_tiny_model_is_counted_whole_by_both_arithmetics() -> None:
    config = tiny_config("ddp")
    groups, largest = find_groups(config, get_model(config.model.preset))
    assert count_params(groups) == find_unit_shapes(get_model(config.model.preset)).num_params() == TINY
    assert largest == 176_640 or largest < TINY


def test_one_process_holds_16_bytes_a_parameter_and_every_stage_is_refused_there() -> None:
    import torch

    alone = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
    table = zero_stages.measure_states(STAGES, alone)
    [row] = table.rows
    assert row.strategy == "single" and row.formula.total == 16 * TINY
    assert table.problems(0) == []


# --- Measured -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_hold_what_the_formula_and_its_differences_say_to_the_byte(pair: list[dict[str, Any]]) -> None:
    table: StateTable = pair[0]["states"]
    assert [row.strategy for row in table.rows] == [name for name in (*STAGES, *OFFLOADED) for _ in range(2)]
    assert table.problems(0) == []
    for row in table.rows:
        assert row.formula == estimate_fp32_state(
            find_groups(tiny_config("ddp"), get_model("tiny"))[0], row.strategy.removesuffix("+cpu"), 2
        )


@pytest.mark.slow
def test_four_ranks_do_too(four: StateTable) -> None:
    assert len(four.rows) == 16 and four.problems(0) == []


@pytest.mark.slow
def test_a_model_of_odd_sizes_does_too_and_engines_forget_gradients_in_their_step(pair: list[dict[str, Any]]) -> None:
    for of_rank in pair:
        for stage, (row, after) in of_rank["odd"].items():
            assert row.problems(0) == []
            assert (after.gradients_bytes == 0) == (stage < 3)
            assert after.optimizer_bytes == row.measured.optimizer_bytes


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
    assert rows["deepspeed-zero1"].measured == rows["deepspeed-zero2"].measured
    # ZeRO-1 reduces at the end of backward, when all gradients are whole (the step's scratch padding aside).
    assert rows["deepspeed-zero1"].peaks.gradients_bytes > rows["deepspeed-zero2"].peaks.gradients_bytes
    assert rows["deepspeed-zero1"].peaks.gradients_bytes == pytest.approx(4 * TINY, rel=0.001)
    assert rows["zero2"].peaks.gathered_bytes >= 4 * TINY > 3 * rows["fsdp"].peaks.gathered_bytes
    assert rows["deepspeed-zero3"].peaks.gathered_bytes == 4 * TINY  # a small model stays gathered
    for name in ("ddp", "zero1", "deepspeed-zero1", "deepspeed-zero2"):
        assert rows[name].peaks.gathered_bytes == 0


@pytest.mark.slow
def test_the_table_shows_the_fullest_rank_and_says_why(pair: list[dict[str, Any]]) -> None:
    table: StateTable = pair[0]["states"]
    lines = str(table).splitlines()
    assert len(lines) == 1 + len(STAGES) + len(OFFLOADED)
    assert lines[1].split()[:7] == ["ddp", "2", "1.943", "1.943", "3.886", "7.771", "7.771"]
    assert "an fp32 copy of its part" in table.reasons("deepspeed-zero3", 2)
    with pytest.raises(ValueError, match="num_ranks = 3: choose one of"):
        table.reasons("ddp", 3)
    assert (table + table).problems() == [] and set(table.ledgers(2)) == set(table.formulas(2)) == {*STAGES, *OFFLOADED}


@pytest.mark.slow
def test_two_ranks_send_what_the_formula_and_its_differences_say(pair: list[dict[str, Any]]) -> None:
    for of_rank in pair:
        table: TrafficTable = of_rank["traffic"]
        assert [row.name for row in table.rows] == [*STAGES, FREES]
        assert table.problems() == []
        rows = {row.name: row for row in table.rows}
        whole = 4 * TINY
        for stage in (1, 2):
            row = rows[f"deepspeed-zero{stage}"]
            assert "reduce-scatter" not in row.backward and row.backward["all-reduce"].payload_bytes >= whole
            assert row.update["all-gather"].payload_bytes == whole
        assert rows[FREES].backward["all-gather"].payload_bytes == 2 * whole
        assert rows["deepspeed-zero3"].backward["reduce-scatter"].payload_bytes == whole
        assert rows["deepspeed-zero3"].start["broadcast"].payload_bytes == pytest.approx(2 * whole, rel=0.01)
        assert "stage3_max_live_parameters" in table.reasons() and FREES in str(table)


@pytest.mark.slow
def test_traffic_of_another_stage_is_seen(pair: list[dict[str, Any]]) -> None:
    rows: dict[str, TrafficRow] = {row.name: row for row in pair[0]["traffic"].rows}

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


def test_a_comparison_needs_a_round_and_two_engines() -> None:
    for wrong in ({"num_rounds": 0}, {"strategies": ("fsdp", "fsdp")}):
        with pytest.raises(ValueError, match="need 1 or more rounds, and 2 or more strategies to compare"):
            compare_engines(**wrong)  # type: ignore[arg-type]


def test_the_ratio_is_the_median_over_rounds_not_of_medians() -> None:
    seconds = {"a": (1.0, 4.0, 9.0), "b": (1.0, 2.0, 10.0)}
    table = EngineTable("here", 2, 10, ("a", "b"), seconds, {"line": {"a": "x", "b": "y"}}, 0.0)
    assert table.ratio == 1.0
    assert "a takes 1.00 x the time of b (rounds from 0.90 to 2.00)" in str(table)
