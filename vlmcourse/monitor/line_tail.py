"""The lines that a file has got since it was last read, whatever became of the file in between.

Enters: a path, whose file may not be there yet, may be cut, replaced or moved away with its folder. Leaves: whole
lines, each once, and whether they are of another file than the ones before. Chapter 6.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class NewLines(NamedTuple):
    """What one look found."""

    lines: list[str]
    """Without their ends; a last line that has no end yet is left for the next look."""
    is_anew: bool
    """Whether what was read before is no longer what the file holds: forget it."""


class LineTail:
    """Reads one file's new lines."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """Read nothing yet.

        Args:
            path: of the file.
            last_bytes: how far back from its end the first look at a long file begins; by default it reads all.
        """
        self.path, self._last_bytes = path, last_bytes
        self._file_id: tuple[int, int] | None = None
        self._read_bytes = 0

    def read(self) -> NewLines:
        """Return what is new. A file that is not there, or not for us to read, has no lines."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                is_anew = self._file_id != (found.st_dev, found.st_ino) or found.st_size < self._read_bytes
                if is_anew:
                    had_file = self._file_id is not None
                    self._file_id, self._read_bytes = (found.st_dev, found.st_ino), 0
                    begin = max(0, found.st_size - self._last_bytes) if self._last_bytes is not None else 0
                    file.seek(begin)
                    self._read_bytes = begin + (len(file.readline()) if begin else 0)  # the first of these may be cut
                else:
                    had_file = True
                    if found.st_size == self._read_bytes:
                        return NewLines([], False)
                file.seek(self._read_bytes)
                content = file.read()
        except OSError:
            had_file, self._file_id, self._read_bytes = self._file_id is not None, None, 0
            return NewLines([], had_file)
        whole = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return NewLines(whole.decode(errors="replace").splitlines(), is_anew and had_file)
