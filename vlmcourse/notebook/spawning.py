"""Lets processes that a cell starts (data loader workers) receive classes and functions defined in the cell.

Forked processes have them anyway. Spawned ones, the rule on macOS and in newer Pythons, would look for them in a main
module that they cannot import; here they travel by value instead.
"""

from __future__ import annotations

import multiprocessing.reduction as reduction
from collections import ChainMap
from typing import Any, BinaryIO

import cloudpickle


class _SpawnPickler(cloudpickle.Pickler):
    """Pickles the cell's definitions by value, and everything else as multiprocessing does."""

    def __init__(self, file: BinaryIO, protocol: int | None = None) -> None:
        forking: Any = reduction.ForkingPickler
        # Before the base class, which reads it once.
        self.dispatch_table = ChainMap(forking._extra_reducers, self.dispatch_table)  # type: ignore[arg-type]
        super().__init__(file, protocol)


def send_definitions_by_value() -> None:
    """Use the pickler above wherever this process spawns another."""

    def dump(obj: object, file: BinaryIO, protocol: int | None = None) -> None:
        _SpawnPickler(file, protocol).dump(obj)

    reduction.dump = dump
