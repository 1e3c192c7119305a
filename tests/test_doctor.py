"""`vlmcourse doctor` sees what a machine lacks and says how to get it."""

import argparse
import importlib.metadata
import json
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from vlmcourse.commands import doctor
from vlmcourse.commands.doctor import GIB

ROOT = Path(__file__).resolve().parent.parent
Memory = namedtuple("Memory", "total available")


def finding(name: str) -> doctor.Finding:
    return next(f for f in doctor.examine() if f.name == name)


def test_a_machine_that_has_everything_passes(capsys):
    assert doctor.run(argparse.Namespace(json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    names = {f["name"] for f in report["findings"]}
    assert {"python", "cores", "memory", "disk", "torch", "gloo", "nccl", "compiler"} <= names


def test_the_table_names_every_finding(capsys):
    doctor.run(argparse.Namespace(json=False))
    printed = capsys.readouterr().out
    assert all(f.name.split("_")[0] in printed for f in doctor.examine())


def test_a_package_that_is_missing_is_named_and_fails_the_command(monkeypatch, capsys):
    def version(package):
        if package == "nbgrader":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert doctor.run(argparse.Namespace(json=True)) == 1
    lines = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert lines["nbgrader"]["state"] == "missing" and "make lab" in lines["nbgrader"]["fix"]
    assert lines["torch"]["state"] == "ok"


def test_no_compiler_is_a_note_that_names_the_package(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = finding("compiler")
    assert found.state == "note" and "apt install g++" in found.fix


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "state", "chapter"), [(16, 8, "ok", "ok"), (2, 1, "note", "missing")]
)
def test_little_memory_is_noted_and_chapters_that_need_more_are_named(monkeypatch, total_gib, free_gib, state, chapter):
    memory = Memory(total_gib * GIB, free_gib * GIB)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    assert finding("memory").state == state
    assert finding("ch01_parallelism").state == chapter


def test_one_core_is_noted(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert finding("cores").state == "note"


def test_a_driver_without_a_cuda_build_of_torch_is_missing_and_not_just_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None)
    found = finding("gpu")
    assert found.state == "missing" and "CUDA build" in found.fix


def test_a_gpu_without_bf16_is_told_to_use_fp16_or_fp32(monkeypatch):
    Properties = namedtuple("Properties", "name total_memory")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties("Tesla V100-SXM2-32GB", 32 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (7, 0))
    found = finding("gpu 0")
    assert found.state == "note" and "V100" in found.value
    assert found.fix.endswith("train.precision = 'fp16' (with a loss scaler) or 'fp32'")


def test_every_chapter_in_the_repository_has_its_needs_listed():
    assert {path.parent.name for path in ROOT.glob("solutions/*/*.ipynb")} <= set(doctor.CHAPTERS)


def test_a_setting_of_the_allocator_that_torch_would_refuse_is_a_note_that_says_why(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert doctor.check_allocator() == []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:true")
    found = finding("allocator")
    assert (found.state, found.value) == ("note", "PYTORCH_ALLOC_CONF=expandable_segments:true")
    assert "with a capital" in found.fix
