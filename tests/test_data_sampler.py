import collections
import random

import pytest

from vlmcourse.data.sampler import GlobalBatchSampler


def test_every_epoch_takes_each_sample_once_in_another_order():
    sampler = GlobalBatchSampler(num_samples=24, global_batch_size=8, seed=1)
    epochs = [[i for step in range(3 * e, 3 * e + 3) for i in sampler.indices(step)] for e in range(4)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != list(range(24))


def test_epochs_follow_without_a_gap_when_the_batch_does_not_divide_them():
    for num_samples, global_batch_size in [(10, 4), (7, 7), (9, 8), (13, 5)]:
        sampler = GlobalBatchSampler(num_samples, global_batch_size, seed=3)
        stream = [i for step in range(3 * num_samples) for i in sampler.indices(step)]
        assert all(len(sampler.indices(step)) == global_batch_size for step in range(20))
        for start in range(0, len(stream), num_samples):
            assert sorted(stream[start : start + num_samples]) == list(range(num_samples))


def test_a_step_is_a_function_of_the_step_alone():
    sampler = GlobalBatchSampler(50, 8, seed=2)
    steps = list(range(60))
    expected = [sampler.indices(step) for step in steps]
    random.Random(0).shuffle(steps)
    resumed = GlobalBatchSampler(50, 8, seed=2)
    assert all(resumed.indices(step) == expected[step] for step in steps)
    assert GlobalBatchSampler(50, 8, seed=4).indices(0) != expected[0]


def test_a_caller_that_changes_a_list_does_not_change_the_order():
    sampler = GlobalBatchSampler(20, 5, seed=0)
    sampler.indices(0).clear()
    first = sampler.indices(0)
    first[0] = -1
    assert -1 not in sampler.indices(0) and len(sampler.indices(0)) == 5


@pytest.mark.parametrize(
    ("accumulation_steps", "dp_degree"), [(1, 1), (4, 1), (1, 2), (4, 2), (2, 8), (1, 16), (16, 1)]
)
def test_ranks_and_micro_batches_take_disjoint_parts_of_the_same_samples(accumulation_steps, dp_degree):
    sampler = GlobalBatchSampler(num_samples=37, global_batch_size=16, seed=5)
    for step in range(6):
        parts = [
            sampler.micro_batch(step, m, accumulation_steps, rank, dp_degree)
            for m in range(accumulation_steps)
            for rank in range(dp_degree)
        ]
        assert {len(part) for part in parts} == {16 // accumulation_steps // dp_degree}
        joined = collections.Counter(i for part in parts for i in part)
        assert joined == collections.Counter(sampler.indices(step))


def test_fewer_samples_than_one_step_takes_are_refused():
    with pytest.raises(ValueError, match=r"4 samples and one optimizer step takes 8.*train\.micro_batch_size"):
        GlobalBatchSampler(num_samples=4, global_batch_size=8, seed=0)


def test_a_batch_that_does_not_divide_is_refused():
    sampler = GlobalBatchSampler(100, 12, 0)
    with pytest.raises(ValueError, match="12 samples does not divide into 2 micro-batches on 4 .* multiple of 8"):
        sampler.micro_batch(0, 0, accumulation_steps=2, dp_rank=0, dp_degree=4)


@pytest.mark.parametrize(("m", "rank"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_micro_batch_or_rank_that_does_not_exist_is_refused(m, rank):
    with pytest.raises(ValueError, match="must be at least 0 and below"):
        GlobalBatchSampler(100, 12, 0).micro_batch(0, m, 2, rank, 3)


def test_negative_steps_and_empty_batches_are_refused():
    with pytest.raises(ValueError, match="step = -1"):
        GlobalBatchSampler(10, 2, 0).indices(-1)
    with pytest.raises(ValueError, match="global_batch_size = 0"):
        GlobalBatchSampler(10, 0, 0)
