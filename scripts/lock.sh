#!/usr/bin/env bash
# Writes constraints.txt anew: installs the newest releases that pyproject.toml allows into an empty environment and lists them.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet torch==2.13.0 -e '.[dev]'
{
    printf '# Every package the course installs, direct and transitive, at the version it was tested with. Written by `make lock`.\n'
    printf '# torch brings its own pinned CUDA packages on machines where its wheel needs them.\n'
    "$venv/bin/python" -m pip freeze --all --exclude-editable | grep -vE '^pip==' | sed 's/+cpu$//' | sort -f
} >"$venv/constraints.txt"
mv "$venv/constraints.txt" constraints.txt
