"""`python -m vlmcourse`: the `vlmcourse` command where its script is not on the PATH."""

import sys

from vlmcourse.cli import main

if __name__ == "__main__":
    sys.exit(main())
