"""What a rank of a plan holds, as a function and as a widget with a slider for each of its arguments.

Enters: a model, ranks, ZeRO stage, precision, sequence, recomputation, micro-batch, a device. Leaves: a `Calculation`,
whose numbers are the planner's and nothing else; `MemoryCalculator` shows it as a bar and, where a choice cannot be
run, says why in the bar's place. Without a widget manager (a terminal, a notebook on paper) `calculate` does the same.
Chapter 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ipywidgets as widgets

from vlmcourse.labs.memory_bar import draw_bar, draw_problems
from vlmcourse.planner import DEVICES, PRECISIONS, Plan, RankMemory, Workload, check_plan
from vlmcourse.planner.hardware import get_device
from vlmcourse.planner.offload_cost import machine_of, ranks_per_node, show_bytes
from vlmcourse.planner.offload_memory import OFFLOAD_LEVELS, estimate_offloaded_memory, find_level_problem
from vlmcourse.planner.offload_runs import describe_runs
from vlmcourse.presets import CLUSTERS, MODELS, Cluster, VLMShape, get_model
from vlmcourse.recompute import find_policy_problem
from vlmcourse.values import check_counts

NOT_JUDGED = ("memory", "host_memory", "batch", "sharding")
"""Codes of problems that are no reason not to show a bar: it shows them itself, or they were not asked about. What is
wrong with splitting is said here, in the names of this module."""
DEVICES_A_NODE = 8
"""Where no machine is known that has the device."""
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEQ_LENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
RECOMPUTE = ("none", "selective", "every:2", "sqrt", "full")
STAGES = {"0 (DDP)": 0, "1 optimizer": 1, "2 + gradients": 2, "3 + weights": 3}


@dataclass(frozen=True, kw_only=True)
class Calculation:
    """What the fullest rank holds, or why there is no such rank."""

    title: str
    """What was asked, in a line."""
    memory: RankMemory | None
    """None where the choice cannot be run."""
    problems: tuple[str, ...] = ()
    """Why it cannot; empty otherwise."""
    device: str = ""
    limit_bytes: int = 0
    """Memory of the device."""
    node_ranks: int = 1
    """Ranks that share the main memory of one node."""
    node_limit_bytes: int | None = None
    """Main memory of a node of such devices; None where no datasheet says."""
    here: str = ""
    """Where no strategy of this package offloads so: which would, with what changed (`describe_runs`)."""

    @property
    def fits_node(self) -> bool:
        """Whether what lies off the devices of a node has room there, as far as that is known."""
        if self.memory is None or self.node_limit_bytes is None:
            return True
        return self.node_ranks * self.memory.host_total <= self.node_limit_bytes

    @property
    def fits(self) -> bool:
        """Whether there is such a rank, it fits its device, and what it has off it fits main memory."""
        return self.memory is not None and self.memory.device_total <= self.limit_bytes and self.fits_node

    @property
    def note(self) -> str:
        """What lies off the device, and what a run here would want changed for that; "" for nothing."""
        if self.memory is None or not self.memory.host_total:
            return ""
        rank = f"{show_bytes(self.memory.host_total)} of this rank are in main memory"
        node_bytes = show_bytes(self.node_ranks * self.memory.host_total)
        if self.node_limit_bytes is None:
            place = f"on a node with {self.node_ranks} ranks: see that yours has as much"
        else:
            place = f"of a node's {show_bytes(self.node_limit_bytes)}{'' if self.fits_node else ', which is too much'}"
        return f"{rank}, {node_bytes} {place}{'. ' if self.here else ''}{self.here}"

    def __str__(self) -> str:
        """Show every owner and the sum, or every problem."""
        if self.memory is None:
            return "\n".join([self.title, *(f"  cannot be run: {problem}" for problem in self.problems)])
        owners = {owner: size for owner, size in self.memory.by_owner().items() if size}
        lines = [f"  {owner:12}{show_bytes(size):>12}" for owner, size in owners.items()]
        lines.append(f"  {'a rank needs':12}{show_bytes(self.memory.device_total):>12}")
        lines.append(f"  {self.device + ' has':12}{show_bytes(self.limit_bytes):>12}")
        lines.append(f"  it {'fits' if self.fits else 'does not fit'}" + (f"; {self.note}" if self.note else ""))
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        """Show the bar, or the problems in its place."""
        if self.memory is None:
            return draw_problems(self.problems)
        return draw_bar(self.memory.by_owner(), self.device, self.limit_bytes, self.note, fits_node=self.fits_node)


def calculate(
    *,
    model: str = "internvl2-8b",
    ranks: int = 8,
    zero_stage: int = 3,
    precision: str = "bf16_mixed",
    seq_len: int = 2048,
    tiles_per_sample: int = 1,
    recompute: str = "full",
    micro_batch_size: int = 1,
    offload: str = "none",
    device: str = "a100-80",
) -> Calculation:
    """Calculate what the fullest of a number of data-parallel ranks holds; `print` shows it as text.

    Args:
        model: a name in `MODELS`.
        ranks: data-parallel ranks; under ZeRO they split the state, otherwise each has all of it.
        zero_stage: 0 to 3.
        precision: a name in `PRECISIONS`.
        seq_len: tokens of a sample in the language tower, image tokens included.
        tiles_per_sample: tiles of a sample's image.
        recompute: policy of both towers, such as none, full or every:2.
        micro_batch_size: samples of one forward pass.
        offload: a name in `OFFLOAD_LEVELS`: how much of the state lies off the device.
        device: a name in `DEVICES`.

    Returns:
        The numbers, or the problems of a choice that cannot be run: none of them is raised.
    """
    split = f"ZeRO-{zero_stage}" if zero_stage else "DDP"
    off = f", offload {offload}" if offload != "none" else ""
    title = (
        f"{model} on {ranks} x {device}, {split}, {precision}, {seq_len} tokens, {_tiles(tiles_per_sample)}, "
        f"recompute {recompute}, micro-batch {micro_batch_size}{off}"
    )
    try:
        check_counts(1, ranks=ranks)
        if problem := find_policy_problem(recompute):
            raise ValueError(f"recompute = {recompute!r}: {problem}")
        shape, spec = get_model(model), get_device(device)
        workload = Workload(seq_len=seq_len, tiles_per_sample=tiles_per_sample)
        plan = Plan(
            dp_replicate=1 if zero_stage else ranks,
            dp_shard=ranks if zero_stage else 1,
            zero_stage=zero_stage,
            precision=precision,
            micro_batch_size=micro_batch_size,
            recompute_vision=recompute,
            recompute_language=recompute,
        )
        problems = [*_plan_problems(plan, shape, device, workload, offload), *_sample_problems(shape, workload)]
        memory = None if problems else estimate_offloaded_memory(plan, shape, workload, level=offload)[0]
    except ValueError as error:
        return Calculation(title=title, memory=None, problems=tuple(_sentences(str(error))))
    if memory is None:
        return Calculation(title=title, memory=None, problems=tuple(problems))
    result = Calculation(title=title, memory=memory, device=device, limit_bytes=spec.memory_bytes)
    return _place(replace(result, here=describe_runs(plan, offload)), plan)


def _place(result: Calculation, plan: Plan) -> Calculation:
    """Return a calculation with the main memory that its ranks share, by the first machine known with the device."""
    machine = next((machine_of(cluster) for cluster in CLUSTERS.values() if cluster.device == result.device), None)
    if machine is None:
        return replace(result, node_ranks=min(plan.num_ranks, DEVICES_A_NODE))
    return replace(result, node_ranks=ranks_per_node(plan, machine), node_limit_bytes=machine.host_bytes)


def _plan_problems(plan: Plan, shape: VLMShape, device: str, workload: Workload, offload: str) -> list[str]:
    """Return what is wrong with how ranks share the state, or with what leaves the device."""
    cluster = Cluster(name=device, device=device, num_nodes=1, devices_per_node=plan.num_ranks, host_memory_bytes=0)
    found = check_plan(plan, shape, cluster, workload).problems
    problems = [problem.message for problem in found if problem.code not in NOT_JUDGED]
    stage = plan.zero_stage
    if stage and plan.num_ranks == 1 and offload == "none":
        problems.append(f"ZeRO-{stage} splits over 1 rank, which is nothing: raise ranks or set zero_stage=0")
    if problem := find_level_problem(plan, offload):
        problems.append(f"offload = {problem}")
    if offload == "optimizer" and not stage:
        problems.append(
            "offload = 'optimizer' with zero_stage=0: no strategy moves optimizer state that is whole on every rank; "
            "set zero_stage=1 or higher"
        )
    return problems


def _sample_problems(shape: VLMShape, workload: Workload) -> list[str]:
    """Return what is wrong with a sample for this model: no room for its image or for its text."""
    found = []
    num_image_tokens = workload.tiles_per_sample * shape.num_visual_tokens_per_tile
    if num_image_tokens >= workload.seq_len:
        found.append(
            f"seq_len = {workload.seq_len}: {_tiles(workload.tiles_per_sample)} are {num_image_tokens} image tokens, "
            "and the text needs room beside them; raise seq_len or lower tiles_per_sample"
        )
    if workload.seq_len > shape.language.max_seq_len:
        found.append(
            f"seq_len = {workload.seq_len}: the positions of {shape.name} were trained for "
            f"{shape.language.max_seq_len} tokens; lower seq_len"
        )
    return found


def _tiles(number: int) -> str:
    return "1 tile" if number == 1 else f"{number} tiles"


def _sentences(message: str) -> list[str]:
    """Return the problems of an error that lists them, or the error itself."""
    listed = [line.removeprefix("  - ") for line in message.splitlines() if line.startswith("  - ")]
    return listed or [message]


class MemoryCalculator(widgets.VBox):
    """A slider or menu for each argument of `calculate`, and the bar; put it at the end of a cell."""

    def __init__(self, **choices: Any) -> None:
        """Build it.

        Args:
            choices: first values, by the name of an argument of `calculate`; each must be among those of its control.

        Raises:
            ValueError: if there is no such argument, or its control has no such value.
        """
        self.controls: dict[str, Any] = _build_controls()
        """By the name of the argument."""
        self.shown = widgets.HTML()
        for name, value in choices.items():
            if name not in self.controls:
                raise ValueError(f"there is no choice {name!r}: choose among {', '.join(self.controls)}")
            self._check(name, value)
            self.controls[name].value = value
        for control in self.controls.values():
            control.observe(self._update, "value")
        self.result = calculate()
        """What is shown."""
        columns = list(self.controls.values())
        half = -(-len(columns) // 2)
        super().__init__([widgets.HBox([widgets.VBox(columns[:half]), widgets.VBox(columns[half:])]), self.shown])
        self._update()

    def _check(self, name: str, value: Any) -> None:
        control = self.controls[name]
        if isinstance(control, widgets.IntSlider):
            known = range(control.min, control.max + 1)
            rule = f"a whole number from {control.min} to {control.max}"
        else:
            known = [option[1] if isinstance(option, tuple) else option for option in control.options]
            rule = f"one of {', '.join(map(str, known))}"
        if value not in known:
            raise ValueError(f"{name} = {value!r}: must be {rule}")

    def _update(self, _change: object = None) -> None:
        self.result = calculate(**{name: control.value for name, control in self.controls.items()})
        self.shown.value = self.result._repr_html_()


def _build_controls() -> dict[str, Any]:
    """Build one control an argument of `calculate`, at the argument's default."""

    def menu(text: str, options: Any, value: object) -> widgets.Dropdown:
        return widgets.Dropdown(options=options, value=value, description=text, style=style)

    def steps(text: str, options: Any, value: object) -> widgets.SelectionSlider:
        return widgets.SelectionSlider(options=options, value=value, description=text, style=style)

    def slider(text: str, smallest: int, largest: int) -> widgets.IntSlider:
        return widgets.IntSlider(value=1, min=smallest, max=largest, description=text, style=style)

    style = {"description_width": "95px"}
    return {
        "model": menu("model", list(MODELS), "internvl2-8b"),
        "ranks": steps("ranks", RANKS, 8),
        "zero_stage": menu("ZeRO stage", list(STAGES.items()), 3),
        "precision": menu("precision", list(PRECISIONS), "bf16_mixed"),
        "offload": menu("off the device", list(OFFLOAD_LEVELS), "none"),
        "seq_len": steps("tokens", SEQ_LENS, 2048),
        "tiles_per_sample": slider("image tiles", 0, 12),
        "recompute": menu("recompute", list(RECOMPUTE), "full"),
        "micro_batch_size": slider("micro-batch", 1, 32),
        "device": menu("device", list(DEVICES), "a100-80"),
    }
