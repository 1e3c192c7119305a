"""Context parallelism: three ways to attend over a split sequence, each equal to one process, in two orders.

Four ranks are started once and run everything, as one group of four and as two of two; the tests compare what they
wrote down with plain attention and with a plain model here.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from context_bugs import ATTENTION_BUGS, MODEL_BUGS
from context_parity import (
    ATTENTION_TOLERANCE,
    BATCH,
    DTYPES,
    FROZEN,
    HEAD_WIDTH,
    HEADS,
    METHODS,
    MODEL_KINDS,
    ORDERS,
    SEQ,
    Run,
    attention_inputs,
    build,
    make_steps,
    reference_attention,
    relative_error,
    train,
)
from parity import KEY_BIAS, LOSS_TOLERANCE, check_gradient, load
from ranks import run_worker

from vlmcourse.parallel import attention_block
from vlmcourse.parallel.attention_block import attend_block, attend_block_backward, choose_kernel, merge_blocks
from vlmcourse.parallel.chunks import (
    chunks_of_rank,
    count_visible_pairs,
    sort_parts,
    take_part,
    unsort_parts,
    visible_meetings,
)
from vlmcourse.planner.context_traffic import estimate_attention_traffic

BF16_EXCESS = 1.25
"""Error of a gradient over that of one process in bf16, both against fp32; measured: 1.08 at most."""
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
KINDS = [(cp, method, order) for cp in (2, 4) for method in METHODS for order in ORDERS]


@pytest.fixture(scope="module")
def all_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    folder: Path = tmp_path_factory.mktemp("context")
    run_worker("context_worker.py", str(folder), nproc=4, timeout_s=200)
    return [load(folder / f"rank{rank}.pt") for rank in range(4)]


@cache
def reference(precision: str = "fp32", num_steps: int = 3) -> Run:
    return train(build(), make_steps()[:num_steps], precision=precision)


def check_run(run: Run) -> None:
    """Raise AssertionError at the first loss or gradient that is not that of one process, in fp32."""
    expected = reference()
    for step, (loss, gradients) in enumerate(zip(run.losses, run.gradients, strict=True)):
        assert abs(loss - expected.losses[step]) <= LOSS_TOLERANCE["fp32"], (step, loss, expected.losses[step])
        assert gradients.keys() == expected.gradients[step].keys()
        for name, gradient in gradients.items():
            check_gradient(f"step {step}: gradient of {name}", gradient, expected.gradients[step][name], "fp32")


# Which rank holds what.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_every_position_is_held_once_and_parts_go_together_again(cp: int, order: str) -> None:
    whole = torch.arange(2 * 24 * 3).view(2, 24, 3)
    parts = torch.cat([take_part(whole, 1, rank, cp, order) for rank in range(cp)], dim=1)
    assert torch.equal(sort_parts(parts, 1, cp, order), whole)
    assert torch.equal(unsort_parts(whole, 1, cp, order), parts)


def test_zigzag_gives_a_rank_an_early_and_a_late_chunk() -> None:
    assert [chunks_of_rank(rank, 3, "zigzag") for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert take_part(torch.arange(12), 0, 1, 3, "zigzag").tolist() == [2, 3, 8, 9]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_visible_pairs_are_those_of_a_mask_counted_one_by_one(cp: int, order: str) -> None:
    positions = torch.arange(32)
    counted = [int((take_part(positions, 0, rank, cp, order) + 1).sum()) for rank in range(cp)]
    assert count_visible_pairs(32, cp, order) == counted
    assert sum(counted) == 32 * 33 // 2


def test_zigzag_balances_causal_work_and_contiguous_does_not() -> None:
    assert len(set(count_visible_pairs(4096, 8, "zigzag"))) == 1
    contiguous = count_visible_pairs(4096, 8, "contiguous")
    assert 14.9 < contiguous[-1] / contiguous[0] < 15  # (2 cp - 1) times as much on the last rank


def test_meetings_are_exactly_the_chunks_that_are_not_masked_as_a_whole() -> None:
    for order in ORDERS:
        seen = set()
        for query_rank in range(4):
            for key_rank in range(4):
                for meeting in visible_meetings(query_rank, key_rank, 4, order):
                    query = chunks_of_rank(query_rank, 4, order)[meeting.query]
                    key = chunks_of_rank(key_rank, 4, order)[meeting.key]
                    assert meeting.is_causal == (query == key)
                    seen.add((query, key))
        num_chunks = 4 * len(chunks_of_rank(0, 4, order))
        assert seen == {(query, key) for query in range(num_chunks) for key in range(query + 1)}


def test_what_does_not_fall_into_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="20 tokens does not fall into 8 equal chunks .*pad it to 24 tokens"):
        take_part(torch.zeros(1, 20), 1, 0, 4, "zigzag")
    with pytest.raises(ValueError, match="30 tokens .* 4 equal chunks"):
        count_visible_pairs(30, 4, "contiguous")
    with pytest.raises(ValueError, match="choose one of zigzag, contiguous"):
        chunks_of_rank(0, 2, "random")


# Attention in blocks, in one process.


def merged_blocks(
    inputs: tuple[torch.Tensor, ...], borders: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Attend without a mask, block by block, forward and backward; return what was found, and the log-sum-exp."""
    q, k, v, grad = inputs
    out, lse = torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
    blocks = [slice(a, b) for a, b in zip((0, *borders), (*borders, k.shape[2]), strict=True)]
    for keys in blocks:
        out, lse = merge_blocks(out, lse, *attend_block(q, k[:, :, keys], v[:, :, keys], False))
    out = out.to(q.dtype)
    found = {"out": out, "dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    for keys in blocks:
        parts = attend_block_backward(grad, q, k[:, :, keys], v[:, :, keys], out, lse, False)
        found["dq"] += parts[0]
        found["dk"][:, :, keys] += parts[1]
        found["dv"][:, :, keys] += parts[2]
    return found, lse


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kernel", ["flash_cpu", "plain"])
def test_merged_blocks_are_one_softmax(heads: tuple[int, int], precision: str, kernel: str) -> None:
    inputs = attention_inputs(*heads, precision)
    q, k, v, grad = (x.float().clone().requires_grad_() for x in inputs)
    k4, v4 = (x.repeat_interleave(heads[0] // heads[1], dim=1) for x in (k, v))
    scores = q @ k4.mT / math.sqrt(HEAD_WIDTH)
    out = scores.softmax(-1) @ v4
    out.backward(grad.detach())
    expected = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    with mock.patch.object(attention_block, "choose_kernel", lambda *given: kernel):
        found, lse = merged_blocks(inputs, (5, 6, 30))
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-4)
    for name, tensor in found.items():
        assert relative_error(tensor, expected[name]) < ATTENTION_TOLERANCE[precision], name


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kernel", ["flash_cpu", "plain"])
def test_a_causal_block_is_causal_attention(precision: str, kernel: str) -> None:
    q, k, v, grad = attention_inputs(4, 2, precision)
    expected = reference_attention(4, 2, precision)
    with mock.patch.object(attention_block, "choose_kernel", lambda *given: kernel):
        out, lse = attend_block(q, k, v, True)
        grads = attend_block_backward(grad, q, k, v, out, lse, True)
    for name, tensor in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert relative_error(tensor, expected[name]) < ATTENTION_TOLERANCE[precision], name


def test_the_cpu_has_a_flash_kernel_that_returns_its_log_sum_exp() -> None:
    q, k, v, _ = attention_inputs(4, 4, "fp32")
    assert choose_kernel(q, k, v, True) == "flash_cpu"


@pytest.mark.gpu(1)
@pytest.mark.parametrize("precision", DTYPES)
def test_blocks_on_a_gpu_are_those_of_the_cpu(precision: str) -> None:
    inputs = attention_inputs(4, 2, precision)
    on_gpu = tuple(x.cuda() for x in inputs)
    kernel = choose_kernel(on_gpu[0], on_gpu[0], on_gpu[0], False)
    assert kernel == ("flash_cuda" if precision == "bf16" else "plain")
    expected, expected_lse = merged_blocks(tuple(x.float() for x in inputs), (16, 40))
    found, lse = merged_blocks(on_gpu, (16, 40))
    assert torch.allclose(lse.cpu(), expected_lse, atol=1e-2)
    for name, tensor in found.items():
        assert relative_error(tensor.cpu(), expected[name]) < ATTENTION_TOLERANCE["bf16"], name


# Attention over ranks.


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("cp", "method", "order"), KINDS)
def test_attention_over_ranks_is_causal_attention(
    all_ranks: list[dict[str, Any]], cp: int, method: str, order: str, precision: str
) -> None:
    for found in all_ranks:
        for heads in HEADS:
            for name, error in found["attention"][cp, method, order, heads, precision][0].items():
                assert error < ATTENTION_TOLERANCE[precision], (heads, name, error)


@pytest.mark.parametrize("bug", ATTENTION_BUGS)
def test_a_bug_planted_in_attention_is_caught(all_ranks: list[dict[str, Any]], bug: str) -> None:
    worst = max(error for found in all_ranks for error in found["attention bugs"][bug].values())
    print(f"{bug}: off by {worst:.2g}")
    assert not worst < 1000 * ATTENTION_TOLERANCE["fp32"]


@pytest.mark.parametrize(("cp", "method", "order"), KINDS)
def test_the_bytes_sent_are_those_of_the_formula(
    all_ranks: list[dict[str, Any]], cp: int, method: str, order: str
) -> None:
    for found in all_ranks:
        for heads in HEADS:
            for precision, dtype in DTYPES.items():
                expected = estimate_attention_traffic(
                    method,
                    num_tokens=BATCH * SEQ,
                    cp=cp,
                    num_heads=heads[0],
                    num_kv_heads=heads[1],
                    head_width=HEAD_WIDTH,
                    element_bytes=dtype.itemsize,
                )
                sent = found["attention"][cp, method, order, heads, precision][1]
                assert sent == (expected.forward, expected.backward)


def test_the_formula_by_hand() -> None:
    # 8 tokens a rank, 2 kv heads of 16 channels in bf16: keys and values are 2 * 8 * 2 * 16 * 2 = 1024 bytes.
    sizes = {"num_tokens": 32, "cp": 4, "num_heads": 8, "num_kv_heads": 2, "head_width": 16}
    assert estimate_attention_traffic("allgather", **sizes).forward == 3 * 1024
    assert estimate_attention_traffic("allgather", **sizes).backward == 3 * 1024
    assert estimate_attention_traffic("ring", **sizes).backward == 3 * 1024 + 3 * 2048
    # 3/4 of 8 q + 8 results + 2 x 4 copied kv heads: 24 heads * 8 tokens * 16 channels * 2 bytes * 3/4.
    assert estimate_attention_traffic("ulysses", **sizes).forward == 24 * 8 * 16 * 2 * 3 / 4
    assert estimate_attention_traffic("ring", **(sizes | {"cp": 1})).total == 0
    with pytest.raises(ValueError, match="cp=3"):
        estimate_attention_traffic("ring", **(sizes | {"cp": 3}))
    with pytest.raises(ValueError, match="cp=16 does not divide 8 query heads"):
        estimate_attention_traffic("ulysses", **(sizes | {"cp": 16}))
    with pytest.raises(ValueError, match="choose one of"):
        estimate_attention_traffic("star", **sizes)


# Whole models.


def test_the_data_was_awkward_enough() -> None:
    micro_batches = [batch for step in make_steps() for batch in step]
    tiles = {sum(batch.tiles_per_sample) for batch in micro_batches}
    assert {0, 1} < tiles and any(count % 4 for count in tiles) and max(tiles) > 4
    assert any(max(batch.tiles_per_sample) > 1 for batch in micro_batches)
    supervised = [
        int((take_part(batch.labels_BS, 1, rank, 4, "zigzag") != -100).sum())
        for batch in micro_batches
        for rank in range(4)
    ]
    assert 0 in supervised and len(set(supervised)) > 4
    assert any(not batch.attention_mask_BS.all() for batch in micro_batches)


@pytest.mark.parametrize(("cp", "method", "order"), MODEL_KINDS)
def test_a_model_over_ranks_matches_one_process_at_every_step(
    all_ranks: list[dict[str, Any]], cp: int, method: str, order: str
) -> None:
    for found in all_ranks:
        assert len(found["models"][cp, method, order].losses) == 3
        check_run(found["models"][cp, method, order])


@pytest.mark.parametrize("method", METHODS)
def test_bf16_over_ranks_rounds_no_worse_than_in_one_process(all_ranks: list[dict[str, Any]], method: str) -> None:
    true, alone = reference(), reference("bf16", 2)
    for found in all_ranks:
        run: Run = found["bf16"][method]
        for step, loss in enumerate(run.losses):
            assert abs(loss - true.losses[step]) < LOSS_TOLERANCE["bf16"]
        # Rounding changes the update, so only the first step has the same weights.
        for name, gradient in run.gradients[0].items():
            if not name.endswith(KEY_BIAS):  # its true gradient is 0: all of it is rounding
                error, error_alone = (
                    float((g - true.gradients[0][name]).norm()) for g in (gradient, alone.gradients[0][name])
                )
                assert error <= BF16_EXCESS * error_alone, (name, error / error_alone)


@pytest.mark.parametrize("method", METHODS)
def test_recomputed_activations_change_nothing(all_ranks: list[dict[str, Any]], method: str) -> None:
    for found in all_ranks:
        check_run(found["recompute"][method])


@pytest.mark.parametrize("towers", FROZEN)
def test_frozen_towers_leave_the_other_gradients_as_they_are(
    all_ranks: list[dict[str, Any]], towers: tuple[str, ...]
) -> None:
    expected = reference().gradients[0]
    trained = {name for name in expected if not name.startswith(tuple(f"{tower}." for tower in towers))}
    for found in all_ranks:
        gradients = found["frozen"][towers].gradients[0]
        assert gradients.keys() == trained
        for name, gradient in gradients.items():
            check_gradient(name, gradient, expected[name], "fp32")


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_data_parallel_groups_of_context_parallel_ranks_match_one_process(
    all_ranks: list[dict[str, Any]], strategy: str
) -> None:
    for found in all_ranks:
        check_run(found[strategy])


@pytest.mark.parametrize("cp", [2, 4])
def test_gathered_logits_are_those_of_a_plain_model(all_ranks: list[dict[str, Any]], cp: int) -> None:
    for found in all_ranks:
        logits, expected = found["logits"][cp]
        assert torch.allclose(logits, expected, atol=1e-5)


def test_a_model_generates_outside_of_its_group_and_goes_back(all_ranks: list[dict[str, Any]]) -> None:
    for found in all_ranks:
        written, expected, nothing_sent = found["generated"]
        assert written == expected and nothing_sent


@pytest.mark.parametrize("bug", MODEL_BUGS)
def test_a_bug_planted_in_the_model_is_caught(all_ranks: list[dict[str, Any]], bug: str) -> None:
    caught = []
    for found in all_ranks:
        run: Run = found["model bugs"][bug]
        assert len(run.losses) == 1, "it did not train"
        try:
            check_run(run)
        except AssertionError as error:
            caught.append(str(error).splitlines()[0])
    print(f"{bug}: {caught[:1]}")
    assert caught, "it was not noticed on any rank"


REFUSALS = {
    "method": "context-parallel method 'star': choose one of ring, allgather, ulysses",
    "order": "context-parallel order 'sideways'",
    "one rank": "Context parallelism over 1 rank splits nothing",
    "twice": "This model already takes a part",
    "heads": "cp=4 does not divide 2 query heads",
    "heads in attention": "cp=4 does not divide 3 query heads",
    "length": "A sequence of",
    "labels": "A sequence of",
    "left padding": "A context-parallel model was given a mask",
    "left padding by name": "A context-parallel model was given a mask",
    "cache": "A context-parallel model was asked to generate",
    "last only": "A context-parallel model was asked to generate",
    "mask": "Context-parallel attention of 48 queries to 48 keys, is_causal=False, with a mask",
    "not causal": "Context-parallel attention of 48 queries to 48 keys, is_causal=False, no mask",
    "more keys": "Context-parallel attention of 4 queries to 48 keys",
    "dtensor": "Context-parallel attention was given a DTensor",
    "plain model": "rank {rank}: 2 of 2 attentions are not context-parallel",
    "one attention put back": "rank {rank}: 1 of 2 attentions are not context-parallel",
    "tiles not shared": "rank {rank}: encode_tiles is shared by 1 rank(s) instead of 4",
    "other number of ranks": "rank {rank}: 2 of 2 attentions are context-parallel over 4 ranks (ring, zigzag) "
    "instead of not context-parallel",
}

BROKEN_MODELS = ("plain model", "one attention put back", "tiles not shared", "other number of ranks")


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_done_is_refused_before_anything_is_sent(all_ranks: list[dict[str, Any]], case: str) -> None:
    for rank, found in enumerate(all_ranks):
        assert found["refusals"].keys() == REFUSALS.keys()
        kind = "RuntimeError" if case in BROKEN_MODELS else "ValueError"
        assert found["refusals"][case].startswith(f"{kind} after 0 bytes: {REFUSALS[case].format(rank=rank)}")
