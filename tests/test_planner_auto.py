"""strategy = "auto": a search where the machine is known, the rule by ranks elsewhere; always what can run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.layout import find_layout
from vlmcourse.planner import auto
from vlmcourse.planner.auto import settle_run
from vlmcourse.planner.degrees import settle
from vlmcourse.planner.search_reasons import split_gain
from vlmcourse.planner.this_cluster import ThisCluster, describe_gpus, find_cluster
from vlmcourse.presets import get_model

H100X8 = "NVIDIA H100 80GB HBM3, 81559\n" * 8


def config_of(**sections: dict[str, Any]) -> TrainConfig:
    table: dict[str, Any] = {"parallel": {"strategy": "auto"}, "model": {"preset": "internvl2-8b"}}
    table["data"] = {"max_seq_len": 4090, "max_tiles_per_image": 6}
    table["train"] = {"precision": "bf16", "micro_batch_size": 1, "accumulation_steps": 4}
    for name, values in sections.items():
        table[name] = {**table.get(name, {}), **values}
    return parse_config(table)


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThisCluster]:
    found = describe_gpus(H100X8, 8)
    assert isinstance(found, ThisCluster)
    monkeypatch.setattr(auto, "find_cluster", lambda world_size, environ: describe_gpus(H100X8, world_size))
    yield found


# --- The search -----------------------------------------------------------------------------------------------------


def test_on_known_gpus_the_fastest_plan_that_fits_is_chosen_and_the_reason_says_what_was_rejected(
    eight_gpus: ThisCluster,
) -> None:
    config = config_of(activations={"vision": "full", "language": "full"})
    chosen, reason = settle_run(config, 8, get_model("internvl2-8b"))
    search = auto.search_run(config, get_model("internvl2-8b"), eight_gpus)
    assert search.task.workload.seq_len == 4096 and search.task.workload.tiles_per_sample == 7
    best = search.best[0].choice
    assert (chosen.tp, chosen.cp, chosen.pp) == (best.tp, best.cp, best.pp)
    assert best.micro_batch_size == 1 and best.grad_accum_steps == 4
    for cost in search.best:  # what auto does not choose is the configuration's
        assert (cost.choice.recompute_vision, cost.choice.recompute_language) == ("full", "full")
        assert cost.choice.gradient_sync == "last" or cost.choice.zero_stage < 2
    # Batches differ with the data-parallel ranks: the shortest step is not the fastest training.
    assert min(cost.seconds for cost in search.best) < search.best[0].seconds
    assert max(cost.samples_per_s for cost in search.best) == search.best[0].samples_per_s
    first, other = search.best[0], min(search.best, key=lambda cost: cost.step.num_samples)
    saved_s = first.step.num_samples * (1 / other.samples_per_s - 1 / first.samples_per_s)
    assert sum(split_gain(first, other).values()) == pytest.approx(saved_s)
    for words in ("s a step predicted", "plans looked at; rejected:", "does not fit", "next ", "8 x NVIDIA H100"):
        assert words in reason, reason
    rule, _ = settle(config.parallel, 8, get_model("internvl2-8b"), 4)
    assert chosen != rule  # tp = 2, which exchanges in every layer


def test_less_memory_makes_auto_split_more(monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape = config_of(activations={"vision": "full", "language": "full"}), get_model("internvl2-2b")
    found = []
    for mib in (81559, 20000):
        printed = f"NVIDIA H100 80GB HBM3, {mib}\n" * 4
        monkeypatch.setattr(
            auto, "find_cluster", lambda world_size, environ, printed=printed: describe_gpus(printed, 4)
        )
        found.append(settle_run(config, 4, shape)[0])
    assert found[0].strategy in ("ddp", "zero1") and found[1].strategy in ("fsdp", "zero2", "hsdp"), found


@pytest.mark.parametrize("model", ["tiny", "internvl2-1b", "internvl2-26b"])
def test_whatever_the_search_chooses_can_run(model: str, eight_gpus: ThisCluster) -> None:
    shape = get_model(model)
    for world_size, steps, schedule in ((2, 1, "1f1b"), (3, 8, "1f1b"), (8, 8, "zbv")):
        config = config_of(
            parallel={"pp_schedule": schedule}, train={"accumulation_steps": steps}, model={"preset": model}
        )
        chosen, reason = settle_run(config, world_size, shape)
        assert chosen.strategy != "auto" and reason and chosen.problems() == []
        find_layout(chosen, world_size)
        assert settle(chosen, world_size, shape, steps) == (chosen, "")
        assert replace(config, parallel=chosen).parallel == chosen  # the other sections allow it
        assert chosen.timeout_s == config.parallel.timeout_s


# --- The rule -------------------------------------------------------------------------------------------------------


def test_on_cpu_cores_the_rule_of_chapter_1_decides_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape = config_of(), get_model("internvl2-8b")
    rule, why = settle(config.parallel, 8, shape, 4)
    monkeypatch.setenv("PATH", "")
    chosen, reason = settle_run(config, 8, shape)
    assert chosen == rule and reason.startswith(why)
    assert reason.endswith("without a search: ranks run on CPU cores, whose speed no datasheet says)")
    assert settle_run(config, 8, shape, elsewhere="it is far away")[1].endswith("it is far away)")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"precision": "bf16_pure"}}, "train.precision = 'bf16_pure'"),
        (
            {"parallel": {"prefetch": 0, "cp_method": "ring"}, "train": {"micro_batch_size": 400}},
            "none of .* plans fits",
        ),
    ],
)
def test_where_the_search_has_no_answer_the_rule_decides_and_says_why(
    sections: dict[str, dict[str, Any]], words: str, eight_gpus: ThisCluster
) -> None:
    config, shape = config_of(**sections), get_model("internvl2-8b")
    chosen, reason = settle_run(config, 8, shape)
    assert chosen == settle(config.parallel, 8, shape, config.train.accumulation_steps)[0]
    assert re.search(words, reason), reason


def test_a_named_strategy_one_rank_and_an_unknown_shape_need_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "find_cluster", None)
    named = config_of(parallel={"strategy": "fsdp"})
    assert settle_run(named, 8, get_model("internvl2-8b")) == (named.parallel, "")
    assert settle_run(config_of(), 1, get_model("internvl2-8b"))[0].strategy == "single"
    assert settle_run(config_of(), 8, None) == (config_of().parallel, "")


# --- The machine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("", "there are 0 GPUs for 2 ranks"),
        ("NVIDIA H100 80GB HBM3, 81559\n", "there are 1 GPUs for 2 ranks"),
        ("NVIDIA H100 80GB HBM3, 81559\nTesla T4, 15360\n", "GPUs are of several kinds"),
        ("Matrox G400, 32\n" * 2, "peak or links of 'Matrox G400' are not in planner/hardware.py"),
        ("NVIDIA A100 80GB PCIe, 81920\n" * 2, "peak or links of 'NVIDIA A100 80GB PCIe'"),
        ("NVIDIA H200, [N/A]\n" * 2, "does not say how much memory"),
    ],
)
def test_gpus_that_cannot_be_described_are_said(printed: str, words: str) -> None:
    found = describe_gpus(printed, 2)
    assert isinstance(found, str) and words in found


def test_gpus_are_described_with_the_memory_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Tesla V100-SXM2-16GB, 16160'\necho 'Tesla V100-SXM2-16GB, 16160'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = find_cluster(2, {})
    assert isinstance(found, ThisCluster) and found.cluster.num_devices == 2 and found.cluster.num_nodes == 1
    assert found.device.memory_bytes == 16160 * 2**20 and found.device.name == found.cluster.device == "v100-32"
    assert "several machines" in str(find_cluster(4, {"LOCAL_WORLD_SIZE": "2"}))
    assert "CPU cores" in str(find_cluster(2, {"CUDA_VISIBLE_DEVICES": ""}))
    assert "there are 1 GPUs" in str(find_cluster(2, {"CUDA_VISIBLE_DEVICES": "1"}))
    program.write_text("#!/bin/sh\nexit 9\n")
    assert "CPU cores" in str(find_cluster(2, {}))
