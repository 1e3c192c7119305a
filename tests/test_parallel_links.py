"""Links are measured on live ranks, and the line through the times is the right one and says when it is a poor one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import read_part

from vlmcourse.parallel.links import DEFAULT_SIZES, MEASURED_KINDS, LinkSample, fit_link, measure_links
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.network import Link

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return read_part(tmp_path_factory, "communication_worker.py", "links")


def test_every_collective_is_measured_over_the_sizes(found: list[dict[str, Any]]) -> None:
    fits = found[0]["fits"]
    assert tuple(fits) == MEASURED_KINDS
    for fit in fits.values():
        assert [payload_bytes for payload_bytes, _ in fit["samples"]] == [4096, 65536, 1 << 20]
        assert all(0 < seconds < 10 for _, seconds in fit["samples"])
        assert fit["latency_s"] >= 0 and fit["bytes_per_s"] > 0 and fit["residual_fraction"] >= 0
        assert fit["text"].endswith("do not predict from it") == (fit["residual_fraction"] > 0.25)


def test_all_ranks_have_the_same_fit(found: list[dict[str, Any]]) -> None:
    assert found[0] == found[1], "the slowest rank's times count for all"


def test_a_size_that_the_ranks_do_not_divide_is_rounded_up(found: list[dict[str, Any]]) -> None:
    assert found[0]["pair"] == [8, 8192]


@pytest.mark.parametrize("kind", MEASURED_KINDS)
def test_a_fit_finds_the_latency_and_bandwidth_behind_exact_times(kind: str) -> None:
    link = Link(latency_s=20e-6, bytes_per_s=3e9)
    samples = [LinkSample(payload_bytes=size, seconds=link.estimate_s(kind, size, 8)) for size in DEFAULT_SIZES]
    fit = fit_link(kind, 8, samples)
    assert fit.link.latency_s == pytest.approx(20e-6, rel=1e-6)
    assert fit.link.bytes_per_s == pytest.approx(3e9, rel=1e-6)
    assert fit.residual_fraction < 1e-6 and fit.is_good
    assert fit.predict_s(10**9) == pytest.approx(link.estimate_s(kind, 10**9, 8))


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """Least squares of absolute errors would give the latency up for the last sample."""
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    samples = [LinkSample(payload_bytes=n, seconds=link.estimate_s("all-gather", n, 2)) for n in DEFAULT_SIZES]
    samples[-1] = LinkSample(payload_bytes=samples[-1].payload_bytes, seconds=1.2 * samples[-1].seconds)
    assert fit_link("all-gather", 2, samples).link.latency_s == pytest.approx(1e-5, rel=0.1)


def test_times_off_the_line_are_called_a_poor_fit() -> None:
    times_s = [1e-5, 1e-3, 2e-5, 3e-3, 1e-4]
    samples = [LinkSample(payload_bytes=4**i * 1024, seconds=seconds) for i, seconds in enumerate(times_s)]
    fit = fit_link("all-reduce", 2, samples)
    assert not fit.is_good and "a poor fit" in str(fit)


def test_latency_and_bandwidth_stay_physical() -> None:
    def fit(*times_s: float) -> Link:
        sizes = (1000, 2000, 4000)
        samples = [LinkSample(payload_bytes=n, seconds=t) for n, t in zip(sizes, times_s, strict=True)]
        return fit_link("all-gather", 2, samples).link

    assert fit(1.0, 4.0, 16.0).latency_s == 0
    falling = fit(1.0, 0.9, 0.8)
    assert falling.bytes_per_s == math.inf and 0.8 < falling.latency_s < 1


@pytest.mark.parametrize(
    ("ranks", "change", "words"),
    [
        (1, {}, "on 1 rank: nothing is sent"),
        (2, {"kinds": ["all-redcue"]}, "did you mean 'all-reduce'?"),
        (2, {"sizes": [8, 8]}, "two different sizes"),
        (2, {"sizes": [0, 8]}, "two different sizes"),
        (2, {"num_repeats": 0}, "num_repeats = 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    ranks: int, change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: ranks)
    place = ALONE if ranks == 1 else Ranks(0, 0, ranks, torch.device("cpu"), "gloo")
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        measure_links(place, **change)


def test_a_fit_needs_different_sizes_and_real_times() -> None:
    same = [LinkSample(payload_bytes=8, seconds=1.0)] * 3
    with pytest.raises(ValueError, match="3 samples of 2 ranks: need 2 different sizes"):
        fit_link("all-reduce", 2, same)
    with pytest.raises(ValueError, match="is 0 s or less"):
        fit_link("all-reduce", 2, [*same, LinkSample(payload_bytes=16, seconds=0.0)])
