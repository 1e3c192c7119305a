"""Accumulation in one process: sizes of batches, weights of tokens, short groups."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from parity import awkward_samples, build_trainer, parity_config, small_shape
from torch import Tensor, nn

from vlmcourse.batch import describe_batch, effective_batch_size, nearest_accumulation
from vlmcourse.config import ConfigError, check_batch, parse_config
from vlmcourse.data.sampler import GlobalBatchSampler
from vlmcourse.data.samples import IGNORE_LABEL
from vlmcourse.labs import ch02
from vlmcourse.layout import find_layout
from vlmcourse.models.cnn import ConvTower, FrozenBatchNorm2d, freeze_batch_norms, measure_statistics
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.sync import gradient_sync
from vlmcourse.planner import Plan, estimate_rank_memory
from vlmcourse.presets import get_model
from vlmcourse.train.accumulate import Accumulation, accumulate_gradients, count_tokens
from vlmcourse.train.batches import build_sampler, load_micro_batches
from vlmcourse.train.loss import TokenLoss, token_loss_sum, token_weights, weight_sum

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")

# --- Sizes ----------------------------------------------------------------------------------------------------------


def test_the_effective_batch_is_one_number_wherever_it_is_named() -> None:
    assert effective_batch_size(2, 8, 8) == 128  # exercise 4.2: 8 V100
    assert describe_batch(2, 8, 8) == "2 x 8 x 8 = 128"
    assert Plan(tp=2, dp_shard=4, zero_stage=2, micro_batch_size=1).global_batch_size(16) == 64  # F5
    train = {"micro_batch_size": 3, "accumulation_steps": 5}
    config = parse_config({"train": train, "data": {"num_train_samples": 29}, "parallel": {"strategy": "ddp"}})
    with pytest.raises(ConfigError, match="3 x 5 x 2 = 30 samples"):
        check_batch(config, find_layout(config.parallel, 2).dp_degree)
    samples = awkward_samples()
    trainer = build_trainer(parity_config("single", 4, 1, "all towers"), ALONE, seed=0)
    assert trainer.global_batch_size == effective_batch_size(2, 4, 1) == 8 <= len(samples)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, -2)])
def test_a_batch_of_nothing_is_refused_by_name(sizes: tuple[int, int, int]) -> None:
    names = ("micro_batch_size", "accumulation_steps", "dp_degree")
    wrong = next(f"{name} = {size}" for name, size in zip(names, sizes, strict=True) if size < 1)
    with pytest.raises(ValueError, match=wrong):
        effective_batch_size(*sizes)


def test_the_nearest_accumulation_says_how_far_it_is_off() -> None:
    assert [(c.accumulation_steps, c.error) for c in nearest_accumulation(256, 2, 8)] == [(16, 0)]
    assert [(c.accumulation_steps, c.error) for c in nearest_accumulation(100, 2, 8)] == [(6, -4), (7, 12)]
    assert [(c.accumulation_steps, c.samples, c.error) for c in nearest_accumulation(5, 2, 8)] == [(1, 16, 11)]
    with pytest.raises(ValueError, match="target = 0"):
        nearest_accumulation(0, 1, 1)
    rng = random.Random(1)
    for _ in range(200):
        target, micro, dp = rng.randint(1, 500), rng.randint(1, 9), rng.randint(1, 20)
        found = nearest_accumulation(target, micro, dp)
        every = [effective_batch_size(micro, steps, dp) - target for steps in range(1, 501)]
        assert min(map(abs, every)) == min(abs(choice.error) for choice in found)
        assert all(choice.samples - choice.error == target for choice in found)


# --- Weights of tokens ----------------------------------------------------------------------------------------------


def ragged_labels() -> Tensor:
    labels_BS = torch.full((4, 9), IGNORE_LABEL)
    for row, num in enumerate((1, 4, 0, 9)):
        labels_BS[row, :num] = torch.arange(num) % 5
    return labels_BS


def test_a_sample_of_n_tokens_counts_as_the_square_root_of_n() -> None:
    weights_BS = token_weights(ragged_labels(), "sqrt")
    assert torch.allclose(weights_BS.sum(dim=1), torch.tensor([1.0, 2.0, 0.0, 3.0]))
    assert torch.allclose(weights_BS[3], torch.full((9,), 1 / 3))
    assert weight_sum(ragged_labels(), "sqrt") == pytest.approx(6)
    assert weight_sum(ragged_labels(), "tokens") == float(token_weights(ragged_labels(), "tokens").sum()) == 14
    with pytest.raises(ValueError, match="choose tokens or sqrt"):
        token_weights(ragged_labels(), "square")


def test_the_weighted_loss_is_the_weighted_sum_of_token_losses() -> None:
    labels_BS, logits_BSV = ragged_labels(), torch.randn(4, 9, 5, generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for row, num in enumerate((1, 4, 0, 9)):
        for s in range(num):
            nll = -torch.log_softmax(logits_BSV[row, s], 0)[labels_BS[row, s]]
            expected += float(nll) / num**0.5
    assert float(TokenLoss("sqrt")(logits_BSV, labels_BS)) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(TokenLoss()(logits_BSV, labels_BS), token_loss_sum(logits_BSV, labels_BS))


def test_config_names_an_unknown_weighting_group_or_exchange() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(
            {
                "train": {"loss_weighting": "sqr", "last_group": "shorten"},
                "parallel": {"strategy": "ddp", "gradient_sync": "each"},
            }
        )
    for words in ("train.loss_weighting = 'sqr'", "train.last_group = 'shorten'", "parallel.gradient_sync = 'each'"):
        assert words in str(error.value)
    for parallel in ({"strategy": "ddp"}, {"strategy": "fsdp", "pp": 2}, {}, {"strategy": "auto"}):
        with pytest.raises(ConfigError, match="gradient_sync = 'every'"):
            parse_config({"parallel": parallel | {"gradient_sync": "every"}})


# --- The last group -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_samples", "size", "steps", "dp"), [(32, 12, 6, 2), (29, 8, 2, 2), (13, 12, 3, 4)])
def test_a_short_group_takes_every_sample_of_an_epoch_once(num_samples: int, size: int, steps: int, dp: int) -> None:
    sampler = GlobalBatchSampler(num_samples, size, 3, "short")
    seen: list[int] = []
    for step in range(-(-num_samples // size)):
        counts = set()
        for rank in range(dp):
            count = sampler.num_micro_batches(step, steps)
            counts.add(count)
            parts = [sampler.micro_batch(step, m, steps, rank, dp) for m in range(count)]
            assert all(len(part) <= size // (steps * dp) for part in parts)
            seen += [index for part in parts for index in part]
        assert len(counts) == 1
        # No round of micro-batches is empty on all ranks, and none is missing.
        assert (count - 1) * (size // steps) < len(sampler.indices(step)) <= count * (size // steps)
    assert sorted(seen) == list(range(num_samples))
    assert sorted(sampler.indices(-(-num_samples // size))) != sorted(sampler.indices(0))  # the next epoch's order
    assert sampler.fewest_samples == num_samples % size


def test_a_dropped_group_leaves_whole_steps() -> None:
    sampler = GlobalBatchSampler(29, 8, 3, "drop")
    assert [len(sampler.indices(step)) for step in range(6)] == [8] * 6
    epoch = [index for step in range(3) for index in sampler.indices(step)]
    assert len(set(epoch)) == 24 and sampler.num_micro_batches(2, 4) == 4
    filled = GlobalBatchSampler(29, 8, 3)
    assert filled.fewest_samples == 8 and len(filled.indices(3)) == 8
    with pytest.raises(ValueError, match="fill, short or drop"):
        GlobalBatchSampler(29, 8, 3, "shorten")


def test_a_short_group_that_a_pipeline_cannot_run_is_refused_before_any_rank_waits() -> None:
    train = {"last_group": "short", "accumulation_steps": 4, "micro_batch_size": 2}
    config = parse_config({"train": train, "parallel": {"pp": 2}})
    assert build_sampler(config, config.parallel, 28, 8).fewest_samples == 4
    with pytest.raises(ValueError, match=r"1 instead of 4 micro-batches.*1f1b.*'fill' or 'drop'"):
        build_sampler(config, config.parallel, 25, 8)
    plain = dataclasses.replace(config.parallel, pp=1)
    assert build_sampler(config, plain, 25, 8).fewest_samples == 1


def test_a_mute_micro_batch_adds_nothing_to_the_counts_of_a_step() -> None:
    trainer = build_trainer(parity_config("single", 1, 1, "all towers"), ALONE, seed=0)
    data = [next(sample for sample in trainer.train_data if sample.images)] * 13
    sampler = GlobalBatchSampler(13, 12, 0, "short")  # its second step is one sample, for two ranks
    batches = [
        batch
        for rank in range(2)
        for batch in load_micro_batches(
            sampler, trainer.collator, data, 1, accumulation_steps=3, dp_rank=rank, dp_degree=2
        )
    ]
    assert [batch.is_mute for batch in batches] == [False, True]
    assert batches[0].num_supervised_tokens > 0 == batches[1].num_supervised_tokens
    layout, alone = find_layout(trainer.parallel, 1), [trainer.collator(data[:1])]
    assert count_tokens(batches, ALONE, layout) == count_tokens(alone, ALONE, layout)
    assert alone[0].num_visual_tokens > 0 and batches[1].num_visual_tokens > 0


# --- One process ----------------------------------------------------------------------------------------------------


def test_a_plain_model_has_nothing_to_exchange() -> None:
    model = nn.Linear(2, 1)
    with gradient_sync(model, False):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_weights_of_tokens_change_the_step_and_not_its_counts() -> None:
    trainer = build_trainer(parity_config("single", 4, 1, "all towers"), ALONE, seed=0)
    batches = trainer.load_step(0)
    runs = [
        accumulate_gradients(build_model(small_shape(), seed=0), batches, ALONE, "fp32", how=Accumulation(weighting=w))
        for w in ("tokens", "sqrt")
    ]
    assert runs[0].tokens == runs[1].tokens and abs(runs[0].loss - runs[1].loss) > 1e-4


def test_a_step_of_no_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 0: 0 micro-batches: a step needs 1 or more"):
        accumulate_gradients(nn.Linear(1, 1), [], ALONE, "fp32")


# --- The convolutional tower ----------------------------------------------------------------------------------------


def test_a_frozen_batch_norm_does_what_the_trained_one_does_in_evaluation() -> None:
    pixels = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    tower = ConvTower()
    measure_statistics(tower, pixels)
    expected = tower.eval()(pixels)
    freeze_batch_norms(tower)
    frozen = [module for module in tower.modules() if isinstance(module, FrozenBatchNorm2d)]
    assert len(frozen) == 3 and not [p for module in frozen for p in module.parameters()]
    assert torch.allclose(tower.train()(pixels), expected, atol=1e-6)
    with pytest.raises(ValueError, match="choose from batch, group"):
        ConvTower("layer")


# --- The chapter's glue ---------------------------------------------------------------------------------------------


def test_the_text_is_right_about_the_memory_of_a_13b_model_on_eight_gpus() -> None:
    plan = Plan(dp_shard=8, zero_stage=3, micro_batch_size=16, activation_checkpointing=False)
    memory = estimate_rank_memory(plan, get_model("vlm-13b"))
    sizes = memory.activations, memory.gathered, memory.allowance
    assert [round(size / 1e9, 1) for size in sizes] == [267.4, 2.2, 2.1]
    named = memory.state + memory.activations + memory.gathered + memory.allowance
    assert named == memory.device_total


def test_cuts_of_one_batch_have_one_gradient_and_less_to_keep() -> None:
    costs, largest = ch02.measure_cuts(4, (4, 1), repeats=1)
    assert largest < 1e-5
    assert [(cost.micro_batch_size, cost.num_micro_batches) for cost in costs] == [(4, 1), (1, 4)]
    assert costs[1].activation_bytes < costs[0].activation_bytes / 3
    assert (
        costs[0].gradient_bytes == costs[1].gradient_bytes == 4 * sum(p.numel() for p in ch02.tiny_model().parameters())
    )


def test_times_of_cuts_are_taken_in_turns_and_the_least_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def turns(runs: Any, num_runs: int) -> dict[Any, list[float]]:
        for prepare, run in list(runs.values()) * num_runs:
            prepare()
            run()
        return {name: [3.0 + name, 1.0 + name, 2.0 + name] for name in runs}

    monkeypatch.setattr(ch02, "accumulate_gradients", lambda model, *_: done.append(f"{id(model)}"))
    monkeypatch.setattr(ch02, "flat_gradient", lambda model: torch.ones(1))
    monkeypatch.setattr(ch02, "seconds_in_turns", turns)
    costs, _ = ch02.measure_cuts(2, (2, 1), repeats=2)
    assert [cost.seconds for cost in costs] == [1.0, 2.0]
    one, other, *timed = done
    assert one != other and timed == [one, other] * 2


def test_ragged_micro_batches_are_far_apart() -> None:
    batches = ch02.cut(ch02.ragged_samples(8, period=2), ch02.build_collator(), 2)
    counts = [batch.num_supervised_tokens for batch in batches]
    assert len(counts) == 4 and min(counts[1], counts[3]) > 3 * max(counts[0], counts[2])
