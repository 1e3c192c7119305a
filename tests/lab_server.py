"""A Jupyter server for tests, as a person starts one."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from readme import environment

LAB_FLAGS = ("--no-browser", "--ip=127.0.0.1", "--IdentityProvider.token=test", "--ServerApp.port_retries=0")


@contextmanager
def served(
    command: list[str], folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a Jupyter server on a free port, which stands for {port} in the command; give its process and address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [part.replace("{port}", str(port)) for part in command],
        cwd=folder,
        env=environment() | dict(env or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=30)


def fetch(server: subprocess.Popen, url: str, limit_s: float = 120) -> bytes:
    """Return what the server answers, waiting for it to start."""
    until = time.monotonic() + limit_s
    while True:
        assert server.poll() is None, f"the server ended with exit code {server.poll()}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return response.read()
        except (urllib.error.URLError, ConnectionError) as error:
            assert time.monotonic() < until, f"no answer within {limit_s} s: {error}"
            time.sleep(0.3)
