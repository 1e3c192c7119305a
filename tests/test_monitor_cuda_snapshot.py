"""Snapshots of the real allocator, hand-written in the documented form: read, drawn from, and compared with."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from vlmcourse.monitor import alloc_conf
from vlmcourse.monitor.allocator_check import compare_with_simulator
from vlmcourse.monitor.cuda_snapshot import SnapshotError, read_map, read_settings, read_trace, take_snapshot
from vlmcourse.planner.allocator_settings import AllocatorSettings
from vlmcourse.planner.memory_map import ALLOCATED, FREE, WAITING

MIB = 2**20
BASE = 0x7F0000000000
OTHER = 0x7F0010000000
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "roundup_power2_divisions": {str(2**i): 0 for i in range(16)},
}


def block(address: int, size: int, state: str, requested: int = 0) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


def entry(action: str, address: int, size: int, metadata: str = "", stream: int = 0) -> dict[str, Any]:
    found = {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "time_us": 1,
        "frames": [],
        "pool_id": (0, 0),
    }
    return found | ({"user_metadata": metadata} if metadata else {})


def snapshot() -> dict[str, Any]:
    """Of a program that asks for 5, 5 and 30 MiB less a little, gives the first back, and for 600 bytes."""
    segments = [
        {
            "device": 0,
            "address": BASE,
            "total_size": 20 * MIB,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "allocated_size": 5 * MIB,
            "active_size": 5 * MIB,
            "is_expandable": False,
            "blocks": [
                block(BASE, 5 * MIB, "inactive"),
                block(BASE + 5 * MIB, 5 * MIB, "active_allocated", 5 * MIB),
                block(BASE + 10 * MIB, 10 * MIB, "inactive"),
            ],
        },
        {
            "device": 0,
            "address": OTHER,
            "total_size": 30 * MIB,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "allocated_size": 30 * MIB,
            "active_size": 30 * MIB,
            "is_expandable": False,
            "blocks": [block(OTHER, 30 * MIB, "active_allocated", 30 * MIB - 100)],
        },
        {
            "device": 0,
            "address": OTHER + 64 * MIB,
            "total_size": 2 * MIB,
            "stream": 0,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "allocated_size": 0,
            "active_size": 1024,
            "is_expandable": False,
            "blocks": [
                block(OTHER + 64 * MIB, 1024, "active_pending_free", 600),
                block(OTHER + 64 * MIB + 1024, 2 * MIB - 1024, "inactive"),
            ],
        },
    ]
    small = OTHER + 64 * MIB
    trace = [
        entry("segment_alloc", BASE, 20 * MIB),
        entry("alloc", BASE, 5 * MIB, "weights"),
        entry("alloc", BASE + 5 * MIB, 5 * MIB, "activations"),
        entry("segment_alloc", OTHER, 30 * MIB),
        entry("alloc", OTHER, 30 * MIB - 100),
        entry("free_requested", BASE, 5 * MIB),
        entry("free_completed", BASE, 5 * MIB),
        entry("segment_alloc", small, 2 * MIB),
        entry("alloc", small, 600),
        entry("free_requested", small, 600),
        entry("snapshot", 0, 0),
    ]
    return {"segments": segments[::-1], "device_traces": [trace, []], "allocator_settings": copy.deepcopy(SETTINGS)}


def test_segments_and_blocks_become_a_map() -> None:
    found = read_map(snapshot())
    assert [segment.size_bytes // MIB for segment in found.segments] == [20, 30, 2]
    assert (found.reserved_bytes, found.allocated_bytes) == (52 * MIB, 35 * MIB)
    assert found.rounding_bytes == 100
    assert [(b.state, b.requested_bytes) for b in found.segments[2].blocks] == [(WAITING, 600), (FREE, 0)]
    assert found.holes(is_small=False) == (10 * MIB, 5 * MIB)
    owners = {b.address: b.owner for b in found.blocks() if b.state == ALLOCATED}
    assert owners == {BASE + 5 * MIB: "activations", OTHER: ""}


def test_the_simulator_does_what_the_snapshot_tells() -> None:
    real = read_trace(snapshot())
    assert [size // MIB for size in real.reserved_bytes] == [20, 20, 50, 50, 52]
    found = compare_with_simulator(snapshot())
    assert found.is_equal, found.describe()
    assert found.real_allocated_bytes == 35 * MIB + 1024  # what waits for a stream is still in use


def test_differences_to_the_simulator_are_reported() -> None:
    other = snapshot()
    other["device_traces"][0][3]["size"] += 2 * MIB  # a segment of 32 MiB for 30
    other["segments"][1]["total_size"] += 2 * MIB
    other["segments"][1]["blocks"].append(block(OTHER + 30 * MIB, 2 * MIB, "inactive"))
    found = compare_with_simulator(other)
    assert not found.is_equal
    assert (found.num_events_off, found.first_off, found.largest_gap_bytes) == (3, 2, 2 * MIB)
    assert "3 of 5 events off, by 2,097,152 bytes at most; 1 segments only simulated, 1 only real" in found.describe()


def test_segments_given_back_alone_are_a_call_of_empty_cache() -> None:
    other = snapshot()
    trace = other["device_traces"][0]
    trace[-1:] = [
        entry("free_completed", OTHER + 64 * MIB, 600),
        entry("free_requested", OTHER, 30 * MIB - 100),
        entry("free_completed", OTHER, 30 * MIB - 100),
        entry("segment_free", OTHER, 30 * MIB),
        entry("segment_free", OTHER + 64 * MIB, 2 * MIB),
        entry("snapshot", 0, 0),
    ]
    del other["segments"][:2]
    assert compare_with_simulator(other).is_equal
    assert [event.kind for event in read_trace(other).trace.events].count("empty_cache") == 1


def freed(address: int, size: int) -> list[dict[str, Any]]:
    return [entry("free_requested", address, size), entry("free_completed", address, size)]


def full_segment(address: int, size: int, device: int = 0, stream: int = 0, used: int | None = None) -> dict[str, Any]:
    used = size if used is None else used
    blocks = [block(address, used, "active_allocated", used)]
    blocks += [block(address + used, size - used, "inactive")] if used < size else []
    where = {"device": device, "address": address, "total_size": size, "stream": stream, "is_expandable": False}
    return {**where, "segment_type": "small" if size == 2 * MIB else "large", "blocks": blocks}


def whole(number: int, size_mib: int) -> list[dict[str, Any]]:
    """A segment that is asked for and used whole."""
    at, size = BASE + number * 256 * MIB, size_mib * MIB
    return [entry("segment_alloc", at, size), entry("alloc", at, size)]


def test_empty_cache_before_a_request_that_needs_a_new_segment_is_a_call_too() -> (
    None
):  # F15's remedy, before each step
    trace = [*whole(0, 30), *freed(BASE, 30 * MIB), entry("segment_free", BASE, 30 * MIB), *whole(1, 40)]
    segments = [full_segment(BASE + 256 * MIB, 40 * MIB)]
    found = {"segments": segments, "device_traces": [trace], "allocator_settings": copy.deepcopy(SETTINGS)}
    for device_bytes in (None, 100 * MIB, 60 * MIB):  # on the last one the allocator itself would have to do it
        assert compare_with_simulator(found, device_bytes=device_bytes).is_equal


def test_a_request_that_fails_and_is_caught_has_emptied_the_cache() -> None:
    trace = [*whole(0, 30), *freed(BASE, 30 * MIB), entry("segment_free", BASE, 30 * MIB)]
    trace += [entry("oom", 64 * MIB, 80 * MIB), entry("segment_alloc", OTHER, 2 * MIB), entry("alloc", OTHER, 512)]
    segments = [full_segment(OTHER, 2 * MIB, used=512)]
    found = {"segments": segments, "device_traces": [trace], "allocator_settings": copy.deepcopy(SETTINGS)}
    for device_bytes in (None, 64 * MIB):
        assert compare_with_simulator(found, device_bytes=device_bytes).is_equal


def test_only_some_unused_segments_given_back_for_a_new_one_are_the_allocators_doing() -> None:
    sizes = (40, 50, 60)
    trace = [entry for number, size in enumerate(sizes) for entry in whole(number, size)]
    for number, size in enumerate(sizes):
        trace += freed(BASE + number * 256 * MIB, size * MIB)
    trace += [entry("segment_free", BASE + number * 256 * MIB, sizes[number] * MIB) for number in (2, 1)]
    trace += whole(3, 100)
    kept = full_segment(BASE, 40 * MIB)
    kept["blocks"][0]["state"] = "inactive"
    found = {"segments": [kept, full_segment(BASE + 768 * MIB, 100 * MIB)], "device_traces": [trace]}
    settings = AllocatorSettings(max_split_bytes=32 * MIB)
    assert compare_with_simulator(found, settings=settings, device_bytes=200 * MIB).is_equal


def test_each_gpu_has_its_own_segments_and_each_stream_its_own_blocks() -> None:
    other = snapshot()
    for segment in other["segments"]:
        segment["device"] = 1
    streamed = OTHER + 128 * MIB  # for 5 MiB, which the hole of the first stream would hold
    trace = other["device_traces"][0][:-1]
    trace += [entry("segment_alloc", streamed, 20 * MIB, stream=7), entry("alloc", streamed, 5 * MIB, stream=7)]
    other["device_traces"] = [whole(0, 30), trace]
    other["segments"] += [full_segment(streamed, 20 * MIB, 1, 7, used=5 * MIB), full_segment(BASE, 30 * MIB)]
    assert compare_with_simulator(other, device=1).is_equal and compare_with_simulator(other, device=0).is_equal
    assert (read_map(other, 1).reserved_bytes, read_map(other, 0).reserved_bytes) == (72 * MIB, 30 * MIB)


def test_settings_are_those_of_the_snapshot() -> None:
    other = snapshot()
    other["allocator_settings"]["roundup_power2_divisions"] |= {"1": 8, "4": 2}
    assert read_settings(other).roundup_divisions == (8, 0, 2, *[0] * 13)
    other["allocator_settings"] |= {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,large_segment_size_mb:40",
        "max_split_size": 64 * MIB,
        "expandable_segments": True,
        "garbage_collection_threshold": 0.8,
    }
    found = read_settings(other)
    assert (found.max_split_bytes, found.large_segment_bytes) == (64 * MIB, 40 * MIB)
    assert found.expandable_segments and found.memory_fraction is None
    assert read_settings(snapshot()).max_split_bytes is None
    del other["allocator_settings"]
    with pytest.raises(SnapshotError, match="pass settings="):
        read_settings(other)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: s["device_traces"][0].clear(), "no trace of GPU 0"),
        (lambda s: s["device_traces"][0].pop(1), "began too late"),
        (lambda s: s["device_traces"][0].pop(0), "must begin before"),
        (lambda s: s["device_traces"][0][1].update(pool_id=(1, 0)), "1 private pools"),
        (lambda s: s["segments"][2]["blocks"].pop(1), "contradicts itself"),
        (lambda s: s["segments"][2]["blocks"][0].update(state="asleep"), "'asleep': must be one of"),
        (lambda s: s["segments"][0].pop("total_size"), "no 'total_size'"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(spoil: Any, words: str) -> None:
    other = snapshot()
    spoil(other)
    with pytest.raises(SnapshotError, match=words):
        read_map(other)
        compare_with_simulator(other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and so there is a snapshot")
def test_without_a_gpu_no_snapshot_is_taken_and_the_reason_is_said() -> None:
    with pytest.raises(
        RuntimeError, match="there is no CUDA allocator to ask: record a trace with monitor.alloc_trace"
    ):
        take_snapshot()


# --- Whether a setting came in time -----------------------------------------------------------------------------------

ASK = """
import os, sys, torch
from vlmcourse.monitor.alloc_conf import check_alloc_conf
def told(name):
    verdict = check_alloc_conf()
    print(name, verdict.state, '|', verdict.fix)
told('start')
os.environ['PYTORCH_ALLOC_CONF'] = 'max_split_size_mb:64'
told('first')
os.environ['PYTORCH_ALLOC_CONF'] = 'max_split_size_mb:128'
told('again')
"""


def ask(**variables: str) -> dict[str, str]:
    """What a process of its own says at three moments: torch reads the variable once in a process."""
    clean = {name: value for name, value in os.environ.items() if name not in alloc_conf.NAMES}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=clean | variables, capture_output=True, text=True, timeout=120, check=True
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_a_setting_that_came_after_the_allocator_was_configured_is_called_too_late() -> None:
    said = ask()
    right = "in effect" if torch.cuda.is_available() else "no gpu"
    assert said["start"].startswith("unset")
    assert said["first"].startswith(right)
    assert said["again"].startswith("too late | torch had configured its allocator before PYTORCH_ALLOC_CONF was set")
    assert "goes by 'max_split_size_mb:64'" in said["again"] and "above `import torch`" in said["again"]


def test_the_older_name_wins_where_both_are_set() -> None:
    said = ask(PYTORCH_ALLOC_CONF="max_split_size_mb:64", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128")
    assert said["start"].startswith("in effect" if torch.cuda.is_available() else "no gpu")
    assert "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 is the one" in said["start"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("expandable_segments:true", "with a capital"), ("max_split:64", "did you mean max_split_size_mb"), ("", "")],
)
def test_what_torch_would_refuse_is_wrong_before_torch_is_asked(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    monkeypatch.setattr(alloc_conf, "_used_settings", lambda: pytest.fail("torch was asked"))
    verdict = alloc_conf.check_alloc_conf()
    assert verdict.state == ("wrong" if text else "unset") and words in verdict.fix
