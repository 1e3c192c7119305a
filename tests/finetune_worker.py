"""What each rank of `vlmcourse train` does. Usage: finetune_worker.py CONFIG."""

from __future__ import annotations

import sys

from vlmcourse import cli

if __name__ == "__main__":
    sys.exit(cli.main(["train", sys.argv[1]]))
