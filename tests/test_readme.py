"""README.md: every command in it works as written, and every file that it names is there."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from readme import README, ROOT, environment, shell_commands

from vlmcourse.cli import COMMANDS
from vlmcourse.commands.doctor import CHAPTERS


def test_every_make_target_and_subcommand_exists():
    commands = shell_commands()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands:
        program, *words = command.split()
        if program == "make":
            assert re.search(rf"^{words[0]}:", makefile, flags=re.M), command
        elif program == "vlmcourse":
            assert words[0] in COMMANDS, command
        else:
            assert shutil.which(program, path=environment()["PATH"]), command
    assert {"make lab", "make test", "make demo"} <= set(commands)


def test_every_linked_file_exists():
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert targets and all((ROOT / target).exists() for target in targets), targets


def test_every_chapter_stands_in_the_chapter_table_with_its_time():
    for name, chapter in CHAPTERS.items():
        assert re.search(rf"\({re.escape(f'chapters/{name}/{name}.ipynb')}\) \| {chapter.minutes} minutes", README), (
            name
        )


def test_doctor_runs():
    done = subprocess.run(["vlmcourse", "doctor"], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "gloo" in done.stdout, done.stdout + done.stderr


@pytest.mark.notebook
def test_make_lab_serves_chapter_1():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--no-browser --ip=127.0.0.1 --port={port} --IdentityProvider.token=test --ServerApp.port_retries=0"
    server = subprocess.Popen(
        ["make", "lab", f"LAB_FLAGS={flags}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        path = "chapters/ch01_parallelism/ch01_parallelism.ipynb"
        answer = json.loads(fetch(server, f"http://127.0.0.1:{port}/api/contents/{path}?token=test&content=0"))
        assert answer["type"] == "notebook"
        assert b"jupyter-config-data" in fetch(server, f"http://127.0.0.1:{port}/lab/tree/{path}?token=test")
    finally:
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
