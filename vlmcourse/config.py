"""A training run as data: TOML in, frozen dataclasses out, every mistake reported at once.

Enters: a TOML file and `section.key=value` overrides. Leaves: a `TrainConfig`. The model shapes that
`model.preset` may name are in `presets.py`, how the ranks share the work is in `layout.py`.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmcourse.batch import describe_batch, effective_batch_size
from vlmcourse.engine_rules import engine_problems
from vlmcourse.layout import CHOICES as PARALLEL_CHOICES
from vlmcourse.layout import ParallelConfig
from vlmcourse.log_config import LOGGING_CHOICES, LoggingConfig
from vlmcourse.precision_rules import PRECISIONS, precision_problems
from vlmcourse.presets import MODELS
from vlmcourse.profile_schedule import ProfileConfig
from vlmcourse.recompute import POLICIES, RECOMPUTING_TOWERS, ActivationsConfig
from vlmcourse.state_offload import CHOICES as OFFLOAD_CHOICES
from vlmcourse.state_offload import OffloadConfig
from vlmcourse.values import (
    ConfigError,
    add_choices,
    at_least_one,
    at_least_zero,
    check_values,
    describe_missing,
    did_you_mean,
    suggest_choice,
)

TOWERS = ("vision", "projector", "language")
LOSS_WEIGHTINGS = ("tokens", "sqrt")
LAST_GROUPS = ("fill", "short", "drop")
DATASETS = ("digits", "llava")
BAD_ROW_POLICIES = ("refuse", "skip")
CHOICES: dict[str, tuple[str, ...]] = {
    "model.preset": tuple(MODELS),
    "data.dataset": DATASETS,
    "data.on_bad_row": BAD_ROW_POLICIES,
    "train.last_group": LAST_GROUPS,
    "train.loss_weighting": LOSS_WEIGHTINGS,
    "train.precision": PRECISIONS,
    **{f"parallel.{name}": known for name, known in PARALLEL_CHOICES.items()},
    **{f"activations.{tower}": POLICIES for tower in RECOMPUTING_TOWERS},
    **{f"offload.{name}": known for name, known in OFFLOAD_CHOICES.items()},
    **{f"logging.{name}": known for name, known in LOGGING_CHOICES.items()},
}
"""What texts may be of which there are a few."""
MAX_SEED = 2**63 - 1
"""TOML's largest integer; torch takes 64 bits, NumPy any number."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes, and the seed everything random in it derives from."""

    name: str = "run"
    output_dir: str = "runs"
    """Parent folder; the run writes to `output_dir/name`."""
    seed: int = 0

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        found = []
        has_separator = "/" in self.name or "\\" in self.name
        if not self.name.strip() or self.name in (".", "..") or has_separator or not self.name.isprintable():
            found.append(f"run.name = {self.name!r}: must be one folder's name, such as 'run', without '/' or '\\'")
        if not 0 <= self.seed <= MAX_SEED:
            found.append(f"run.seed = {self.seed}: must be from 0 to {MAX_SEED}, 2**63 - 1")
        return found


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained, and which of its towers stay frozen."""

    preset: str = "tiny"
    """A name in `presets.MODELS`; ignored when `hf_folder` is set."""
    hf_folder: str = ""
    """A Hugging Face InternVL folder (config.json + safetensors) to start from, transformers' or the original's."""
    freeze: tuple[str, ...] = ()
    """Towers that are not trained: any of vision, projector, language."""

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        found = []
        if not self.hf_folder and self.preset not in MODELS:
            found.append(f"model.preset = {self.preset!r}: {suggest_choice(self.preset, MODELS)}")
        for tower in self.freeze:
            if tower not in TOWERS:
                found.append(f"model.freeze names {tower!r}: {suggest_choice(tower, TOWERS)}")
        if set(TOWERS) <= set(self.freeze):
            found.append("model.freeze names every tower: nothing would train; leave one out")
        return found


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model learns from."""

    dataset: str = "digits"
    """digits (made from scans that ship with scikit-learn) or llava (a JSON/JSONL file and images)."""
    path: str = ""
    """llava only: the conversation file."""
    image_dir: str = ""
    """llava only: the folder that image names in the file are relative to."""
    tokenizer: str = "builtin"
    """builtin (the small one in the package) or a Hugging Face tokenizer folder."""
    on_bad_row: str = "refuse"
    """llava only: refuse (stop and list every bad row) or skip (list them and go on)."""
    num_train_samples: int = 4096
    num_eval_samples: int = 256
    """Held-out samples that exact match is measured on."""
    max_seq_len: int = 256
    """Tokens a sample may have, image tokens included; a longer one is refused."""
    max_tiles_per_image: int = 1
    """1 resizes each image to one tile; more splits large images as InternVL does."""

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        found = []
        if self.dataset not in DATASETS:
            found.append(f"data.dataset = {self.dataset!r}: {suggest_choice(self.dataset, DATASETS)}")
        if self.dataset == "llava" and not self.path:
            found.append("data.path is empty: dataset = 'llava' needs the path of its JSON or JSONL file")
        if self.on_bad_row not in BAD_ROW_POLICIES:
            found.append(f"data.on_bad_row = {self.on_bad_row!r}: {suggest_choice(self.on_bad_row, BAD_ROW_POLICIES)}")
        elif self.dataset == "digits":
            found += [
                f"data.{name} = {getattr(self, name)!r} with dataset = 'digits': only 'llava' reads it; set dataset = "
                "'llava', or leave it out"
                for name in ("path", "image_dir", "on_bad_row")
                if getattr(self, name) != getattr(DataConfig, name)
            ]
        found += at_least_one(self, "data", "num_train_samples", "num_eval_samples", "max_seq_len")
        found += at_least_one(self, "data", "max_tiles_per_image")
        return found


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """How long and in what steps."""

    num_steps: int = 100
    """Optimizer steps."""
    micro_batch_size: int = 8
    """Samples in one forward pass of one rank."""
    accumulation_steps: int = 1
    """Micro-batches a rank adds up before one optimizer step."""
    last_group: str = "fill"
    """What the end of an epoch does where it leaves fewer samples than a step takes: fill (up from the next epoch),
    short (a step of what is left, with fewer micro-batches), drop (leave them out)."""
    loss_weighting: str = "tokens"
    """tokens (all supervised tokens of a step weigh the same) or sqrt (InternVL 2.5's square averaging: those of a
    sample with n of them weigh 1 / sqrt(n))."""
    precision: str = "fp32"
    """fp32; bf16 or fp16 (autocast over fp32 weights, fp16 with a loss scaler); bf16_master or bf16_pure (bf16 weights,
    with fp32 copies in the optimizer or rounded at random); fp8 (8-bit operands of matrix products; not with tp, cp or
    pp, which show a rank other largest elements than one process sees)."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    log_every: int = 20
    """Steps between log rows. A row looks at every gradient, moment and weight once (bench/step_monitor.md)."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates once, at the end. The distributed model itself answers, so no rank needs
    memory for more weights; under parallel.pp each new token takes a pass of whole sequences through all stages."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves once, at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay on disk."""

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        found = at_least_one(self, "train", "num_steps", "micro_batch_size", "accumulation_steps", "log_every")
        found += at_least_one(self, "train", "keep_checkpoints")
        found += at_least_zero(self, "train", "max_grad_norm", "eval_every", "checkpoint_every")
        for name, known in (("last_group", LAST_GROUPS), ("loss_weighting", LOSS_WEIGHTINGS)):
            if getattr(self, name) not in known:
                found.append(f"train.{name} = {getattr(self, name)!r}: {suggest_choice(getattr(self, name), known)}")
        if self.precision not in PRECISIONS:
            found.append(f"train.precision = {self.precision!r}: {suggest_choice(self.precision, PRECISIONS)}")
        return found


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with one learning rate a tower, warm-up and cosine decay."""

    lr_vision: float = 1e-3
    lr_projector: float = 1e-3
    lr_language: float = 1e-3
    weight_decay: float = 0.01
    """Applied to matrices only, not to norms, biases or embeddings of position."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    warmup_steps: int = 10
    """Optimizer steps over which the rates rise linearly from 0."""
    min_lr_fraction: float = 0.1
    """The cosine ends at this fraction of each rate."""

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        rates = ("lr_vision", "lr_projector", "lr_language", "eps")
        return [
            *check_values(self, "optimizer", rates, lambda value: value > 0, "must be greater than 0"),
            *check_values(self, "optimizer", ("beta1", "beta2"), lambda value: 0 <= value < 1, "must be in [0, 1)"),
            *at_least_zero(self, "optimizer", "weight_decay", "warmup_steps"),
            *check_values(
                self, "optimizer", ("min_lr_fraction",), lambda value: 0 <= value <= 1, "must be between 0 and 1"
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a `Trainer` needs; each field is one section of the TOML file."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        found = [problem for section in dataclasses.fields(self) for problem in getattr(self, section.name).problems()]
        found += precision_problems(self.train.precision, self.parallel)
        parallel = self.parallel
        found += self.activations.contradictions(parallel, self.model.freeze)
        found += self.profile.contradictions(self.train.num_steps)
        found += self.offload.contradictions(parallel, self.train.precision, self.train.accumulation_steps)
        found += engine_problems(parallel.strategy, self.train.precision, self.activations, parallel.deepspeed_config)
        if found:
            raise ConfigError("The training configuration", found)


def check_batch(config: TrainConfig, dp_degree: int) -> None:
    """Refuse a step that takes more samples than there are, where their number is known without reading a file.

    Args:
        config: the run.
        dp_degree: ranks with samples of their own.

    Raises:
        ConfigError: naming the keys that do not fit together.
    """
    data, train = config.data, config.train
    sizes = train.micro_batch_size, train.accumulation_steps, dp_degree
    batch = effective_batch_size(*sizes)
    if data.dataset == "digits" and data.num_train_samples < batch:
        problem = (
            f"data.num_train_samples = {data.num_train_samples}: one optimizer step takes "
            f"{describe_batch(*sizes)} samples (train.micro_batch_size x train.accumulation_steps x data-parallel "
            "ranks), and there must be that many; raise it, or lower one of these"
        )
        raise ConfigError("The training configuration", [problem])


def load_config(path: str | Path, overrides: Mapping[str, object] | None = None) -> TrainConfig:
    """Read a TOML training configuration and check all of it.

    Args:
        path: the TOML file.
        overrides: values that win over the file, by dotted name: `{"train.num_steps": 20}`.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: one error that lists every unknown key, wrong type and bad value.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(describe_missing(path, "configuration file", "a TOML file"))
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(str(path), [f"it cannot be read ({error.strerror})"]) from error
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        problem = f"line {line} has a byte that is not UTF-8 (0x{byte:02x}): save it as UTF-8"
        raise ConfigError(str(path), [problem]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), [f"this is not valid TOML: {error}"]) from error
    return parse_config(table, overrides, where=str(path))


def parse_config(
    table: Mapping[str, Any], overrides: Mapping[str, object] | None = None, where: str = "The training configuration"
) -> TrainConfig:
    """Turn nested tables, as `tomllib` gives them, into a checked `TrainConfig`.

    Args:
        table: section name -> key -> value.
        overrides: values that win, by dotted name.
        where: what the error message calls the source.

    Raises:
        ConfigError: one error that lists everything wrong.
    """
    merged: dict[str, Any] = {name: dict(v) if isinstance(v, Mapping) else v for name, v in table.items()}
    found: list[str] = []
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        if not key:
            found.append(f"override {dotted!r}: write it as section.key, such as train.num_steps")
        elif isinstance(merged.setdefault(section, {}), dict):
            merged[section][key] = value
    sections = typing.get_type_hints(TrainConfig)
    built: dict[str, Any] = {}
    for name, values in merged.items():
        if name not in sections:
            found.append(f"[{name}]: there is no such section; {did_you_mean(name, sections)}")
        elif not isinstance(values, Mapping):
            found.append(f"{name} = {values!r}: {name} is a section; write [{name}] and its keys below it")
        else:
            fields = _read_section(sections[name], name, values, found)
            built[name] = sections[name](**fields)
            found += built[name].problems()
    if found:
        raise ConfigError(where, found)
    return TrainConfig(**built)


def _read_section(section: type, name: str, values: Mapping[str, Any], found: list[str]) -> dict[str, Any]:
    """Keep the keys of one table that fit `section`; add a sentence to `found` for each that does not."""
    hints = typing.get_type_hints(section)
    kept = {}
    for key, value in values.items():
        if key not in hints:
            found.append(f"{name}.{key}: there is no such key; {did_you_mean(key, hints)}")
            continue
        try:
            kept[key] = _as_type(value, hints[key])
        except (TypeError, OverflowError) as error:
            choices = add_choices(CHOICES.get(f"{name}.{key}", TOWERS if key == "freeze" else ()))
            found.append(f"{name}.{key} = {value!r}: {error}{choices}")
    return kept


def _as_type(value: object, hint: Any) -> object:
    """Return `value` as `hint` (str, int, float, bool or tuple[str, ...]), refusing silent conversions."""
    if isinstance(hint, types.GenericAlias):
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise TypeError("must be a list of strings")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"must be {hint.__name__}, not {type(value).__name__}")
    return value
