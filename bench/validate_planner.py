"""The planner's errors on published figures, on rows held back from fitting, beside those of other estimators.

    python bench/validate_planner.py FOLDER > bench/validate_planner.md      # about a minute on one core

FOLDER holds playbook_h100.csv, llm_foundry.csv and published.csv. The (model, GPUs) groups of the first two are drawn
into four folds with a fixed seed; constants are fitted on three and judged on the fourth, four times. The package has
what is found on all rows, rounded. Nothing was searched for on rows of published.csv, but they were in view when
torchtitan's bytes of logits were counted and BigScience's fixed bytes and 16-bit gradients chosen: its errors flatter.
The other estimators are the arithmetic of their functions, on what they are told of a plan:

- DeepSpeed: `estimate_zero2_model_states_mem_needs` without offloading, 2 P + 18 P / ranks, P the parameters of one
  tensor- and pipeline-parallel part; it has none for stages 0 and 1, and is not made for most of these rows.
- accelerate: `estimate-memory`'s largest number for training in bfloat16 with Adam, 8 P of the whole model.
- textbook: 16 bytes a parameter of the part (less where ZeRO splits), and Korthikanti's 34 s b h a layer
  over the tensor-parallel degree (2 s b h where layers are recomputed), for the micro-batches in flight.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlmcourse.planner.figure_check import count_within, memory_interval, memory_pairs, predict_memory_bytes
from vlmcourse.planner.figure_rows import PLAYBOOK_SHAPES, read_figures
from vlmcourse.planner.figure_scores import error_summary, mean_regret_pct, mean_spearman
from vlmcourse.planner.figure_software import MIB, NanotronConstants, nanotron
from vlmcourse.planner.figure_values import FigureRow
from vlmcourse.planner.layer_activations import korthikanti_layer_bytes
from vlmcourse.planner.peak import stage_params
from vlmcourse.planner.roofline import Speeds, estimate_tokens_per_s

SEED = 0
NUM_FOLDS = 4
PUBLISHED_GROUPS = ("torchtitan", "BigScience 3D sweep")
FIXED_BYTES = [size * MIB for size in (0, 100, 200, 300, 400, 500, 600, 800)]
SLOW_S = [0.01, 0.02, 0.03, 0.04, 0.06, 0.08]
"""Measured seconds of a layer and a micro-batch from which a host may be what is waited for."""
BOUNDS = {
    "product_fraction": (0.4, 0.9),
    "half_width": (50.0, 2000.0),
    "traffic_passes": (1.0, 12.0),
    "link_fraction": (0.3, 0.9),
    "network_bytes_per_s": (5e9, 50e9),  # a network card of 400 Gbit/s for each GPU
    "network_latency_s": (1e-6, 5e-3),
    "layer_s": (1e-5, 1e-2),
    "hopper_fraction": (0.7, 1.0),
    "pipeline_s": (0.005, 3.0),
}


def with_constants(row: FigureRow, constants: NanotronConstants) -> FigureRow:
    """Return a playbook row whose run has other constants; other rows as they are."""
    if row.run is None or row.group not in PLAYBOOK_SHAPES:
        return row
    return dataclasses.replace(row, run=dataclasses.replace(row.run, software=nanotron(constants, pp=row.run.pp)))


def fold_of(rows: Sequence[FigureRow]) -> list[int]:
    """Return the fold of each row; rows whose plans were chosen for the same are of one fold."""
    choices = sorted({repr(row.choice) for row in rows})
    random.Random(SEED).shuffle(choices)
    folds = {choice: number % NUM_FOLDS for number, choice in enumerate(choices)}
    return [folds[repr(row.choice)] for row in rows]


def fit_memory(rows: Sequence[FigureRow]) -> NanotronConstants:
    """Find nanotron's fixed bytes: least mean error, each at most a half."""

    def score(constants: NanotronConstants) -> float:
        pairs = memory_pairs([with_constants(row, constants) for row in rows])
        return statistics.mean(min(abs(predicted / measured - 1), 0.5) for predicted, measured in pairs)

    return min((dataclasses.replace(NanotronConstants(), fixed_bytes=size) for size in FIXED_BYTES), key=score)


def layer_seconds(row: FigureRow) -> float:
    """Return the measured seconds of a step for each layer and micro-batch of a stage, the bubble's among these."""
    assert row.run is not None and row.tokens_per_s
    run = row.run
    step_s = run.step_tokens / (row.tokens_per_s * run.num_ranks)
    return step_s / ((run.grad_accum_steps + run.pp - 1) * max(run.layers_of_stages()))


def print_kinds(rows: Sequence[FigureRow]) -> None:
    """Print what is left of the error where it were known, or is told by measured seconds, what a run keeps."""
    measured = [(row, memory_interval(row), row.memory_bytes) for row in rows if row.memory_bytes and row.tokens_per_s]
    known = [(row, interval, size) for row, interval, size in measured if interval is not None and size is not None]

    def errors(choose: Callable[[FigureRow, tuple[float, float], float], float]) -> str:
        return _cells(*error_summary([(choose(row, interval, size), size) for row, interval, size in known]))

    def by_time(limit_s: float) -> str:
        return errors(lambda row, interval, _: interval[layer_seconds(row) < limit_s])

    print("\nOf the playbook's rows, all of one kind, median and p90 (%):\n")
    print("| gathered inputs are kept | median (%) | p90 (%) |\n| --- | --- | --- |")
    print(f"| by no run | {errors(lambda _, interval, __: interval[0])} |")
    print(f"| by all runs | {errors(lambda _, interval, __: interval[1])} |")
    print(f"| by runs without a pipeline (the package's rule) | {_cells(*error_summary(memory_pairs(rows)))} |")
    nearer = errors(lambda _, interval, size: min(interval, key=lambda end: abs(end - size)))
    print(f"| by those that are nearer so (this uses the answer) | {nearer} |")
    for limit_s in SLOW_S:
        print(f"| by those that took less than {limit_s} s a layer and micro-batch | {by_time(limit_s)} |")
    inside, number, _ = count_within(rows)
    print(f"\nInside the interval between the first two lines, with 5 % at each end: {inside} of {number} rows.\n")


def fit_speeds(
    rows: Sequence[FigureRow], constants: NanotronConstants, num_tries: int = 400
) -> tuple[Speeds, NanotronConstants]:
    """Find `Speeds` and nanotron's own seconds by a random search: least mean of |log error|, each at most 1.5."""
    rng = random.Random(SEED)
    table = [row for row in rows if row.group in PLAYBOOK_SHAPES]
    sample = rng.sample(table, min(len(table), 200)) + [row for row in rows if row.group not in PLAYBOOK_SHAPES]

    def score(values: dict[str, float]) -> float:
        speeds, with_own = _split_speeds(values, constants)
        errors: list[float] = []
        for row in (with_constants(row, with_own) for row in sample):
            if row.run is not None and row.device is not None and row.tokens_per_s:
                errors.append(abs(math.log(estimate_tokens_per_s(row.run, row.device, speeds) / row.tokens_per_s)))
        return statistics.mean(min(error, 1.5) for error in errors)

    best = {name: math.sqrt(low * high) for name, (low, high) in BOUNDS.items()}
    least = score(best)
    for _ in range(num_tries):
        name = rng.choice(list(BOUNDS))
        low, high = BOUNDS[name]
        tried = best | {name: min(high, max(low, best[name] * math.exp(rng.gauss(0, 0.4))))}
        if (found := score(tried)) < least:
            best, least = tried, found
    return _split_speeds(best, constants)


def _split_speeds(values: dict[str, float], constants: NanotronConstants) -> tuple[Speeds, NanotronConstants]:
    own = {name: values[name] for name in ("layer_s", "pipeline_s")}
    speeds = Speeds(**{name: value for name, value in values.items() if name not in own})
    return speeds, dataclasses.replace(constants, **own)


def deepspeed_bytes(row: FigureRow) -> float | None:
    """Return what DeepSpeed's estimator says of ZeRO-2 on the row's ranks."""
    if row.run is None:
        return None
    num_params = stage_params(row.run, row.stage or 0)
    return 2 * num_params + 18 * num_params / (row.run.dp * row.run.cp)


def accelerate_bytes(row: FigureRow) -> float | None:
    """Return what `accelerate estimate-memory` says of the model, which knows no plan."""
    return None if row.run is None else 8.0 * row.run.num_params


def textbook_bytes(row: FigureRow) -> float | None:
    """Return 16 bytes a parameter and Korthikanti's layers."""
    run = row.run
    if run is None:
        return None
    stage = row.stage or 0
    split = [run.dp * run.cp if run.zero_stage >= at_least else 1 for at_least in (3, 2, 1)]
    state = stage_params(run, stage) * (2 / split[0] + 2 / split[1] + 12 / split[2])
    shape = run.shape
    layer = korthikanti_layer_bytes(run.seq_len // run.cp, run.micro_batch_size, shape.hidden_size, shape.num_heads)
    if run.recompute == "full":
        layer = 2 * run.num_tokens * shape.hidden_size * run.tp
    return state + run.layers_of_stages()[stage] * run.micro_batches_in_flight(stage) * layer / run.tp


def _cells(*numbers: float | None) -> str:
    return " | ".join("n/a" if number is None else f"{number:.1f}" for number in numbers)


def judge(
    rows: Sequence[FigureRow], constants: NanotronConstants, speeds: Speeds
) -> tuple[list[tuple[float, float]], list[tuple[Any, float, float]]]:
    """Return predicted and measured peaks, and choice, predicted and measured tokens/s, of rows."""
    changed = [with_constants(row, constants) for row in rows]
    tokens = [
        (row.choice, estimate_tokens_per_s(row.run, row.device, speeds), row.tokens_per_s)
        for row in changed
        if row.tokens_per_s and row.run is not None and row.device is not None
    ]
    return memory_pairs(changed), tokens


def print_line(name: str, kind: str, pairs: list[tuple[float, float]], tokens: list[tuple[Any, float, float]]) -> None:
    """Print a line of the first table: errors, rank correlation and regret."""
    of_tokens = error_summary([(predicted, measured) for _, predicted, measured in tokens])
    ranked, regret = mean_spearman(tokens), mean_regret_pct(tokens)
    shown = "n/a" if ranked is None else f"{ranked:.2f}"
    numbers = _cells(*error_summary(pairs), *of_tokens)
    print(f"| {name} | {kind} | {len(pairs)} | {len(tokens)} | {numbers} | {shown} | {_cells(regret)} |")


def print_held_back(tables: dict[str, list[FigureRow]]) -> None:
    """Fit on three folds, judge on the fourth, four times; print errors of all rows together, each held back once."""
    held = {name: (list[tuple[float, float]](), list[tuple[Any, float, float]]()) for name in tables}
    for number in range(NUM_FOLDS):
        fitted, judged = {}, {}
        for name, rows in tables.items():
            folds = fold_of(rows)
            fitted[name] = [row for row, fold in zip(rows, folds, strict=True) if fold != number]
            judged[name] = [row for row, fold in zip(rows, folds, strict=True) if fold == number]
        playbook = [row for name in PLAYBOOK_SHAPES for row in fitted[name]]
        speeds, constants = fit_speeds([row for rows in fitted.values() for row in rows], fit_memory(playbook))
        for name, rows in judged.items():
            pairs, tokens = judge(rows, constants, speeds)
            held[name][0].extend(pairs)
            held[name][1].extend(tokens)
    all_pairs = [pair for name in PLAYBOOK_SHAPES for pair in held[name][0]]
    all_tokens = [triple for name in PLAYBOOK_SHAPES for triple in held[name][1]]
    print_line("playbook", "held back", all_pairs, all_tokens)
    for name, (pairs, tokens) in held.items():
        print_line(name, "held back", pairs, tokens)


def print_estimators(parts: dict[str, list[FigureRow]]) -> None:
    """Print the errors of each estimator's peak memory, this planner's with the package's constants."""
    estimators: dict[str, Callable[[FigureRow], float | None]] = {
        "this planner": predict_memory_bytes,
        "DeepSpeed's estimator": deepspeed_bytes,
        "accelerate estimate-memory": accelerate_bytes,
        "16 B a parameter + Korthikanti": textbook_bytes,
    }
    print("| rows | number | estimator | median (%) | p90 (%) |\n| --- | --- | --- | --- | --- |")
    for name, rows in parts.items():
        measured = [row for row in rows if row.memory_bytes]
        for estimator, predict in estimators.items():
            numbers = _cells(*error_summary(memory_pairs(measured, predict)))
            print(f"| {name} | {len(measured)} | {estimator} | {numbers} |")


def main() -> None:
    """Fit, judge and print."""
    folder = Path(sys.argv[1])
    used: dict[str, list[FigureRow]] = {}
    for name in ("playbook_h100", "llm_foundry", "published"):
        used[name] = [row for row in read_figures(folder / f"{name}.csv") if not row.reason]
    tables = {model: [row for row in used["playbook_h100"] if row.group == model] for model in PLAYBOOK_SHAPES}
    tables["llm-foundry"] = used["llm_foundry"]
    print(f"Made by `python bench/validate_planner.py FOLDER`, seed {SEED}. Errors are |predicted / measured - 1|.")
    print("Goals: memory 5 and 15 %, tokens/s 10 and 25 % (median and p90), Spearman 0.95, regret 3 %.\n")
    print(
        "| rows | | peaks | speeds | memory, median (%) | p90 (%) | tokens/s, median (%) | p90 (%) | Spearman | ",
        end="",
    )
    print("regret (%) |\n|" + " --- |" * 10)
    print_held_back(tables)
    published = {name: [row for row in used["published"] if row.group == name] for name in PUBLISHED_GROUPS}
    for name, rows in ({"playbook": used["playbook_h100"]} | tables | published).items():
        kind = "in view" if name in PUBLISHED_GROUPS else "fitted"
        print_line(name, kind, *judge(rows, NanotronConstants(), Speeds()))
    print_kinds(used["playbook_h100"])
    print_estimators({"playbook": used["playbook_h100"]} | published)
    everything = [row for rows in tables.values() for row in rows]
    speeds, constants = fit_speeds(everything, fit_memory(used["playbook_h100"]))
    print(f"\nFound on all rows: `{constants}`, `{speeds}`.\n")
    print(f"The package has: `{NanotronConstants()}`, `{Speeds()}`.")


if __name__ == "__main__":
    main()
