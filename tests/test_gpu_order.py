"""Tensor-parallel ranks on GPUs that are close: what `vlmcourse train` sets before it asks for a GPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmcourse.commands import train
from vlmcourse.commands.gpu_order import order_gpus
from vlmcourse.config import load_config
from vlmcourse.layout import ParallelConfig
from vlmcourse.planner.topology import Topology, read_sample

ROOT = Path(__file__).parents[1]
ON_FOUR = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
PAIRED = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,2,1,3"}
"""On the sample machine, NVLink bridges join GPUs 0 and 2, and 1 and 3."""
Machine = Callable[[str], None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let `nvidia-smi` describe one of the sample machines."""

    def install(name: str) -> None:
        program = tmp_path / "nvidia-smi"
        (tmp_path / "table").write_text(read_sample(name), encoding="utf-8")
        program.write_text(f'#!/bin/sh\n[ "$*" = "topo -m" ] && cat "{tmp_path}/table"\n', encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_groups_go_onto_bridged_pairs(machine: Machine) -> None:
    machine("nvlink_pairs")
    variables, text = order_gpus(ParallelConfig(strategy="fsdp", tp=2), ON_FOUR)
    assert variables == PAIRED
    assert "each group lies inside a domain (0-2, 1-3)" in text and "dp_shard = 2: crosses between domains" in text
    # A scheduler that lists all GPUs in their own order has chosen nothing.
    assert order_gpus(ParallelConfig(strategy="fsdp", tp=2), ON_FOUR | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})[0] == PAIRED


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (ParallelConfig(strategy="fsdp"), {}),
        (ParallelConfig(strategy="fsdp", tp=2), {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}),
        (ParallelConfig(strategy="fsdp", tp=2), {"CUDA_VISIBLE_DEVICES": ""}),
        (ParallelConfig(strategy="fsdp", tp=2), {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}),
    ],
    ids=["no groups", "a person's order", "no GPUs wanted", "more ranks than GPUs"],
)
def test_nothing_is_changed(machine: Machine, config: ParallelConfig, changes: dict[str, str]) -> None:
    machine("nvlink_pairs")
    assert order_gpus(config, ON_FOUR | changes) == ({}, "")


def test_groups_larger_than_a_domain_are_told_of(machine: Machine) -> None:
    machine("nvlink_pairs")
    variables, text = order_gpus(ParallelConfig(tp=4), ON_FOUR)
    assert variables == {} and "may be slow: tp = 4 is larger than the largest fast domain" in text


TRIPLES = tuple(tuple("X" if a == b else "NV4" if a // 3 == b // 3 else "SYS" for b in range(6)) for a in range(6))
"""Two domains of three GPUs."""


@pytest.mark.parametrize(
    ("tp", "num_local", "order", "words"),
    [
        (3, 6, "0,1,2,3,4,5", "on each of 2 machines"),
        (2, 4, "0,1,3,4", "on each of 3 machines"),
        (2, 6, None, "dp_shard 6 x tp 2 need 6 GPUs on each machine, and only 4 of 6 hold whole groups of tp = 2"),
        (4, 6, None, "tp = 4 is larger than the largest fast domain"),
    ],
)
def test_each_rank_of_a_machine_keeps_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tp: int, num_local: int, order: str | None, words: str
) -> None:
    monkeypatch.setattr("vlmcourse.commands.gpu_order.read_topology", lambda: Topology(TRIPLES))
    ranks = {"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": str(num_local)}
    variables, text = order_gpus(ParallelConfig(strategy="fsdp", tp=tp), ranks)
    assert variables.get("CUDA_VISIBLE_DEVICES") == order and words in text


def test_a_group_over_two_machines_is_told_of(machine: Machine) -> None:
    machine("nvlink8")
    variables, text = order_gpus(ParallelConfig(tp=8), {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert variables == {} and "tp = 8 does not divide the 4 ranks of a machine: a group would span two" in text
    ranks = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6"}
    assert order_gpus(ParallelConfig(strategy="fsdp", tp=2), ranks)[0]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5"


def test_a_table_that_cannot_be_read_stops_no_run(machine: Machine, tmp_path: Path) -> None:
    machine("nvlink_pairs")
    (tmp_path / "table").write_text("no table\n", encoding="utf-8")
    variables, text = order_gpus(ParallelConfig(strategy="fsdp", tp=2), ON_FOUR)
    assert variables == {} and "cannot be read (this is not what" in text


def test_a_machine_without_gpus_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert order_gpus(ParallelConfig(strategy="fsdp", tp=2), ON_FOUR) == ({}, "")


def test_a_rank_sets_them_before_it_asks_for_a_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("nvlink_pairs")
    for name in PAIRED:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in (ON_FOUR | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    seen = {}

    def init_ranks(timeout_s: float) -> None:
        seen.update({name: os.environ.get(name) for name in PAIRED})
        raise InterruptedError

    monkeypatch.setattr("vlmcourse.parallel.ranks.init_ranks", init_ranks)
    config = load_config(ROOT / "configs" / "tiny.toml", {"parallel.strategy": "fsdp", "parallel.tp": 2})
    with pytest.raises(InterruptedError):
        train._train_here(argparse.Namespace(resume=None), config)
    assert seen == PAIRED
    assert "each group lies inside a domain (0-2, 1-3)" in capsys.readouterr().out
