"""All lines that a cell's ranks have printed, in a file, for cells that print more than a notebook can show.

The files are in a private folder, one a kernel, that is removed when the kernel ends. A cell that is shown whole leaves
none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import TextIO

from vlmcourse.notebook.jobs import FOLDER_PREFIX

MEMORY_CHARS = 1 << 20
"""What is kept in memory before there is a file."""
MAX_FILE_CHARS = 10**9
NUMBERS = count(1)


class KeptOutput:
    """The lines of one cell; a disk that is full costs lines here, never the cell."""

    def __init__(self) -> None:
        self._in_memory: list[str] = []
        self._num_chars = 0
        self._file: TextIO | None = None
        self._path: Path | None = None
        self._is_needed = False
        self._problem = ""

    def write(self, lines: Sequence[str]) -> None:
        """Keep lines, each given without its end."""
        text = "\n".join([*lines, ""])
        self._num_chars += len(text)
        if self._problem:
            return
        if self._num_chars > MAX_FILE_CHARS:
            self._problem = f"only the first {MAX_FILE_CHARS:,} characters"
            return
        if self._file is None:
            self._in_memory.append(text)
            if self._num_chars > MEMORY_CHARS:
                self._open()
            return
        try:
            self._file.write(text)
        except OSError as error:
            self._fail(error)

    def describe(self) -> str:
        """Say where all lines are, up to now; from here on the file stays."""
        self._is_needed = True
        try:
            if self._in_memory:
                self._open()
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._fail(error)
        if self._path is None:
            return f"they could not be kept ({self._problem})"
        return f"{self._problem or 'all of them'}, until the kernel ends: {self._path}"

    def close(self) -> None:
        """No more lines come; a file that nobody was told of is removed."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file, self._problem = None, self._problem or "the cell had ended"
        if self._path is not None and not self._is_needed:
            self._path.unlink(missing_ok=True)

    def _open(self) -> None:
        try:
            path = private_folder() / f"output-{next(NUMBERS)}.txt"
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            self._path = path
            self._file = os.fdopen(handle, "w", encoding="utf-8", errors="replace", buffering=1 << 16)
            self._file.writelines(self._in_memory)
        except OSError as error:
            self._fail(error)
        self._in_memory.clear()

    def _fail(self, error: OSError) -> None:
        self._problem = f"only the first lines, because of {error.strerror}"
        if self._path is None:
            self._problem = str(error.strerror)


@cache
def private_folder() -> Path:
    """Return this process's folder for such files, which only this user can read; made at the first call.

    Its name lets a later kernel remove it where this one is killed, see `jobs.remove_orphans`.

    Raises:
        OSError: if it cannot be made.
    """
    path = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-output-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
