"""What a process takes where there is no GPU: processor time, memory, and power, measured by RAPL or estimated.

Enters: this process, and Linux's `/sys/class/powercap` where it can be read. Leaves: one `CpuSample` a question, with a
range of watts and the words for what it covers. RAPL counts the processor's packages and, where it has the counter,
their memory: not the board, disks, fans or the power supply, but all processes of the machine. Most kernels let only
root read it; virtual machines have none. Without it power is estimated: busy cores times the watts of a core, a wide
range.

Source: Linux, Documentation/power/powercap. The watts of a core are rated power over cores: from 360 W / 96 (EPYC 9654)
= 3.75 up to 125 W / 8 (Core i7-11700K) = 15.6, from the makers' data sheets.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

POWERCAP = Path("/sys/class/powercap")
WATTS_PER_BUSY_CORE = (3.0, 16.0)
"""Least and most that one busy core takes, its part of caches and memory controllers included."""
RAPL, ESTIMATE = "RAPL: packages and memory of the whole machine, not the board", "estimate from busy cores"


@dataclass(frozen=True, kw_only=True)
class CpuSample:
    """One look at this process, over the time since the look before."""

    cpu_percent: float
    """Of one core: 200 where two are busy."""
    seconds: float
    """Since the look before: what the means are over."""
    rss_bytes: int
    """Resident set size of this process."""
    watts_low: float
    watts_high: float
    """The same as `watts_low` where it was measured."""
    source: str
    """What the watts are of: `RAPL` or `ESTIMATE`."""


class Rapl:
    """The energy counters of the processors of this machine."""

    def __init__(self, root: Path = POWERCAP) -> None:
        """Find the counters that can be read; `is_readable` says whether there are any."""
        zones = [path for path in sorted(root.glob("intel-rapl:*")) if self._counts(path)]
        self._zones = {zone: int((zone / "max_energy_range_uj").read_text()) for zone in zones}
        self._last = {zone: _read_microjoules(zone) for zone in self._zones}

    @property
    def is_readable(self) -> bool:
        """Whether any counter can be read."""
        return bool(self._zones)

    def take_joules(self) -> float:
        """Return the joules since this was last called (or the counters were found); a counter may have wrapped."""
        microjoules = 0
        for zone, limit in self._zones.items():
            now = _read_microjoules(zone)
            microjoules += (now - self._last[zone]) % (limit + 1)
            self._last[zone] = now
        return microjoules / 1e6

    @staticmethod
    def _counts(zone: Path) -> bool:
        """Whether a zone is a package or its memory and can be read; cores and graphics are parts of a package."""
        try:
            name = (zone / "name").read_text().strip()
            _read_microjoules(zone)
            int((zone / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            return False
        return name.startswith("package") or name == "dram"


class CpuProbe:
    """Looks at this process, and at the power of its machine or a guess at its own."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._process = psutil.Process()
        self._rapl = Rapl(root)
        self._last_s, self._last_cpu_s = time.monotonic(), self._cpu_seconds()

    @property
    def source(self) -> str:
        """What its watts are of."""
        return RAPL if self._rapl.is_readable else ESTIMATE

    def sample(self) -> CpuSample:
        """Look once."""
        now_s, cpu_s = time.monotonic(), self._cpu_seconds()
        seconds = max(now_s - self._last_s, 1e-9)
        cores = (cpu_s - self._last_cpu_s) / seconds
        self._last_s, self._last_cpu_s = now_s, cpu_s
        low, high = (cores * watts for watts in WATTS_PER_BUSY_CORE)
        if self._rapl.is_readable:
            low = high = self._rapl.take_joules() / seconds
        return CpuSample(
            cpu_percent=100 * cores,
            seconds=seconds,
            rss_bytes=self._process.memory_info().rss,
            watts_low=low,
            watts_high=high,
            source=self.source,
        )

    def close(self) -> None:
        """Nothing is held."""

    def _cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def _read_microjoules(zone: Path) -> int:
    return int((zone / "energy_uj").read_text())
