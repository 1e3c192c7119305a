"""The ways to run ranks from a notebook that `notebook_launch.py` compares, each used as its own documentation says.

Enters: a piece of Python that every rank shall run, which may use `rank`, `torch` and `dist` in an initialised process
group. Leaves: the notebook cell that runs it on two ranks.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import socket
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

IMPORTS = "import torch, torch.distributed as dist\n"
FROM_ENVIRONMENT = IMPORTS + 'dist.init_process_group("gloo")\nrank = dist.get_rank()\n'


@dataclass(frozen=True)
class Tool:
    """One way to run ranks."""

    key: str
    """Its name on the command line of the benchmark."""
    name: str
    """Its name in the table."""
    make_cell: Callable[[str, Path], str]
    """Turns what the ranks shall run into a cell; may leave a script in the folder given."""
    setup: tuple[str, ...] = ()
    """Cells that a new notebook runs first."""
    restart: tuple[str, ...] = ()
    """Cells that make it usable again where it can no longer run a cell; for ways that keep their ranks."""
    package: str = ""
    """What has to be installed."""

    @property
    def keeps_ranks(self) -> bool:
        """Whether its ranks stay from cell to cell."""
        return bool(self.restart)

    def find_version(self) -> str | None:
        """Return the version that is installed, "" where none is needed, None where it is missing."""
        try:
            return importlib.metadata.version(self.package) if self.package else ""
        except importlib.metadata.PackageNotFoundError:
            return None


def in_magic(first_line: str, before: str = IMPORTS) -> Callable[[str, Path], str]:
    """Return what puts the code of the ranks under a cell magic."""
    return lambda code, folder: f"{first_line}\n{before}{code}"


def as_script(code: str, folder: Path) -> str:
    """Run the code as a script under the real torchrun."""
    script = folder / "script.py"
    script.write_text(f"{FROM_ENVIRONMENT}{code}dist.destroy_process_group()\n", encoding="utf-8")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return f"!{shlex.join(run)}"


def as_function(launch: str, before: str) -> Callable[[str, Path], str]:
    """Return what puts the code of the ranks into a function that a call starts."""

    def make_cell(code: str, folder: Path) -> str:
        body = textwrap.indent(before + code, "    ")
        return f"def train():\n{body}{launch.format(port=find_free_port())}"

    return make_cell


def find_free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


START_ENGINES = """\
import ipyparallel as ipp
cluster = ipp.Cluster(n=2)
client = cluster.start_and_connect_sync(activate=True)
client[:].scatter("rank", [0, 1], flatten=True).get()
import socket
with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    client[:].push({"port": found.getsockname()[1]}).get()
"""
JOIN_ENGINES = f"""\
%%px
{IMPORTS}dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
"""
LOAD = "%load_ext vlmcourse"

TOOLS = (
    Tool("cell", "`%%torchrun`", in_magic("%%torchrun -n 2"), (LOAD,)),
    Tool(
        "session",
        "`%%torchrun` in a session",
        in_magic("%%torchrun"),
        (LOAD, "%torchrun start -n 2"),
        ("%torchrun restart -n 2",),
    ),
    Tool("direct", "`%%torchrun --launcher direct`", in_magic("%%torchrun -n 2 --launcher direct"), (LOAD,)),
    Tool("torchrun", "`!torchrun --standalone` on a script", as_script),
    Tool(
        "nbdistributed",
        "nbdistributed",
        in_magic("%%distributed", before=""),
        ("%load_ext nbdistributed", "%dist_init -n 2"),
        ("%dist_reset", "%dist_init -n 2"),
        "nbdistributed",
    ),
    Tool(
        "ipyparallel",
        "ipyparallel, `%%px`",
        in_magic("%%px", before=""),
        (START_ENGINES, JOIN_ENGINES),
        ("cluster.stop_cluster_sync()", START_ENGINES, JOIN_ENGINES),
        "ipyparallel",
    ),
    Tool(
        "notebook_launcher",
        "accelerate, `notebook_launcher` with gloo",
        as_function("notebook_launcher(train, num_processes=2, use_port='{port}')", FROM_ENVIRONMENT),
        ("from accelerate import notebook_launcher",),
        package="accelerate",
    ),
    Tool(
        "debug_launcher",
        "accelerate, `debug_launcher`",
        as_function("debug_launcher(train, num_processes=2)", IMPORTS + "rank = dist.get_rank()\n"),
        ("from accelerate import debug_launcher",),
        package="accelerate",
    ),
)

PKILL = """\
#!{python}
# Stands in for pkill: ends only processes of this benchmark, instead of every one on the machine with such a name.
import os, re, sys
import psutil

number = 9 if "-9" in sys.argv else 15
for process in psutil.process_iter():
    try:
        is_ours = process.environ().get("{mark}") == os.environ["{mark}"]
        if is_ours and process.pid != os.getpid() and re.search(sys.argv[-1], " ".join(process.cmdline())):
            process.send_signal(number)
    except psutil.Error:
        pass
"""


def hide_pkill(folder: Path, mark: str) -> None:
    """Put a `pkill` into a folder, for the front of PATH, that sees only processes with a mark.

    nbdistributed ends its workers by patterns such as `torch.*distributed`, whosever they are.

    Args:
        folder: where to write it.
        mark: the name of an environment variable that marks the processes.
    """
    path = folder / "pkill"
    path.write_text(PKILL.format(python=sys.executable, mark=mark), encoding="utf-8")
    path.chmod(0o755)
