"""Compressed gradients travel in fewer bytes, train nearly alike, and differ from whole ones: the hook is used."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import read_part

LOSS_TOLERANCE = {"fp16": 1e-3, "bf16": 1e-2, "powersgd": 0.3}
"""Largest difference of a loss of about 5.5 in 8 steps. fp16 and bf16: 11 and 8 significant bits of each gradient;
measured: 2e-5 and 6e-4. powersgd: one column for each matrix, the rest in later steps; measured: 0.08."""
MEAN_TOLERANCE = {"fp16": 1e-3, "bf16": 1e-2, "powersgd": 0.2}
"""Relative, of the mean of 118 gradients. powersgd: the part that is still owed, shared out over the steps."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return read_part(tmp_path_factory, "communication_worker.py", "compression")[0]


def gradient_bytes(run: dict[str, Any]) -> int:
    """Return what a step sends besides two sums of a few numbers: token counts before, the loss after."""
    assert run["sent"][0] == 24 and run["sent"][-1] == 8
    return sum(run["sent"][1:-1])


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_half_precision_halves_the_bytes(found: dict[str, Any], kind: str) -> None:
    assert gradient_bytes(found["none"]) == 4 * found["none"]["num_params"]
    assert gradient_bytes(found[kind]) == 2 * found["none"]["num_params"]


def test_powersgd_sends_less_than_a_tenth_in_three_parts(found: dict[str, Any]) -> None:
    assert len(found["powersgd"]["sent"]) == 2 + 3
    assert gradient_bytes(found["powersgd"]) < gradient_bytes(found["none"]) / 10


def test_the_buckets_of_powersgd_are_exchanged_one_after_the_other_on_every_rank(found: dict[str, Any]) -> None:
    first, second = found["order of buckets"]
    assert first == second
    factor = 256 * 2 * 4  # one matrix's left or right factor of two columns in fp32
    num_buckets = len(first) // 3
    assert num_buckets > 2 and len(first) == 3 * num_buckets
    # Of each bucket what is not compressed (nothing here), the left factors, the right factors.
    for start in range(0, len(first), 3):
        whole, left, right = first[start : start + 3]
        assert whole == 0 and left == right and left % factor == 0


@pytest.mark.parametrize("kind", ["fp16", "bf16", "powersgd"])
def test_losses_stay_near_those_of_whole_gradients_and_are_not_the_same(found: dict[str, Any], kind: str) -> None:
    pairs = zip(found[kind]["losses"], found["none"]["losses"], strict=True)
    differences = [abs(compressed - whole) for compressed, whole in pairs]
    assert differences[0] == 0, "the first loss comes before the first gradient"
    assert 0 < max(differences) < LOSS_TOLERANCE[kind]


@pytest.mark.parametrize("kind", ["none", "fp16", "bf16", "powersgd"])
def test_a_step_without_pictures_does_not_stop_the_vision_tower_for_good(found: dict[str, Any], kind: str) -> None:
    """In the first step that PowerSGD compresses no sample has a picture; the tower has 12 matrices."""
    with_gradient = found[kind]["vision matrices with a gradient"]
    assert with_gradient == [12, 12, 0, 12, 12, 12, 12, 12]


@pytest.mark.parametrize("kind", ["fp16", "bf16", "powersgd"])
def test_what_is_lost_in_one_step_is_not_lost_for_good(found: dict[str, Any], kind: str) -> None:
    assert 0 < found["mean gradient is off by"][kind] < MEAN_TOLERANCE[kind]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fsdp", "FSDP shards this model"),
        ("plain", "the model is a Stack, not a DistributedDataParallel"),
        ("unknown", "did you mean 'bf16'?"),
        ("quantized", "torch's quantization hooks fail on gloo; choose one of fp16, bf16, powersgd"),
        ("powersgd start", "powersgd_start_step = 1: must be at least 1 and 2"),
        ("first", "accepted"),
        ("second", "the model has a hook already (bf16_hook)"),
    ],
)
def test_what_would_not_be_compressed_is_refused(found: dict[str, Any], case: str, words: str) -> None:
    assert words in found["refusals"][case]
