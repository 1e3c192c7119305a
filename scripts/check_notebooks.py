"""Fail when a notebook given on the command line carries stored outputs or execution counts."""

import json
import sys
from pathlib import Path


def main(paths: list[str]) -> int:
    """Name every offending notebook; return 1 if there is one."""
    dirty = []
    for path in paths:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        if any(cell.get("outputs") or cell.get("execution_count") for cell in cells):
            dirty.append(path)
    for path in dirty:
        sys.stdout.write(f"{path} carries outputs: clear them (Edit > Clear Outputs of All Cells) and save\n")
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
