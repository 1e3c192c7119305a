"""Where weights and optimizer state lie while the device does not need them: on it, in main memory, or in files.

Enters: the section [offload] of a configuration. Leaves: an `OffloadConfig`, and one sentence for each wish that a
strategy would not carry out although the run would look as if it did. No torch: `parallel.engine_offload` and
`parallel.fsdp` carry it out and prove it. Activations are another matter, see [activations]. Chapter 5.

Source: Ren et al. 2021 (ZeRO-Offload), Rajbhandari et al. 2021 (ZeRO-Infinity); DeepSpeed 0.19.8, `runtime/zero/`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from vlmcourse.layout import ParallelConfig
from vlmcourse.strategies import ACCELERATE_DEEPSPEED, DEEPSPEED
from vlmcourse.values import at_least_one, check_types, suggest_choice

PLACES = ("none", "cpu", "nvme")
ADAMS = ("torch", "deepspeed")
CHOICES: dict[str, tuple[str, ...]] = {"optimizer": PLACES, "parameters": PLACES, "adam": ADAMS}
"""What texts of an `OffloadConfig` may be of which there are a few."""
OFFLOADING = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3", *ACCELERATE_DEEPSPEED, "fsdp")
"""Strategies that can move weights or optimizer state off the device."""
PRECISIONS = ("fp32", "bf16", "fp16")
"""Values of train.precision whose weights are fp32 and whose optimizer is PyTorch's own: those offloaded here."""
KEPT = {
    "fsdp": ("strategy", "prefetch", "gradient_sync", "timeout_s"),
    "deepspeed-zero3": ("strategy", "timeout_s"),
}
"""Strategies that are proposed to a run that cannot offload -> what may stay in its section [parallel]."""
ADAM_TENSORS = 4
"""What an update of Adam holds at once for a part of the weights: weights, gradients and two moments."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where the state of training lies while the device does not need it."""

    optimizer: str = "none"
    """Moments, and the fp32 weights that are updated: none (on the device), cpu (in main memory, and updated there) or
    nvme (in files, and updated in main memory; deepspeed-zero3 only). All shards of a rank, always."""
    parameters: str = "none"
    """A rank's shards of the weights: none, cpu or nvme. deepspeed-zero3 and fsdp only, together with `optimizer`."""
    layered: bool = False
    """With `parameters`: one layer's weights at a time come to the device, none ahead of the one that computes. Least
    memory, most waiting; under nvme it is so in any case. What layers keep for backward: see [activations]."""
    nvme_path: str = ""
    """nvme only: a folder on a fast disk of this machine, for several times the bytes of the weights."""
    pin_memory: bool = True
    """Where ranks have a GPU: lock the pages of what lies in main memory, so that copies run beside computation.
    Without a GPU nothing is copied and nothing is locked."""
    buffer_count: int = 5
    """nvme only: tensors that pass through main memory at the same time; Adam needs 4."""
    buffer_elements: int = 100_000_000
    """nvme only, for `parameters`: elements of one such buffer; it must hold a rank's shard of the largest weight."""
    adam: str = "torch"
    """deepspeed strategies only: what updates in main memory: torch (PyTorch's fused AdamW) or deepspeed (its
    DeepSpeedCPUAdam, compiled at first use; torch where there is no compiler)."""

    @property
    def is_plain(self) -> bool:
        """Whether everything stays on the device."""
        return self.optimizer == self.parameters == "none"

    @property
    def uses_nvme(self) -> bool:
        """Whether anything goes to files."""
        return "nvme" in (self.optimizer, self.parameters)

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        if found := check_types(self, "offload", CHOICES):
            return found
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                found.append(f"offload.{name} = {getattr(self, name)!r}: {suggest_choice(getattr(self, name), known)}")
        found += at_least_one(self, "offload", "buffer_count", "buffer_elements")
        return found or [*self._incomplete(), *self._unread()]

    def _incomplete(self) -> list[str]:
        """Return which of these values want another one, one sentence each."""
        found = []
        if self.uses_nvme and not self.nvme_path:
            found.append("offload.nvme_path is empty: 'nvme' writes files; name a folder on a fast disk")
        if self.optimizer == "nvme" and self.buffer_count < ADAM_TENSORS:
            found.append(
                f"offload.buffer_count = {self.buffer_count} with offload.optimizer = 'nvme': an update of Adam holds "
                f"{ADAM_TENSORS} tensors at once (weights, gradients, two moments); set it to {ADAM_TENSORS} or more"
            )
        if self.parameters != "none" and self.optimizer == "none":
            found.append(
                f"offload.parameters = {self.parameters!r} with offload.optimizer = 'none': what is updated would stay "
                "on the device, as a second copy of the same shards, and nothing would be saved; set offload.optimizer "
                f"= {self.parameters!r} too"
            )
        elif self.parameters == "nvme" and self.optimizer == "cpu":
            found.append(
                "offload.parameters = 'nvme' with offload.optimizer = 'cpu': main memory would hold the larger part, "
                "and the weights there anyway; set offload.optimizer = 'nvme' too, or offload.parameters = 'cpu'"
            )
        if self.layered and self.parameters == "none":
            found.append(
                "offload.layered = true with offload.parameters = 'none': weights that stay on the device do not come "
                "to it one layer at a time; set offload.optimizer and offload.parameters too, or leave it out"
            )
        return found

    def _unread(self) -> list[str]:
        """Return which values nothing would read, one sentence each."""
        if self.is_plain:
            names, why = ("nvme_path", "pin_memory", "buffer_count", "buffer_elements", "adam"), "nothing is offloaded"
        elif not self.uses_nvme:
            names, why = ("nvme_path", "buffer_count", "buffer_elements"), "nothing goes to nvme"
        elif self.parameters != "nvme":
            names, why = ("buffer_elements",), "no parameters go to nvme"
        else:
            return []
        return [
            f"offload.{name} = {getattr(self, name)!r}: {why}, so nothing reads it; leave it out"
            for name in names
            if getattr(self, name) != getattr(OffloadConfig, name)
        ]

    def contradictions(
        self, parallel: ParallelConfig, precision: str = "fp32", accumulation_steps: int = 1
    ) -> list[str]:
        """Return which of these wishes the run's strategy or precision would not carry out, one sentence each.

        Args:
            parallel: strategy and degrees.
            precision: `train.precision`.
            accumulation_steps: `train.accumulation_steps`.
        """
        if self.is_plain or self.problems():
            return []
        strategy = parallel.strategy
        if strategy not in OFFLOADING:
            ways = self._ways(parallel, precision, accumulation_steps)
            return [f"{self}: parallel.strategy = {strategy!r} {_why_not(strategy)}; choose {', or '.join(ways)}"]
        if parallel.deepspeed_config:
            return [
                f"{self} with parallel.deepspeed_config = {parallel.deepspeed_config!r}: an engine is given that file "
                "alone; say it there (offload_optimizer, offload_param), or leave the file out"
            ]
        found = self._refused_by_fsdp(parallel) if strategy == "fsdp" else self._refused_by_engine(strategy)
        if self.layered and strategy == "fsdp" and accumulation_steps > 1 and parallel.gradient_sync == "last":
            found.append(
                f"offload.layered = true with train.accumulation_steps = {accumulation_steps} and "
                "parallel.gradient_sync = 'last': whole gradients of all layers would stay on the device until the "
                "last micro-batch; set parallel.gradient_sync = 'every'"
            )
        if precision not in PRECISIONS:
            found.append(
                f"{self} with train.precision = {precision!r}: its weights, scales or master copies are this package's "
                "own, and were never moved to main memory; choose fp32 or bf16, or leave offload out"
            )
        return found

    def _ways(self, parallel: ParallelConfig, precision: str, accumulation_steps: int) -> list[str]:
        """Return what to choose instead so that the choice is not refused in its turn."""
        ways = []
        for strategy, kept in KEPT.items():
            if strategy == "fsdp" and self.uses_nvme:
                continue
            names = [field.name for field in dataclasses.fields(parallel) if field.name not in kept]
            names += ["prefetch"] if self.layered and strategy == "fsdp" else []
            changed = [name for name in names if getattr(parallel, name) != getattr(ParallelConfig, name)]
            needs = []
            if strategy == "fsdp":
                needs += [
                    f"offload.{name} = 'cpu'" for name in ("optimizer", "parameters") if getattr(self, name) != "cpu"
                ]
                needs += ["offload.adam = 'torch'"] if self.adam != "torch" else []
                whole = self.layered and accumulation_steps > 1 and parallel.gradient_sync == "last"
                needs += ["parallel.gradient_sync = 'every'"] if whole else []
                needs += ["train.precision = 'bf16'"] if precision not in PRECISIONS else []
            elif precision != "fp32":
                needs.append("train.precision = 'fp32'")
            with_ = f" with {' and '.join(needs)}" if needs else ""
            joint = " and" if needs else ""
            without = f"{joint} without {' and '.join(f'parallel.{name}' for name in changed)}" if changed else ""
            ways.append(f"{strategy!r}{with_}{without}")
        return ways

    def _refused_by_fsdp(self, parallel: ParallelConfig) -> list[str]:
        found = []
        if self.optimizer != "cpu" or self.parameters != "cpu":
            found.append(
                f"{self} with parallel.strategy = 'fsdp': its CPUOffloadPolicy moves shards of weights, gradients and "
                "optimizer state together, and to main memory only; set offload.optimizer and offload.parameters to "
                f"'cpu'{self._without_files()}, or choose 'deepspeed-zero3'"
            )
        if self.layered and parallel.prefetch:
            found.append(
                f"offload.layered = true with parallel.prefetch = {parallel.prefetch}: weights that are asked for "
                "ahead are a second layer's; leave one of them out"
            )
        if self.adam != "torch":
            found.append(
                f"offload.adam = {self.adam!r} with parallel.strategy = 'fsdp': it has PyTorch's; leave it out"
            )
        if parallel.tp * parallel.pp * parallel.cp > 1:
            found.append(
                f"{self} with tp = {parallel.tp}, cp = {parallel.cp}, pp = {parallel.pp}: shards of parts off the "
                "device are not tested; leave these degrees at 1, or leave offload out"
            )
        return found

    def _without_files(self) -> str:
        """Return what has to go with 'nvme', or nothing would read it; "" where nothing has."""
        names = ("nvme_path", "buffer_count", "buffer_elements") if self.uses_nvme else ()
        left = [f"offload.{name}" for name in names if getattr(self, name) != getattr(OffloadConfig, name)]
        return f" without {' and '.join(left)}" if left else ""

    def _refused_by_engine(self, strategy: str) -> list[str]:
        found = []
        if DEEPSPEED[strategy] < 3 and self.parameters != "none":
            found.append(
                f"offload.parameters = {self.parameters!r} with parallel.strategy = {strategy!r}: it keeps all weights "
                "on the device and would not read this; choose 'deepspeed-zero3', or leave it out"
            )
        if DEEPSPEED[strategy] < 3 and self.optimizer == "nvme":
            found.append(
                f"offload.optimizer = 'nvme' with parallel.strategy = {strategy!r}: DeepSpeed accepts it, writes no "
                f"file and stays in main memory; choose 'cpu'{self._without_files()}, or 'deepspeed-zero3'"
            )
        return found

    def __str__(self) -> str:
        """Show what is offloaded, as the TOML file says it."""
        names = [name for name in ("optimizer", "parameters") if getattr(self, name) != "none"]
        parts = [f"offload.{name} = {getattr(self, name)!r}" for name in names]
        return ", ".join([*parts, *["offload.layered = true"] * self.layered]) or "nothing offloaded"


def _why_not(strategy: str) -> str:
    """Say why a strategy moves nothing off the device."""
    if strategy == "auto":
        return "may choose one that moves nothing off the device"
    if strategy == "zero2":
        return "keeps all weights on the device from forward to backward"
    if strategy == "hsdp":
        return "adds up gradients of several copies, which is not tested from main memory"
    if strategy == "deepspeed-zero0":
        return "has whole optimizer state on every rank, and DeepSpeed would not read this"
    return "has whole weights and the optimizer on the device, and nothing that moves them"
