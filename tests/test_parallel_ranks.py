"""Finding out who this process is among the ranks, and saying clearly when the environment makes no sense."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from vlmcourse.machine import num_usable_cores
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def set_environment(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_process_without_rank_is_alone_and_needs_no_group() -> None:
    ranks = init_ranks()
    assert (ranks.rank, ranks.local_rank, ranks.world_size, ranks.backend) == (0, 0, 1, "none")
    assert ranks.is_main
    assert not dist.is_initialized()
    shutdown_ranks()


def test_one_launched_rank_has_a_group_and_joins_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    try:
        ranks = init_ranks(timeout_s=20)
        assert init_ranks() == ranks
        assert (ranks.world_size, ranks.backend, str(ranks.device)) == (1, "gloo", "cpu")
        assert dist.get_world_size() == 1
    finally:
        shutdown_ranks()
    assert not dist.is_initialized()
    shutdown_ranks()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": 0}, "WORLD_SIZE=None in the environment of a rank: it must be a whole number"),
        ({"RANK": "x", "WORLD_SIZE": 2}, "RANK='x' in the environment"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "rank 2: RANK=2 of WORLD_SIZE=2"),
        ({"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2}, "LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2"),
        ({"RANK": 0, "WORLD_SIZE": 2}, "MASTER_ADDR=None, MASTER_PORT=None: both must say where"),
    ],
)
def test_an_environment_that_makes_no_sense_is_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, object], words: str
) -> None:
    set_environment(monkeypatch, **values)
    with pytest.raises(RuntimeError) as caught:
        init_ranks(timeout_s=1)
    assert words in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.timeout(60)
def test_ranks_that_do_not_appear_are_reported_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    with pytest.raises(RuntimeError, match="rank 1: 2 ranks did not meet at 127.0.0.1:.* within 2 s"):
        init_ranks(timeout_s=2)
    assert not dist.is_initialized()


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        init_ranks()
        assert torch.get_num_threads() == num_usable_cores()
        torch.set_num_threads(1)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        init_ranks()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
