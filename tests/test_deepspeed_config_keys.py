"""Every key that DeepSpeed's own code reads is in our table, with its default; 'auto' is what transformers makes."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from vlmcourse.config import parse_config
from vlmcourse.deepspeed_config import AUTO, KEYS, VERSION, Run, resolve_deepspeed
from vlmcourse.deepspeed_config.key import DETAIL, ENGINE, OFF, RUN, Key
from vlmcourse.deepspeed_config.keys import OLD_NAMES, OPEN, REMOVED, SHORT_NAMES

SECTIONS = {
    "zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
    "zero_optimization.offload_param": "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.offload_optimizer": "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.zenflow": "deepspeed.runtime.zenflow.zenflow_config:ZenFlowConfig",
    "zero_optimization.leaf_module": "deepspeed.runtime.zero.leaf_module_config:DeepSpeedZeroLeafModuleConfig",
    "fp16": "deepspeed.runtime.precision_config:DeepSpeedFP16Config",
    "bf16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "comms_logger": "deepspeed.comm.config:CommsLoggerConfig",
    "tensorboard": "deepspeed.monitor.config:TensorBoardConfig",
    "wandb": "deepspeed.monitor.config:WandbConfig",
    "csv_monitor": "deepspeed.monitor.config:CSVConfig",
    "comet": "deepspeed.monitor.config:CometConfig",
    "compile": "deepspeed.compile.config:CompileConfig",
    "timers.throughput": "deepspeed.utils.config:DeepSpeedThroughputTimerConfig",
    "hybrid_engine": "deepspeed.runtime.config:HybridEngineConfig",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config:TPTrainingConfig",
}
"""Section -> the pydantic class that DeepSpeed reads it with."""
NO_JSON = {"tensor_parallel.dtype", "zero_optimization.leaf_module.classes"}
"""Keys whose default is no value of JSON, or a list of modules of other packages."""


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import DeepSpeed when a test runs, and leave no trace of the choice in the environment of others."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return pytest.importorskip("deepspeed")


def load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def own_fields() -> Iterator[tuple[str, Any, str]]:
    """Yield each field of DeepSpeed's classes: dotted name, what pydantic knows of it, the field's name in Python."""
    for section, path in SECTIONS.items():
        for name, field in load(path).model_fields.items():
            yield f"{section}.{field.alias or name}", field, f"{section}.{name}"


class Recorder(dict[str, Any]):
    """A table that notes every key it is asked for, at any depth."""

    asked: typing.ClassVar[set[str]] = set()

    def __init__(self, prefix: str = "", content: dict[str, Any] | None = None) -> None:
        super().__init__(content or {})
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(f"{self.prefix}{key}")
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(f"{self.prefix}{key}")
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(f"{self.prefix}{key}")
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Recorder:
        return self


def test_the_table_is_of_the_installed_version(deepspeed: Any) -> None:
    assert deepspeed.__version__.split("+")[0] == VERSION


def test_every_field_of_deepspeeds_classes_is_in_the_table_under_its_name_or_as_an_old_one() -> None:
    missing = [name for name, _, _ in own_fields() if name not in {**KEYS, **OLD_NAMES}]
    assert missing == []
    other = [python for name, _, python in own_fields() if python != name and name.startswith("zero_optimization")]
    assert sorted(other) == sorted(name for name in SHORT_NAMES if name.startswith("zero_optimization"))


def test_the_table_has_no_key_in_these_sections_that_deepspeed_has_not() -> None:
    real = {name for name, _, _ in own_fields()} | {python for _, _, python in own_fields()}
    ours = [name for name in KEYS if name.rpartition(".")[0] in SECTIONS]
    assert [name for name in ours if name not in real] == []


def test_a_default_and_a_kind_are_deepspeeds() -> None:
    wrong = [
        f"{name}: {problem}"
        for name, field, _ in own_fields()
        if name in KEYS and name not in NO_JSON and (problem := compare(KEYS[name], field))
    ]
    assert wrong == []


def compare(key: Key, field: Any) -> str:
    """Return how a key differs from what pydantic knows of it."""
    default, hint = field.get_default(call_default_factory=True), field.annotation
    if key.kind == "section" or isinstance(default, dict):
        return ""
    if (default.value if isinstance(default, enum.Enum) else default) != key.default:
        return f"the default is {default}"
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        values = {str(each.value) for each in hint}
        return "" if set(key.kind.split("|")) == values else f"it may be {values}"
    kinds = {bool: "bool", int: "count", str: "text", float: "number"}
    if key.kind == "any" or "|" in key.kind or hint not in kinds:
        return ""
    is_same = key.kind == kinds[hint] or {key.kind, kinds[hint]} == {"count", "number"}
    return "" if is_same else f"the kind is {kinds[hint]}"


def test_every_key_that_deepspeed_asks_for_outside_of_these_classes_is_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    Recorder.asked.clear()
    inner = {name for name in KEYS if KEYS[name].kind == "section" and "." not in name}
    plain = {"comms_logger", "weight_quantization", "hybrid_engine", "compile", "zero_optimization", "fp16", "bf16"}
    plain |= {"tensorboard", "wandb", "csv_monitor", "comet", "tensor_parallel", "timers", "datastates_ckpt"}
    plain |= {"expert_parallel", "autotuning", "pipeline", "data_efficiency"}
    content: dict[str, Any] = {name: Recorder(f"{name}.") for name in inner - plain}
    content["checkpoint"]["parallel_write"] = Recorder("checkpoint.parallel_write.")
    content["optimizer"]["type"] = "AdamW"
    content["scheduler"]["type"] = "WarmupLR"
    DeepSpeedConfig(Recorder("", {"train_micro_batch_size_per_gpu": 1, **content}))  # type: ignore[arg-type]
    asked = {name for name in Recorder.asked if not name.startswith(("autotuning.", "data_efficiency."))}
    assert len(asked) > 60
    known = {**KEYS, **OLD_NAMES, **REMOVED, **SHORT_NAMES}
    assert sorted(asked - set(known)) == []


def test_removed_names_are_those_that_deepspeed_refuses() -> None:
    config = importlib.import_module("deepspeed.runtime.config")
    top, zero = config._REMOVED_TOP_LEVEL_CONFIG_KEYS, config._REMOVED_ZERO_CONFIG_KEYS
    assert set(REMOVED) == {*top, *(f"zero_optimization.{name}" for name in zero)}


def test_options_of_optimizers_and_schedulers_are_those_of_deepspeeds_classes() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import lr_schedules

    for kind in (DeepSpeedCPUAdam, FusedAdam):
        options = set(inspect.signature(kind).parameters) - {"model_params", "params"}
        assert {f"optimizer.params.{name}" for name in options} <= set(KEYS)
    for name in lr_schedules.VALID_LR_SCHEDULES:
        options = set(inspect.signature(getattr(lr_schedules, name)).parameters) - {"optimizer"}
        assert {f"scheduler.params.{option}" for option in options} <= set(KEYS)


def test_a_key_says_what_it_does_in_one_sentence() -> None:
    for name, key in KEYS.items():
        assert key.role in (RUN, ENGINE, DETAIL, OFF), name
        assert 5 <= len(key.does) <= 100 and not key.does.endswith("."), name
    assert all(name in KEYS for name in (*AUTO, *OPEN, *SHORT_NAMES.values()))


def test_auto_becomes_what_transformers_makes_of_it() -> None:
    pytest.importorskip("accelerate")
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    written: dict[str, Any] = {}
    from_accelerate = ("device", "nvme_path", "stage", "stage3_gather_16bit_weights_on_model_save")
    names = [name for name in AUTO if name.rpartition(".")[2] not in from_accelerate]
    for name in names:
        table, parts = written, name.split(".")
        for part in parts[:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = "auto"
    for stage in (2, 3):
        written["zero_optimization"]["stage"] = stage
        theirs = integration.HfTrainerDeepSpeedConfig(json.loads(json.dumps(written)))
        optimizer = {"beta1": 0.8, "beta2": 0.97, "eps": 1e-7, "weight_decay": 0.02, "warmup_steps": 7}
        optimizer |= dict.fromkeys(("lr_vision", "lr_projector", "lr_language"), 3e-4)
        train = {"micro_batch_size": 3, "accumulation_steps": 4, "max_grad_norm": 0.7, "num_steps": 90}
        parallel = {"strategy": f"deepspeed-zero{stage}"}
        config = parse_config({"train": train, "optimizer": optimizer, "parallel": parallel})
        arguments = types.SimpleNamespace(
            **{"world_size": 5, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
            **{"max_grad_norm": 0.7, "learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.97},
            **{"adam_epsilon": 1e-7, "weight_decay": 0.02, "save_on_each_node": False, "fp16": False, "bf16": False},
            **{"fp16_full_eval": False, "bf16_full_eval": False, "get_warmup_steps": lambda steps: 7},
        )
        theirs.trainer_config_process(arguments)
        model = types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=96))
        theirs.trainer_config_finalize(arguments, model, 90)
        run = Run(config, world_size=5, hidden_size=96)
        for name in names:
            expected = theirs.get_value(name)
            if expected == "auto":  # below stage 3 DeepSpeed drops it, and takes its default
                expected = KEYS[name].default
            assert AUTO[name](run) == expected, (stage, name)
        ours = resolve_deepspeed(written, run)
        assert "auto" not in json.dumps(ours)
        assert ours["train_batch_size"] == 60 and ours["zero_optimization"]["reduce_bucket_size"] == 96 * 96


def test_a_run_is_not_changed_by_reading() -> None:
    written = {"zero_optimization": {"stage": "auto"}}
    config = parse_config({"parallel": {"strategy": "deepspeed-zero1"}})
    assert resolve_deepspeed(written, Run(config))["zero_optimization"] == {"stage": 1}
    assert written == {"zero_optimization": {"stage": "auto"}}
