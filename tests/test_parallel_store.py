"""The store in which the ranks of one machine meet: nobody outside the machine can reach it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free port, in the environment of a lone rank 0."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number}.items():
        monkeypatch.setenv(name, str(value))
    yield number
    shutdown_ranks()


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {(found.laddr.ip, found.laddr.port) for found in connections if found.status == psutil.CONN_LISTEN}


def test_ranks_on_one_machine_listen_on_its_loopback_alone(port: int) -> None:
    before = listening()
    init_ranks(timeout_s=20)
    opened = listening() - before
    assert ("127.0.0.1", port) in opened
    assert {address for address, _ in opened} == {"127.0.0.1"}


def test_the_port_is_free_again_after_the_ranks_have_left(port: int) -> None:
    for _ in range(2):
        init_ranks(timeout_s=20)
        shutdown_ranks()
    assert ("127.0.0.1", port) not in listening()


def test_a_taken_port_is_named(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(RuntimeError, match=f"rank 0: cannot listen on 127.0.0.1:{port} .*another MASTER_PORT"):
            init_ranks(timeout_s=5)
    assert not dist.is_initialized()
