"""README.md: every command in it works as written, and every file that it names is there."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from vlmcourse.cli import COMMANDS
from vlmcourse.commands.doctor import CHAPTERS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def shell_commands() -> list[str]:
    """Return every command line of README's bash blocks, without its comment."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


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


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_main_run_answers_95_percent_of_heldout_questions(tmp_path):
    line = next(command for command in shell_commands() if command.startswith("vlmcourse train"))
    command = [*line.split(), "--json", "--set", f"run.output_dir={json.dumps(str(tmp_path))}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["exact_match"] >= 0.95
    assert result["loss_last"] < 0.1 < 3 < result["loss_first"]
    assert (result["strategy"], result["world_size"]) == ("ddp", 2)
    assert result["tokens_per_s"] > 0 and result["peak_bytes"] > 0 and result["seconds"] > 0
    assert (tmp_path / "tiny" / "training.png").stat().st_size > 10_000


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_demo_trains_runs_the_chapter_and_grades():
    command = ["vlmcourse", "demo", "--json", "--steps", "40"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    parts = {part["name"]: part for part in json.loads(done.stdout.splitlines()[-1])["parts"]}
    assert all(part["good"] for part in parts.values()), parts
    assert {"loss before -> after", "held-out exact match", "speed", "ch01_parallelism"} <= set(parts)
    earned, most = re.findall(r"\d+", parts["reference answers"]["seen"])
    assert earned == most and int(most) > 0
    # nbgrader gives an unchanged written answer its zero without asking a person, so a blank counts out of more points.
    earned, most_of_blank = re.findall(r"\d+", parts["blank submission"]["seen"])
    assert earned == "0" and int(most_of_blank) >= int(most)


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
