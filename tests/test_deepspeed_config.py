"""A user's ds_config.json: what is wrong with it is said in words, all at once; what is right is given to DeepSpeed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vlmcourse import cli
from vlmcourse.config import ConfigError, parse_config
from vlmcourse.deepspeed_config import (
    Run,
    check_deepspeed_file,
    explain_deepspeed,
    explanation_table,
    find_deepspeed_problems,
    load_deepspeed_json,
    resolve_deepspeed,
)
from vlmcourse.parallel.engines import build_deepspeed_settings, choose_deepspeed_settings
from vlmcourse.strategies import DEEPSPEED

CPU = {"device": "cpu"}
RIGHT: dict[str, Any] = {
    **{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
    **{"gradient_clipping": "auto", "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}},
    **{"bf16": {"enabled": "auto"}, "steps_per_print": 2000, "wall_clock_breakdown": False},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "zero_optimization": {
        **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
        **{"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        **{"stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9},
        **{"stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
        **{"offload_optimizer": {"device": "none", "pin_memory": True}, "offload_param": {"device": "none"}},
    },
}
"""A file as Hugging Face's users have it."""


def make_run(stage: int = 3, world_size: int | None = 2, **tables: dict[str, Any]) -> Run:
    train = {"micro_batch_size": 4, "accumulation_steps": 2} | tables.pop("train", {})
    table = {"parallel": {"strategy": f"deepspeed-zero{stage}"}, "train": train, **tables}
    return Run(parse_config(table), world_size, hidden_size=64)


def zero(**keys: Any) -> dict[str, Any]:
    """Return a file with such keys in zero_optimization, stage 3 unless it says another."""
    return {"zero_optimization": {"stage": 3, **keys}}


WRONG_PLACES: list[tuple[dict[str, Any], str]] = [
    (
        {"stage": 2},
        """stage: it is in a wrong place and would not be read there; it belongs into 'zero_optimization': \
write {"zero_optimization": {"stage": 2}}""",
    ),
    (
        {"overlap_comm": True},
        """overlap_comm: it is in a wrong place and would not be read there; it belongs into \
'zero_optimization': write {"zero_optimization": {"overlap_comm": true}}""",
    ),
    (
        {"offload_optimizer": CPU},
        """offload_optimizer: it is in a wrong place and would not be read there; it belongs \
into 'zero_optimization': write {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}""",
    ),
    (
        {"prefetch_bucket_size": 5},
        """prefetch_bucket_size: it is in a wrong place and would not be read there; it \
belongs into 'zero_optimization': write {"zero_optimization": {"stage3_prefetch_bucket_size": 5}}""",
    ),
    (
        zero(gradient_clipping=1.0),
        """zero_optimization.gradient_clipping: it is in a wrong place and would not be read \
there; it belongs to the top of the file: write {"gradient_clipping": 1.0}""",
    ),
    (
        zero(offload_param={"pipeline_read": True}),
        """zero_optimization.offload_param.pipeline_read: it is in a wrong \
place and would not be read there; it belongs into 'zero_optimization.offload_optimizer': write \
{"zero_optimization": {"offload_optimizer": {"pipeline_read": true}}}""",
    ),
    (
        zero(pin_memory=True),
        """zero_optimization.pin_memory: it is in a wrong place and would not be read there; it \
belongs into 'zero_optimization.offload_param' or into 'zero_optimization.offload_optimizer'""",
    ),
    (
        {"optimizer": {"type": "AdamW", "lr": 1e-3}},
        """optimizer.lr: it is in a wrong place and would not be read there; \
it belongs into 'optimizer.params': write {"optimizer": {"params": {"lr": 0.001}}}""",
    ),
    (
        {"cpu_offload": True},
        """cpu_offload: it is in a wrong place, and of an old version: write "offload_optimizer": \
{"device": "cpu"}""",
    ),
]
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    (
        {"zero_optimisation": {"stage": 2}},
        "zero_optimisation: DeepSpeed 0.19.8 has no such key; did you mean \
'zero_optimization'?",
    ),
    ({"gradient_cliping": 1}, "gradient_cliping: DeepSpeed 0.19.8 has no such key; did you mean 'gradient_clipping'?"),
    (
        zero(stage3_prefetch_bucketsize=5),
        "zero_optimization.stage3_prefetch_bucketsize: DeepSpeed 0.19.8 has no such \
key in 'zero_optimization'; did you mean 'stage3_prefetch_bucket_size'?",
    ),
    (
        {"reduce_buckets_size": 5},
        "reduce_buckets_size: DeepSpeed 0.19.8 has no such key; did you mean \
'reduce_bucket_size', which belongs into 'zero_optimization'?",
    ),
    ({"_comment": "mine"}, "_comment: DeepSpeed 0.19.8 has no such key; leave it out, JSON has no comments"),
    (
        {"max_grad_norm": 1.0},
        "max_grad_norm: DeepSpeed calls it 'gradient_clipping': write {\"gradient_clipping\": 1.0}",
    ),
    (
        {"per_device_train_batch_size": 4},
        "per_device_train_batch_size: DeepSpeed calls it \
'train_micro_batch_size_per_gpu': write {\"train_micro_batch_size_per_gpu\": 4}",
    ),
    ({"amp": {"enabled": True}}, "amp: DeepSpeed 0.19.8 refuses it: Apex is gone; leave it out"),
    (
        zero(mics_shard_size=2),
        "zero_optimization.mics_shard_size: DeepSpeed 0.19.8 refuses it: MiCS is gone; leave it \
out",
    ),
    (
        zero(stage3_gather_fp16_weights_on_model_save=True),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save: \
this is an old name: its name is stage3_gather_16bit_weights_on_model_save now",
    ),
    (
        zero(prefetch_bucket_size=5, stage3_prefetch_bucket_size=6),
        "zero_optimization.prefetch_bucket_size: it is \
another name of 'stage3_prefetch_bucket_size', which is there too; leave one out",
    ),
]
WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    (zero(stage=4), "zero_optimization.stage = 4: must be one of 0, 1, 2, 3"),
    (
        zero(reduce_bucket_size="5e8"),
        'zero_optimization.reduce_bucket_size = "5e8": must be a whole number, 1 or \
greater, not a text',
    ),
    (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size = 0: must be 1 or greater"),
    ({"train_batch_size": "32"}, 'train_batch_size = "32": must be a whole number, 1 or greater, not a text'),
    ({"train_batch_size": 1.5}, "train_batch_size = 1.5: must be a whole number, 1 or greater"),
    (
        {"enabled": True},
        "enabled: DeepSpeed 0.19.8 has no such key; it belongs into one of its sections, such as 'fp16', 'bf16', "
        "'torch_autocast', 'tensorboard'",
    ),
    (zero(sub_group_size=1.5), "zero_optimization.sub_group_size = 1.5: must be a whole number, 0 or greater"),
    (zero(overlap_comm="true"), 'zero_optimization.overlap_comm = "true": must be true or false, not a text'),
    (
        zero(offload_param={"device": "gpu"}),
        'zero_optimization.offload_param.device = "gpu": must be one of none, cpu, \
nvme',
    ),
    (
        zero(offload_optimizer="cpu"),
        'zero_optimization.offload_optimizer = "cpu": must be a table of keys, {...}, not a \
text',
    ),
    (
        {"zero_optimization": True},
        'zero_optimization = true: true and false are an old form; write {"stage": 1}, or \
another stage',
    ),
    (
        zero(sub_group_size="auto"),
        "zero_optimization.sub_group_size = \"auto\": nothing fills it in, see the keys that \
may be 'auto'; write a value (DeepSpeed's own value is 1000000000)",
    ),
    (
        zero(offload_optimizer={"device": "cpu", "ratio": 1.5}),
        "zero_optimization.offload_optimizer.ratio = 1.5: must be \
from 0 to 1",
    ),
]
INCONSISTENT: list[tuple[dict[str, Any], str]] = [
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled and bf16.enabled are both true: weights have \
one format; set one of them to false",
    ),
    (
        zero(stage=1, offload_param=CPU),
        "zero_optimization.offload_param.device = 'cpu' with stage = 1: weights are \
split, and can wait elsewhere, in stage 3 only; raise the stage, or leave it out",
    ),
    (
        zero(stage=0, offload_optimizer=CPU),
        "zero_optimization.offload_optimizer.device = 'cpu' with stage = 0: without \
ZeRO there is no part of the optimizer's state to move; raise the stage, or leave it out",
    ),
    (
        zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}),
        "zero_optimization.offload_optimizer.\
device = 'nvme' with stage = 2: only stage 3 reads and writes a disk; choose 'cpu' without nvme_path, or \
stage 3",
    ),
    (
        zero(offload_param={"device": "nvme"}),
        "zero_optimization.offload_param.device = 'nvme' without nvme_path: name a \
folder on a fast disk",
    ),
    (
        zero(offload_param={"nvme_path": "/fast"}),
        "zero_optimization.offload_param.nvme_path with device = 'none': only \
'nvme' reads it; leave it out",
    ),
    (
        zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        "zero_optimization.offload_optimizer.ratio = 0.5 \
with stage = 2: only stage 3 can offload a part of the state; leave it out",
    ),
    (
        zero(stage=2, stage3_prefetch_bucket_size=7),
        "zero_optimization.stage3_prefetch_bucket_size = 7 with stage = 2: \
only stage 3 reads it; leave it out",
    ),
]
INCONSISTENT += [
    (
        {**zero(stage=3), "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor = 2.0 with stage = 3 and reduce_scatter = true: gradients are summed first there; "
        "set reduce_scatter to false, or leave it out",
    ),
]
INCONSISTENT += [
    (
        zero(stage=1, allgather_bucket_size=4999),
        "zero_optimization.allgather_bucket_size = 4999 with stage = 1: it must be a multiple of 2; make it even",
    ),
]
AGAINST_THE_RUN: list[tuple[dict[str, Any], str]] = [
    (
        zero(stage=2),
        "zero_optimization.stage is 2, and parallel.strategy = 'deepspeed-zero3': set the strategy to \
'deepspeed-zero2', or the stage to 3 or 'auto'",
    ),
    (
        {},
        "zero_optimization.stage is left out, which is 0, and parallel.strategy = 'deepspeed-zero3': set the strategy \
to 'deepspeed-zero0', or the stage to 3 or 'auto'",
    ),
    (
        {**zero(), "train_batch_size": 64},
        "train_batch_size = 64, and train_micro_batch_size_per_gpu x \
gradient_accumulation_steps x ranks = 4 x 2 x 2 = 16: they must be equal; write 'auto' for train_batch_size, or change \
one of the others",
    ),
    (
        {**zero(), "train_micro_batch_size_per_gpu": 1},
        "train_micro_batch_size_per_gpu = 1, and train.micro_batch_size = \
4: make them equal, or write 'auto' in the file",
    ),
    (
        {**zero(), "gradient_accumulation_steps": 1},
        "gradient_accumulation_steps = 1, and train.accumulation_steps = 2: \
make them equal, or write 'auto' in the file",
    ),
    (
        {**zero(), "gradient_clipping": 0.5},
        "gradient_clipping = 0.5, and train.max_grad_norm = 1.0: make them equal, or \
write 'auto' in the file",
    ),
    (
        {**zero(), "optimizer": {"type": "Lamb"}},
        "optimizer.type = 'Lamb': a run trains with AdamW; write 'AdamW', or \
leave the section out",
    ),
    (
        {**zero(), "optimizer": {"params": {"lr": 5e-5}}},
        "optimizer.params.lr = 5e-05, and optimizer.lr_vision = 0.001, \
optimizer.lr_projector = 0.001, optimizer.lr_language = 0.001: make them equal, or write 'auto' in the file",
    ),
    (
        {**zero(), "optimizer": {"params": {"betas": [0.9, 0.999]}}},
        "optimizer.params.betas = [0.9, 0.999], and \
[optimizer.beta1, optimizer.beta2] = [0.9, 0.95]: make them equal, or write 'auto' in the file",
    ),
    (
        {**zero(), "optimizer": {"params": {"adam_w_mode": False}}},
        "optimizer.params.adam_w_mode = False: a run's AdamW \
does not do it; leave it out",
    ),
    (
        {**zero(), "scheduler": {"type": "WarmupLR"}},
        "scheduler: a run's rates follow [optimizer] warmup_steps and \
min_lr_fraction, which no scheduler of DeepSpeed's equals; leave the section out, or choose WarmupLR, WarmupDecayLR, \
WarmupCosineLR with no params but these, each 'auto': warmup_min_lr, warmup_max_lr, warmup_num_steps, total_num_steps",
    ),
    (
        {**zero(), "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": 9}}},
        "scheduler: a run's rates follow [optimizer] warmup_steps and \
min_lr_fraction, which no scheduler of DeepSpeed's equals; leave the section out, or choose WarmupLR, WarmupDecayLR, \
WarmupCosineLR with no params but these, each 'auto': warmup_min_lr, warmup_max_lr, warmup_num_steps, total_num_steps",
    ),
    (
        {**zero(), "bf16": {"enabled": True}},
        "bf16.enabled = True: the engines are used in fp32 here; set it to false or \
'auto', or choose 'fsdp' with precision = 'bf16'",
    ),
    (
        {**zero(), "gradient_allreduce_op": "sum"},
        "gradient_allreduce_op = 'sum': the loss is divided for gradients that \
are averaged; leave it out",
    ),
    (
        {**zero(), "activation_checkpointing": {"cpu_checkpointing": True}},
        "activation_checkpointing.cpu_checkpointing = \
True: the model does not call deepspeed.checkpointing, so nothing reads it; leave it out",
    ),
    (
        {**zero(), "tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel.autotp_size = 2: a DeepSpeed engine shares \
samples only here; choose 'fsdp' with parallel.tp",
    ),
    (
        zero(round_robin_gradients=True),
        "zero_optimization.round_robin_gradients = True: whole gradients cannot be gathered under it "
        "(safe_get_full_grad of DeepSpeed 0.19.8 fails); leave it out",
    ),
    (
        zero(zero_quantized_weights=True),
        "zero_optimization.zero_quantized_weights = True: gather weights as 8-bit \
integers (qwZ); no run here does that, and it is not tested; leave it out",
    ),
    (
        zero(zenflow={"topk_ratio": 0.1}),
        "zero_optimization.zenflow: update the most important gradients on the GPU and \
the others later on the CPU; no run here does that, and it is not tested; leave it out",
    ),
    (
        {**zero(), "data_efficiency": {"enabled": True, "anything": 1}},
        "data_efficiency.enabled = True: switch \
data_efficiency on; no run here does that, and it is not tested; leave it out",
    ),
]


@pytest.mark.parametrize(("settings", "sentence"), [*WRONG_PLACES, *UNKNOWN, *WRONG_VALUES, *INCONSISTENT])
def test_a_file_that_is_wrong_in_any_run_is_told_so(settings: dict[str, Any], sentence: str) -> None:
    assert find_deepspeed_problems(settings) == [sentence]


@pytest.mark.parametrize(("settings", "sentence"), AGAINST_THE_RUN)
def test_a_file_that_does_not_fit_a_run_is_told_so(settings: dict[str, Any], sentence: str) -> None:
    assert find_deepspeed_problems(settings, make_run()) == [sentence]


def test_all_problems_come_at_once() -> None:
    everything: dict[str, Any] = {"stage": 2, "gradient_cliping": 1, "gradient_clipping": 9, "train_batch_size": 7}
    everything |= {"zero_optimization": {"stage": 2, "sub_group_size": "big", "offload_param": CPU}}
    with pytest.raises(ConfigError, match=r"my\.json has 7 problems") as caught:
        resolve_deepspeed(everything, make_run(), where="my.json")
    text = str(caught.value)
    for words in ("stage: it is in", "gradient_cliping", "gradient_clipping = 9", "train_batch_size = 7", '= "big"'):
        assert words in text
    assert "parallel.strategy = 'deepspeed-zero3'" in text and "with stage = 2: weights are split" in text


def test_a_file_of_hugging_faces_users_is_filled_in_from_the_run() -> None:
    resolved = resolve_deepspeed(RIGHT, make_run())
    assert "optimizer" not in resolved  # the run brings its own
    assert resolved["train_micro_batch_size_per_gpu"] == 4 and resolved["gradient_accumulation_steps"] == 2
    assert resolved["train_batch_size"] == 16 and resolved["gradient_clipping"] == 1.0
    assert resolved["fp16"]["enabled"] is False and resolved["bf16"] == {"enabled": False}
    sizes = resolved["zero_optimization"]
    assert sizes["reduce_bucket_size"] == 4096 and sizes["stage3_prefetch_bucket_size"] == 3686
    assert sizes["stage3_param_persistence_threshold"] == 640 and sizes["sub_group_size"] == 1e9


def test_what_a_file_leaves_out_of_the_run_is_the_runs() -> None:
    resolved = resolve_deepspeed(zero(), make_run(train={"max_grad_norm": 0.0}))
    assert resolved == {
        **{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4},
        **{"gradient_accumulation_steps": 2, "gradient_clipping": 0.0},  # DeepSpeed's own default is 1.0
    }


def test_null_is_the_runs_value_too() -> None:
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    resolved = resolve_deepspeed({**zero(), **dict.fromkeys(names)}, make_run())
    assert [resolved[name] for name in names] == [4, 2]


def test_counts_that_json_has_as_8_point_0_are_whole_numbers() -> None:
    written = {"train_batch_size": 16.0, "train_micro_batch_size_per_gpu": 4.0, "gradient_accumulation_steps": 2.0}
    written |= {"zero_optimization": {"stage": 3, "sub_group_size": 1e9}, "steps_per_print": None}
    resolved = resolve_deepspeed(written, make_run())
    values = (*(resolved[name] for name in list(written)[:3]), resolved["zero_optimization"]["sub_group_size"])
    assert [repr(value) for value in values] == ["16", "4", "2", "1000000000"]
    [problem] = find_deepspeed_problems({**written, "train_batch_size": 7}, make_run())
    assert "= 4 x 2 x 2 = 16" in problem


def test_a_scheduler_that_is_all_auto_is_left_to_the_run() -> None:
    params = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    moved = {"device": "cpu", "pin_memory": True}  # the documentation's own example has both
    written = {**zero(offload_optimizer=moved), "scheduler": {"type": "WarmupDecayLR", "params": params}}
    resolved = resolve_deepspeed(written, make_run())
    assert "scheduler" not in resolved and resolved["zero_optimization"]["offload_optimizer"] == moved
    rows = explain_deepspeed(written, make_run(optimizer={"warmup_steps": 0}))
    assert {row.name: row.value for row in rows}["scheduler.params.warmup_num_steps"] == 1  # as transformers has it


@pytest.mark.parametrize(
    "section",
    [
        {"type": "Foo", "params": {"warmup_min_lr": "auto"}},
        {"type": "WarmupLR", "params": {"warmup_type": "auto"}},
        {"type": "WarmupLR", "params": {}},
    ],
)
def test_advice_about_a_scheduler_can_be_followed(section: dict[str, Any]) -> None:
    [problem] = find_deepspeed_problems({**zero(), "scheduler": section}, make_run())
    names = problem.partition("each 'auto': ")[2].split(", ")
    for kind in problem.partition("or choose ")[2].partition(" with")[0].split(", "):
        followed = {"type": kind, "params": dict.fromkeys(names, "auto")}
        assert find_deepspeed_problems({**zero(), "scheduler": followed}, make_run()) == []
    rows = explain_deepspeed({"scheduler": section | {"params": {"warmup_min_lr": "auto"}}}, make_run())
    assert all("drops" in row.does for row in rows) and len(rows) == 2


def test_a_refused_stage_is_said_once_and_2_point_0_is_2() -> None:
    for stage in ("3", True, None, 3.5, float("nan"), 4.0):
        tables = zero(stage=stage, offload_param=CPU)
        assert len(find_deepspeed_problems(tables, make_run())) == len(find_deepspeed_problems(tables)) == 1, stage
    assert len(find_deepspeed_problems({"zero_optimization": True}, make_run())) == 1
    written = zero(stage=3.0, stage3_prefetch_bucket_size="auto")
    sizes = resolve_deepspeed(written, make_run())["zero_optimization"]
    assert repr(sizes["stage"]) == "3" and sizes["stage3_prefetch_bucket_size"] == 3686


@pytest.mark.parametrize(
    ("stage", "parts"),
    [
        (0, {"offload_optimizer": CPU}),
        (2, {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}),
        (2, {"offload_param": CPU}),
        (3, {"offload_optimizer": {"device": "nvme"}}),
    ],
)
def test_a_mistake_about_offload_is_said_once_and_in_the_words_of_the_file(stage: int, parts: dict[str, Any]) -> None:
    [problem] = find_deepspeed_problems(zero(stage=stage, **parts), make_run(stage))
    assert problem.startswith("zero_optimization.offload_")


def test_sizes_of_an_unknown_model_are_not_guessed() -> None:
    run = Run(make_run().config, 2)
    with pytest.raises(ConfigError, match="reduce_bucket_size = 'auto': the hidden size of the model is not known"):
        resolve_deepspeed(zero(reduce_bucket_size="auto"), run)
    assert find_deepspeed_problems(zero(reduce_bucket_size="auto"), run) == []  # known when ranks have started


def test_rates_that_differ_by_tower_go_with_auto_and_with_no_number() -> None:
    run = make_run(optimizer={"lr_vision": 1e-4, "lr_language": 2e-4})
    written = {**zero(), "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    assert find_deepspeed_problems(written, run) == []
    written["optimizer"]["params"]["lr"] = 2e-4
    assert len(find_deepspeed_problems(written, run)) == 1


@pytest.mark.parametrize("strategy", DEEPSPEED)
def test_what_is_made_from_a_run_reads_back_as_the_same_run(strategy: str, tmp_path: Path) -> None:
    table = {"train": {"micro_batch_size": 3, "accumulation_steps": 5, "max_grad_norm": 0.25}}
    config = parse_config(table, {"parallel.strategy": strategy})
    made = build_deepspeed_settings(config)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(made), encoding="utf-8")
    again = parse_config(table, {"parallel.strategy": strategy, "parallel.deepspeed_config": str(path)})
    check_deepspeed_file(Run(again, 2, 64))
    assert choose_deepspeed_settings(again, 2, 64) == made == choose_deepspeed_settings(config, 2, 64)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"line 1, column 2: this is not valid JSON .*; comments are not either"),
        ('{"a": 1} // mine', r"line 1, column 10: this is not valid JSON"),
        ("[1]", r"it must hold one table of keys"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', r"stage: it is there twice in the same table"),
        (b"\xff\xfe", r"byte 0 is not UTF-8"),
    ],
)
def test_a_file_that_is_no_table_of_json_is_refused(text: str | bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        load_deepspeed_json(path)
    with pytest.raises(FileNotFoundError, match="give the path"):
        load_deepspeed_json(tmp_path / "none.json")


def test_a_file_is_read_by_deepspeeds_strategies_only() -> None:
    for strategy in ("ddp", "fsdp", "accelerate-ddp"):
        with pytest.raises(
            ConfigError, match=f"deepspeed_config = 'x' with parallel.strategy = '{strategy}': only"
        ) as caught:
            parse_config({"parallel": {"strategy": strategy, "deepspeed_config": "x"}})
        named = set(re.findall(r"'((?:accelerate-)?deepspeed-zero\d)'", str(caught.value)))
        assert named == {
            "deepspeed-zero0",
            "deepspeed-zero3",
            "accelerate-deepspeed-zero1",
            "accelerate-deepspeed-zero3",
        }


# --- Explained --------------------------------------------------------------------------------------------------------


def test_each_key_is_explained_with_its_value_where_that_comes_from_and_the_default() -> None:
    rows = {row.name: row for row in explain_deepspeed(RIGHT, make_run())}
    row = rows["zero_optimization.stage3_param_persistence_threshold"]
    assert (row.value, row.source, row.default) == (640, "auto", 100_000)
    assert (rows["steps_per_print"].value, rows["steps_per_print"].source) == (2000, "file")
    assert "whole on every rank" in row.does
    assert (rows["optimizer.params.lr"].value, rows["optimizer.params.lr"].source) == (1e-3, "auto")
    several = {"lr_vision": 1e-4, "lr_projector": 1e-3, "lr_language": 3e-4}
    (row,) = explain_deepspeed(RIGHT, make_run(optimizer=several), ["optimizer.params.lr"])
    assert row.value == {"vision": 1e-4, "projector": 1e-3, "language": 3e-4}
    assert "vision 0.0001, projector 0.001, language 0.0003" in explanation_table([row])
    without = {row.name: row for row in explain_deepspeed(RIGHT)}
    assert without["train_batch_size"].value == "auto"


def test_auto_is_filled_in_by_the_stage_of_the_file() -> None:
    name = "zero_optimization.stage3_param_persistence_threshold"
    for stage, of_run, value in (
        (3, 2, 640),
        (2, 3, 100_000),
        ("auto", 3, 640),
        ("auto", 2, 100_000),
        (None, 3, 100_000),
    ):
        file = {"stage": stage, "stage3_param_persistence_threshold": "auto"}
        settings = {"zero_optimization": {key: value for key, value in file.items() if value is not None}}
        (row,) = explain_deepspeed(settings, make_run(of_run), [name])
        assert row.value == value, (stage, of_run)
    kept = zero(stage=2, stage3_param_persistence_threshold="auto")
    assert not any("only stage 3 reads it" in problem for problem in find_deepspeed_problems(kept, make_run(3)))


def test_keys_that_are_not_written_can_be_explained_too() -> None:
    names = ["zero_optimization.offload_param", "gradient_clipping", "zero_optimization.offload_optimizer.pin_memory"]
    rows = explain_deepspeed({}, make_run(train={"max_grad_norm": 0.5}), names)
    found = {row.name.rpartition(".")[2]: row for row in rows}
    assert set(found) == {
        *("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "gradient_clipping")
    }
    assert (found["gradient_clipping"].value, found["gradient_clipping"].source) == (0.5, "run")
    assert (found["max_in_cpu"].value, found["max_in_cpu"].source) == (1_000_000_000, "default")
    table = explanation_table(rows)
    assert "1,000,000,000" in table and table.splitlines()[0].split() == [
        "key",
        "value",
        "from",
        "default",
        "what",
        "it",
        "does",
    ]
    with pytest.raises(KeyError, match="DeepSpeed has no such key; write dotted names"):
        explain_deepspeed({}, names=["stage"])


# --- Commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("right.json").write_text(json.dumps(RIGHT), encoding="utf-8")
    Path("wrong.json").write_text(json.dumps({"stage": 2, **zero(stage=2)}), encoding="utf-8")
    Path("run.toml").write_text('[parallel]\nstrategy = "deepspeed-zero3"\n', encoding="utf-8")
    return tmp_path


def test_the_command_explains_a_file_and_then_says_what_is_wrong(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "right.json", "--config", "run.toml", "--nproc", "2"]) == 0
    said = capsys.readouterr().out
    assert "zero_optimization.reduce_bucket_size" in said and "auto" in said
    assert cli.main(["explain", "wrong.json", "--config", "run.toml"]) == 2
    said = capsys.readouterr()
    assert "wrong.json has 2 problems" in said.err and "zero_optimization.stage" in said.out
    assert cli.main(["explain", "wrong.json", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert len(found["problems"]) == 1 and found["keys"][0]["name"] == "zero_optimization.stage"
    assert cli.main(["explain", "right.json", "--nproc", "2"]) == 2
    assert "with --config" in capsys.readouterr().err
    for strategy in ("ddp", "auto", "accelerate-ddp"):
        run = ["--config", "run.toml", "--set", f"parallel.strategy={strategy}", "--nproc", "2"]
        assert cli.main(["train", *run[1:], "--deepspeed", "right.json"]) == 2
        sentence = capsys.readouterr().err.splitlines()[1]
        assert "only DeepSpeed reads it" in sentence
        assert cli.main(["explain", "right.json", *run]) == 2
        assert sentence in capsys.readouterr().err.splitlines()
        assert cli.main(["explain", "right.json", *run, "--json"]) == 2
        assert sentence.removeprefix("  - ") in json.loads(capsys.readouterr().out)["problems"]
    assert cli.main(["explain", "right.json", "--all"]) == 0
    assert "aio.block_size" in capsys.readouterr().out


def test_train_refuses_a_file_before_any_rank_starts(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "run.toml", "--nproc", "2", "--deepspeed", "wrong.json"]) == 2
    said = capsys.readouterr().err
    assert "wrong.json has 2 problems" in said and "set the strategy to 'deepspeed-zero2'" in said
    assert cli.main(["train", "run.toml", "--nproc", "2", "--deepspeed", "none.json"]) == 2
    assert f"There is no file 'none.json' in the folder {str(files)!r}: give the path" in capsys.readouterr().err
    assert cli.main(["explain", str(files)]) == 2
    assert f"{str(files)!r} is a folder: give the path of DeepSpeed's JSON" in capsys.readouterr().err
