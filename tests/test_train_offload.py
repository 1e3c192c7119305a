"""Offloading what layers keep for backward: moved once, weights left where they are, changed memory noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vlmcourse.train.offload import Offloading

pytestmark = pytest.mark.timeout(120)


def gradient_of(leaf: Tensor) -> Tensor:
    """Return a copy of a leaf's gradient."""
    assert leaf.grad is not None
    return leaf.grad.clone()


def test_offloading_moves_each_tensor_once_and_no_weights() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(32, 64, requires_grad=True)
    offloading = Offloading()
    with offloading.hooks():
        y = x * 1.0
        z = (y @ weight).sum() + (y * y).sum() + (y[:, 1:] * y[:, :-1]).sum()
    assert offloading.moved_bytes == y.nbytes
    z.backward()
    gradients = gradient_of(x), gradient_of(weight)
    x.grad = weight.grad = None
    y = x * 1.0
    ((y @ weight).sum() + (y * y).sum() + (y[:, 1:] * y[:, :-1]).sum()).backward()
    assert torch.equal(gradient_of(x), gradients[0]) and torch.equal(gradient_of(weight), gradients[1])


def test_offloading_leaves_the_transposed_weight_of_a_layer_where_it_is() -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x, offloading = torch.randn(4, 64), Offloading()
    with offloading.hooks():
        layers(x).sum()
    assert offloading.moved_bytes == 2 * x.nbytes  # the input, and tanh's output


def test_offloading_moves_a_cast_of_a_weight_that_has_become_another() -> None:
    weight, offloading = nn.Parameter(torch.arange(1024.0).view(32, 32)), Offloading()
    cast = weight.to(torch.bfloat16)
    before = cast.detach().clone()
    weight.data = torch.zeros(2, 2)
    assert torch.equal(offloading._pack(cast).restore(), before) and offloading.moved_bytes == cast.nbytes


def test_offloading_under_autocast_moves_no_casts_of_weights() -> None:
    torch.manual_seed(0)
    last = nn.Linear(64, 64, bias=False)
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), last)
    x = torch.randn(32, 64)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layers(x) + last(x)  # a weight of two uses

    forward().float().square().sum().backward()
    expected = [gradient_of(p).clone() for p in layers.parameters()]
    layers.zero_grad()
    offloading = Offloading()
    with offloading.hooks():
        y = forward()
    # In bf16: the input, cast for each of two uses, and tanh's output, which is the second layer's input.
    assert offloading.moved_bytes == 3 * x.numel() * 2
    y.float().square().sum().backward()
    assert all(torch.equal(gradient_of(p), want) for p, want in zip(layers.parameters(), expected, strict=True))
    with offloading.hooks():
        y = forward()
    with torch.no_grad():
        last.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"a weight of \[64, 64\] was changed between forward and backward"):
        y.float().sum().backward()


def test_offloading_tells_memory_that_was_given_away_from_what_it_held_before() -> None:
    offloading, memory = Offloading(), np.arange(512, dtype=np.float32)
    first = offloading._pack(torch.from_numpy(memory))
    memory *= 2  # another tensor at the same address, as an allocator would give it
    second = offloading._pack(torch.from_numpy(memory))
    tensor = torch.from_numpy(memory)
    third = offloading._pack(tensor)
    tensor.add_(1)  # the same tensor, changed in place
    fourth = offloading._pack(tensor)
    assert [float(moved.restore()[1]) for moved in (first, second, third, fourth)] == [1, 2, 2, 3]
