"""README.md: every command in it works as written, and every file that it names is there."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from lab_server import LAB_FLAGS, fetch, served
from notebook_kernel import Kernel
from readme import README, ROOT, environment, notebook_cells, shell_commands, toml_blocks

from vlmcourse import cli
from vlmcourse.cli import COMMANDS
from vlmcourse.commands.doctor import CHAPTERS
from vlmcourse.commands.start import check_degrees
from vlmcourse.commands.train import parse_overrides
from vlmcourse.config import load_config, parse_config
from vlmcourse.layout import CONTEXT_METHODS, SCHEDULES, VISION_HEADS


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


def test_the_parallel_block_and_its_command_are_one_run_that_fits_the_ranks_given():
    (block,) = toml_blocks("Every parallelism")
    (command,) = [line for line in shell_commands("Every parallelism") if line.startswith("vlmcourse train")]
    args = cli.parse(command.split()[1:])
    of_block, of_command = parse_config(tomllib.loads(block)), load_config(args.config, parse_overrides(args.overrides))
    assert of_block.parallel == of_command.parallel
    assert of_block.train.accumulation_steps == of_command.train.accumulation_steps
    for config in (of_block, of_command):
        assert check_degrees(config, args.nproc) == config.parallel
    with pytest.raises(ValueError, match="2 takes all of them, and nothing is left to share"):
        check_degrees(of_command, args.nproc // 2)
    for words in re.findall(r"(\w+) = ((?:\"\w+\"(?:, )?)+)", re.sub(r"^.*?#", "", block, flags=re.M)):
        known = {"vision_heads": VISION_HEADS, "cp_method": CONTEXT_METHODS, "pp_schedule": SCHEDULES}[words[0]]
        assert set(re.findall(r"\w+", words[1])) <= set(known)


def test_every_launch_command_writes_what_it_says(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for line in shell_commands("Every parallelism") if "launch" in line.split()]
    assert [words[words.index("--target") + 1] for words in commands] == ["torchrun", "slurm", "k8s"]
    for words in commands:
        assert cli.main(words[1:]) == 0, words
    assert capsys.readouterr().out.count("\n# on 10.0.0.") == 2
    assert (tmp_path / "job.sbatch").read_text().startswith("#!/bin/bash")
    assert "PyTorchJob" in (tmp_path / "job.yaml").read_text()


@pytest.mark.notebook
def test_make_lab_serves_chapter_1():
    with served(["make", "lab", f"LAB_FLAGS={' '.join(LAB_FLAGS)} --port={{port}}"], ROOT) as (server, url):
        path = "chapters/ch01_parallelism/ch01_parallelism.ipynb"
        answer = json.loads(fetch(server, f"{url}/api/contents/{path}?token=test&content=0"))
        assert answer["type"] == "notebook"
        assert b"jupyter-config-data" in fetch(server, f"{url}/lab/tree/{path}?token=test")


@pytest.mark.notebook
def test_notebook_example_runs_in_a_chapters_folder(tmp_path):
    folder = tmp_path / "chapters" / "ch01_parallelism"
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    kernel = Kernel(cwd=str(folder))
    try:
        for cell in notebook_cells():
            shown = kernel.run(cell)
            assert not shown.error, shown.traceback
        assert 0 < float(kernel.run("print(loss)").stdout) < 10
    finally:
        kernel.close()


CHAPTER = "ch01_parallelism"


@pytest.fixture
def small_course(tmp_path):
    """A copy of the course with two written-out parts and the essay of exercise 4.1, and two submissions of them."""
    for name in (".gitignore", "nbgrader_config.py", "autotests.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    notebook = nbformat.read(ROOT / "solutions" / CHAPTER / f"{CHAPTER}.ipynb", as_version=4)
    kept = ("ex04_1_setup", "ex04_1_a", "ex04_1_b", "ex04_1_d")
    notebook.cells = [cell for cell in notebook.cells if cell.id.startswith(kept)]
    for folder in ("solutions", "chapters"):  # chapters/ comes with the repository
        (tmp_path / folder / CHAPTER).mkdir(parents=True)
        nbformat.write(notebook, tmp_path / folder / CHAPTER / f"{CHAPTER}.ipynb")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.notebook
@pytest.mark.timeout(600)
def test_instructors_commands_work_in_the_order_given(small_course):
    solution = small_course / "solutions" / CHAPTER / f"{CHAPTER}.ipynb"
    release = small_course / "chapters" / CHAPTER / f"{CHAPTER}.ipynb"
    commands = shell_commands("For instructors")
    said = run_here(commands.pop(0), small_course)
    assert "BEGIN SOLUTION" not in release.read_text(encoding="utf-8")
    for student, notebook in {"anna": solution, "bo": release}.items():
        (small_course / "submitted" / student / CHAPTER).mkdir(parents=True)
        shutil.copy(notebook, small_course / "submitted" / student / CHAPTER)
    for command in commands:
        if command == "make lab":
            check_formgrader(small_course)
        else:
            said += run_here(command, small_course)
    assert "without encryption" not in said
    with (small_course / "grades.csv").open(encoding="utf-8") as file:
        grades = {row["student_id"]: float(row["raw_score"]) for row in csv.DictReader(file)}
    assert grades == {"anna": 6, "bo": 0}
    page = small_course / "feedback" / "bo" / CHAPTER / f"{CHAPTER}.html"
    assert "state_bytes_per_rank is not solved yet" in page.read_text(encoding="utf-8")
    status = subprocess.run(["git", "status", "--porcelain"], cwd=small_course, capture_output=True, text=True)
    assert [line for line in status.stdout.splitlines() if line.startswith("??")] == []


def run_here(command: str, folder: Path) -> str:
    done = subprocess.run(command.split(), cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def check_formgrader(folder: Path) -> None:
    """Start JupyterLab as `make lab` does, and ask its formgrader whom it would grade by hand."""
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}", *LAB_FLAGS, "--port={port}"]
    with served([*command, "--allow-root"], folder) as (server, url):
        found = json.loads(fetch(server, f"{url}/formgrader/api/submissions/{CHAPTER}?token=test"))
        waiting = {submission["student"]: submission["needs_manual_grade"] for submission in found}
        assert waiting == {"anna": True, "bo": False}
