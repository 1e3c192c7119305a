"""The commands that README.md tells a user to type, for the tests that run them."""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def shell_commands(section: str = "") -> list[str]:
    """Return every command line of README's bash blocks, or of one section's, without its comment."""
    lines = [line.split("  #")[0].strip() for block in _blocks("bash", section) for line in block.splitlines()]
    return [line for line in lines if line]


def notebook_cells() -> list[str]:
    """Return the cells of README's notebook example, in order."""
    return _blocks("python", "In a notebook")


def toml_blocks(section: str) -> list[str]:
    """Return the TOML of one section."""
    return _blocks("toml", section)


def _blocks(language: str, section: str) -> list[str]:
    start = README.index(f"\n## {section}\n") if section else 0
    end = README.find("\n## ", start + 1) if section else len(README)
    return re.findall(rf"```{language}\n(.*?)```", README[start:end], flags=re.S)


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
