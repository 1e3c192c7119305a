"""Activation policies: equal gradients, less kept, exactly the blocks named, and refusals; on one and on two ranks."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from activations_cases import (
    FOUR_RANKS,
    FULL,
    LEDGERS,
    POLICIES,
    STRATEGIES,
    check_ledger,
    deep_shape,
    exact_gradients,
    is_exact,
    run_case,
)
from parity import GRADIENT_TOLERANCE
from ranks import run_worker
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vlmcourse.config import parse_config
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.stages import StageBlocks
from vlmcourse.recompute import Segment, plan_segments, split_segments
from vlmcourse.train.activations import (
    SegmentedBlocks,
    apply_activations,
    cover_blocks,
    covered_blocks,
    plan_activations,
    uncover_blocks,
)
from vlmcourse.values import ConfigError

pytestmark = pytest.mark.timeout(900)
ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
TOLERANCE = 1e-6
"""Recomputation does the same arithmetic again: relative length of a difference, parameter by parameter. Ranks add up
the same numbers in another order than one process does: in fp32 that alone is 3e-6, so ranks too compute in float64,
and must come to what one process does there, to 1e-9."""


def difference(gradients: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> float:
    """Return the largest difference of a parameter's gradient, over its length; a missing one counts as 1."""
    assert len(gradients) == len(expected) and gradients[0].keys() == expected[0].keys() and gradients[0]
    lengths = [
        float((got - of_step[name]).norm()) / max(float(of_step[name].norm()), 1e-12)
        for step, of_step in zip(gradients, expected, strict=True)
        for name, got in step.items()
        if not name.endswith("k_proj.bias")
    ]
    return max(lengths)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """Every case of one process."""
    return {
        f"{strategy} | {policy}": run_case(strategy, policy, ALONE)
        for strategy, (_, _, policies) in STRATEGIES.items()
        if strategy.startswith("single")
        for policy in policies
    }


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every case of two ranks, run in one start."""
    folder = tmp_path_factory.mktemp("activations")
    run_worker("activations_worker.py", str(folder), timeout_s=600)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    """Gradients of one process's step in float64, without a policy."""
    return exact_gradients("single", "none", ALONE)


def check_against_none(found: dict[str, dict[str, Any]]) -> int:
    """Check every case against that of the same strategy without a policy; return how many there were."""
    num_checked = 0
    for case, result in found.items():
        assert isinstance(result, dict), f"{case}: {result}"
        plain = found[f"{case.partition(' |')[0]} | none"]
        assert result["losses"][0] == pytest.approx(plain["losses"][0], rel=TOLERANCE), case
        if result is not plain:
            assert result["peak_bytes"] < plain["peak_bytes"], f"{case} keeps no less"
            num_checked += 1
        if plain["gradients"][0]:
            assert difference(result["gradients"][:1], plain["gradients"][:1]) <= TOLERANCE, case
    return num_checked


def test_gradients_of_every_policy_are_those_of_the_plain_run(alone: dict[str, dict[str, Any]]) -> None:
    num_plain = sum(case.endswith("| none") for case in alone)
    assert check_against_none(alone) == len(alone) - num_plain > 15


@pytest.mark.slow
def test_gradients_are_equal_under_every_strategy(on_ranks) -> None:
    here = {name: case for name, case in STRATEGIES.items() if name != FOUR_RANKS and not name.startswith("single")}
    for found in on_ranks:
        cases = {case: result for case, result in found.items() if not case.startswith("ledger")}
        assert len(cases) == sum(len(policies) for _, _, policies in here.values())
        check_against_none(cases)


def test_in_float64_every_policy_on_one_process_leaves_gradients_as_they_are(exact: dict[str, Tensor]) -> None:
    for policy in STRATEGIES["single"][2]:
        assert difference([exact_gradients("single", policy, ALONE)], [exact]) <= GRADIENT_TOLERANCE["fp64"], policy


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if is_exact(s) and s not in ("single", FOUR_RANKS)])
def test_in_float64_every_policy_on_ranks_gives_the_gradients_of_one_process(strategy: str, on_ranks, exact) -> None:
    # So that both sides of a comparison with the plain run cannot be wrong alike.
    for found in on_ranks:
        for policy in STRATEGIES[strategy][2]:
            [got] = found[f"{strategy} | {policy}"]["gradients"][:1]
            assert {gradient.dtype for gradient in got.values()} == {torch.float64}
            assert difference([got], [exact]) <= GRADIENT_TOLERANCE["fp64"], policy


@pytest.mark.slow
def test_recomputation_gathers_no_weights_again_and_repeats_what_a_block_sends(on_ranks) -> None:
    found = on_ranks[0]
    for strategy in ("ddp", "zero1", "zero2", "fsdp", "1f1b", "gpipe", "interleaved"):
        policies = STRATEGIES[strategy][2]
        assert len({str(found[f"{strategy} | {policy}"]["calls"]) for policy in policies}) == 1, strategy
    for strategy in ("tp", "cp", "ulysses"):
        plain, full = (sum(found[f"{strategy} | {policy}"]["calls"].values()) for policy in ("none", "full"))
        assert plain < full < 2 * plain, strategy


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LEDGERS)
def test_ledger_and_report_say_what_a_rank_holds_under_every_strategy(strategy: str, on_ranks) -> None:
    for rank, of_rank in enumerate(on_ranks):
        check_ledger(of_rank[f"ledger | {strategy}"], strategy, rank)


def test_policies_name_segments() -> None:
    assert plan_segments("none", 5) == []
    assert plan_segments("full", 2) == [Segment(0, 1), Segment(1, 1)]
    assert [s.first for s in plan_segments("every:2", 5)] == [1, 3]
    assert [s.first for s in plan_segments("every:2", 3, first_number=3)] == [0, 2]  # blocks 3 and 5 of the tower
    assert [s.num_blocks for s in plan_segments("sqrt", 16)] == [4, 4, 4, 4]
    assert sorted(s.num_blocks for s in plan_segments("sqrt", 10)) == [2, 2, 3, 3]
    assert all(s.selective for s in plan_segments("selective", 3))
    for num_blocks in range(1, 20):
        for length in range(1, 22):
            segments = split_segments(num_blocks, length)
            assert [i for s in segments for i in s.blocks] == list(range(num_blocks))
            assert max(s.num_blocks for s in segments) <= length
    for wrong in ("every", "every:0", "every:x", "every:٣", "all", 3):
        with pytest.raises(ValueError, match=r"every:k|choose one of|must be text"):
            plan_segments(wrong, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"activations.vision": "fulll"}, "did you mean 'full'"),
        ({"activations.vision": "every:0"}, "every:2"),
        ({"activations.offload": True, "activations.language": "selective"}, "store of their own"),
        ({"activations.vision": "full", "model.freeze": ["vision"]}, "nothing to recompute"),
        ({"activations.language": "selective", "parallel.pp": 2, "parallel.pp_schedule": "zbv"}, "in two parts"),
        ({"activations.vision": "selective", "parallel.pp": 2, "parallel.pp_schedule": "dualpipev"}, "in two parts"),
        ({"activations.vision": "sqrt", "parallel.pp": 2, "parallel.adaptive": True}, "runs as one"),
        ({"activations.offload": True, "parallel.tp": 2}, "leave offload out"),
    ],
)
def test_what_would_not_work_is_refused_with_the_configuration(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({}, keys)


def test_policy_that_would_cover_no_block_is_refused_before_any_rank_waits() -> None:
    config = parse_config({"activations": {"language": "every:9"}})
    with pytest.raises(ConfigError, match="the tower has 4 blocks"):
        plan_activations(config, config.parallel, deep_shape())


def test_schedule_that_auto_might_choose_is_checked_again() -> None:
    config = parse_config({"activations": {"language": "selective"}})
    chosen = dataclasses.replace(config.parallel, pp=2, pp_schedule="zbv")
    with pytest.raises(ConfigError, match="two parts"):
        plan_activations(config, chosen, deep_shape())


def test_names_of_parameters_and_the_wrapping_can_be_undone() -> None:
    model = build_model(deep_shape(), seed=0)
    names = [name for name, _ in model.named_parameters()]
    for policy in ("full", "sqrt", "every:2", "selective", "none"):
        config = parse_config({"activations": {"vision": policy, "language": policy}}).activations
        apply_activations(model, config)
        assert [name for name, _ in model.named_parameters()] == names
        assert len(model.vision.blocks) == 4 and model.vision.blocks[1] is model.vision.get_submodule("blocks.1")
        assert covered_blocks(model.vision) == {"every:2": [1, 3], "none": []}.get(policy, [0, 1, 2, 3])
    uncover_blocks(model.vision)
    assert not any("forward" in block.__dict__ for block in model.vision.blocks)


def test_a_stage_counts_blocks_from_the_first_of_the_whole_tower() -> None:
    model = build_model(deep_shape(), seed=0)
    model.vision.blocks = StageBlocks(model.vision.blocks, [1, 2, 3])
    apply_activations(model, parse_config({"activations": {"vision": "every:2"}}).activations)
    assert covered_blocks(model.vision) == [1, 3]


def test_policy_that_something_undid_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmcourse.train.activations.covered_blocks", lambda tower: [0])
    with pytest.raises(RuntimeError, match=r"blocks \[0\] are covered instead of \[0, 1, 2, 3\]"):
        apply_activations(build_model(deep_shape()), parse_config({"activations": FULL}).activations)


def test_segments_that_leave_blocks_out_or_do_not_exist_are_refused() -> None:
    tower = Chain(4)
    for segments in ([Segment(0, 2)], [Segment(3, 2)], [Segment(0, 1), Segment(0, 1)]):
        with pytest.raises(ValueError, match=r"they must cover all|each at most once"):
            cover_blocks(tower, segments)


@pytest.mark.parametrize("wrong", ["full", [(0, 2)], [0, 1]])
def test_what_is_no_segment_is_refused_and_the_tower_stays_as_it_was(wrong: Any) -> None:
    tower = Chain(4)
    cover_blocks(tower, plan_segments("full", 4))
    with pytest.raises(ValueError, match="must be `Segment`s; after the tower, give what plan_segments"):
        cover_blocks(tower, wrong)
    assert covered_blocks(tower) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="this list needs its layers in an nn.ModuleList called `blocks`"):
        cover_blocks(plan_segments("full", 4), tower)  # type: ignore[arg-type]


class Layer(nn.Module):
    """A block with dropout, which counts its calls and remembers the masks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear, self.num_calls = nn.Linear(width, width), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + F.dropout(torch.tanh(self.linear(x)), 0.5, self.training)


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Layer() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def gradient_of(leaf: Tensor) -> Tensor:
    """Return a copy of a leaf's gradient."""
    assert leaf.grad is not None
    return leaf.grad.clone()


def run_chain(chain: Chain, segments: list[Segment], offload: bool = False) -> tuple[list[Tensor], list[int], Tensor]:
    """Return gradients, calls of each block, and a number drawn after the step."""
    cover_blocks(chain, segments, offload=offload)
    plain: list[Any] = list(chain.blocks.children())
    for block in plain:
        block.num_calls = 0
    torch.manual_seed(5)
    chain.zero_grad()
    chain(torch.ones(3, 16)).square().sum().backward()  # an input without a gradient, as the first layer of a model has
    return [gradient_of(p) for p in chain.parameters()], [block.num_calls for block in plain], torch.rand(())


@pytest.mark.parametrize("policy", ["full", "every:3", "sqrt", "selective"])
def test_dropout_is_the_same_in_recomputation_and_leaves_the_generator_alone(policy: str) -> None:
    chain = Chain(9)
    expected, calls, draw = run_chain(chain, [])
    assert calls == [1] * 9
    segments = plan_segments(policy, 9)
    gradients, calls, drawn = run_chain(chain, segments)
    assert all(torch.equal(got, want) for got, want in zip(gradients, expected, strict=True))
    covered = {i for segment in segments for i in segment.blocks}
    assert calls == [1 + (i in covered) for i in range(9)]
    assert drawn == draw


def test_nothing_runs_twice_without_gradients() -> None:
    chain = Chain(4)
    cover_blocks(chain, plan_segments("sqrt", 4))
    assert isinstance(chain.blocks, SegmentedBlocks)
    with torch.no_grad():
        chain(torch.ones(1, 16))
    assert [block.num_calls for block in chain.blocks.children()] == [1] * 4
    chain.eval()
    assert len(list(chain.blocks)) == 4  # an evaluation sees single blocks, whose numbers a cache of keys needs


def test_copied_model_recomputes_its_own_blocks() -> None:
    for policy in ("full", "sqrt"):
        chain = Chain(4)
        cover_blocks(chain, plan_segments(policy, 4))
        twin = copy.deepcopy(chain)
        twin(torch.ones(2, 16)).sum().backward()
        assert all(block.num_calls == 0 for block in chain.blocks.children())
        assert all(p.grad is None for p in chain.parameters())
        assert all(p.grad is not None for p in twin.parameters())


def test_selective_keeps_matrix_products_and_attention_and_runs_the_rest_again() -> None:
    model = build_model(deep_shape(), seed=0)
    x = torch.randn(2, 17, 24, requires_grad=True)
    counts: dict[str, dict[str, int]] = {}
    for policy in ("none", "full", "selective"):
        cover_blocks(model.vision, plan_segments(policy, 4))
        with OperationCounter() as counter:
            y = x
            for block in model.vision.blocks:
                y = block(y)
            y.sum().backward()
        counts[policy] = counter.calls
    products = {
        policy: of["addmm"] + of["_scaled_dot_product_flash_attention_for_cpu"] for policy, of in counts.items()
    }
    assert products["full"] > products["none"] == products["selective"]
    assert counts["selective"]["gelu"] == 2 * counts["none"]["gelu"] == counts["full"]["gelu"]


class OperationCounter(TorchDispatchMode):
    """Counts operations by name, those that a checkpoint runs again too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_kept_bytes_fall_from_none_to_selective_to_full(alone: dict[str, dict[str, Any]]) -> None:
    model, kept = build_model(deep_shape(), seed=0), {}
    ids = torch.randint(4, 200, (2, 24))
    for policy in ("none", "every:2", "full", "sqrt"):
        for tower in (model.vision, model.language):
            cover_blocks(tower, plan_segments(policy, 4))
        with ActivationMeter() as meter:
            loss = model(ids).sum()
            kept[policy] = meter.live_bytes
        del loss
    assert kept["none"] > kept["every:2"] > kept["full"] > kept["sqrt"]
    assert set(POLICIES) >= {"none", "full", "every:2", "sqrt", "selective"}


def test_worker_and_cases_are_where_the_tests_expect_them() -> None:
    assert (Path(__file__).parent / "activations_worker.py").exists()
