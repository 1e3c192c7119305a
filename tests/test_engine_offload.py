"""State off the device: losses of one process, proof that it lies where it was asked for, and refusals by name."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offload_worker import NUM_STEPS, RUNS, WEIGHT_SEED
from parity import Recording, build_trainer, check_parity, load, parity_config, record
from ranks import run_worker
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from vlmcourse.config import ConfigError, TrainConfig, parse_config
from vlmcourse.deepspeed_config import Run, find_deepspeed_problems, read_offload
from vlmcourse.parallel.apply import apply_strategy
from vlmcourse.parallel.engine_places import check_after_step, check_engine_offload
from vlmcourse.parallel.engines import build_deepspeed_settings
from vlmcourse.parallel.fsdp import build_offload_policy
from vlmcourse.parallel.nvme import (
    SwapFiles,
    check_swap_files,
    check_swappable,
    clear_swap_folder,
    count_swap_files,
    find_folder_problem,
    find_nvme_problem,
)
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.state_offload import OffloadConfig

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
CPU = {"optimizer": "cpu", "parameters": "cpu"}
NVME = {"optimizer": "nvme", "nvme_path": "/somewhere"}


@cache
def alone(case: str) -> Recording:
    """Return the same steps of one process, each one big batch."""
    return record(build_trainer(parity_config("single", 1, 1, case), ALONE, WEIGHT_SEED), NUM_STEPS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("offload")
    run_worker("offload_worker.py", str(folder))
    return [load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_offloading_changes_no_loss_norm_gradient_or_weight(found: list[dict[str, Any]], name: str) -> None:
    reference = alone(RUNS[name][1])
    for of_rank in found:
        recording, _ = of_rank["runs"][name]
        assert len(recording.losses) == NUM_STEPS
        check_parity(reference, recording, "fp32")
        assert recording.weights.keys() == reference.weights.keys()
        for key, weight in recording.weights.items():
            assert torch.allclose(weight, reference.weights[key], atol=2e-5), key


@pytest.mark.slow
def test_an_engines_state_lies_where_it_says(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for name, (_, places) in of_rank["runs"].items():
            if name.startswith("fsdp"):
                continue
            is_own = name == "zero2, DeepSpeed's Adam"
            assert places["updated_by"] == ("DeepSpeedCPUAdam" if is_own else "AdamW")
            assert (places["num_updates"] > 0) == is_own
            assert places["moved_by"] == {
                "zero3, optimizer": "DeepSpeedZeroOptimizer_Stage3",
                "zero3, both": "DeepSpeedZeRoOffload",
                "zero3, layered": "DeepSpeedZeRoOffload",
                "accelerate zero3, both": "DeepSpeedZeRoOffload",
            }.get(name, "DeepSpeedZeroOptimizer")
            assert set(places["updated"]) == set(places["moments"]) == {"cpu"}
            assert places["moments"]["cpu"] == 2 * places["updated"]["cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2, optimizer", "zero3, both", "fsdp, both"])
def test_a_run_goes_on_with_the_same_losses(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        resumed = of_rank["resume"][name]
        assert resumed["step"] == 1
        assert resumed["losses"] == resumed["expected"]


@pytest.mark.slow
def test_a_model_built_in_shards_begins_with_the_weights_of_a_plain_one(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        built = of_rank["in shards"]
        assert built["num_weights"] > 60 and not built["differing"]
        assert built["largest"] == 0  # elements that a rank has of a parameter outside of its shard
        in_shards, cut_up = built["losses"]
        assert in_shards == cut_up  # and with the same groups of decayed weights


@pytest.mark.slow
def test_a_file_of_the_users_offloads_and_is_held_to_it(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        of_file = of_rank["from a file"]
        expected, of_section = of_rank["runs"]["zero3, both"]
        assert of_file["losses"] == pytest.approx(expected.losses, abs=1e-5)
        of_file["places"]["num_updates"] = 0
        assert of_file["places"] == of_section | {"updated_by": "DeepSpeedCPUAdam"} and of_file["num_updates"] > 0
        assert of_file["nothing"].startswith(f"rank {rank}: deepspeed-zero3 with offload.optimizer = 'cpu'")
        assert "the engine has offload_optimizer False instead of True" in of_file["nothing"]


@pytest.mark.slow
def test_a_setting_that_was_taken_and_did_nothing_is_refused(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        for name, words in {
            "zero1, optimizer": "the engine has cpu_offload False instead of True: DeepSpeed took the setting and did",
            "zero3, both": "offload_optimizer False instead of True; groups updated in main memory False instead of",
            "zero3, one of both": "the engine has offload_param False instead of True; shards made for 'none' instead",
            "zero3, layered": "the engine has elements kept or fetched ahead ",
            "fsdp, layered": "units ask for the weights of others",
            "accelerate zero2, optimizer": "the engine has cpu_offload False instead of True",
            "fsdp, both": "7 of 7 units have OffloadPolicy() instead of CPUOffloadPolicy(pin_memory=False)",
        }.items():
            assert of_rank["nothing"][name].startswith(f"rank {rank}: "), name
            assert words in of_rank["nothing"][name], name


@pytest.mark.slow
def test_what_a_machine_cannot_do_is_refused_on_every_rank(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        said = of_rank["refused"]
        assert said["no libaio"] == "offload.optimizer = 'nvme' cannot be: rank 1: DeepSpeed's async_io finds no libaio"
        assert (
            "groups of weights has 62,336 bytes on each of 2 ranks, and DeepSpeed never writes less"
            in said["too small"]
        )
        assert said["updated by"] == "AdamW"  # of PyTorch, where DeepSpeed's cannot be compiled


@pytest.mark.slow
def test_one_rank_of_a_machine_compiles_for_all(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        together = of_rank["together"]
        assert together["loaded"] == "the operation" and together["waited"]
        failed = "rank 1: the rank that builds 'stub' failed: line 2: error"
        assert together["stale"].startswith("rank 0: a build that was killed left the file ")
        assert together["stale"] == found[0]["together"]["stale"]  # which is shown once
        assert together["said"] == ("line 1\nline 2: error" if rank == 0 else failed)


@pytest.mark.slow
def test_state_in_files_trains_alike_and_its_files_are_counted(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        swap = of_rank["swap"]
        assert swap["files"] == swap["memory"]
        places = swap["places"]
        assert places["moved_by"] == "PartitionedOptimizerSwapper and DeepSpeedZeRoOffload"
        assert places["moments"]["nvme"] == 2 * places["updated"]["nvme"] > 2**20
        assert swap["num_files"] == 3  # one large group: its weights and two moments
        assert swap["num_bytes"] == places["moments"]["nvme"] + places["updated"]["nvme"]
        assert places["parameters"]["nvme"] > 2**20 and places["parameters"]["cpu"] > 0
        assert (
            swap["text"].startswith(f"3 files with {swap['num_bytes']:,} bytes in ") and f"rank{rank}" in swap["text"]
        )
        assert swap["saved"], "the checkpoint has the weights of the run, in files or not"
        assert "cannot be loaded with offload.optimizer = 'nvme'" in swap["resume"]


# --- The section of the configuration -------------------------------------------------------------------------------


def config(strategy: str, offload: dict[str, Any], **more: Any) -> TrainConfig:
    return parse_config({"parallel": {"strategy": strategy}, "offload": offload} | more)


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [
        *((f"deepspeed-zero{stage}", {"optimizer": "cpu"}) for stage in (1, 2, 3)),
        ("deepspeed-zero3", CPU),
        ("deepspeed-zero3", NVME),
        ("deepspeed-zero3", NVME | {"parameters": "cpu"}),
        ("deepspeed-zero3", NVME | {"parameters": "nvme", "buffer_elements": 10}),
        ("deepspeed-zero2", {"optimizer": "cpu", "adam": "deepspeed", "pin_memory": False}),
        ("fsdp", CPU),
        ("fsdp", CPU | {"layered": True}),
        ("deepspeed-zero3", CPU | {"layered": True}),
        ("accelerate-deepspeed-zero1", {"optimizer": "cpu"}),
        ("accelerate-deepspeed-zero3", NVME | {"parameters": "nvme"}),
    ],
)
def test_what_a_strategy_can_offload_is_taken(strategy: str, offload: dict[str, Any]) -> None:
    assert not config(strategy, offload).offload.is_plain


@pytest.mark.parametrize(
    ("strategy", "offload", "words"),
    [
        ("deepspeed-zero2", CPU, "it keeps all weights on the device and would not read this"),
        ("deepspeed-zero1", NVME, "DeepSpeed accepts it, writes no file and stays in main memory"),
        ("fsdp", {"optimizer": "cpu"}, "moves shards of weights, gradients and optimizer state together"),
        ("fsdp", NVME | {"parameters": "nvme"}, "and to main memory only"),
        ("fsdp", CPU | {"adam": "deepspeed"}, "it has PyTorch's; leave it out"),
        ("ddp", {"optimizer": "cpu"}, "'ddp' has whole weights and the optimizer on the device"),
        ("zero1", {"optimizer": "cpu"}, "'zero1' has whole weights and the optimizer on the device"),
        ("zero2", CPU, "'zero2' keeps all weights on the device from forward to backward"),
        ("auto", CPU, "'auto' may choose one that moves nothing off the device"),
        ("accelerate-ddp", CPU, "'accelerate-ddp' has whole weights and the optimizer on the device"),
        ("accelerate-deepspeed-zero2", CPU, "it keeps all weights on the device and would not read this"),
        ("deepspeed-zero3", {"optimizer": "cpu", "layered": True}, "weights that stay on the device do not come to it"),
        ("deepspeed-zero2", CPU | {"layered": True}, "it keeps all weights on the device"),
        ("deepspeed-zero0", {"optimizer": "cpu"}, "has whole optimizer state on every rank"),
        ("deepspeed-zero3", {"parameters": "cpu"}, "as a second copy of the same shards, and nothing would be saved"),
        (
            "deepspeed-zero3",
            NVME | {"optimizer": "cpu", "parameters": "nvme"},
            "main memory would hold the larger part",
        ),
        ("deepspeed-zero3", {"optimizer": "nvme"}, "offload.nvme_path is empty"),
        ("deepspeed-zero3", NVME | {"buffer_count": 3}, "holds 4 tensors at once"),
        ("deepspeed-zero3", NVME | {"buffer_elements": 3}, "no parameters go to nvme"),
        ("deepspeed-zero3", CPU | {"nvme_path": "x"}, "nothing goes to nvme, so nothing reads it"),
        ("deepspeed-zero3", {"pin_memory": False}, "nothing is offloaded, so nothing reads it"),
        ("deepspeed-zero3", {"optimizer": "ram"}, "choose one of none, cpu, nvme"),
        ("deepspeed-zero3", {"optimizer": True}, "choose one of none, cpu, nvme"),
    ],
)
def test_what_would_silently_do_less_is_refused(strategy: str, offload: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(strategy, offload)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "offload", "precision"),
    [
        ({"strategy": "ddp", "compression": "fp16"}, {"optimizer": "cpu"}, "fp32"),
        ({"strategy": "zero2", "gradient_sync": "every", "prefetch": 1}, CPU | {"adam": "deepspeed"}, "bf16"),
        ({"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"optimizer": "cpu"}, "bf16_pure"),
        ({"strategy": "zero1"}, NVME, "bf16"),
        ({"strategy": "deepspeed-zero0"}, {"optimizer": "cpu"}, "fp32"),
        ({"strategy": "zero2", "prefetch": 1}, CPU | {"layered": True}, "bf16"),
    ],
)
def test_what_a_refusal_proposes_is_taken(parallel: dict[str, Any], offload: dict[str, Any], precision: str) -> None:
    table = {"parallel": parallel, "offload": offload, "train": {"precision": precision, "accumulation_steps": 2}}
    with pytest.raises(ConfigError) as caught:
        parse_config(table)
    said = next(problem for problem in caught.value.problems if problem.startswith("offload."))
    ways = said.rpartition("; choose ")[2].split(", or ")
    assert len(ways) == (1 if "nvme_path" in offload else 2)
    for way in ways:
        kept = {key: value for key, value in parallel.items() if f"parallel.{key}" not in way.partition(" without ")[2]}
        changes = dict(re.findall(r"(\w+\.\w+) = '(\w+)'", way))
        run = parse_config({**table, "parallel": kept}, {"parallel.strategy": way.split("'")[1], **changes})
        assert run.offload.optimizer == offload["optimizer"]


@pytest.mark.parametrize(("strategy", "parameters"), [("fsdp", "cpu"), ("deepspeed-zero2", "none")])
def test_who_leaves_files_as_told_is_not_told_to_leave_their_folder_next(strategy: str, parameters: str) -> None:
    offload = NVME | {"parameters": parameters, "buffer_count": 6}
    with pytest.raises(ConfigError) as caught:
        config(strategy, offload)
    [advice] = re.findall(r"'cpu' without (.+?), or ", str(caught.value))
    left = {f"offload.{name}" for name in offload} & set(advice.split(" and "))
    kept = {name: value for name, value in offload.items() if f"offload.{name}" not in left}
    assert config(strategy, kept | {"optimizer": "cpu"}).offload.optimizer == "cpu"


def test_other_precisions_and_axes_are_refused() -> None:
    with pytest.raises(ConfigError, match="with train.precision = 'bf16_pure'"):
        config("fsdp", CPU, train={"precision": "bf16_pure"})
    with pytest.raises(ConfigError, match="with tp = 2, cp = 1, pp = 1: shards of parts off the device"):
        parse_config({"parallel": {"strategy": "fsdp", "tp": 2}, "offload": CPU})
    with pytest.raises(ConfigError, match="'zero2' keeps all weights"):
        zero2 = parse_config({"parallel": {"strategy": "zero2"}}).parallel
        apply_strategy(torch.nn.Linear(2, 2), zero2, ALONE, offload=OffloadConfig(optimizer="cpu", parameters="cpu"))


def test_a_file_of_the_users_and_the_section_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match="an engine is given that file alone; say it there"):
        parse_config({"parallel": {"strategy": "deepspeed-zero3", "deepspeed_config": "ds.json"}, "offload": CPU})


def test_a_file_is_read_as_the_section_that_says_the_same() -> None:
    for strategy, offload in (
        ("deepspeed-zero2", {"optimizer": "cpu"}),
        ("deepspeed-zero3", CPU),
        ("deepspeed-zero3", CPU | {"layered": True}),
        ("deepspeed-zero3", NVME | {"parameters": "nvme", "buffer_elements": 10, "layered": True}),
    ):
        of_run = config(strategy, offload | {"pin_memory": False})
        settings = build_deepspeed_settings(of_run)
        assert read_offload(settings) == of_run.offload
        without = {key: value for key, value in settings.items() if key != "zero_force_ds_cpu_optimizer"}
        assert read_offload(without) == dataclasses.replace(of_run.offload, adam="deepspeed")
        assert read_offload(without | {"optimizer": {"params": {"torch_adam": True}}}) == of_run.offload
    assert read_offload(build_deepspeed_settings(config("deepspeed-zero3", {}))).is_plain


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "a run moves all of the optimizer's state, or none"),
        (
            {"offload_param": {"device": "cpu"}},
            "in the words of [offload]: offload.parameters = 'cpu' with offload.opt",
        ),
        (
            {part: {"device": "nvme", "nvme_path": f"/{part}"} for part in ("offload_optimizer", "offload_param")},
            "name one folder in both",
        ),
    ],
)
def test_what_a_file_would_move_and_a_run_could_not_prove_is_refused(zero: dict[str, Any], words: str) -> None:
    run = Run(config("deepspeed-zero3", {}), 2, 64)
    (said,) = find_deepspeed_problems({"zero_optimization": {"stage": 3, **zero}}, run)
    assert words in said


def test_whole_gradients_or_prefetching_beside_one_layer_at_a_time_are_refused() -> None:
    of_run = {"train": {"accumulation_steps": 2}, "offload": CPU | {"layered": True}}
    with pytest.raises(ConfigError, match="whole gradients of all layers would stay on the device"):
        parse_config({"parallel": {"strategy": "fsdp"}, **of_run})
    assert parse_config({"parallel": {"strategy": "fsdp", "gradient_sync": "every"}, **of_run}).offload.layered
    assert parse_config({"parallel": {"strategy": "deepspeed-zero3"}, **of_run}).offload.layered
    with pytest.raises(ConfigError, match="offload.layered = true with parallel.prefetch = 1"):
        parse_config({"parallel": {"strategy": "fsdp", "prefetch": 1}, "offload": CPU | {"layered": True}})


def test_deepspeeds_settings_say_what_is_offloaded() -> None:
    zero = build_deepspeed_settings(config("deepspeed-zero2", {"optimizer": "cpu"}))
    pins = torch.cuda.is_available()
    assert zero["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": pins}
    assert "offload_param" not in zero["zero_optimization"] and zero["zero_force_ds_cpu_optimizer"] is False
    both = NVME | {"parameters": "nvme", "buffer_count": 6, "buffer_elements": 10, "pin_memory": False}
    zero = build_deepspeed_settings(config("deepspeed-zero3", both))["zero_optimization"]
    shared = {"device": "nvme", "nvme_path": "/somewhere", "buffer_count": 6, "pin_memory": False}
    assert zero["offload_optimizer"] == shared
    assert zero["offload_param"] == shared | {"buffer_size": 10, "max_in_cpu": 0}
    assert zero["stage3_prefetch_bucket_size"] == zero["stage3_max_live_parameters"] == 0
    assert "offload_optimizer" not in build_deepspeed_settings(config("deepspeed-zero3", {}))["zero_optimization"]


# --- Files ----------------------------------------------------------------------------------------------------------


class StubAsyncIO:
    """Stands for DeepSpeed's `AsyncIOBuilder`."""

    name = "async_io"

    def __init__(self, has_libaio: bool) -> None:
        self.has_libaio = has_libaio

    def is_compatible(self, verbose: bool) -> bool:
        return self.has_libaio


def test_a_machine_without_libaio_names_the_package(tmp_path: Path) -> None:
    said = find_nvme_problem(str(tmp_path), StubAsyncIO(has_libaio=False))
    assert said.startswith("DeepSpeed's async_io finds no libaio") and "libaio-dev (Debian, Ubuntu)" in said
    assert "\n" not in said


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this operating system has no O_DIRECT")
def test_a_folder_that_takes_no_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written to" in find_folder_problem(tmp_path / "file" / "folder")
    real = os.open

    def refuse_direct(path: str, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse_direct)
    assert "its file system takes no direct I/O" in find_folder_problem(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_weights_and_moments_count_as_proof(tmp_path: Path) -> None:
    folder = tmp_path / "zero_stage_3" / "optimizer" / "rank1"
    folder.mkdir(parents=True)
    sizes = {"1_9": 40, "exp_avg-1_9": 40, "exp_avg_sq-1_9": 40, "1_9_gradient_0_10": 7}
    for name, size in sizes.items():
        (folder / f"{name}.tensor.swp").write_bytes(bytes(size))
    files = count_swap_files(folder)
    assert (files.num_files, files.weight_bytes, files.moment_bytes, files.num_bytes) == (3, 40, 80, 120)
    check_swap_files(files, 1)
    clear_swap_folder(str(tmp_path), 1)
    empty = count_swap_files(folder)
    assert empty == SwapFiles(folder, 0, 0, 0)
    for missing in (empty, SwapFiles(folder, 1, 40, 0)):
        with pytest.raises(RuntimeError, match="rank 1: offload.optimizer = 'nvme', but .* are moments: weights and"):
            check_swap_files(missing, 1)


def test_a_model_too_small_for_files_is_refused() -> None:
    assert check_swappable("optimizer", [2**19, 2**18 - 1, 10], 2, 0) == 1
    with pytest.raises(ValueError, match=r"largest of 2 groups of weights has 1,048,572 bytes on each of 2 ranks"):
        check_swappable("optimizer", [2**19 - 2, 10], 2, 0)
    with pytest.raises(
        ValueError, match=r"offload.parameters = 'nvme': the largest of 1 weights has 8 bytes on each of 4"
    ):
        check_swappable("parameters", [8], 4, 0)


# --- Places, with the meta device in the place of a GPU's memory -----------------------------------------------------

ON_META = Ranks(rank=0, local_rank=0, world_size=2, device=torch.device("meta"), backend="none")


def stub_engine(*, updated: str, moments: str, moves: bool = True) -> Any:
    """Return what `engine_places` looks at in a ZeRO-2 engine; tensors lie on the devices named."""
    part = torch.zeros(8, device=updated)
    state = {key: torch.zeros(8, device=moments) for key in ("exp_avg", "exp_avg_sq")}
    adam = torch.optim.AdamW([torch.nn.Parameter(part)])
    adam.state[part] = state | {"step": torch.zeros(())}
    optimizer = SimpleNamespace(cpu_offload=moves, single_partition_of_fp32_groups=[part], optimizer=adam)
    module = torch.nn.Linear(2, 2, device="meta")
    return SimpleNamespace(zero_optimization_stage=lambda: 2, module=module, optimizer=optimizer)


def test_weights_that_stayed_on_the_device_are_refused() -> None:
    offload = OffloadConfig(optimizer="cpu")
    check_engine_offload(stub_engine(updated="cpu", moments="cpu"), offload, "AdamW", ON_META)
    with pytest.raises(RuntimeError, match="the engine has 32 bytes of weights in the optimizer on 'meta': DeepSpeed"):
        check_engine_offload(stub_engine(updated="meta", moments="cpu"), offload, "AdamW", ON_META)
    with pytest.raises(RuntimeError, match="updates by 'AdamW' instead of 'DeepSpeedCPUAdam'"):
        check_engine_offload(stub_engine(updated="cpu", moments="cpu"), offload, "DeepSpeedCPUAdam", ON_META)
    with pytest.raises(RuntimeError, match="cpu_offload True instead of False; 32 bytes of weights .* on 'cpu'"):
        check_engine_offload(stub_engine(updated="cpu", moments="cpu"), OffloadConfig(), "AdamW", ON_META)


def test_moments_that_the_first_step_made_elsewhere_are_refused() -> None:
    offload = OffloadConfig(optimizer="cpu")
    check_after_step(stub_engine(updated="cpu", moments="cpu"), offload, ON_META)
    check_after_step(stub_engine(updated="meta", moments="meta"), OffloadConfig(), ON_META)
    with pytest.raises(RuntimeError, match="made moments of 64 bytes on 'meta', and they must lie on cpu"):
        check_after_step(stub_engine(updated="cpu", moments="meta"), offload, ON_META)
    empty = stub_engine(updated="cpu", moments="cpu")
    empty.optimizer.optimizer.state.clear()
    with pytest.raises(RuntimeError, match="made moments of no bytes"):
        check_after_step(empty, offload, ON_META)


def test_locked_pages_are_asked_of_a_gpu_only() -> None:
    assert build_offload_policy(OffloadConfig(), ALONE) == OffloadPolicy()
    both = OffloadConfig(optimizer="cpu", parameters="cpu")
    assert build_offload_policy(both, ALONE) == CPUOffloadPolicy(pin_memory=False)
    on_gpu = dataclasses.replace(ALONE, device=torch.device("cuda", 0))
    assert build_offload_policy(both, on_gpu) == CPUOffloadPolicy(pin_memory=True)
    unlocked = dataclasses.replace(both, pin_memory=False)
    assert build_offload_policy(unlocked, on_gpu) == CPUOffloadPolicy(pin_memory=False)
