"""README.md: every command in it works as written, and every file that it names is there."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from lab_server import LAB_FLAGS, fetch, served
from notebook_kernel import Kernel
from readme import README, ROOT, environment, notebook_cells, shell_commands

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
