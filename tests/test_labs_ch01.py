"""Chapter 1's glue: predictions missing or wrong, an example that is what the text says, honest counters."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_worker

from vlmcourse.data.samples import IGNORE_LABEL
from vlmcourse.labs import ch01
from vlmcourse.layout import ParallelConfig
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.fsdp import apply_fsdp
from vlmcourse.parallel.ulysses import count_sent_kv_heads
from vlmcourse.planner import Plan, check_plan, count_params
from vlmcourse.planner.context_traffic import estimate_attention_traffic
from vlmcourse.planner.degrees import resolve_auto
from vlmcourse.planner.schedules import ideal_bubble_fraction
from vlmcourse.planner.shapes import count_embedding_params, count_language_layer_params
from vlmcourse.presets import get_cluster, get_model


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (None, "No prediction yet"),
        ({"ddp": None, "fsdp": 4}, "No prediction for ddp yet"),
        ("16 bytes", "'16 bytes' is not a number"),
        (True, "True is not a number"),
        (float("nan"), "nan is not a number"),
        ({"ddp": "x", "fsdp": 4}, "'x' is not a number"),
        ({"ddp": "x", "fsdp": None}, "'x' is not a number: write plain digits such as 12 or 0.5, without"),
        (16, "Noted: 16 bytes a parameter."),
        ({"ddp": 8.4, "fsdp": 4}, "Noted: ddp 8.4, fsdp 4 bytes a parameter."),
    ],
)
def test_a_prediction_is_checked_only_for_being_there(prediction: object, expected: str, capsys: Any) -> None:
    ch01.check_prediction(prediction, "bytes a parameter")
    shown = capsys.readouterr()
    assert shown.out.startswith(expected)
    assert not shown.err


def test_a_prediction_may_have_no_unit_and_a_text_hides_no_gap(capsys: Any) -> None:
    ch01.check_prediction("65504")
    ch01.check_prediction(65504)
    ch01.check_prediction({"dp 8": "128", "tp 2": None}, "samples")
    wrong, noted, text, gap, _ = capsys.readouterr().out.splitlines()
    assert wrong == "'65504' is not a number: write plain digits such as 12 or 0.5."
    assert noted == "Noted: 65504."
    assert text.startswith("'128' is not a number")
    assert gap.startswith("No prediction for tp 2 yet")


@pytest.mark.parametrize(
    ("prediction", "name", "shown"),
    [
        (None, "", "-"),
        (1.5, "", "1.5"),
        ("a", "", "-"),
        ([1, 2], "", "-"),
        ({"x": 2}, "x", "2"),
        ({"x": 2}, "y", "-"),
        ({"fsdp": 50, "deepspeed_zero3": 62}, "deepspeed-zero3", "62"),
        ({"zero_1": 1, "zero1": 2}, "zero1", "2"),
        ({"zero_1": 1}, "zero2", "-"),
        (3, "x", "3"),
    ],
)
def test_a_prediction_can_always_be_shown_in_a_table(prediction: object, name: str, shown: str) -> None:
    assert ch01.guess(prediction, name) == shown


def test_a_table_lines_up_and_shows_thousands(capsys: Any) -> None:
    ch01.print_table(["name", "bytes"], [["a", 12345], ["longer", 1.5], ["none", None]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "name     bytes"
    assert [line.split()[-1] for line in lines[2:]] == ["12,345", "1.5", "-"]
    assert len({len(line) for line in lines}) == 1


def test_the_example_has_short_conversations_first_and_is_the_same_each_time() -> None:
    model, collate, samples = ch01.load_example(8)
    batch = collate(samples)
    supervised = (batch.labels_BS != IGNORE_LABEL).sum(dim=1)
    assert supervised[:4].sum() * 2 < supervised[4:].sum(), "the two ranks must hold clearly different numbers"
    again, _, same_samples = ch01.load_example(8)
    assert [s.messages for s in samples] == [s.messages for s in same_samples]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_text_is_right_about_internvl2_26b() -> None:
    shape = get_model("internvl2-26b")
    params = count_params(shape)
    assert round(100 * params.vision / params.total) == 22
    assert round(100 * params.vision / params.total * 14 / 16) == 19
    assert count_embedding_params(shape.language) > count_language_layer_params(shape.language)
    assert round(100 * count_embedding_params(shape.language) / params.total) == 2
    assert (shape.vision.num_patches, shape.num_visual_tokens_per_tile) == (1024, 256)


def test_relative_error_is_relative() -> None:
    assert ch01.relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.08, rel=1e-5)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ch01")
    run_worker("ch01_worker.py", str(folder), timeout_s=200)
    return [json.loads((folder / f"found{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_exchange_swaps_the_tensors_of_two_ranks(found: list[dict[str, Any]]) -> None:
    assert [of_rank["exchange"] for of_rank in found] == [[11, 12], [1, 2]]
    assert [of_rank["every"] for of_rank in found] == [[0, 1], [0, 1]]


def test_ddp_reduces_every_gradient_once_a_step(found: list[dict[str, Any]]) -> None:
    weights_bytes = (3 * 6 * 6 + 5) * 4
    assert found[0]["ddp"] == {"all-reduce": [2, weights_bytes + 24]}
    assert found[0]["ddp ring"] == {"all-reduce": weights_bytes + 24}


def test_fsdp_gathers_blocks_twice_and_the_root_once(found: list[dict[str, Any]]) -> None:
    blocks_bytes, root_bytes = 3 * 6 * 6 * 4, 2 * 5 * 4  # the row of five is padded to one row for each rank
    counted = found[0]["fsdp"]
    assert counted["all-gather"] == [7, 2 * blocks_bytes + root_bytes]
    assert counted["reduce-scatter"] == [4, blocks_bytes + root_bytes]
    assert counted["all-reduce"] == [1, 24]
    assert found[0]["fsdp ring"]["all-gather"] == blocks_bytes + root_bytes / 2


def test_uneven_shards_are_named_with_their_excess(found: list[dict[str, Any]]) -> None:
    assert [of_rank["uneven"] for of_rank in found] == [{"row": 2.5}, {"row": -2.5}]


def test_gathered_weights_come_and_go_with_each_block(found: list[dict[str, Any]]) -> None:
    block, root = 6 * 6 * 4, 5 * 4
    forward = [size for name, size in found[0]["events"] if "forward" in name]
    assert forward == [block + root, root] * 3
    backward = [size for name, size in found[0]["events"] if name.startswith("backward")]
    assert backward == [block + root] * 3
    assert found[0]["events after"] == 0, "the hooks stay only inside `with`"


def test_the_mechanisms_by_hand_agree_with_one_process_and_the_library(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        printed = of_rank["mechanisms"]
        assert "collectives forward: 1, predicted 2" in printed["s10_by_hand"]
        assert "stored 32 of 64 numbers" in printed["s10_by_hand"]
        assert printed["s10_backward"].endswith("[3.0, 3.0]\n"), "the part was used once by rank 0 and twice by rank 1"
        assert "[(4, 4), (4, 4)]" in printed["s10_library"]
        gaps = {name: [float(gap) for gap in re.findall(r"off by (\S+\d)", text)] for name, text in printed.items()}
        assert {name: len(of_cell) for name, of_cell in gaps.items()} == {
            "s10_by_hand": 2,
            "s10_backward": 0,
            "s10_library": 1,
            "s12_by_hand": 1,
        }
        assert max(gap for of_cell in gaps.values() for gap in of_cell) < 1e-4


def cell_source(notebook: str, cell_id: str) -> str:
    path = Path(__file__).parents[1] / "solutions" / notebook / f"{notebook}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return next("".join(cell["source"]) for cell in cells if cell["id"] == cell_id)


def test_two_blocks_of_keys_merge_into_attention_over_both(capsys: Any) -> None:
    torch.manual_seed(0)
    exec(cell_source("ch01b_model_parallelism", "s11_merge"), {"torch": torch})
    (gap,) = re.findall(r"off by (\S+\d)", capsys.readouterr().out)
    assert float(gap) < 1e-5


def test_the_chapter_shows_the_lines_of_fully_shard_and_little_else(capsys: Any) -> None:
    exec(cell_source("ch01_parallelism", "s6_source"), {"inspect": inspect, "apply_fsdp": apply_fsdp})
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) <= 6 and sum("fully_shard(" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [("gpipe", 3 / 15), ("1f1b", 3 / 15), ("interleaved", 3 / 27), ("zbv", 0), ("dualpipev", 3 / 75)],
)
def test_the_text_has_the_formulas_of_the_bubbles(schedule: str, bubble: float) -> None:
    assert ideal_bubble_fraction(schedule, 4, 12) == pytest.approx(bubble)


def test_an_event_that_is_not_there_is_an_error() -> None:
    assert ch01.first_event([("forward a", 1), ("backward a", 2)], "backward") == 1
    with pytest.raises(ValueError, match="none of 0 events begins with 'x'"):
        ch01.first_event([], "x")


def test_shapes_for_pipelines_and_odd_heads_can_be_built() -> None:
    assert ch01.deeper_tiny(6).language.num_layers == 6
    shape = ch01.odd_tiny(5)
    assert (shape.vision.num_heads, shape.vision.hidden_size) == (5, 80)
    build_model(shape, device="meta")
    build_model(ch01.deeper_tiny(), device="meta")


def test_a_sample_without_its_picture_is_text_only() -> None:
    _, collate, samples = ch01.load_example(2)
    text = ch01.without_picture(samples[0])
    batch = collate([text])
    assert not text.images and batch.num_visual_tokens == 0 and batch.num_supervised_tokens > 0


def test_the_text_is_right_about_plans_for_the_26b_model() -> None:
    shape, cluster = get_model("internvl2-26b"), get_cluster("h100x8")
    rule, _ = resolve_auto(ParallelConfig(strategy="auto"), 8, shape)
    assert (rule.strategy, rule.tp, rule.vision_tp) == ("fsdp", 2, 1)
    of_rule = check_plan(Plan(dp_shard=4, zero_stage=3, tp=2), shape, cluster)
    alone = check_plan(Plan(dp_shard=8, zero_stage=3), shape, cluster)
    assert of_rule.ok and alone.ok
    assert round((of_rule.memory.device_total - alone.memory.device_total) / 1e9) == 8
    assert round(16 * count_params(shape).vision / 1e9) == 89
    assert check_plan(Plan(tp=8), shape, cluster).codes == ("memory",)
    pipeline = check_plan(Plan(dp_shard=2, zero_stage=3, pp=4), shape, cluster)
    assert pipeline.codes == ("memory",)
    assert round(alone.memory.state / 1e9) == 51 and pipeline.memory.state > 1.3 * alone.memory.state
    for plan in (Plan(dp_shard=1000, zero_stage=3), Plan(dp_shard=64, zero_stage=3, tp=4, pp=4)):
        assert check_plan(plan, shape, cluster).memory.state < 2e9
    assert Plan(tp=2, dp_shard=4, zero_stage=2).global_batch_size(16) == 64


def test_the_text_is_right_about_context_parallel_traffic() -> None:
    language = get_model("internvl2-26b").language
    sizes = {"num_heads": language.num_heads, "num_kv_heads": language.num_kv_heads, "head_width": 128}
    sent = {
        method: [estimate_attention_traffic(method, num_tokens=32768, cp=cp, **sizes).total for cp in (2, 4, 8, 16)]
        for method in ("ring", "allgather", "ulysses")
    }
    assert sent["ring"] == [2 * size for size in sent["allgather"]]
    assert [u < a for u, a in zip(sent["ulysses"], sent["allgather"], strict=True)] == [False, False, True, True]
    # 2,048 tokens a rank; queries and results of 48 heads, keys and values of 8, each of them twice; forward, backward
    assert sent["ulysses"][-1] == 2 * 2048 * (2 * 48 + 2 * 2 * 8) * 128 * 2 * 15 / 16
    assert count_sent_kv_heads(8, 16) == 16
