"""How fast the search over plans is, and what it finds: `python bench/plan_search.py [--write]`.

Prints plans a second on one core, and the best plans of several models and clusters; --write puts the same into
bench/plan_search.md. Nothing is asserted: times depend on the machine, and plans are predictions.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from vlmcourse.commands.plan import ALIKE_FACTOR, build_cluster
from vlmcourse.machine import describe_machine
from vlmcourse.planner.choice import Task
from vlmcourse.planner.memory import GB
from vlmcourse.planner.search import Search, search_plans
from vlmcourse.planner.search_reasons import drop_alike, say_losses, say_miss
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import get_model

SHOWN = 3
CASES = (
    # model, device, devices, samples of a step, frozen towers, tiles of typical samples
    ("internvl2-1b", "h100", 8, 256, (), (6,)),
    ("internvl2-8b", "a100-80", 8, 256, (), (6,)),
    ("internvl2-8b", "h100", 16, 256, ("vision",), (1, 1, 2, 3, 6, 12)),
    ("internvl2-26b", "h100", 8, 128, (), (6,)),
    ("internvl2-26b", "h100", 8, 128, ("vision",), (6,)),
    ("internvl2-26b", "h200", 8, 128, (), (6,)),
    ("internvl2-76b", "h100", 64, 512, (), (6,)),
    ("vlm-13b", "a100-40", 4, 64, (), (6,)),
)


def build_case(case: tuple[str, str, int, int, tuple[str, ...], tuple[int, ...]]) -> Task:
    """Return the task of a case."""
    model, device, num_devices, batch, frozen, tiles = case
    return Task(
        model=get_model(model),
        cluster=build_cluster(device, num_devices),
        global_batch_size=batch,
        workload=Workload(seq_len=4096, tiles_per_sample=tiles[0]),
        tile_counts=tiles if len(tiles) > 1 else (),
        frozen=frozen,
    )


def describe(search: Search, seconds: float) -> str:
    """Return a case in Markdown."""
    task = search.task
    tiles = f"tiles {', '.join(map(str, task.tile_counts))}" if task.tile_counts else ""
    named = f"{task.workload.tiles_per_sample} tiles"
    frozen = f", {' and '.join(task.frozen)} frozen" if task.frozen else ""
    lines = [
        f"## {task.model.name} on {task.cluster.name}, {task.global_batch_size} samples of 4,096 tokens, "
        f"{tiles or named}{frozen}",
        "",
        f"{search.num_plans:,} plans in {seconds:.1f} s: {search.num_plans / seconds:,.0f} a second; "
        f"{search.num_costed:,} worked out in full.",
        "",
    ]
    if search.best:
        lines += ["| plan | s/step | tokens/s | MFU | GB/rank | lost to |", "|---|---|---|---|---|---|"]
    else:
        lines.append("No plan fits.")
    for cost in drop_alike(search.best)[:SHOWN]:
        lines.append(
            f"| {cost.choice} | {cost.seconds:.3g} | {cost.tokens_per_s:,.0f} | {100 * cost.mfu:.0f} % | "
            f"{cost.peak_bytes / GB:.1f} | {say_losses(cost)} |"
        )
    counted = sorted(search.rejected.items(), key=lambda item: -item[1])
    lines += ["", "Rejected: " + ", ".join(f"{rule} {number:,}" for rule, number in counted) + "."]
    best = search.best[0] if search.best else None
    lines += [f"Nearest miss: {say_miss(miss, best)}." for miss in search.misses[:1]]
    return "\n".join(lines)


HEAD = """\
# The search over plans

Made by `python bench/plan_search.py --write`. All plans are predictions of the planner, none was run. Plans that share
the same work out between dp and cp in another way are shown once. A plan that a bound rules out counts as looked at;
how many were worked out in full stands beside it, and `tests/test_planner_search.py` shows on small spaces that nothing
is lost by the bounds.
"""


def main() -> int:
    """Run the cases; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write bench/plan_search.md")
    args = parser.parse_args()
    parts = [HEAD, f"Times: one core of {describe_machine()}."]
    for case in CASES:
        task = build_case(case)
        start_s = time.perf_counter()
        search = search_plans(task, top=SHOWN * ALIKE_FACTOR)
        parts.append("\n" + describe(search, time.perf_counter() - start_s))
        print(parts[-1], flush=True)
    if args.write:
        Path(__file__).with_suffix(".md").write_text("\n".join(parts) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
