"""Set-up: one set of pins everywhere, and a reason with a remedy when a machine lacks a step."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def normal(name: str) -> str:
    """Return a package name as pip compares it, without its extras."""
    return re.sub(r"[-_.]+", "-", name.split("[")[0]).lower()


def pins(lines: list[str]) -> dict[str, str]:
    """Return name -> version of every `name==version` line."""
    return {normal(n): v for n, _, v in (line.strip().partition("==") for line in lines) if v}


def constraints() -> dict[str, str]:
    return pins((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())


def direct_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert "vlmcourse[loggers]" in extras["dev"]
    named = [*project["dependencies"], *extras["dev"], *extras["loggers"]]
    return {normal(re.split(r"[=<>]", d)[0]) for d in named} - {"vlmcourse"}


def test_constraints_pin_torch_and_every_direct_dependency():
    assert constraints()["torch"] == "2.13.0"
    assert direct_dependencies() <= set(constraints())


def test_conda_environment_pins_equal_the_constraints():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    packages = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert "-c constraints.txt" in packages and "-e .[dev]" in packages
    found = pins([entry for entry in packages if not entry.startswith("-")])
    assert set(found) == direct_dependencies()
    assert found == {name: constraints()[name] for name in found}


def test_installed_packages_are_the_pinned_ones():
    from importlib.metadata import version

    wrong = {
        n: (version(n), constraints()[n]) for n in direct_dependencies() if version(n).split("+")[0] != constraints()[n]
    }
    assert not wrong, f"(installed, pinned): {wrong}"


def test_every_pinned_package_accepts_the_oldest_python_that_the_course_does():
    from importlib.metadata import distributions

    from packaging.specifiers import SpecifierSet

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    refused = {
        d.name: r for d in distributions() if (r := d.metadata["Requires-Python"]) and oldest not in SpecifierSet(r)
    }
    assert not refused, f"Python {oldest} cannot install these: {refused}"


@pytest.fixture
def bare_clone(tmp_path):
    """A copy of the files that set-up reads, in a folder with a space and a non-ASCII letter, without .venv."""
    clone = tmp_path / "vlm cöurse"
    (clone / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "Makefile", "scripts/setup.sh"):
        shutil.copy(ROOT / name, clone / name)
    (clone / "vlmcourse").mkdir()
    shutil.copy(ROOT / "vlmcourse/__init__.py", clone / "vlmcourse/__init__.py")
    return clone


def set_up(clone: Path, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "VIRTUAL_ENV"))} | environment
    command = ["bash", "scripts/setup.sh"]
    return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=120)


def fake_programs(folder: Path, **scripts: str) -> str:
    """Write executable shell scripts and return a PATH that has only them and the basic tools."""
    folder.mkdir()
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    for tool in ("bash", "dirname", "cat", "cksum", "grep", "tail", "tee", "rm", "mkdir", "env"):
        (folder / tool).symlink_to(shutil.which(tool) or "")
    return str(folder)


def test_no_recent_python_is_named_with_a_remedy(bare_clone, tmp_path):
    path = fake_programs(tmp_path / "bin", python3="exit 1", python="exit 1")
    result = set_up(bare_clone, PATH=path)
    assert result.returncode == 1
    assert "no Python 3.11 or newer" in result.stderr and "apt install python3" in result.stderr


def test_a_named_python_that_is_not_there_is_not_replaced_by_another(bare_clone):
    result = set_up(bare_clone, PYTHON="/nix/python3.12")
    assert result.returncode == 1
    assert "PYTHON=/nix/python3.12 is not a Python 3.11 or newer" in result.stderr


def test_a_missing_venv_module_is_named_with_a_remedy(bare_clone, tmp_path):
    path = fake_programs(tmp_path / "bin", python3='case "$*" in *ensurepip*) exit 1;; *) exit 0;; esac')
    result = set_up(bare_clone, PATH=path)
    assert result.returncode == 1
    assert "no venv module" in result.stderr and "python3-venv" in result.stderr


def test_no_network_is_named_and_nothing_is_marked_as_done(bare_clone):
    nowhere = "http://127.0.0.1:9"
    result = set_up(bare_clone, PIP_INDEX_URL=nowhere, PIP_RETRIES="0", PIP_CONFIG_FILE=os.devnull, PIP_TIMEOUT="2")
    assert result.returncode == 1
    assert "could not reach a package index" in result.stderr and "PIP_FIND_LINKS" in result.stderr
    assert not (bare_clone / ".venv/installed").exists()


def test_set_up_that_is_done_returns_at_once():
    if not (ROOT / ".venv/installed").exists():
        pytest.skip("the tests run outside the .venv that make test makes")
    result = subprocess.run(["bash", "scripts/setup.sh"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
