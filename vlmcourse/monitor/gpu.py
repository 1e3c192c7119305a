"""Watch the hardware of a rank while it trains: a thread that looks at the GPU, or at the process, at its own pace.

Enters: a rank's device. Leaves: values for the rows of a run (`performance/gpu_util`, `performance/memory_used_gb`,
`hardware/…`, `energy/…`), each a mean since the row before, and the energy so far. The thread touches neither CUDA nor
torch: NVML and `/proc` are asked beside them, and training never waits for it. See `nvml.py` and `cpu_power.py` for
what the numbers hold; energy is power times time between samples, or the card's own counter where it has one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from vlmcourse.monitor.cpu_power import RAPL, CpuProbe, CpuSample
from vlmcourse.monitor.energy import EnergyMeter
from vlmcourse.monitor.nvml import GpuProbe, GpuSample, NvmlError
from vlmcourse.parallel.ranks import Ranks

logger = logging.getLogger(__name__)
PERIOD_S = 0.5
KEEP_EVERY_S = 5.0
"""Seconds between writes of the energy so far: a run that is killed loses no more of it, and a look."""
GPU_BOARD = "NVML: the GPU's board, not the rest of the machine"
GB = 10**9


class Probe(Protocol):
    """What looks at the hardware."""

    def sample(self) -> GpuSample | CpuSample:
        """Look once."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


def build_probe(device: torch.device, local_rank: int, say: Callable[[str], None]) -> tuple[Probe, bool]:
    """Return what looks at a rank's hardware, and whether its energy counts as this rank's.

    Args:
        device: the rank's.
        local_rank: its number on its machine: RAPL counts the whole machine, so that of rank 0 alone may be added up.
        say: prints one line where a GPU cannot be asked, and the process is watched instead.
    """
    if device.type == "cuda":
        try:
            return GpuProbe(device), True
        except NvmlError as error:
            say(f"The GPU is not watched: {error}. What follows is of the process, without the GPU's power")
    probe = CpuProbe()
    return probe, local_rank == 0 or probe.source != RAPL


def watch_hardware(
    ranks: Ranks, folder: Path, period_s: float, say: Callable[[str], None], *, continues: bool
) -> HardwareSampler | None:
    """Start to watch a rank's hardware for a run.

    Args:
        ranks: this process's place.
        folder: the run's.
        period_s: seconds between looks; 0 starts nothing.
        say: prints one line where something cannot be watched.
        continues: whether the run goes on: then its energy counts on.

    Returns:
        What watches, or None.
    """
    if period_s <= 0:
        return None
    probe, counts = build_probe(ranks.device, ranks.local_rank, say)
    sampler = HardwareSampler(probe, period_s=period_s, counts_energy=counts)
    if continues:
        sampler.meter.go_on(folder, ranks.rank)
    return sampler


class HardwareSampler:
    """A thread that looks every `period_s` seconds; the numbers are read by the thread that trains."""

    def __init__(self, probe: Probe, *, period_s: float = PERIOD_S, counts_energy: bool = True) -> None:
        """Start looking.

        Args:
            probe: what looks.
            period_s: seconds between looks.
            counts_energy: whether the energy seen is added up.

        Raises:
            ValueError: if the period is not above 0.
        """
        if period_s <= 0:
            raise ValueError(f"period_s = {period_s}: must be greater than 0")
        self._probe, self._period_s, self._counts_energy = probe, period_s, counts_energy
        self._sums: dict[str, list[float]] = {}
        self._reasons: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failed = ""
        self.meter = EnergyMeter()
        """Energy so far."""
        self._kept_in: tuple[Path, int] | None = None
        self._keep_at_s = 0.0
        self._has_said = False
        self._thread = threading.Thread(target=self._run, name="hardware-sampler", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> str:
        """Why no more looks are taken; empty while all is well."""
        return self._failed

    def take_row(self) -> dict[str, float | str]:
        """Return means since this was last called, by the names of a run's rows, without what cannot be measured."""
        with self._lock:
            row: dict[str, float | str] = {name: sum(seen) / len(seen) for name, seen in self._sums.items()}
            self._sums = {}
            if self._reasons:
                row["hardware/throttle_reasons"] = ", ".join(sorted(self._reasons))
                self._reasons = set()
            if self._counts_energy and self.meter.source:
                row |= {"energy/joules_low": self.meter.joules_low, "energy/joules_high": self.meter.joules_high}
        return row

    def keep_in(self, folder: Path, rank: int) -> None:
        """Write the energy so far to a run's folder from now on, every `KEEP_EVERY_S`: a killed run has no end.

        Args:
            folder: the run's; it must be there, and an earlier run's of the same name be moved aside.
            rank: whose energy it is.
        """
        self._kept_in = folder, rank

    def close(self) -> None:
        """Take a last look and stop; safe to call twice."""
        self._stop.set()
        self._thread.join(5)
        self._probe.close()

    def finish(self, folder: Path, rank: int) -> str:
        """Stop, and keep the energy of this rank in the run's folder; return what went wrong, or nothing."""
        self.close()
        if self._counts_energy and self.meter.source:
            try:
                self.meter.save(folder, rank)
            except OSError as error:
                return f"The energy of this run is not kept ({error.strerror})"
        return f"The hardware was not watched to the end ({self._failed})" if self._failed else ""

    def _run(self) -> None:
        is_last = isinstance(self._probe, CpuProbe) and self._stop.wait(
            self._period_s
        )  # it looks back, a GPU's does not
        while True:
            try:
                sample = self._probe.sample()
            except (OSError, RuntimeError, psutil.Error) as error:
                self._failed = str(error) or type(error).__name__
                return
            with self._lock:
                self._add(sample)
            self._keep()
            if is_last:
                return
            is_last = self._stop.wait(self._period_s)

    def _keep(self) -> None:
        """Write the energy so far where that is due; a disk that does not take it is named once."""
        if self._kept_in is None or not self._counts_energy or not self.meter.source:
            return
        if (now_s := time.monotonic()) < self._keep_at_s:
            return
        self._keep_at_s = now_s + KEEP_EVERY_S
        folder, rank = self._kept_in
        try:
            self.meter.save(folder, rank)
        except OSError as error:
            if not self._has_said:
                logger.warning("rank %d: the energy so far is not kept in %s: %s", rank, folder, error.strerror)
            self._has_said = True

    def _add(self, sample: GpuSample | CpuSample) -> None:
        now_s = time.monotonic()
        for name, value in row_values(sample).items():
            self._sums.setdefault(name, []).append(value)
        if isinstance(sample, CpuSample):
            self.meter.add_mean(sample.seconds, sample.watts_low, sample.watts_high, sample.source)
            return
        self._reasons |= set(sample.throttle_reasons or ())
        if sample.energy_joules is not None:
            self.meter.add_counter(now_s, sample.energy_joules, GPU_BOARD)
        elif sample.power_watts is not None:
            self.meter.add_power(now_s, sample.power_watts, GPU_BOARD)


def row_values(sample: GpuSample | CpuSample) -> dict[str, float]:
    """Return the numbers of one sample by the names of a run's rows; what is None is left out."""
    if isinstance(sample, CpuSample):
        watts = (sample.watts_low + sample.watts_high) / 2
        kind = "measured" if sample.source == RAPL else "estimated"
        return {
            "hardware/cpu_percent": sample.cpu_percent,
            "hardware/rss_gb": sample.rss_bytes / GB,
            f"hardware/{kind}_cpu_watts": watts,
        }
    values: dict[str, Any] = {
        "performance/gpu_util": sample.utilisation_percent,
        "performance/memory_used_gb": None if sample.memory_used_bytes is None else sample.memory_used_bytes / GB,
        "hardware/gpu_watts": sample.power_watts,
        "hardware/gpu_celsius": sample.temperature_celsius,
        "hardware/gpu_is_throttled": None if sample.throttle_reasons is None else float(bool(sample.throttle_reasons)),
        "hardware/pcie_rx_bytes_per_s": sample.pcie_rx_bytes_per_s,
        "hardware/pcie_tx_bytes_per_s": sample.pcie_tx_bytes_per_s,
        "hardware/nvlink_rx_bytes_per_s": sample.nvlink_rx_bytes_per_s,
        "hardware/nvlink_tx_bytes_per_s": sample.nvlink_tx_bytes_per_s,
    }
    return {name: float(value) for name, value in values.items() if value is not None}
