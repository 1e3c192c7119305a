"""Size of the update by tower against copies of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import build_trainer, parity_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vlmcourse.config import TOWERS
from vlmcourse.monitor import towers
from vlmcourse.monitor.towers import sum_gradient_squares, sum_update_squares
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.ranks import Ranks

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")


def asked_square(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, before: torch.Tensor) -> float:
    """Return the square of AdamW's last update of a weight in float64, as the paper writes it."""
    (group,) = [group for group in optimizer.param_groups if any(p is parameter for p in group["params"])]
    state, (beta1, beta2) = optimizer.state[parameter], group["betas"]
    step = float(state["step"])
    m, v = state["exp_avg"].double() / (1 - beta1**step), state["exp_avg_sq"].double() / (1 - beta2**step)
    return float((group["lr"] * (m / (v.sqrt() + group["eps"]) + group["weight_decay"] * before)).square().sum())


@pytest.mark.parametrize(("precision", "chunk_elements"), [("fp32", 2**24), ("fp32", 100), ("bf16_master", 2**24)])
def test_an_update_is_what_the_weights_changed_by(
    precision: str, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(towers.CHUNK_ELEMENTS, "cpu", chunk_elements)
    config = parity_config("single", 2, 1, "all towers")
    # A decay and an eps large enough to be seen.
    optimizer = dataclasses.replace(config.optimizer, weight_decay=5.0, eps=1e-3)
    trainer = build_trainer(
        dataclasses.replace(config, optimizer=optimizer, train=dataclasses.replace(config.train, precision=precision)),
        ALONE,
        seed=0,
    )
    named = dict(trainer.model.named_parameters())

    def weights() -> dict[str, torch.Tensor]:
        state = trainer.optimizer.state
        return {name: state[p].get("master", p).detach().double().clone() for name, p in named.items()}

    for _ in range(3):
        trainer.train_step()
    before = weights()
    trainer.train_step()
    after = weights()
    updates, sizes = sum_update_squares(trainer.model, trainer.optimizer, world_size=1)
    gradients = sum_gradient_squares(trainer.model, trainer.optimizer, world_size=1)
    for tower in TOWERS:
        names = [name for name in named if name.startswith(f"{tower}.")]
        changed = sum(float((after[name] - before[name]).square().sum()) for name in names)
        assert updates[tower] == pytest.approx(changed, rel=1e-3), tower  # weights are rounded to fp32
        asked = sum(asked_square(trainer.optimizer, named[name], before[name]) for name in names)
        assert updates[tower] == pytest.approx(asked, rel=1e-6), tower
        assert sizes[tower] == pytest.approx(sum(float(after[name].square().sum()) for name in names), rel=1e-6)
        squares = [named[name].grad.double().square().sum() for name in names]  # type: ignore[union-attr]
        assert gradients[tower] == pytest.approx(float(sum(squares)), rel=1e-6)


def test_a_piece_counts_once_however_many_ranks_hold_it_and_a_tied_copy_not_at_all() -> None:
    weight, copy = (torch.nn.Parameter(torch.full((2,), 3.0)) for _ in range(2))
    groups = [{"params": [weight, copy], "tower": "language"}]
    optimizer = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.0, eps=0.0)
    weight.grad, copy.grad = (torch.full((2,), 1.0) for _ in range(2))
    optimizer.step()  # Adam's first step is the rate, up or down
    stage: Any = object.__new__(PipelinedModel)
    vars(stage)["pipeline"] = SimpleNamespace(pp=2, tied_copy=copy)
    # Four ranks: a plain model is on all of them, a stage of two on half of them.
    for model, held_by, num_weights in ((torch.nn.Linear(1, 1), 4, 4), (stage, 2, 2)):
        gradients = sum_gradient_squares(model, optimizer, world_size=4)
        updates, weights = sum_update_squares(model, optimizer, world_size=4)
        assert gradients == {"vision": 0, "projector": 0, "language": num_weights / held_by}
        assert updates["language"] == pytest.approx(num_weights * 0.25 / held_by)
        assert weights["language"] == pytest.approx(num_weights * 2.5**2 / held_by)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Be rank 0 of four that are not there: what is sent goes nowhere."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def stepped(optimizer: Any, *weights: torch.Tensor) -> Any:
    """Return an optimizer after its first step, of gradients that are 1: each element moves by the rate."""
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


OPTIONS: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.0, "eps": 0.0}


@pytest.mark.parametrize(
    ("axes", "placements", "num_elements"),
    [
        (("copies", "shards"), (Replicate(), Shard(0)), 4),  # HSDP: two copies of two shards
        (("copies", "shards"), (Replicate(), Replicate()), 2),
        (("copies", "shards"), (Shard(0), Shard(0)), 8),
        (("shards",), (Shard(0),), 4),  # two ranks hold the shards, and the two others the same in a mesh of their own
    ],
)
def test_a_piece_of_a_distributed_tensor_counts_once_however_many_copies_there_are(
    four_ranks: None, axes: tuple[str, ...], placements: tuple[Any, ...], num_elements: int
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))[axes]
    piece = DTensor.from_local(torch.full((2,), 3.0), mesh, placements, run_check=False)
    weight = torch.nn.Parameter(piece)
    assert weight.numel() == num_elements
    optimizer = stepped(torch.optim.AdamW([{"params": [weight], "tower": "language"}], **OPTIONS), weight)
    gradients = sum_gradient_squares(torch.nn.Identity(), optimizer, world_size=4)
    updates, weights = sum_update_squares(torch.nn.Identity(), optimizer, world_size=4)
    # Four ranks with pieces alike add up to the whole tensor.
    assert 4 * gradients["language"] == pytest.approx(num_elements)
    assert 4 * updates["language"] == pytest.approx(num_elements * 0.25)
    assert 4 * weights["language"] == pytest.approx(num_elements * 2.5**2)


def test_an_update_whose_state_is_on_one_rank_counts_there_in_full(four_ranks: None) -> None:
    layers = [torch.nn.Parameter(torch.full((2,), 3.0)) for _ in range(4)]
    groups = [{"params": layers, "tower": "language"}]
    optimizer = stepped(ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **OPTIONS), *layers)
    assert len(optimizer.optim.state) == 1  # of four layers, this rank's
    updates, weights = sum_update_squares(torch.nn.Identity(), optimizer, world_size=4)
    assert updates["language"] == pytest.approx(2 * 0.25) and weights["language"] == pytest.approx(2 * 2.5**2)
    # The gradient is on all of them.
    assert sum_gradient_squares(torch.nn.Identity(), optimizer, world_size=4)["language"] == 4 * 2 / 4
