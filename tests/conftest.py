"""The order of the files, one thread a test, and the marker `gpu(n)`: skip a test where there are fewer than n GPUs."""

from __future__ import annotations

import sys
from itertools import chain, zip_longest

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take long first, so that in the end no worker waits for another one's.

    Between them stand those that drive a notebook: they wait much of their time, and leave their core to the others.
    """
    slow = list(dict.fromkeys(item.path for item in items if item.get_closest_marker("slow")))
    waiting = [item.path for item in items if item.get_closest_marker("notebook") and item.path not in slow]
    both = chain.from_iterable(zip_longest(slow, dict.fromkeys(waiting)))
    place = {path: number for number, path in enumerate(both)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures are built: they may need the GPUs too
def pytest_runtest_setup(item: pytest.Item) -> None:
    use_one_thread()
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    if len(marker.args) != 1 or not isinstance(marker.args[0], int) or marker.args[0] < 1:
        raise pytest.UsageError(f"{item.nodeid}: write the number of GPUs that it needs, as in @pytest.mark.gpu(2)")
    num_needed, num_gpus = marker.args[0], count_gpus()
    if num_gpus < num_needed:
        pytest.skip(f"needs {num_needed} GPU(s), this machine has {num_gpus}")


def use_one_thread() -> None:
    """Let torch compute with one thread, as the tests' ranks do, whatever an earlier test left.

    Sums over two threads round otherwise: bf16 gradients then differ in their last bit from those of a rank.
    """
    if "torch" in sys.modules:  # tests of the planner do without
        sys.modules["torch"].set_num_threads(1)


def count_gpus() -> int:
    """Return how many GPUs this torch can use."""
    import torch  # takes seconds, which tests of the planner do without

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
