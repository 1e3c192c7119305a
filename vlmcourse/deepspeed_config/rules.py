"""Which values of a DeepSpeed configuration do not go together, with each other or with the run's own configuration?

Enters: what `names.read_keys` has read, and a run. Leaves: one sentence for each problem, all of them at once.
DeepSpeed refuses some of these one by one when ranks have started; others it does not notice: a key that nothing reads,
or one that would change the gradients under a Trainer that knows nothing of it.

Source: the checks in DeepSpeed 0.19.8, `runtime/config.py`, `runtime/zero/config.py`, `runtime/engine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vlmcourse.deepspeed_config.auto import AUTO, HIDDEN_SIZE_KEYS, Run
from vlmcourse.deepspeed_config.key import OFF
from vlmcourse.deepspeed_config.keys import KEYS
from vlmcourse.deepspeed_config.names import Reading
from vlmcourse.deepspeed_config.zero_keys import STAGE_3_PREFIX
from vlmcourse.strategies import DEEPSPEED

ZERO = "zero_optimization"
ADAM_NAMES = ("adam", "adamw")
"""What DeepSpeed calls AdamW: its Adam decays weights apart from the gradient too, unless told otherwise."""
HARMLESS = {"fp32", "float32"}
"""Formats that may be named where DeepSpeed's default is to choose: a run is in fp32."""
WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""DeepSpeed's schedulers with options that a run can fill in."""
SAME_AS: dict[str, str] = {
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer.params.betas": "[optimizer.beta1, optimizer.beta2]",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
}
"""Keys of the file -> those of the run that must be equal; `AUTO` says what they are."""
REASONS = {
    "fp16": "the engines are used in fp32 here; set it to false or 'auto', or choose 'fsdp' with precision = 'fp16'",
    "bf16": "the engines are used in fp32 here; set it to false or 'auto', or choose 'fsdp' with precision = 'bf16'",
    "torch_autocast": "the engines are used in fp32 here; set it to false",
    "scheduler": (
        "a run's rates follow [optimizer] warmup_steps and min_lr_fraction, which no scheduler of DeepSpeed's equals; "
        f"leave the section out, or choose {', '.join(WARMUPS)} with no params but these, each 'auto': "
        f"{', '.join(name.rpartition('.')[2] for name in AUTO if name.startswith('scheduler.params'))}"
    ),
    "activation_checkpointing": "the model does not call deepspeed.checkpointing, so nothing reads it; leave it out",
    "gradient_allreduce_op": "the loss is divided for gradients that are averaged; leave it out",
    "tensorboard": "a run has its own loggers; set it to false",
    "wandb": "a run has its own loggers; set it to false",
    "comet": "a run has its own loggers; set it to false",
    "csv_monitor": "a run has its own loggers; set it to false",
    "tensor_parallel": "a DeepSpeed engine shares samples only here; choose 'fsdp' with parallel.tp",
    "sequence_parallel_size": "a DeepSpeed engine shares samples only here; choose 'fsdp' with parallel.cp",
    "data_parallel_size": "a DeepSpeed engine shares samples between all ranks here; leave it out",
    "pipeline": "the model is no PipelineModule; leave it out, or choose 'fsdp' with parallel.pp",
    "optimizer.params": "a run's AdamW does not do it; leave it out",
    f"{ZERO}.round_robin_gradients": (
        "whole gradients cannot be gathered under it (safe_get_full_grad of DeepSpeed 0.19.8 fails); leave it out"
    ),
    f"{ZERO}.compute_grad_norm": "a run logs the norm; leave it out",
    f"{ZERO}.elastic_checkpoint": "a run does not save in that format; leave it out",
}
"""Keys and sections that must be off -> why, and what to do; the rest gets `DEFAULT_REASON`."""
DEFAULT_REASON = "no run here does that, and it is not tested; leave it out"


class Values:
    """Values of a file with 'auto' filled in, and DeepSpeed's default for what is left out."""

    def __init__(self, reading: Reading, run: Run | None) -> None:
        self.written = reading.values
        self.sections = reading.sections
        self.refused = reading.refused
        self.filled: dict[str, Any] = {}
        run = run and run.for_file(reading.values)
        for name, value in reading.values.items():
            is_auto = value == "auto" and name in AUTO
            self.filled[name] = value if not is_auto else None if run is None else AUTO[name](run)

    def __getitem__(self, name: str) -> Any:
        found = self.filled.get(name)
        return KEYS[name].default if found is None else found

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None where what stands there is refused, or is 'auto' with no run to fill it in."""
        name = f"{ZERO}.stage"
        is_open = self.written.get(name) == "auto" and self.filled[name] is None
        return None if is_open or self.refused & {ZERO, name} else self[name]

    def says(self, name: str) -> bool:
        """Whether the file itself gives a value, and not null or 'auto'."""
        return self.written.get(name) not in (None, "auto")


def find_inconsistencies(values: Values) -> list[str]:
    """Return which values of a file, each right alone, do not go together."""
    rules = RULES if values.stage is not None else RULES_OF_ANY_STAGE
    return [problem for rule in rules for problem in rule(values)]


def find_contradictions(values: Values, run: Run) -> list[str]:
    """Return where a file and a run's configuration say different things, and what a run here would not do."""
    return [
        *_strategy(values, run),
        *_same_values(values, run),
        *_rate(values, run),
        *_batch(values, run),
        *_off(values),
    ]


# --- Within the file --------------------------------------------------------------------------------------------------


def _precisions(values: Values) -> list[str]:
    if values["fp16.enabled"] is True and values["bf16.enabled"] is True:
        return ["fp16.enabled and bf16.enabled are both true: weights have one format; set one of them to false"]
    return []


def _offload(values: Values) -> list[str]:
    stage, found = values[f"{ZERO}.stage"], []
    for part, least, why in (
        ("offload_param", 3, "weights are split, and can wait elsewhere, in stage 3 only"),
        ("offload_optimizer", 1, "without ZeRO there is no part of the optimizer's state to move"),
    ):
        device = values[f"{ZERO}.{part}.device"]
        said = f"{ZERO}.{part}.device = {device!r}"
        if device != "none" and stage < least:
            found.append(f"{said} with stage = {stage}: {why}; raise the stage, or leave it out")
        if device == "nvme" and least <= stage < 3:
            found.append(
                f"{said} with stage = {stage}: only stage 3 reads and writes a disk; choose "
                "'cpu' without nvme_path, or stage 3"
            )
        if device == "nvme" and not values[f"{ZERO}.{part}.nvme_path"]:
            found.append(f"{said} without nvme_path: name a folder on a fast disk")
        if device != "nvme" and values.says(f"{ZERO}.{part}.nvme_path"):
            found.append(f"{ZERO}.{part}.nvme_path with device = {device!r}: only 'nvme' reads it; leave it out")
    ratio = values[f"{ZERO}.offload_optimizer.ratio"]
    if ratio < 1 and stage != 3:
        found.append(
            f"{ZERO}.offload_optimizer.ratio = {ratio} with stage = {stage}: only stage 3 can offload a part of the "
            "state; leave it out"
        )
    return found


def _unread(values: Values) -> list[str]:
    """Name what stage 3 alone reads where the stage is another."""
    stage = values[f"{ZERO}.stage"]
    if stage == 3:
        return []
    return [
        f"{name} = {values[name]!r} with stage = {stage}: only stage 3 reads it; leave it out"
        for name in values.written
        if name.startswith(STAGE_3_PREFIX) and values.says(name) and values[name] != KEYS[name].default
    ]


def _scaling(values: Values) -> list[str]:
    """Name what a reduce-scatter of gradients cannot do: from stage 2 on DeepSpeed refuses it, when ranks run."""
    stage = values[f"{ZERO}.stage"]
    if stage < 2 or not values[f"{ZERO}.reduce_scatter"]:
        return []
    return [
        f"{name} = {values[name]!r} with stage = {stage} and reduce_scatter = true: gradients are summed first there; "
        "set reduce_scatter to false, or leave it out"
        for name in ("prescale_gradients", "gradient_predivide_factor")
        if values[name] != KEYS[name].default
    ]


def _buckets(values: Values) -> list[str]:
    """Name a size that ZeRO-1 and 2 cannot align."""
    size, stage = values[f"{ZERO}.allgather_bucket_size"], values[f"{ZERO}.stage"]
    if stage not in (1, 2) or size % 2 == 0:
        return []
    return [f"{ZERO}.allgather_bucket_size = {size} with stage = {stage}: it must be a multiple of 2; make it even"]


RULES_OF_ANY_STAGE: tuple[Callable[[Values], list[str]], ...] = (_precisions,)
RULES = (*RULES_OF_ANY_STAGE, _offload, _unread, _scaling, _buckets)


# --- With the run -----------------------------------------------------------------------------------------------------


def _strategy(values: Values, run: Run) -> list[str]:
    strategy, stage = run.config.parallel.strategy, values.stage
    if strategy not in DEEPSPEED or stage in (None, run.stage):
        return []  # a strategy that is not DeepSpeed's is refused by the run's own configuration
    prefix = "" if values.says(f"{ZERO}.stage") else "left out, which is "
    first = strategy.rstrip("0123456789")
    choice = f"{first}{stage}" if f"{first}{stage}" in DEEPSPEED else f"deepspeed-zero{stage}"
    return [
        f"{ZERO}.stage is {prefix}{stage}, and parallel.strategy = {strategy!r}: set the strategy to {choice!r}, or "
        f"the stage to {run.stage} or 'auto'"
    ]


def _same_values(values: Values, run: Run) -> list[str]:
    found = []
    for name, ours in SAME_AS.items():
        expected = AUTO[name](run)
        if values.says(name) and not _are_equal(values.written[name], expected):
            found.append(
                f"{name} = {values.written[name]!r}, and {ours} = {expected!r}: make them equal, or write 'auto' in "
                "the file"
            )
    return found


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_are_equal(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-12)
    return one == other


def _rate(values: Values, run: Run) -> list[str]:
    """Compare the optimizer: its name, and its one rate with the rate of each tower."""
    found, optimizer = [], run.config.optimizer
    kind = values["optimizer.type"]
    if values.says("optimizer.type") and str(kind).lower() not in ADAM_NAMES:
        found.append(f"optimizer.type = {kind!r}: a run trains with AdamW; write 'AdamW', or leave the section out")
    rates = {tower: getattr(optimizer, f"lr_{tower}") for tower in ("vision", "projector", "language")}
    rate = values.written.get("optimizer.params.lr")
    if values.says("optimizer.params.lr") and any(not _are_equal(rate, each) for each in rates.values()):
        theirs = ", ".join(f"optimizer.lr_{tower} = {each!r}" for tower, each in rates.items())
        found.append(f"optimizer.params.lr = {rate!r}, and {theirs}: make them equal, or write 'auto' in the file")
    return found


def _batch(values: Values, run: Run) -> list[str]:
    """Compare the samples of a step with what makes them up: in DeepSpeed all ranks have samples of their own."""
    if not values.says("train_batch_size") or run.world_size is None:
        return []
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    parts: list[Any] = [values.written[name] if values.says(name) else AUTO[name](run) for name in names]
    batch, product = values.written["train_batch_size"], math.prod(map(int, parts)) * run.world_size
    if batch == product:
        return []
    return [
        f"train_batch_size = {batch}, and train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks = "
        f"{parts[0]} x {parts[1]} x {run.world_size} = {product}: they must be equal; write 'auto' for "
        "train_batch_size, or change one of the others"
    ]


def _leaves_rates_to_the_run(values: Values) -> bool:
    """Whether a scheduler has only options that are the run's, 'auto', as Hugging Face's users write it."""
    options = {name: value for name, value in values.written.items() if name.startswith("scheduler.params.")}
    is_warmup = values.written.get("scheduler.type", WARMUPS[0]) in WARMUPS
    return is_warmup and bool(options) and all(value == "auto" and name in AUTO for name, value in options.items())


def _off(values: Values) -> list[str]:
    """Name what is switched on that no run here does."""
    passed = {"scheduler", "scheduler.params", "scheduler.type"} if _leaves_rates_to_the_run(values) else set[str]()
    found = [
        f"{name}: {_reason(name)}"
        for name in sorted(values.sections)
        if KEYS[name].role == OFF and name.count(".") < 2 and name not in passed and not _is_inside_off(name, values)
    ]
    for name, value in values.written.items():
        key = KEYS[name]
        is_on = key.role == OFF and value not in (None, "auto", key.default) and str(value).lower() not in HARMLESS
        if is_on and name not in passed and not _is_inside_off(name, values):
            found.append(f"{name} = {value!r}: {_reason(name)}")
    return found


def _is_inside_off(name: str, values: Values) -> bool:
    """Whether a section around this key is named already."""
    parts = name.split(".")
    around = [".".join(parts[:i]) for i in range(1, len(parts))]
    return any(KEYS[each].role == OFF and each in values.sections for each in around)


def _reason(name: str) -> str:
    parts = name.split(".")
    options = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return next((REASONS[each] for each in options if each in REASONS), f"{KEYS[name].does}; {DEFAULT_REASON}")


def find_unfilled(values: Values) -> list[str]:
    """Return which sizes cannot be filled in, because the model's hidden size is not known."""
    return [
        f"{name} = 'auto': the hidden size of the model is not known; write a number of elements"
        for name in HIDDEN_SIZE_KEYS
        if values.written.get(name) == "auto" and values.filled[name] is None
    ]
