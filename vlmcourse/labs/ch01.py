"""Chapter 1's glue: tables of predictions, examples that are small enough to check, looks at a live run.

Enters: what a cell of the chapter has at hand. Leaves: printed tables, and measurements as plain data that can travel
from the ranks back to the notebook. Everything that a run needs is in the package itself; this only looks at it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import Batch, Sample
from vlmcourse.data.tokenizer import IMAGE_MARKER, load_tokenizer
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.parallel.comm import local_part, max_over_ranks, wait_for_all
from vlmcourse.parallel.fsdp import find_units
from vlmcourse.parallel.holdings import RankHoldings, measure_holdings, watch_inputs
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.timeline import Action, makespan_s
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.train.trainer import Trainer

MAX_SEQ_LEN = 256

# --- Predictions and tables -----------------------------------------------------------------------------------------


def check_prediction(prediction: object, unit: str = "") -> None:
    """Say whether a prediction has been filled in; whether it is right is for the measurement to show.

    Args:
        prediction: a number, or a mapping of names to numbers; None where nothing has been written yet.
        unit: what the numbers are counted in; "" where they have no unit.
    """
    values = dict(prediction) if isinstance(prediction, Mapping) else {"": prediction}
    missing = [name for name, value in values.items() if value is None]
    wrong = [name for name, value in values.items() if value is not None and not is_number(value)]
    if wrong:
        shown = ", ".join(repr(values[name]) for name in wrong)
        without = f", without the unit ({unit})" if unit else ""
        print(f"{shown} is not a number: write plain digits such as 12 or 0.5{without}.")
    if missing:
        which = f" for {', '.join(missing)}" if any(missing) else ""
        print(f"No prediction{which} yet: write a number in place of None and run this cell again.")
        print("Guessing first is half of the learning; the notebook also runs without.")
    if not wrong and not missing:
        noted = ", ".join(f"{name} {guess(value)}".strip() for name, value in values.items())
        print(f"Noted: {noted} {unit}".rstrip() + ".")


def is_number(value: object) -> bool:
    """Tell whether a prediction is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def guess(prediction: object, name: str = "") -> str:
    """Return a prediction as text for a table, "-" where there is no number.

    Args:
        prediction: as in `check_prediction`.
        name: which one of a mapping; one that is spelt otherwise, as `zero_3` for "ZeRO-3", is found too.
    """
    value = prediction
    if isinstance(prediction, Mapping):
        by_plain_name = {_letters_of(key): given for key, given in prediction.items()}
        value = prediction.get(name, by_plain_name.get(_letters_of(name)))
    return f"{value:g}" if is_number(value) else "-"


def _letters_of(name: object) -> str:
    """Return the letters and digits of a name, small."""
    return "".join(filter(str.isalnum, str(name).lower()))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a header: text on the left, numbers on the right, a dash for None.

    Args:
        header: one name a column, with its unit.
        rows: cells; floats are shown in four significant digits, whole numbers with thousands separators.
    """
    shown = [[_as_text(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *shown]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    print(line(header))
    print("-" * (sum(widths) + 2 * (len(widths) - 1)))
    for cells in shown:
        print(line(cells))


def _as_text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.1f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


# --- An example that one process can check --------------------------------------------------------------------------


def load_example(num_samples: int = 8) -> tuple[VLM, Collator, list[Sample]]:
    """Return the tiny model, what turns samples into a batch, and a few short and a few long conversations.

    Args:
        num_samples: how many; the first half has one question each, the rest four.

    Returns:
        The same weights and samples in every process.
    """
    shape, tokenizer, half = get_model("tiny"), load_tokenizer("builtin"), num_samples // 2
    short, long = (DigitsDataset(num_samples, seed=0, split="train", num_turns=turns) for turns in (1, 4))
    return build_model(shape, seed=0), Collator(tokenizer, shape, MAX_SEQ_LEN), [*short[:half], *long[half:]]


def flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters as one vector [parameters], on CPU."""
    return torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the length of the difference over the length of what was expected."""
    return ((got - expected).norm() / expected.norm()).item()


# --- Looking at a run -----------------------------------------------------------------------------------------------


def uneven_shards(model: nn.Module) -> dict[str, float]:
    """Return by how many elements more than an equal part this rank stores of a parameter, where it is not equal."""
    num_ranks = dist.get_world_size()
    excess = {name: local_part(p).numel() - p.numel() / num_ranks for name, p in model.named_parameters()}
    return {name: elements for name, elements in excess.items() if elements}


@contextmanager
def watch_gathered_weights(model: nn.Module) -> Iterator[list[tuple[str, int]]]:
    """Note, before and after every unit but the root, how many bytes of whole weights an FSDP2 model holds.

    A parameter of an FSDP2 model is a `DTensor` (this rank's shard) except while it is gathered; then it is a plain
    tensor. What FSDP gathers ahead for the next unit is not seen, nor embedding and
    output matrix in backward (hooks there would stand in FSDP's way).

    Args:
        model: sharded by `apply_fsdp`.

    Returns:
        A list that fills up as the model runs: names such as "forward vision.blocks.0", and bytes.
    """
    events: list[tuple[str, int]] = []

    def note(text: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            whole = (p for p in model.parameters() if not isinstance(p, DTensor))
            events.append((text, sum(p.numel() * p.element_size() for p in whole)))

        return hook

    units = set(find_units(model))
    handles = []
    for name, module in model.named_modules():
        if module in units:
            handles += [
                module.register_forward_pre_hook(note(f"forward {name}")),
                module.register_forward_hook(note(f"after forward {name}")),
            ]
        if module in units and name.split(".")[-1] not in ("embedding", "lm_head"):
            handles += [
                module.register_full_backward_pre_hook(note(f"before backward {name}")),
                module.register_full_backward_hook(note(f"backward {name}")),
            ]
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


def first_event(events: Sequence[tuple[str, int]], start: str) -> int:
    """Return the index of the first event whose name begins with `start`.

    Raises:
        ValueError: if there is none.
    """
    for index, (name, _) in enumerate(events):
        if name.startswith(start):
            return index
    raise ValueError(f"none of {len(events)} events begins with {start!r}")


# --- Strategies on live ranks ---------------------------------------------------------------------------------------


def report_holdings(trainer: Trainer) -> RankHoldings:
    """Make one optimizer step and return what this rank holds; all ranks must call this."""
    with watch_inputs(trainer.model) as inputs:
        trainer.train_step()
    batches = trainer.load_step(trainer.step - 1)
    return measure_holdings(
        trainer.model, trainer.optimizer, trainer.shape, trainer.place, trainer.parallel, batches, inputs
    )


def record_schedule(
    trainer: Trainer, batches: Sequence[Batch] | None = None, num_steps: int = 4
) -> tuple[list[list[Action]], int]:
    """Run forward and backward of a pipeline a few times and return the fastest pass; all ranks must call this.

    Args:
        trainer: of a pipeline; its weights stay as they are.
        batches: micro-batches to run instead of those of the first step; the same on every rank.
        num_steps: passes that are recorded, after one that is not.

    Returns:
        The actions of every rank, and the most bytes that this rank kept for backward.

    Raises:
        ValueError: if the trainer's model is not a pipeline.
    """
    if not isinstance(trainer.model, PipelinedModel):
        raise ValueError(f"a {type(trainer.model).__name__} has no schedule: set parallel.pp to 2 or more")
    pipeline = trainer.model.pipeline
    micro_batches = trainer.load_step(0) if batches is None else batches
    passes: list[list[list[Action]]] = []
    for number in range(num_steps + 1):
        trainer.optimizer.zero_grad(set_to_none=True)
        pipeline.record = number > 0
        pipeline.forward_backward(micro_batches)
        if pipeline.record:
            passes.append(pipeline.gather_actions())
    pipeline.record = False
    with ActivationMeter() as meter:
        pipeline.forward_backward(micro_batches)
    return min(passes, key=makespan_s), meter.peak_bytes


def time_every_split(
    trainer: Trainer, num_rounds: int = 2, num_steps: int = 2
) -> tuple[dict[tuple[int, ...], float], list[float]]:
    """Move an adaptive pipeline to every split of its layers in turn and time steps there; all ranks must call this.

    The rounds go through the splits in opposite orders, so that a machine that becomes slower hits all of them.

    Args:
        trainer: with `parallel.adaptive` on a pipeline of two stages; it makes real steps.
        num_rounds: times that each split is visited.
        num_steps: steps that are timed at each visit, after one that is not.

    Returns:
        By layers per stage, the fastest step, as long as its slowest rank took; and the losses of all steps made.

    Raises:
        ValueError: if the trainer does not adapt, or has another number of stages.
    """
    scheduler = trainer.scheduler
    if scheduler is None or scheduler.pipeline.num_stages != 2:
        raise ValueError("time_every_split: the trainer needs pp = 2, adaptive = true and a schedule of two stages")
    present, losses = scheduler.pipeline.split, []
    splits = [
        dataclasses.replace(present, layers_per_stage=(first, present.num_layers - first))
        for first in range(1, present.num_layers)
    ]
    fastest_s = dict.fromkeys((split.layers_per_stage for split in splits), math.inf)
    for number in range(num_rounds):
        for split in splits if number % 2 == 0 else splits[::-1]:
            scheduler.move(split)
            losses.append(trainer.train_step().loss)
            for _ in range(num_steps):
                wait_for_all(trainer.ranks)
                report = trainer.train_step()
                losses.append(report.loss)
                slowest_s = max_over_ranks([report.seconds], trainer.ranks)[0]
                fastest_s[split.layers_per_stage] = min(fastest_s[split.layers_per_stage], slowest_s)
    return fastest_s, losses


def deeper_tiny(num_language_layers: int = 6) -> VLMShape:
    """Return tiny's shape with more language layers, so that a pipeline has something to split."""
    tiny = get_model("tiny")
    language = dataclasses.replace(tiny.language, num_layers=num_language_layers)
    return dataclasses.replace(tiny, name="tiny, deeper", language=language)


def odd_tiny(num_heads: int = 5) -> VLMShape:
    """Return tiny's shape with a vision tower of as many heads as asked for, each of 16 channels."""
    tiny = get_model("tiny")
    vision = dataclasses.replace(tiny.vision, num_heads=num_heads, hidden_size=16 * num_heads)
    return dataclasses.replace(tiny, name=f"tiny, {num_heads} vision heads", vision=vision)


def without_picture(sample: Sample) -> Sample:
    """Return the conversation of a sample alone."""
    messages = tuple(
        dataclasses.replace(message, text=message.text.replace(IMAGE_MARKER, "").strip()) for message in sample.messages
    )
    return dataclasses.replace(sample, images=(), messages=messages)
