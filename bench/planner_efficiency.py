"""Fit the constants of `planner/efficiency.py` on published runs, and show the errors on runs that were held back.

Usage: python bench/planner_efficiency.py FOLDER > bench/planner_efficiency.md

FOLDER holds llm_foundry.csv (MosaicML's llm-foundry, throughput of MPT models under FSDP) and playbook_h100.csv (the
Ultra-Scale Playbook's table). Constants are fitted on the first file's rows of one node only, in four folds, each
without some (model, device) groups, then on all of them. Rows of several nodes and the other file are never fitted.
MPT's GELU MLP of two matrices is described as a gated one of the same FLOPs and bytes. Takes about two minutes.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from scipy.optimize import minimize

from vlmcourse.planner import Plan, Workload
from vlmcourse.planner.efficiency import AMPERE, HOPPER, Speeds
from vlmcourse.planner.stages import StageSplit
from vlmcourse.planner.step_settings import StepSettings
from vlmcourse.planner.step_time import decoder_alone, estimate_step_time
from vlmcourse.presets import Cluster, LanguageShape, VLMShape

DEVICES = {"h100_80gb": "h100", "a100_40gb": "a100-40", "a100_80gb": "a100-80"}
NETWORK_BYTES_PER_S = {"h100": 50e9, "a100-40": 25e9, "a100-80": 25e9}
"""Of one device: the tables' 3,200 and 1,600 Gbit/s a node, over 8."""
SHARED = ("half_inner", "memory_fraction", "lost_fraction")
OF_GENERATION = ("product_fraction", "attention_fraction")
START = [0.75, 0.4, 0.55, 0.25, 128.0, 0.8, 0.2]
"""A100's two, H100's two, those shared."""
NUM_FOLDS = 4
PLAYBOOK = {
    "1B": (16, 2048, 32, 8192, True),
    "3B": (28, 3072, 32, 8192, True),
    "8B": (32, 4096, 32, 14336, False),
}
"""Layers, width, heads, MLP, tied embeddings."""


class Case(NamedTuple):
    """A run that somebody measured."""

    group: tuple[str, str]
    plan: Plan
    shape: VLMShape
    cluster: Cluster
    workload: Workload
    settings: StepSettings
    measured: float
    """Tokens a second of one device."""
    split: StageSplit | None = None

    def ratio(self, speeds: Speeds | None = None) -> float:
        """Return predicted over measured tokens a second."""
        step = estimate_step_time(
            self.plan, self.shape, self.cluster, self.workload, self.settings, split=self.split, speeds=speeds
        )
        return step.tokens_per_s_per_device / self.measured


def nodes_of(device: str, num_devices: int) -> Cluster:
    return Cluster(
        name=f"{device}x{num_devices}",
        device=device,
        num_nodes=max(1, num_devices // 8),
        devices_per_node=8,
        host_memory_bytes=1,
        network_bytes_per_s=NETWORK_BYTES_PER_S[device],
    )


def read_foundry(path: Path) -> list[Case]:
    cases: list[Case] = []
    for row in csv.DictReader(path.open()):
        if "fp8" in row["precision"]:
            continue
        width, heads = int(row["d_model"]), int(row["n_heads"])
        shape = LanguageShape(
            vocab_size=int(row["vocab"]),
            num_layers=int(row["n_layers"]),
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=heads,
            mlp_size=round(8 * width / 3),
            tied_embeddings=True,
        )
        plan = Plan(
            dp_shard=int(row["n_gpus"]),
            zero_stage=3 if row["sharding"] == "FULL_SHARD" else 2,
            precision="bf16_fp32_grads" if row["precision"].startswith("amp") else "bf16_mixed",
            activation_checkpointing=row["act_ckpt"] == "True",
            micro_batch_size=int(row["micro_batch"]),
        )
        cases.append(
            Case(
                (row["model"], row["gpu"]),
                plan,
                decoder_alone(shape, row["model"]),
                nodes_of(DEVICES[row["gpu"]], plan.num_ranks),
                Workload(seq_len=int(row["seq_len"]), tiles_per_sample=0),
                StepSettings(grad_accum_steps=int(row["grad_accum"])),
                float(row["tokens_s_gpu"]),
            )
        )
    return cases


def read_playbook(path: Path) -> list[Case]:
    cases: list[Case] = []
    for row in csv.DictReader(path.open()):
        layers, width, heads, mlp, tied = PLAYBOOK[row["model"]]
        split = split_by_products(layers, 4 * width**2 + 3 * width * mlp, 131072 * width, int(row["pp"]))
        if not row["tokens_s_gpu"] or split is None:
            continue
        shape = LanguageShape(
            vocab_size=131072,
            num_layers=layers,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=heads,
            mlp_size=mlp,
            tied_embeddings=tied,
        )
        plan = Plan(
            dp_shard=int(row["dp"]),
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            zero_stage=int(row["zero_stage"]),
            precision="bf16_fp32_grads",
            activation_checkpointing=False,
            micro_batch_size=int(row["micro_batch"]),
        )
        cases.append(
            Case(
                (row["tp"], "pp" if plan.pp > 1 else ""),
                plan,
                decoder_alone(shape, row["model"]),
                nodes_of("h100", plan.num_ranks),
                Workload(seq_len=4096, tiles_per_sample=0),
                StepSettings(grad_accum_steps=int(row["grad_accum"])),
                float(row["tokens_s_gpu"]),
                split,
            )
        )
    return cases


def split_by_products(num_layers: int, of_layer: int, of_head: int, num_stages: int) -> StageSplit | None:
    """Cut stages as nanotron does, by the cost of products; None where a stage would have no layer."""
    counts, spent, stage = [0] * num_stages, 0, 0
    for _ in range(num_layers):
        counts[stage] += 1
        spent += of_layer
        while stage < num_stages - 1 and spent * num_stages >= (num_layers * of_layer + of_head) * (stage + 1):
            stage += 1
    if min(counts[:-1], default=1) < 1:
        return None
    counts[0] += 2
    counts[-1] += 1
    return StageSplit(num_vision_layers=0, num_language_layers=num_layers, layers_per_stage=tuple(counts))


def speeds_from(values: Sequence[float], device: str) -> Speeds:
    shared = dict(zip(SHARED, values[4:], strict=True))
    of_generation = dict(zip(OF_GENERATION, values[2:4] if device == "h100" else values[:2], strict=True))
    shared["memory_fraction"], shared["lost_fraction"] = min(1.0, values[5]), min(1.0, values[6])
    return dataclasses.replace(HOPPER if device == "h100" else AMPERE, **shared, **of_generation)


def fit(cases: Sequence[Case]) -> list[float]:
    """Minimise the mean absolute error in logarithms, softly kept near the start."""
    start = [math.log(value) for value in START]

    def loss(logs: Sequence[float]) -> float:
        values = [math.exp(log) for log in logs]
        errors = [math.log(case.ratio(speeds_from(values, case.cluster.device))) for case in cases]
        drift = sum((log - begin) ** 2 for log, begin in zip(logs, start, strict=True))
        return sum(math.sqrt(error**2 + 1e-4) for error in errors) / len(errors) + 0.002 * drift

    found = minimize(loss, start, method="Powell", options={"maxfev": 700, "xtol": 1e-3, "ftol": 1e-4})
    return [math.exp(log) for log in found.x]


def errors_pct(ratios: Sequence[float]) -> str:
    errors = sorted(100 * abs(ratio - 1) for ratio in ratios)
    return f"{len(errors)} | {median(errors):.1f} | {errors[math.ceil(0.9 * len(errors)) - 1]:.1f}"


def main() -> None:
    folder = Path(sys.argv[1])
    cases = read_foundry(folder / "llm_foundry.csv")
    one_node = [case for case in cases if case.plan.num_ranks == 8]
    groups = sorted({case.group for case in one_node})
    random.Random(1).shuffle(groups)
    held: list[float] = []
    print("Made by `python bench/planner_efficiency.py FOLDER`. Errors are |predicted / measured - 1| of tokens/s.\n")
    print(
        "| fold | " + " | ".join(("A100 product", "A100 attention", "H100 product", "H100 attention", *SHARED)) + " |"
    )
    print("|" + " --- |" * 8)
    for fold in range(NUM_FOLDS):
        out = set(groups[fold::NUM_FOLDS])
        values = fit([case for case in one_node if case.group not in out])
        held += [c.ratio(speeds_from(values, c.cluster.device)) for c in one_node if c.group in out]
        print(f"| {fold} | " + " | ".join(f"{value:.3g}" for value in values) + " |", flush=True)
    print("| all | " + " | ".join(f"{value:.3g}" for value in fit(one_node)) + " |")
    print("\n| llm-foundry's rows | number | median (%) | p90 (%) |\n| --- | --- | --- | --- |")
    print(f"| one node, held back | {errors_pct(held)} |")
    print(f"| one node, constants of the package (fitted on them) | {errors_pct([c.ratio() for c in one_node])} |")
    more = [case.ratio() for case in cases if case.plan.num_ranks != 8]
    print(f"| several nodes, never fitted | {errors_pct(more)} |")
    playbook = read_playbook(folder / "playbook_h100.csv")
    print("\n| playbook's rows, never fitted | number | predicted / measured: p5 | p25 | median | p75 |")
    print("|" + " --- |" * 6)
    for tensor in ((1, 2, 4, 8), (16, 32)):
        for pipelined in (False, True):
            found = sorted(
                case.ratio() for case in playbook if case.plan.tp in tensor and (case.plan.pp > 1) == pipelined
            )
            shown = (f"{found[int(share * len(found))]:.2f}" for share in (0.05, 0.25, 0.5, 0.75))
            name = f"tp {tensor[0]} to {tensor[-1]}, pp {'> 1' if pipelined else '1'}"
            print(f"| {name} | {len(found)} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
