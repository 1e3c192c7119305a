"""What a rank runs that `torchrun` has started: tell the notebook that it is there, then run the cell like any other.

`torchrun` knows nothing of notebooks: it would mix what its ranks print, and it starts them again after a failure.
So each rank hands the notebook the reading end of a pipe of its own, through a socket in the cell's private folder, and
is told in which folder this attempt leaves its reports and displays.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from vlmcourse.notebook import guard
from vlmcourse.notebook.worker import main as run_cell

SOCKET_NAME = "ranks"
HELLO_BYTES = 4096
ANSWER_S = 60.0
"""How long the notebook may take to answer; it does so at once unless its machine is very busy."""


def main(folder: str) -> None:
    """Run the cell that `folder` describes as the rank that the environment describes."""
    guard.call_prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)  # `torchrun` itself leaves its ranks alone if it is killed
    run_cell(announce(Path(folder)))


def announce(folder: Path) -> str:
    """Send this rank's output to the notebook from now on.

    Args:
        folder: the private folder of the cell.
    Returns:
        The folder of this attempt.
    Raises:
        OSError: if the notebook has gone.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    hello = {name: int(os.environ[name]) for name in names} | {"PID": os.getpid()}
    output, output_end = os.pipe()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with mine, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notebook, socket_address(folder) as address:
        notebook.connect(address)
        socket.send_fds(notebook, [json.dumps(hello).encode()], [output, theirs.fileno()])
        theirs.close()
        os.close(output)
        mine.settimeout(ANSWER_S)
        attempt = mine.recv(HELLO_BYTES).decode()
    if not attempt:
        raise OSError("the notebook has gone")
    sys.stdout.flush()
    sys.stderr.flush()
    for standard in (1, 2):
        os.dup2(output_end, standard)
    os.close(output_end)
    return attempt


@contextlib.contextmanager
def socket_address(folder: Path) -> Iterator[str]:
    """Name the socket in `folder`: the name of a socket may have about 100 characters, a temporary folder's more."""
    if sys.platform != "linux":
        yield str(folder / SOCKET_NAME)
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_NAME}"
    finally:
        os.close(handle)
