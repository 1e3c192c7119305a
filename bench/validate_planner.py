"""The planner's errors on published figures, on rows held back from fitting, beside those of other estimators.

    python bench/validate_planner.py FOLDER > bench/validate_planner.md      # half a minute on one core

FOLDER holds playbook_h100.csv, llm_foundry.csv and published.csv. Half of the (model, GPUs) groups of the playbook and
of llm-foundry, drawn with a fixed seed, are fitted to; the constants found there are printed, and the package has
those, rounded. The other estimators are the arithmetic of their functions, on what they are told of a plan:

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

from vlmcourse.planner.figure_check import memory_pairs, predict_memory_bytes, predict_tokens_per_s
from vlmcourse.planner.figure_rows import PLAYBOOK_SHAPES, read_figures
from vlmcourse.planner.figure_scores import error_summary, mean_regret_pct, mean_spearman
from vlmcourse.planner.figure_software import MIB, NanotronConstants, SweepRule, nanotron
from vlmcourse.planner.figure_values import FigureRow
from vlmcourse.planner.layer_activations import korthikanti_layer_bytes
from vlmcourse.planner.peak import stage_params
from vlmcourse.planner.roofline import Speeds, estimate_tokens_per_s

SEED = 0
GRIDS: dict[str, Sequence[float]] = {
    "fixed_bytes": [size * MIB for size in (0, 100, 200, 300, 400, 600)],
    "late_micro_batches": (0.0, 0.4, 0.6, 0.8, 1.0),
    "gathered_after": (1.0, 1.5, 2.0, 2.5, 3.0),
}
RULE_GRIDS: dict[str, Sequence[int]] = {
    "one_stage_below": (128, 256, 512, 1024),
    "two_stages_up_to": (0, 8, 16, 32, 64),
    "four_stages_up_to": (32, 64, 128, 256),
    "more_stages_up_to": (64, 128, 256, 512),
    "pipeline_tp_below": (8, 16, 32, 64),
}
BOUNDS = {
    "product_fraction": (0.4, 0.9),
    "half_width": (50.0, 2000.0),
    "traffic_passes": (1.0, 12.0),
    "link_fraction": (0.3, 0.9),
    "network_bytes_per_s": (5e9, 50e9),  # a network card of 400 Gbit/s for each GPU
    "network_latency_s": (1e-6, 5e-3),
    "layer_s": (1e-5, 1e-2),
    "hopper_fraction": (0.7, 1.0),
    "second_sweep_s": (0.05, 3.0),
}


def with_constants(row: FigureRow, constants: NanotronConstants) -> FigureRow:
    """Return a playbook row whose run has other constants; other rows as they are."""
    run = row.run
    if run is None or row.group not in PLAYBOOK_SHAPES:
        return row
    accum = run.grad_accum_steps
    software = nanotron(constants, tp=run.tp, pp=run.pp, num_gpus=run.num_ranks, grad_accum_steps=accum)
    return dataclasses.replace(row, run=dataclasses.replace(run, software=software))


def hold_back(rows: Sequence[FigureRow]) -> tuple[list[FigureRow], list[FigureRow]]:
    """Split rows in halves by what their plan was chosen for: those to fit to, and those to judge by."""
    choices = sorted({repr(row.choice) for row in rows})
    random.Random(SEED).shuffle(choices)
    fitted = set(choices[: len(choices) // 2])
    return [row for row in rows if repr(row.choice) in fitted], [row for row in rows if repr(row.choice) not in fitted]


def fit_memory(rows: Sequence[FigureRow]) -> NanotronConstants:
    """Find nanotron's constants on a grid, one at a time, three times over: least median + a third of the p90."""

    def score(constants: NanotronConstants) -> float:
        median, p90 = error_summary(memory_pairs([with_constants(row, constants) for row in rows]))
        return (median or 0.0) + (p90 or 0.0) / 3

    best = NanotronConstants()
    for _ in range(3):
        for name, grid in GRIDS.items():
            best = min((dataclasses.replace(best, **{name: value}) for value in grid), key=score)
        for name, grid in RULE_GRIDS.items():
            rules: list[SweepRule] = [dataclasses.replace(best.rule, **{name: value}) for value in grid]
            best = min((dataclasses.replace(best, rule=rule) for rule in rules), key=score)
    return best


def fit_speeds(
    rows: Sequence[FigureRow], constants: NanotronConstants, num_tries: int
) -> tuple[Speeds, NanotronConstants]:
    """Find `Speeds` and nanotron's own seconds by a random search: least mean of |log error|, each at most 1.5."""
    rng = random.Random(SEED)
    table = [row for row in rows if row.group in PLAYBOOK_SHAPES]
    sample = rng.sample(table, min(len(table), 200)) + [row for row in rows if row.group not in PLAYBOOK_SHAPES]

    def score(values: dict[str, float]) -> float:
        speeds, with_sweep = _split_speeds(values, constants)
        errors: list[float] = []
        for row in (with_constants(row, with_sweep) for row in sample):
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
    own = {name: values[name] for name in ("layer_s", "second_sweep_s")}
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


def memory_table(parts: dict[str, Sequence[FigureRow]]) -> list[str]:
    """Return lines: the errors of each estimator on each part, median and 90th percentile."""
    estimators: dict[str, Callable[[FigureRow], float | None]] = {
        "this planner": predict_memory_bytes,
        "DeepSpeed's estimator": deepspeed_bytes,
        "accelerate estimate-memory": accelerate_bytes,
        "16 B a parameter + Korthikanti": textbook_bytes,
    }
    lines = ["| rows | number | estimator | median (%) | p90 (%) |", "| --- | --- | --- | --- | --- |"]
    for name, rows in parts.items():
        measured = [row for row in rows if row.memory_bytes]
        for estimator, predict in estimators.items():
            numbers = _cells(*error_summary(memory_pairs(measured, predict)))
            lines.append(f"| {name} | {len(measured)} | {estimator} | {numbers} |")
    return lines


def tokens_table(parts: dict[str, Sequence[FigureRow]]) -> list[str]:
    """Return lines: the roofline's errors on each part, the rank correlation of plans and the regret."""
    head = "| rows | number | median (%) | p90 (%) | Spearman | regret (%) |"
    lines = [head, "| --- | --- | --- | --- | --- | --- |"]
    for name, rows in parts.items():
        found: list[tuple[Any, float, float]] = [
            (row.choice, predicted, row.tokens_per_s)
            for row in rows
            if row.tokens_per_s and (predicted := predict_tokens_per_s(row)) is not None
        ]
        errors = error_summary([(predicted, measured) for _, predicted, measured in found])
        ranked, regret = mean_spearman(found), mean_regret_pct(found)
        shown = "n/a" if ranked is None else f"{ranked:.2f}"
        lines.append(f"| {name} | {len(found)} | {_cells(*errors)} | {shown} | {_cells(regret)} |")
    return lines


def main() -> None:
    """Fit, judge and print."""
    folder = Path(sys.argv[1])
    files = {name: read_figures(folder / f"{name}.csv") for name in ("playbook_h100", "llm_foundry", "published")}
    used = {name: [row for row in rows if not row.reason] for name, rows in files.items()}
    playbook_fit, playbook_held = hold_back(used["playbook_h100"])
    foundry_fit, foundry_held = hold_back(used["llm_foundry"])
    constants = fit_memory(playbook_fit)
    speeds, constants = fit_speeds([*playbook_fit, *foundry_fit], constants, num_tries=400)
    print(f"Made by `python bench/validate_planner.py FOLDER`, seed {SEED}. Errors are |predicted / measured - 1|.\n")
    print("Goals on rows held back: memory 5 and 15 %, tokens/s 10 and 25 %, Spearman 0.95, regret 3 %.\n")
    print(f"Found on the fitted half: `{constants}`, `{speeds}`.\n")
    print(f"The package has, rounded: `{NanotronConstants()}`, `{Speeds()}`.\n")
    print("Peak memory, with the package's constants:\n")
    parts: dict[str, Sequence[FigureRow]] = {"playbook, fitted": playbook_fit, "playbook, held back": playbook_held}
    by_model = {f"playbook, held back, {m}": [r for r in playbook_held if r.group == m] for m in PLAYBOOK_SHAPES}
    others = {
        group: [row for row in used["published"] if row.group == group]
        for group in ("torchtitan", "BigScience 3D sweep")
    }
    print("\n".join(memory_table(parts | by_model | others)))
    print("\nTokens/s by the roofline, with the package's constants:\n")
    foundry = {"llm-foundry, fitted": foundry_fit, "llm-foundry, held back": foundry_held}
    print("\n".join(tokens_table(parts | foundry | others)))
    best: list[tuple[float, float]] = []
    for row in playbook_held:
        first = dataclasses.replace(constants, rule=SweepRule(**dict.fromkeys(RULE_GRIDS, 10**9)))
        second = dataclasses.replace(constants, rule=SweepRule(**dict.fromkeys(RULE_GRIDS, 0)))
        both = [memory_pairs([with_constants(row, each)]) for each in (first, second)]
        best += [min((pairs[0] for pairs in both), key=lambda pair: abs(pair[0] / pair[1] - 1))]
    print(f"\nIf it were known of which sweep a held-back row is: median and p90 {_cells(*error_summary(best))} %.")


if __name__ == "__main__":
    main()
