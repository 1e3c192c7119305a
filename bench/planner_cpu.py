"""Predict steps of small models on one CPU core after a calibration of a few seconds, and measure them.

Usage: python bench/planner_cpu.py > bench/planner_cpu.md

One thread; seconds are those of the process, so that other work on the machine counts less. A step is forward, loss,
backward, clipping and AdamW.
"""

from __future__ import annotations

import dataclasses
import time
from statistics import median

import torch
import torch.nn.functional as F

from vlmcourse.machine import num_usable_cores
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.calibrate import calibrate_cpu
from vlmcourse.planner import Plan, Workload, estimate_step_time
from vlmcourse.presets import VLMShape, get_cluster, get_model

NUM_STEPS = 5


def measure_step_s(shape: VLMShape, batch: int, seq_len: int) -> float:
    """Return the median seconds of a step, with one tile a sample."""
    model = build_model(shape, seed=0)
    ids = torch.full((batch, seq_len), 5)
    ids[:, : shape.num_visual_tokens_per_tile] = shape.image_token_id
    pixels = torch.zeros(batch, 3, shape.vision.image_size_px, shape.vision.image_size_px)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    times: list[float] = []
    for _ in range(NUM_STEPS):
        start = time.process_time()
        logits = model(ids, pixels, tiles_per_sample=[1] * batch)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
    return median(times[1:])


def main() -> None:
    torch.set_num_threads(1)
    small, tiny = get_model("small"), get_model("tiny")
    wide = dataclasses.replace(
        small,
        name="small, wider",
        language=dataclasses.replace(
            small.language, num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=8, mlp_size=1536
        ),
    )
    cases = ((small, 2, 320), (small, 1, 512), (small, 8, 96), (wide, 4, 128), (tiny, 8, 64), (tiny, 16, 128))
    print(f"Made by `python bench/planner_cpu.py`, one thread on a machine with {num_usable_cores()} cores.\n")
    print("| model | samples | positions | measured (ms) | predicted (ms) | error (%) |\n|" + " --- |" * 6)
    for shape, batch, seq_len in cases:
        head_width = shape.language.hidden_size // shape.language.num_heads
        found = calibrate_cpu(clock=time.process_time, head_width=head_width)
        plan = Plan(precision="fp32", activation_checkpointing=False, micro_batch_size=batch)
        predicted_s = estimate_step_time(
            plan,
            shape,
            get_cluster("h100x8"),
            Workload(seq_len=seq_len, tiles_per_sample=1),
            device=found.device,
            speeds=found.speeds,
        ).seconds
        measured_s = measure_step_s(shape, batch, seq_len)
        error_pct = 100 * (predicted_s / measured_s - 1)
        row = (shape.name, batch, seq_len, f"{1e3 * measured_s:.0f}", f"{1e3 * predicted_s:.0f}", f"{error_pct:+.0f}")
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    print(f"\nThe last calibration: {found}.")


if __name__ == "__main__":
    main()
