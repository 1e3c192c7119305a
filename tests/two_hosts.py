"""Two hosts on one machine: network namespaces that see nothing but each other, over a pair of virtual cards.

Needs Linux, root and `ip`; everything is removed afterwards, processes included, however the body ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = "course0"
"""The virtual card's name, the same in both."""
HOSTS = ("10.213.7.1", "10.213.7.2")
TRAIN_S = 120
COMMAND_S = 10


def ip(*words: str) -> str:
    """Run `ip`; an error shows what it said."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Return why this machine cannot play two hosts; empty where it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "there is no `ip` (install iproute2)"
    try:
        with two_hosts():
            return ""
    except OSError as error:
        return f"this machine allows no network namespaces: {error}"


@dataclass(frozen=True)
class TwoHosts:
    """The names of two namespaces."""

    names: tuple[str, str]

    def num_bytes(self) -> int:
        """Return what has crossed from the first to the second."""
        (card,) = json.loads(ip("-n", self.names[0], "-s", "-j", "link", "show", LINK))
        return card["stats64"]["tx"]["bytes"]

    def run(self, commands: Sequence[str], cwd: Path, timeout_s: float = TRAIN_S) -> None:
        """Run a command of shell on each of the first hosts and wait for all; a failure shows what they printed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_"))}
        environment |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        (cwd / "hosts").write_text("".join(f"{host} {name}\n" for host, name in zip(HOSTS, self.names, strict=True)))
        (cwd / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once; the real one is out of reach
        prepare = "".join(f"mount --bind {shlex.quote(str(cwd / n))} /etc/{n}; " for n in ("hosts", "resolv.conf"))
        outputs = [cwd / f"host{number}.txt" for number in range(len(commands))]
        deadline_s = time.monotonic() + timeout_s
        processes = []
        for name, command, output in zip(self.names, commands, outputs, strict=False):
            # These mounts are seen by this command only: `ip netns exec` gives it mounts of its own.
            words = ["ip", "netns", "exec", name, "bash", "-c", f"{prepare}exec {command}"]
            with output.open("w") as file:
                processes.append(subprocess.Popen(words, cwd=cwd, env=environment, stdout=file, stderr=file))
        try:
            codes = [process.wait(timeout=max(0.1, deadline_s - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes = ["still running"]
        finally:
            self.end_all()
            for process in processes:
                process.wait(COMMAND_S)
        if any(codes):
            shown = "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in outputs)
            raise AssertionError(f"the hosts ended with {codes} within {timeout_s:g} s:\n{shown}")

    def end_all(self) -> None:
        """End every process in the two."""
        for name in self.names:
            for pid in ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make the two, and remove them and what still runs in them."""
    first, second = names = tuple(f"course{os.getpid()}{letter}" for letter in "ab")
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip("-n", first, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", second)
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{host}/24", "dev", LINK)
            ip("-n", name, "link", "set", LINK, "up")
            ip("-n", name, "link", "set", "lo", "up")
        hosts = TwoHosts((first, second))
        stack.callback(hosts.end_all)
        yield hosts
