"""A test that is marked with `gpu(n)` runs where there are n GPUs, and says why where there are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.fixture
def gpu_memory():
    raise RuntimeError("a fixture was built")

@pytest.mark.gpu(2)
def test_of_two(gpu_memory):
    pass

@pytest.mark.gpu(1)
def test_of_one():
    pass

def test_of_none():
    pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers =\n    gpu(n)\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return pytester


def test_a_test_that_needs_more_gpus_is_skipped_before_its_fixtures_with_the_reason(run: pytest.Pytester) -> None:
    run.makepyfile(TESTS)
    result = run.runpytest_inprocess("-rs", "--strict-markers")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines("*needs 2 GPU(s), this machine has 1*")


def test_without_a_gpu_every_marked_test_is_skipped(run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run.makepyfile(TESTS)
    result = run.runpytest_inprocess("-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines("*needs 1 GPU(s), this machine has 0*")


@pytest.mark.parametrize("marker", ["gpu", "gpu()", "gpu('2')", "gpu(0)"])
def test_a_marker_without_a_number_is_an_error_and_not_a_test_that_never_runs(
    run: pytest.Pytester, marker: str
) -> None:
    run.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass")
    result = run.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*write the number of GPUs*@pytest.mark.gpu(2)*")
