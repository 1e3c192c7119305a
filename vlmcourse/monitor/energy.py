"""Joules of a run, joules per token, and CO2 of the electricity: each a range, with the words for what it leaves out.

Enters: power or energy counters over time; a country. Leaves: `EnergyMeter`, a file a rank in `energy/` of the run's
folder (written while the run goes on, so that one that is killed keeps what was measured), and `RunEnergy`, which adds
up all ranks. CO2 is energy times the mean grid intensity of a country's year, from
tables that codecarbon brings (read as a file; nothing is asked over a network). What is not measured (the rest of the
machine, cooling, making the hardware) is not guessed, and the words say so.

Source: codecarbon, data/private_infra/global_energy_mix.json, after Our World in Data; 3.6e6 J are 1 kWh.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcourse.monitor.whole_file import replace_file

FOLDER_NAME = "energy"
JOULES_PER_KWH = 3.6e6
INTENSITY_SPREAD = 0.5
"""An hour's grid intensity is taken to lie within this part of the year's mean: a convention, no measurement."""
GRID_FILE = Path("data", "private_infra", "global_energy_mix.json")


class EnergyMeter:
    """Adds up energy: of power at moments (by trapezoids), of mean power over times, or of a counter."""

    def __init__(self) -> None:
        self.joules_low = self.joules_high = 0.0
        self.seconds = 0.0
        """Between the first and the last sample."""
        self.source = ""
        """What the energy is of; empty before the first sample."""
        self._last: tuple[float, float] | None = None

    def add_power(self, now_s: float, watts: float, source: str) -> None:
        """Take the power at one moment of a clock that never goes back."""
        if self._last is not None:
            seconds = now_s - self._last[0]
            self.add_mean(seconds, (mean := (self._last[1] + watts) / 2), mean, source)
        self._last, self.source = (now_s, watts), source

    def add_mean(self, seconds: float, watts_low: float, watts_high: float, source: str) -> None:
        """Take the mean power over the last `seconds`, as a range of watts."""
        self.joules_low += seconds * watts_low
        self.joules_high += seconds * watts_high
        self.seconds, self.source = self.seconds + seconds, source

    def add_counter(self, now_s: float, joules: float, source: str) -> None:
        """Take a counter of joules at one moment; one that went back was reset, and begins anew."""
        if self._last is not None:
            grown = max(0.0, joules - self._last[1])
            self.joules_low, self.joules_high = self.joules_low + grown, self.joules_high + grown
            self.seconds += now_s - self._last[0]
        self._last, self.source = (now_s, joules), source

    def go_on(self, folder: Path, rank: int) -> None:
        """Count on from what this rank has kept of the run before a resume; from 0 where nothing of it can be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads((folder / FOLDER_NAME / f"rank{rank:04d}.json").read_text(encoding="utf-8"))
            before = kept["joules_low"], kept["joules_high"], kept["seconds"]
            self.joules_low, self.joules_high, self.seconds = before

    def save(self, folder: Path, rank: int) -> None:
        """Write what one rank took so far to `energy/` of its run's folder; a reader sees the old file or the new one.

        Raises:
            OSError: if it cannot be written.
        """
        place = folder / FOLDER_NAME
        place.mkdir(exist_ok=True)
        kept = {"joules_low": self.joules_low, "joules_high": self.joules_high}
        kept |= {"seconds": self.seconds, "source": self.source}
        replace_file(place / f"rank{rank:04d}.json", json.dumps(kept))


@dataclass(frozen=True)
class Co2:
    """CO2 of some electricity, as a range."""

    grams_low: float
    grams_high: float
    country: str
    year: int
    """Of the grid's mean intensity."""
    intensity_g_per_kwh: float


@dataclass(frozen=True)
class RunEnergy:
    """Energy of all ranks of a run."""

    joules_low: float
    joules_high: float
    num_ranks: int
    """Ranks whose energy was counted."""
    seconds: float
    """The longest time that a rank was watched."""
    sources: tuple[str, ...]

    def joules_per_token(self, num_tokens: int) -> tuple[float, float]:
        """Return the least and most joules for each token trained on.

        Raises:
            ValueError: if there are no tokens.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens = {num_tokens}: must be 1 or greater")
        return self.joules_low / num_tokens, self.joules_high / num_tokens

    def co2(self, country: str) -> Co2:
        """Return the CO2 of this energy from a country's grid.

        Args:
            country: ISO 3166 code of three letters, such as DEU.

        Raises:
            ValueError: if there is no such country in the table.
            RuntimeError: if codecarbon is not installed.
        """
        name, year, intensity = read_grid_intensity(country)
        low, high = self.joules_low / JOULES_PER_KWH, self.joules_high / JOULES_PER_KWH
        spread = (1 - INTENSITY_SPREAD) * intensity * low, (1 + INTENSITY_SPREAD) * intensity * high
        return Co2(*spread, name, year, intensity)

    def describe(self, num_tokens: int, country: str) -> str:
        """Return energy, joules per token and CO2 in one line, with what they leave out."""
        per_token = self.joules_per_token(num_tokens)
        carbon = self.co2(country)
        left_out = "cooling and the making of the hardware left out"
        grid = f"{carbon.country}'s mean of {carbon.year}, {carbon.intensity_g_per_kwh:.0f} g/kWh"
        return (
            f"{_range(self.joules_low, self.joules_high)} J on {self.num_ranks} rank(s) in {self.seconds:.0f} s, "
            f"{_range(*per_token)} J a token ({'; '.join(self.sources)}; {left_out}), "
            f"{_range(carbon.grams_low, carbon.grams_high)} g of CO2 (at {grid}, taken to vary by "
            f"{INTENSITY_SPREAD:.0%} with the hour and the place)"
        )


def read_energy(folder: str | Path) -> RunEnergy:
    """Add up what the ranks of a run have kept, up to its end or up to a few seconds ago.

    Raises:
        FileNotFoundError: if no rank has kept its energy there.
    """
    files = sorted((Path(folder) / FOLDER_NAME).glob("rank*.json"))
    if not files:
        raise FileNotFoundError(
            f"There is no energy of a run in {str(folder)!r}: give the folder of a run whose hardware was watched "
            "(logging.hardware_every_s above 0) for a few seconds"
        )
    kept: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return RunEnergy(
        joules_low=sum(rank["joules_low"] for rank in kept),
        joules_high=sum(rank["joules_high"] for rank in kept),
        num_ranks=len(kept),
        seconds=max(rank["seconds"] for rank in kept),
        sources=tuple(sorted({rank["source"] for rank in kept})),
    )


def read_grid_intensity(country: str) -> tuple[str, int, float]:
    """Return a country's name, the year of its figure, and grams of CO2 per kWh of its electricity.

    Args:
        country: ISO 3166 code of three letters, such as DEU.

    Raises:
        ValueError: if there is no such country in the table.
        RuntimeError: if codecarbon is not installed.
    """
    spec = importlib.util.find_spec("codecarbon")  # finds the package without running it
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("CO2 needs the tables of codecarbon, which is not installed: pip install codecarbon")
    table = json.loads((Path(next(iter(spec.submodule_search_locations))) / GRID_FILE).read_text(encoding="utf-8"))
    if country not in table:
        raise ValueError(f"country = {country!r}: must be a code of three capital letters, such as DEU, FRA or USA")
    found = table[country]
    return str(found["country_name"]), int(found["year"]), float(found["carbon_intensity"])


def _range(low: float, high: float) -> str:
    """Return a range to three digits, or one number where both ends are the same."""
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
