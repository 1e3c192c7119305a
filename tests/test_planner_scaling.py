"""Scaling by arithmetic: laws, fits that find what was put in, intervals, and losses that add up to the whole."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from vlmcourse.planner.efficiency_loss import LOSSES, StepParts, split_loss
from vlmcourse.planner.scaling import (
    RankTimes,
    amdahl_speedup,
    find_last_paying,
    find_serial_fraction,
    gustafson_speedup,
    mean_interval,
    measure_speedups,
)
from vlmcourse.planner.scaling_fit import COMMUNICATION, fit_amdahl, fit_communication, fit_gustafson
from vlmcourse.planner.scaling_limits import compare_laws, estimate_last_paying

SIZES = (1, 2, 4, 8, 16)


def make_times(
    serial_s: float = 0.0,
    parallel_s: float = 0.0,
    latency_s: float = 0.0,
    bandwidth_s: float = 0.0,
    *,
    sizes: Sequence[int] = SIZES,
    num_turns: int = 4,
    noise: float = 0.0,
    seed: int = 5,
    kind: str = "strong",
    measured: bool = True,
) -> list[RankTimes]:
    rng = random.Random(seed)
    turns = [rng.uniform(0.7, 1.5) for _ in range(num_turns)] if noise else [1.0] * num_turns
    found = []
    for n in sizes:
        wait = latency_s * (n - 1) + bandwidth_s * (1 - 1 / n)
        step = serial_s + parallel_s / (n if kind == "strong" else 1) + wait
        factors = [turn * math.exp(rng.gauss(0, noise)) for turn in turns]
        waits = tuple(wait * factor for factor in factors)
        steps = tuple(step * factor for factor in factors)
        found.append(RankTimes(num_ranks=n, step_s=steps, communication_s=waits if measured else None))
    return found


# --- Laws -----------------------------------------------------------------------------------------------------------


def test_five_point_two_on_eight_is_65_percent_and_a_serial_part_of_7_7_percent() -> None:
    fraction = find_serial_fraction(5.2, 8)
    assert fraction == pytest.approx((8 / 5.2 - 1) / 7) and round(fraction, 3) == 0.077
    assert amdahl_speedup(fraction, 8) == pytest.approx(5.2)
    assert gustafson_speedup(0.25, 8) == pytest.approx(0.25 + 0.75 * 8)
    assert amdahl_speedup(0, 8) == gustafson_speedup(0, 8) == 8
    for wrong in ((7.7, 8), (0.077, 0)):
        with pytest.raises(ValueError, match=r"7.7 % is 0.077"):
            amdahl_speedup(*wrong)
    with pytest.raises(ValueError, match="need a number above 0, and 2 ranks or more"):
        find_serial_fraction(1.0, 1)


def test_speedups_compare_within_a_turn_so_that_a_busy_turn_does_not_count() -> None:
    one, two = RankTimes(num_ranks=1, step_s=(1.0, 3.0)), RankTimes(num_ranks=2, step_s=(0.6, 1.8))
    alone, strong = measure_speedups("strong", [two, one])
    assert alone.speedup == (1, 1, 1)
    assert strong.speedup == pytest.approx((1 / 0.6,) * 3) and strong.efficiency == pytest.approx((0.5 / 0.6,) * 3)
    weak = measure_speedups("weak", [one, two])[1]
    assert weak.speedup == pytest.approx((2 / 0.6,) * 3)


def test_an_interval_is_students_over_the_logarithms() -> None:
    logs = [0.1, 0.2, 0.4]
    value, low, high = mean_interval([math.exp(log) for log in logs])
    mean, deviation = sum(logs) / 3, math.sqrt(sum((log - sum(logs) / 3) ** 2 for log in logs) / 2)
    half = 4.302653 * deviation / math.sqrt(3)  # 97.5 % of Student's t with 2 degrees of freedom, from a table
    assert (value, low, high) == pytest.approx((math.exp(mean), math.exp(mean - half), math.exp(mean + half)), rel=1e-5)


def test_what_nothing_can_be_said_of_is_refused() -> None:
    one, two = RankTimes(num_ranks=1, step_s=(1.0,)), RankTimes(num_ranks=2, step_s=(0.6, 0.7))
    for times, words in (
        ([one, two], "every number of ranks once in each turn"),
        ([two], "need 2 or more different numbers"),
        ([one, RankTimes(num_ranks=2, step_s=(0.6,))], "one ratio has no interval"),
        ([two, RankTimes(num_ranks=4, step_s=(0.4, 0.4))], "no times of 1 rank"),
    ):
        with pytest.raises(ValueError, match=words):
            measure_speedups("strong", times)
    with pytest.raises(ValueError, match="must be 'strong'"):
        measure_speedups("string", [two])
    with pytest.raises(ValueError, match="a time above 0"):
        RankTimes(num_ranks=1, step_s=(0.0,))
    with pytest.raises(ValueError, match="give one a turn"):
        RankTimes(num_ranks=1, step_s=(1.0,), communication_s=())


# --- Fits -----------------------------------------------------------------------------------------------------------


def test_a_fit_finds_what_was_put_in() -> None:
    amdahl = fit_amdahl("strong", make_times(0.02, 0.5))
    assert (amdahl.serial_s, amdahl.parallel_s) == pytest.approx((0.02, 0.5))
    assert amdahl.serial_fraction == pytest.approx(0.02 / 0.52) and amdahl.residual_fraction < 1e-9 and amdahl.is_good
    assert amdahl.predict_speedup(64) == pytest.approx(amdahl_speedup(0.02 / 0.52, 64))
    terms = (0.02, 0.5, 0.001, 0.03)
    for kind, times in (("strong", make_times(*terms)), ("weak", make_times(0, *terms[1:], kind="weak"))):
        fit = fit_communication(kind, times)
        wanted = terms if kind == "strong" else (0, *terms[1:])
        assert (fit.serial_s, fit.parallel_s, fit.latency_s, fit.bandwidth_s) == pytest.approx(wanted, abs=1e-9)
        speedup = (8 if kind == "weak" else 1) * fit.predict_s(1) / fit.predict_s(8)
        assert fit.predict_speedup(8) == pytest.approx(speedup)
        assert fit.spare_sizes == 2 and "proves nothing" not in str(fit)
    no_rank_alone = fit_amdahl("strong", make_times(0.02, 0.5, sizes=(4, 8, 32)))
    assert no_rank_alone.predict_s(1) == pytest.approx(0.52)


def test_bandwidth_looks_like_a_serial_part_unless_communication_is_measured() -> None:
    """F20: the time of a ring's bytes is 1 - 1/N, which no step time tells from Amdahl's serial part."""
    times = make_times(0.02, 0.5, 0.0, 0.06)
    amdahl = fit_amdahl("strong", times)
    assert amdahl.residual_fraction < 1e-9 and amdahl.serial_s == pytest.approx(0.08)
    blind = fit_communication("strong", make_times(0.02, 0.5, 0.0, 0.06, measured=False))
    assert blind.serial_s == pytest.approx(0.08) and "bandwidth counted as serial" in str(blind)
    seen = fit_communication("strong", times)
    assert (seen.serial_s, seen.bandwidth_s) == pytest.approx((0.02, 0.06))


def test_no_term_is_below_zero_and_a_poor_fit_says_so() -> None:
    grows = [RankTimes(num_ranks=n, step_s=(1.0 + 0.5 * n,) * 2) for n in (1, 2, 4)]
    fit = fit_amdahl("strong", grows)
    assert fit.serial_s > 0 and fit.parallel_s == 0 and not fit.is_good and "do not predict" in str(fit)
    three = fit_communication("strong", grows)
    assert three.residual_fraction < 1e-9 and "as many terms as points, so it proves nothing" in str(three)


def test_gustafson_finds_what_was_put_in() -> None:
    times = [RankTimes(num_ranks=n, step_s=(n / gustafson_speedup(0.15, n),) * 2) for n in SIZES]
    fit = fit_gustafson(times)
    assert fit.serial_fraction == pytest.approx(0.15) and fit.residual_fraction < 1e-9 and "15.0 %" in str(fit)
    with pytest.raises(ValueError, match="needs those of 1 rank"):
        fit_gustafson(times[1:])
    assert "poor" not in str(fit)
    assert str(fit_gustafson([RankTimes(num_ranks=n, step_s=(n**2,) * 2) for n in (1, 2, 8)])).endswith("from it")


# --- What can be told -----------------------------------------------------------------------------------------------


def test_laws_are_told_apart_only_where_the_spread_between_turns_allows_it() -> None:
    pure = compare_laws("strong", make_times(0.05, 0.5, noise=0.02))
    assert not pure.tells_apart and "do not extrapolate" in str(pure)
    clear = compare_laws("strong", make_times(0.02, 0.5, 0.01, noise=0.02))
    assert clear.tells_apart and clear.p_value < 0.001
    drowned = compare_laws("strong", make_times(0.02, 0.5, 0.003, sizes=(1, 2, 4), num_turns=3, noise=0.1))
    assert not drowned.tells_apart
    once = compare_laws("strong", make_times(0.02, 0.5, 0.01, num_turns=1))
    assert math.isnan(once.p_value) and not once.tells_apart
    weak = compare_laws("weak", make_times(0, 0.5, 0.01, kind="weak", noise=0.02))
    assert weak.tells_apart


def test_chance_alone_tells_laws_apart_about_as_seldom_as_it_is_said_to() -> None:
    drawn = [make_times(0.05, 0.5, noise=0.05, sizes=(1, 2, 4, 8), seed=seed) for seed in range(200)]
    num_told = sum(compare_laws("strong", times).tells_apart for times in drawn)
    assert 2 <= num_told <= 15  # 5 % of 200, of which terms that cannot be below 0 leave about a half


def test_one_rank_more_stops_paying_where_the_arithmetic_says() -> None:
    # 1 / (s + (1 - s) / N) with s = 0.077: from 6 to 7 ranks 0.455 are added, from 5 to 6 still 0.511
    assert find_last_paying(lambda n: amdahl_speedup(0.077, n)) == 6
    assert find_last_paying(lambda n: float(n)) is None
    assert find_last_paying(lambda n: 1.0) == 1
    times = make_times(0.077, 0.923, noise=0.05, num_turns=6)
    last = estimate_last_paying(times, fit_amdahl("strong", times))
    assert last.num_ranks is not None and last.low is not None and last.high is not None
    assert last.low <= last.num_ranks <= last.high and last.low < last.high and 4 <= last.num_ranks <= 9
    assert not last.is_extrapolated and "too few" not in str(last)
    times = make_times(0.0, 1.0, sizes=(1, 2, 4), num_turns=3)
    never = estimate_last_paying(times, fit_communication("strong", times))
    assert never.num_ranks is never.low is never.high is None and never.is_extrapolated
    assert fit_communication("strong", times).law == COMMUNICATION and "over 4096" in str(never)


def test_a_poor_fit_is_not_asked_where_ranks_stop_paying_and_growth_is_not_called_communication() -> None:
    """Four ranks on two cores: the second rank adds 0.38, the law is off by 18 % and would have said 5 ranks."""
    measured = {1: (0.0823, 0.0), 2: (0.1193, 0.0181), 4: (0.1771, 0.0374)}
    times = [
        RankTimes(num_ranks=n, step_s=(step_s,) * 3, communication_s=(wait_s,) * 3)
        for n, (step_s, wait_s) in measured.items()
    ]
    fit = fit_communication("weak", times)
    last = estimate_last_paying(times, fit)
    assert not fit.is_good and not last.is_fitted and (last.num_ranks, last.low, last.high) == (1, 1, 1)
    assert str(last).startswith("1 rank (1 to 1), where one more adds under 0.5") and "too poorly" in str(last)
    said = str(compare_laws("weak", times))
    assert said.startswith("step times grow with the ranks (p =") and "cores and memory that ranks share" in said
    all_pay = [replace(one, step_s=(0.08 if one.num_ranks < 4 else 0.1,) * 3) for one in times]
    last = estimate_last_paying(all_pay, replace(fit, residual_fraction=0.2))
    assert (last.num_ranks, last.high) == (4, None) and str(last).startswith("4 ranks and more: all measured ones pay")


def test_what_was_measured_goes_before_a_good_fit() -> None:
    times = [RankTimes(num_ranks=n, step_s=(1 / speedup,) * 3) for n, speedup in ((1, 1.0), (2, 1.9), (4, 2.8))]
    kind_fit = replace(fit_amdahl("strong", times), serial_s=0.0, parallel_s=1.0)
    assert kind_fit.is_good and find_last_paying(kind_fit.predict_speedup) is None
    last = estimate_last_paying(times, kind_fit)
    assert last.num_ranks == 3 and not last.is_extrapolated  # 2 to 4 ranks add 0.45 each


# --- Losses ---------------------------------------------------------------------------------------------------------


def part(data: float, computing: float, waits: float, serial: float) -> StepParts:
    return StepParts(data_wait_s=data, computing_s=computing, communication_s=waits, serial_s=serial)


def test_losses_are_those_worked_out_by_hand() -> None:
    alone = [part(1, 8, 0, 1)]
    steps = [[part(1, 4, 3, 1), part(0.5, 6, 1.5, 1)]]  # of 9 s each: own work 6 and 7.5
    loss = split_loss("strong", alone, steps)
    seconds = {name: 18 * share for name, share in loss.shares.items()}
    wanted = {"communication": 3, "imbalance": 1.5, "input": 0.5, "serial": 1, "computing": 2}
    assert seconds == pytest.approx(wanted) and tuple(seconds) == LOSSES
    assert loss.efficiency == pytest.approx(10 / 18) and "2 ranks lose 44.4 %" in str(loss)
    weak = split_loss("weak", alone, [[part(1, 8, 3, 1), part(1, 10, 1, 1)]])
    assert {name: 26 * share for name, share in weak.shares.items()} == pytest.approx(
        {"communication": 2, "imbalance": 2, "input": 0, "serial": 0, "computing": 2}
    )
    assert weak.efficiency == pytest.approx(10 / 13)


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_losses_add_up_whatever_the_numbers_are(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(50):
        alone = [part(*(rng.random() for _ in range(4))) for _ in range(3)]
        size = rng.randrange(1, 9)
        steps = [[part(*(rng.random() for _ in range(4))) for _ in range(size)] for _ in range(5)]
        loss = split_loss(kind, alone, steps)
        assert sum(loss.shares.values()) == pytest.approx(loss.lost) and loss.shares["imbalance"] >= 0


def test_ranks_that_take_turns_in_being_slow_are_imbalance_too() -> None:
    slow, fast = part(0, 2, 0, 0), part(0, 1, 1, 0)
    loss = split_loss("strong", [part(0, 3, 0, 0)], [[slow, fast], [fast, slow]])
    assert loss.shares == pytest.approx(
        {"communication": 0, "imbalance": 0.25, "input": 0, "serial": 0, "computing": 0}
    )


def test_ranks_that_are_late_at_different_exchanges_of_a_step_are_imbalance() -> None:
    """Each is 1 s late for one of two exchanges; data take 0.1 s and 0.2 s on their way."""
    first = replace(part(0, 3, 1.3, 0), waits_s=(0.1, 1.2))
    second = replace(part(0, 3, 1.3, 0), waits_s=(1.1, 0.2))
    loss = split_loss("strong", [part(0, 6, 0, 0)], [[first, second]])
    wanted = {"communication": 0.6, "imbalance": 2.0, "input": 0, "serial": 0, "computing": 0}
    assert {name: 8.6 * share for name, share in loss.shares.items()} == pytest.approx(wanted)
    unknown = split_loss("strong", [part(0, 6, 0, 0)], [[first, replace(second, waits_s=(1.3,))]])
    assert 8.6 * unknown.shares["communication"] == pytest.approx(2.6)  # an upper bound


def test_steps_that_cannot_be_compared_are_refused() -> None:
    one = part(1, 1, 1, 1)
    for alone, steps in (([], [[one]]), ([one], []), ([one], [[one], [one, one]])):
        with pytest.raises(ValueError, match="need 1 step or more of each"):
            split_loss("strong", alone, steps)
    with pytest.raises(ValueError, match="must be one of"):
        split_loss("both", [one], [[one]])
