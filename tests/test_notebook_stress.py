"""Ranks are launched and killed at random moments: the next cell works, and in the end nothing is left."""

import os
import queue
import random
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from notebook_kernel import Kernel, marked_processes, wait_until

pytestmark = [pytest.mark.notebook, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = int(os.environ.get("VLMCOURSE_STRESS_SEED", "1"))
"""Another one gives other moments."""
LAUNCHES = 100
KILLS = {"rank": 16, "guard": 13, "interrupt": 14, "server": 3, "kernel": 2, "restart": 2}
"""Who is killed, how often: 50 in all."""
CELL_S = 90.0
"""A killed cell has ended by then, with room for a slow machine."""
SESSION_START = "%torchrun start -n 2 --timeout 60"
CELLS = {
    "plain": "%%torchrun -n 2 --timeout 60\nprint('rank', rank)",
    "collectives": """%%torchrun -n 2 --timeout 60
import time, torch, torch.distributed as dist
for step in range(25):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)""",
    "hang": """%%torchrun -n 2 --timeout 60
import time, torch.distributed as dist
dist.barrier() if rank == 0 else time.sleep(0.5)""",
    "exception": "%%torchrun -n 2 --timeout 60\nif rank == 1: raise ValueError('planted')",
    "exit": "%%torchrun -n 2 --timeout 60\nimport os\nif rank == 0: os._exit(3)",
    "figure": "%%torchrun -n 2 --timeout 60\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);",
    "family": """%%torchrun -n 2 --timeout 60
import subprocess, time, torch
from torch.utils.data import DataLoader, TensorDataset
subprocess.Popen(["sleep", "100"], start_new_session=True)
batches = iter(DataLoader(TensorDataset(torch.ones(8)), num_workers=1, persistent_workers=True))
next(batches)
time.sleep(0.3)""",
    "start": SESSION_START,
    "restart": "%torchrun restart -n 2",
    "stop": "%torchrun stop",
}
CHECK = """%%torchrun -n 2 --timeout 60
import torch, torch.distributed as dist
total = torch.tensor([rank + 1])
dist.all_reduce(total)
print("sum", total.item())"""
EXPECTED_ERRORS = (
    "RankFailure",
    "RankTimeout",
    "SessionEnded",
    "RanksInterrupted",
    "KeyboardInterrupt",
    "SessionError",
)
"""How a cell may end that was killed or fails by itself."""


@dataclass
class Stress:
    """A notebook under fire: the kernel that is there now, and what has happened."""

    random: random.Random
    kernel: Kernel = field(default_factory=Kernel)
    marks: list[str] = field(default_factory=list)
    launches: int = 0
    kills: Counter = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Load the extension into a new kernel."""
        self.marks.append(self.kernel.mark)
        self.kernel_pid = self.kernel.pid
        assert self.kernel.run("%load_ext vlmcourse").error == ""

    def tell(self, text: str) -> None:
        """Note what happened, for whoever has to understand a failure."""
        self.story.append(f"{time.monotonic() - self.began_s:.2f} {text}")

    def launch(self, name: str) -> str:
        """Send a cell; return its message id."""
        self.launches += 1
        self.tell(f"{name}")
        return self.kernel.client.execute(CELLS[name])

    def wait_for_end(self, message_id: str) -> str:
        """Return the error with which a cell ends, "" for none, "died" with its kernel."""
        error, end_s = "", time.monotonic() + CELL_S
        while time.monotonic() < end_s:
            try:
                message = self.kernel.client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                if not is_running(self.kernel_pid):
                    return "died"
                continue
            if message["parent_header"].get("msg_id") == message_id:
                if message["msg_type"] == "error":
                    error = f"{message['content']['ename']}: {message['content']['evalue']}"
                elif message["content"].get("execution_state") == "idle":
                    return error
        raise AssertionError(f"stuck: the cell has not ended after {CELL_S:g} s: {self.story[-3:]}")

    def find(self, target: str) -> list[psutil.Process]:
        """Return the processes of that kind which are there now."""
        layer, left = {self.kernel_pid}, list[psutil.Process]()
        with suppress(psutil.Error):
            left = psutil.Process(self.kernel_pid).children(recursive=True)
        for name in ("server", "guard", "rank"):
            found = []
            for process in left:
                with suppress(psutil.Error):
                    if process.ppid() in layer and process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
            if name == target:
                return found
            layer = {process.pid for process in found}
        return []

    def strike(self, target: str, delay_s: float) -> bool:
        """Kill or interrupt; return whether there was something to kill."""
        time.sleep(delay_s)
        if target == "interrupt":
            for _ in range(self.random.choice([1, 1, 2, 3])):  # some people press the button again
                self.kernel.manager.interrupt_kernel()
                time.sleep(self.random.uniform(0, 0.4))
        elif target == "kernel":
            os.kill(self.kernel_pid, signal.SIGKILL)
        elif target != "restart":
            end_s = time.monotonic() + 0.3
            while not (found := self.find(target)):
                if time.monotonic() > end_s:
                    return False
                time.sleep(0.01)
            with suppress(psutil.Error):
                self.random.choice(found).send_signal(signal.SIGKILL)
        self.kills[target] += 1
        return True

    def restart(self) -> None:
        """Restart the kernel as the menu does."""
        self.kernel.manager.restart_kernel(now=self.random.random() < 0.5)
        self.kernel.client.wait_for_ready(timeout=120)
        self.begin()

    def replace_kernel(self) -> None:
        """Begin anew after the kernel was killed; nothing of it is left."""
        mark = self.kernel.mark
        assert wait_until(lambda: not marked_processes(mark), within_s=20), [marked_processes(mark), self.story[-3:]]
        self.kernel.close()
        self.kernel = Kernel()
        self.begin()

    def check(self) -> None:
        """Run a cell that must work, or say that the session has ended: then the next one must."""
        for _ in range(2):
            self.launches += 1
            shown = self.kernel.run(CHECK, timeout_s=CELL_S)
            self.tell(f"check: {shown.error or 'well'}")
            if not shown.error.startswith("SessionEnded"):
                break
        assert shown.error == "" and shown.stdout.count("sum 3") >= 1, [shown, self.story[-4:]]
        session = "ranks since" in self.kernel.run("%torchrun status").stdout
        here = self.kernel.processes
        assert session or wait_until(lambda: not here(), within_s=10), [here(), self.story[-4:]]


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended, collected by its parent or not."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def listening(processes: list[psutil.Process]) -> list[int]:
    """Return the ports on which these processes wait for connections."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            found += [c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return found


def run_round(stress: Stress, target: str | None) -> None:
    """Launch a cell, kill at a random moment, and see that the next cell works."""
    name = stress.random.choice([name for name in CELLS if name != "stop" or target not in ("rank", "guard")])
    message_id = stress.launch(name)
    # Half of the moments are early, where ranks start and meet, the others anywhere in the cell and beyond its end.
    delay_s = stress.random.uniform(0, stress.random.choice([0.15, 0.7]))
    if target is not None:
        hit = stress.strike(target, delay_s)
        stress.tell(f"{target} after {delay_s:.3f} s{'' if hit else ' (none was there)'}")
    if target == "restart":
        stress.restart()
        return
    error = stress.wait_for_end(message_id)
    if target == "kernel":
        stress.replace_kernel()
        return
    stress.tell(f"ended: {error or 'well'}")
    assert not error or error.startswith(EXPECTED_ERRORS), [error, stress.story[-4:]]
    stress.check()


def fire(seed: int, targets: list[str], launches: int) -> Stress:
    """Launch and kill in one notebook until all targets were hit, and see that its end leaves nothing."""
    stress = Stress(random.Random(seed))
    try:
        while targets:
            before = stress.kills.total()
            target = targets.pop()
            run_round(stress, target)
            if stress.kills.total() == before:
                targets.insert(0, target)
        while stress.launches < launches:
            run_round(stress, None)
        stress.kernel.run("%torchrun stop")
        assert stress.kernel.processes() == []
        assert listening(stress.kernel.processes(with_server=True)) == []
    finally:
        print("\n".join([f"notebook {seed}:", *stress.story]))
        stress.kernel.close()
    for mark in stress.marks:
        assert wait_until(lambda mark=mark: not marked_processes(mark), within_s=20), marked_processes(mark)
    return stress


def test_a_hundred_launches_and_fifty_kills_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    targets = [target for target, times in KILLS.items() for _ in range(times)]
    random.Random(SEED).shuffle(targets)
    # Two notebooks at once: most of the time is waiting, and neither may touch the other.
    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(fire, 2 * SEED + half, targets[half::2], LAUNCHES // 2) for half in (0, 1)]
    done = [half.result() for half in halves]
    assert sum((stress.kills for stress in done), Counter()) == Counter(KILLS)
    assert sum(stress.launches for stress in done) >= LAUNCHES
    assert list(tmp_path.glob("vlmcourse-cell-*")) == []
