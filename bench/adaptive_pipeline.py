"""A pipeline with a bad split beside itself after it adapted, and beside every split that there is, as a table.

    python bench/adaptive_pipeline.py                     # 2 ranks, a vision tower heavier than the language tower
    python bench/adaptive_pipeline.py --steps 8 --out adaptive.md

All splits are measured in one run on the same ranks, in rounds: the pipeline moves to each of them in turn, so that a
machine that becomes slower makes all of them slower. About a minute where nothing else runs. Nothing is asserted; the
same with layers that sleep is in `tests/test_parallel_adaptive.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from vlmcourse.config import OptimizerConfig
from vlmcourse.data.samples import IGNORE_LABEL, Batch
from vlmcourse.machine import num_usable_cores
from vlmcourse.models.vlm import build_model
from vlmcourse.notebook.launcher import check_rank_count, run_ranks
from vlmcourse.parallel.adaptive import AdaptivePipelineScheduler
from vlmcourse.parallel.decision import Decision
from vlmcourse.parallel.pipeline import Pipeline
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.planner.stages import StageSplit
from vlmcourse.presets import MODELS, VLMShape
from vlmcourse.train.loss import token_loss_sum
from vlmcourse.train.optimizer import build_optimizer

Times = dict[StageSplit, list[tuple[float, float]]]
"""By split, of each step the seconds, and the CPU seconds of the busiest rank."""
TIMEOUT_S = 1500
START = (8, 1)
"""Layers a stage at the start: all of the vision tower and all language blocks but none for the second rank."""
NUM_MICROBATCHES = 4
WARMUP_STEPS = 1
"""Of each split in each round: the first step makes new buffers."""


def bench_shape() -> VLMShape:
    """Return a model whose computing outweighs its messages: three blocks a tower, vision the wider one."""
    tiny = MODELS["tiny"]
    vision = dataclasses.replace(
        tiny.vision, num_layers=3, hidden_size=384, num_heads=6, mlp_size=1536, patch_size_px=4
    )
    language = dataclasses.replace(
        tiny.language, num_layers=3, hidden_size=256, num_heads=4, num_kv_heads=2, mlp_size=768
    )
    return dataclasses.replace(tiny, name="bench", vision=vision, language=language)


def all_splits(shape: VLMShape) -> list[StageSplit]:
    """Return every split into two stages."""
    num_vision, num_language = shape.vision.num_layers, shape.language.num_layers
    num_layers = num_vision + num_language + 3
    return [
        StageSplit(num_vision_layers=num_vision, num_language_layers=num_language, layers_per_stage=(n, num_layers - n))
        for n in range(1, num_layers)
    ]


def make_batch(shape: VLMShape, seed: int) -> Batch:
    """Return a sample with a picture or two and text around it."""
    generator = torch.Generator().manual_seed(seed)
    per_tile, tiles = shape.num_visual_tokens_per_tile, 1 + seed % 2
    ids = torch.randint(4, shape.language.vocab_size, (1, 2 * per_tile + 64), generator=generator)
    ids[0, 1 : 1 + tiles * per_tile] = shape.image_token_id
    side = shape.vision.image_size_px
    return Batch(
        input_ids_BS=ids,
        labels_BS=torch.where(ids == shape.image_token_id, IGNORE_LABEL, ids),
        attention_mask_BS=torch.ones_like(ids, dtype=torch.bool),
        pixel_values_ICHW=torch.randn(tiles, 3, side, side, generator=generator),
        tiles_per_sample=(tiles,),
        sample_ids=(str(seed),),
        tokens_per_tile=per_tile,
    )


class Bench:
    """One rank's pipeline with the bad split, and what moves its layers."""

    def __init__(self, shape: VLMShape, ranks: Ranks) -> None:
        assert dist.group.WORLD is not None
        start = next(split for split in all_splits(shape) if split.layers_per_stage == START)
        model = build_model(shape, seed=1)
        self.device = ranks.device
        self.pipeline = Pipeline(
            model, dist.group.WORLD, "1f1b", loss_sum=token_loss_sum, device=ranks.device, split=start
        )
        pipelined = PipelinedModel(self.pipeline)
        self.optimizer = build_optimizer(pipelined, OptimizerConfig())
        self.scheduler = AdaptivePipelineScheduler(pipelined, self.optimizer, warmup_steps=1, measure_steps=3)
        self.batches = [make_batch(shape, seed) for seed in range(NUM_MICROBATCHES)]

    def step(self) -> tuple[float, float]:
        """Make one optimizer step; return seconds until the slowest rank was done, and CPU seconds of the busiest."""
        dist.barrier()
        started_s, began_s = time.perf_counter(), time.thread_time()
        self.optimizer.zero_grad()
        self.pipeline.forward_backward(self.batches, 1e-3)
        self.pipeline.reduce_tied_gradients()
        self.optimizer.step()
        both = [time.perf_counter() - started_s, time.thread_time() - began_s]
        seconds = torch.tensor(both, dtype=torch.float64, device=self.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds[0]), float(seconds[1])

    def adapt(self) -> Decision:
        """Train until layers have moved, or were told to stay."""
        while not self.scheduler.decisions:
            self.step()
            self.scheduler.step_done()
        return self.scheduler.decisions[0]

    def time_splits(self, num_rounds: int, num_steps: int) -> Times:
        """Move to every split in turn, back and forth, and time steps there."""
        splits = all_splits(self.pipeline.stages[0].shape)
        seconds: Times = {split: [] for split in splits}
        for number in range(num_rounds):
            for split in splits if number % 2 == 0 else splits[::-1]:
                self.scheduler.move(split)
                seconds[split] += [self.step() for _ in range(WARMUP_STEPS + num_steps)][WARMUP_STEPS:]
        return seconds


def measure(num_rounds: int, num_steps: int, out: Path | None) -> None:
    """Measure as one rank of a pipeline; rank 0 prints."""
    torch.set_num_threads(1)
    ranks, shape = init_ranks(TIMEOUT_S / 2), bench_shape()
    bench = Bench(shape, ranks)
    decision = bench.adapt()
    chosen = bench.pipeline.split
    seconds = bench.time_splits(num_rounds, num_steps)
    load = os.getloadavg()[0]
    shutdown_ranks()
    if ranks.is_main:
        lines = [
            f"Machine: {ranks.world_size} ranks, {ranks.backend}, {num_usable_cores()} cores, {platform.machine()}, "
            f"torch {torch.__version__}, load at the end {load:.1f}",
            f"Model: vision {shape.vision.num_layers} x {shape.vision.hidden_size}, language "
            f"{shape.language.num_layers} x {shape.language.hidden_size}, 1f1b, {NUM_MICROBATCHES} micro-batches",
            f"Decided after {decision.step} steps: {decision.reason}",
        ]
        if decision.moved is not None:
            moved = decision.moved
            lines.append(f"Rank 0 sent {moved.sent_bytes / 1e6:.1f} MB; the move took {1e3 * moved.seconds:.0f} ms")
        lines += ["", *table(seconds, decision.proposal.present, chosen), ""]
        print("\n".join(lines), flush=True)
        if out is not None:
            out.write_text("\n".join(lines), encoding="utf-8")


def table(seconds: Times, start: StageSplit, chosen: StageSplit) -> list[str]:
    """Return a Markdown table of the step times, the best split first, and what it says in a sentence."""
    typical = {split: median(wall_s for wall_s, _ in times) for split, times in seconds.items()}
    busy = {split: median(cpu_s for _, cpu_s in times) for split, times in seconds.items()}
    best, best_s = min(typical.items(), key=lambda item: item[1])
    least_s = min(busy.values())
    lines = ["| split | step (ms) | x best | busiest rank, CPU (ms) | x best | |", "|---|---|---|---|---|---|"]
    for split, at in sorted(typical.items(), key=lambda item: item[1]):
        what = [name for name, which in (("best", best), ("start", start), ("adapted", chosen)) if which == split]
        lines.append(
            f"| {split.describe(0)} / {split.describe(1)} | {1e3 * at:.0f} | {at / best_s:.2f} "
            f"| {1e3 * busy[split]:.0f} | {busy[split] / least_s:.2f} | {', '.join(what)} |"
        )
    return [
        *lines,
        "",
        "Medians. CPU time leaves out what the ranks wait for each other, and for other programs on this machine.",
        f"Start {1e3 * typical[start]:.0f} ms, adapted {1e3 * typical[chosen]:.0f} ms, "
        f"{typical[start] / typical[chosen]:.2f} x as fast; adapted / best of all {len(typical)} splits: "
        f"{typical[chosen] / best_s:.2f} by time, {busy[chosen] / least_s:.2f} by the busiest rank's CPU time.",
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="times that each split is measured (default: 2)")
    parser.add_argument("--steps", type=int, default=2, help="steps of each split in each round (default: 2)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        measure(args.rounds, args.steps, args.out)
        return 0
    check_rank_count(2)
    command = [sys.executable, str(Path(__file__).resolve()), "--rounds", str(args.rounds), "--steps", str(args.steps)]
    command += ["--out", str(args.out.resolve())] if args.out else []
    env = {"OMP_NUM_THREADS": "1"}
    run_ranks(command, 2, timeout_s=TIMEOUT_S, env=env, on_line=lambda rank, line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
