"""What the notebook's dashboard costs the run that it shows: steps with it and without it, in turns.

    python bench/dashboard.py                    # two ranks in a real kernel, a table at the end

One `%%torchrun` cell trains the tiny model, whose steps are the shortest of the course. Meanwhile a thread of the
kernel switches a dashboard on and off every few seconds, and the steps' lengths come from the run's own step log.
Neighbouring turns are compared, so that what else the machine does falls on both. CPU time of the ranks is what other
programs change least. "A look" is measured alone afterwards, in the same kernel: the files have grown by a step, the
widget is sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from notebook_kernel import loaded_kernel

from vlmcourse.machine import describe_machine
from vlmcourse.monitor.step_log import StepRecord, read_step_log

BEGIN = """
import json, threading, time
from IPython.display import display
from vlmcourse.notebook.dashboard import Dashboard
shown = Dashboard("runs/tiny", every_s={every_s}, is_of_cell=True)
turns, over = [], threading.Event()
def take_turns():
    while shown._run.read().step < 5 and not over.wait(0.2):  # the first steps are longer
        pass
    while not over.is_set():
        for is_on in (False, True):
            shown.start() if is_on else shown.end()
            begin_s = time.time()
            over.wait({turn_s})
            turns.append([is_on, begin_s, time.time()])
switch = threading.Thread(target=take_turns, daemon=True)
display(shown)
switch.start()
"""
CELL = """%%torchrun -n {ranks} --timeout 3000
import sys
from vlmcourse.config import load_config
from vlmcourse.train.trainer import Trainer
changes = {{"train.num_steps": {steps}, "train.eval_every": 0, "train.checkpoint_every": 0, "run.output_dir": "runs"}}
Trainer(load_config({config!r}, changes), show_progress=False).fit()
"""
END = "over.set(); switch.join(); shown.end(); print(json.dumps(turns))"
LOOK = """
import shutil
from vlmcourse.monitor.step_log import step_log_path
shutil.copytree("runs/tiny", "runs/copy")
lines = {rank: step_log_path("runs/copy", rank).read_text().splitlines(True)[-1] for rank in range(%d)}
other = Dashboard("runs/copy"); display(other)
cpu_ms = []
for look in range(200):
    for rank, line in lines.items():
        with open(step_log_path("runs/copy", rank), "a") as file:
            file.write(line.replace('"step": ', '"step": 9', 1))
    other.value = ""
    before_s = time.process_time()
    other.refresh()
    cpu_ms.append(1e3 * (time.process_time() - before_s))
print(json.dumps([sorted(cpu_ms)[100], len(other.value)]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--turn-s", type=float, default=4.0, help="seconds with it, and as many without")
    parser.add_argument("--every-s", type=float, default=0.5, help="seconds between two looks")
    options = parser.parse_args()
    config = str(Path(__file__).resolve().parent.parent / "configs" / "tiny.toml")
    with tempfile.TemporaryDirectory() as folder, loaded_kernel(Path(folder)) as kernel:
        kernel.run(BEGIN.format(every_s=options.every_s, turn_s=options.turn_s))
        cell = CELL.format(ranks=options.ranks, steps=options.steps, config=config)
        if error := kernel.run(cell, timeout_s=3000).error:
            raise SystemExit(error)
        turns = json.loads(kernel.run(END).stdout)
        look_ms, num_letters = json.loads(kernel.run(LOOK % options.ranks).stdout)
        logs = read_step_log(Path(folder) / "runs" / "tiny")
    print(f"Machine: {describe_machine()}; {options.ranks} ranks, configs/tiny.toml, {options.steps} steps")
    print_table(turns, [record for log in logs.values() for record in log.steps], options)
    print(
        f"\nA look alone: {look_ms:.2f} ms of CPU time (median of 200), {num_letters:,} letters sent: "
        f"{look_ms / 10 / options.every_s:.2f} % of one core at {1 / options.every_s:g} looks a second."
    )


def print_table(turns: list[list[float]], steps: list[StepRecord], options: argparse.Namespace) -> None:
    """Print medians, and the ratio of each turn with the dashboard to the one before it."""
    print(
        f"In turns of {options.turn_s:g} s, {1 / options.every_s:g} looks a second; medians over steps of all ranks\n"
    )
    print("| | steps | without (ms) | with (ms) | with / without: median of the turns | quartiles |")
    print("|---|---|---|---|---|---|")
    for name, cost in (
        ("clock", lambda step: step.step_s),
        ("CPU of the rank", lambda step: step.step_s * (step.cpu_percent or 0.0) / 100),
    ):
        inside = [[1e3 * cost(s) for s in steps if b <= s.start_s and s.start_s + s.step_s <= e] for _, b, e in turns]
        pairs = [(off, on) for off, on in zip(inside[::2], inside[1::2], strict=False) if len(off) > 3 and len(on) > 3]
        ratios = [statistics.median(on) / statistics.median(off) for off, on in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        off, on = ([value for pair in pairs for value in pair[i]] for i in (0, 1))
        print(
            f"| {name} | {len(off)} and {len(on)} | {statistics.median(off):.1f} | {statistics.median(on):.1f} "
            f"| {middle:.3f} ({len(ratios)} turns) | {low:.3f} to {high:.3f} |"
        )


if __name__ == "__main__":
    main()
