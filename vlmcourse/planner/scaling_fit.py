"""Models of a step's time over the number of ranks, fitted to measurements.

Enters: `RankTimes`. Leaves: a `ScalingFit` by least squares of relative errors with all terms 0 or more. Whether
measurements tell models apart is `scaling_limits`' business. Chapter 6. A model's terms, with N ranks:

- serial_s: what no rank is spared; parallel_s: what N ranks share, each 1/N of it (in weak scaling: all of it);
- latency_s (N - 1): messages that follow each other in a ring, the alpha of each collective;
- bandwidth_s (N - 1) / N: bytes that a rank sends in a ring, the beta of each collective.

Amdahl's law has the first two. The last term is 1 - 1/N: in strong scaling s + p/N + b (N - 1)/N is
(s + b) + (p - b)/N, so **no measurement of step times tells bandwidth from a serial part**. It takes the communication
measured by itself, as the step logs have it; without, the fit has no bandwidth term and says so.

Source: Hockney 1994 for alpha and beta, Thakur et al. 2005 for the rings (see `planner.network`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlmcourse.planner.scaling import (
    RankTimes,
    check_times,
)

GOOD_FIT_FRACTION = 0.1
"""Root mean square of the relative errors up to which a fit describes what was measured."""
POOR_FIT = "a poor fit: do not predict from it"
COMMUNICATION = "with communication"
TERMS = ("serial_s", "parallel_s", "latency_s", "bandwidth_s")


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """One model with the terms that describe the measurements best."""

    law: str
    kind: str
    """strong or weak."""
    serial_s: float
    parallel_s: float
    latency_s: float = 0.0
    """For each rank more."""
    bandwidth_s: float = 0.0
    """That all bytes would take if a rank sent each of them once."""
    residual_fraction: float = 0.0
    """Root mean square of (predicted - measured) / measured over the numbers of ranks."""
    num_sizes: int = 0
    """Different numbers of ranks that it was fitted to."""
    num_terms: int = 2
    """That were free."""
    has_measured_communication: bool = False

    @property
    def spare_sizes(self) -> int:
        """Numbers of ranks beyond what the terms need; with 0 any fit is perfect and proves nothing."""
        return max(0, self.num_sizes - self.num_terms)

    @property
    def is_good(self) -> bool:
        """Whether it describes what was measured."""
        return self.residual_fraction <= GOOD_FIT_FRACTION

    @property
    def serial_fraction(self) -> float:
        """Of the time on one rank."""
        return self.serial_s / (self.serial_s + self.parallel_s)

    def predict_s(self, num_ranks: float) -> float:
        """Predict the seconds of a step."""
        shared_s = self.parallel_s / num_ranks if self.kind == "strong" else self.parallel_s
        return self.serial_s + shared_s + self.predict_communication_s(num_ranks)

    def predict_communication_s(self, num_ranks: float) -> float:
        """Predict the seconds of a step in which even the slowest rank waits."""
        return self.latency_s * (num_ranks - 1) + self.bandwidth_s * (num_ranks - 1) / num_ranks

    def predict_speedup(self, num_ranks: float) -> float:
        """Predict the speed-up over one rank, as `scaling` defines it for this kind."""
        scale = num_ranks if self.kind == "weak" else 1
        return scale * self.predict_s(1) / self.predict_s(num_ranks)

    def __str__(self) -> str:
        """Show terms and goodness in one line, in milliseconds."""
        shared = "shared" if self.kind == "strong" else "on each rank"
        parts = [f"serial {1e3 * self.serial_s:.1f} ms"] if self.kind == "strong" else []
        parts.append(f"{shared} {1e3 * self.parallel_s:.1f} ms")
        if self.law == COMMUNICATION:
            parts.append(f"{1e3 * self.latency_s:.2f} ms for each rank more")
            known = self.has_measured_communication
            is_known = known or self.kind == "weak"
            parts.append(f"bandwidth {1e3 * self.bandwidth_s:.1f} ms" if is_known else "bandwidth counted as serial")
        off = f"off by {100 * self.residual_fraction:.1f} %"
        notes = [off] if self.spare_sizes else [off, "as many terms as points, so it proves nothing"]
        notes += [] if self.is_good else [POOR_FIT]
        return f"{self.law}: {', '.join(parts)}; {'; '.join(notes)}"


def fit_amdahl(kind: str, times: Sequence[RankTimes]) -> ScalingFit:
    """Fit a serial part and one that is shared; in weak scaling a time that does not change with the ranks.

    Args:
        kind: strong or weak.
        times: of 2 or more numbers of ranks; 1 rank need not be among them.

    Raises:
        ValueError: as `check_times` does.
    """
    check_times(kind, times)
    sizes, measured = _columns(times)
    columns = np.ones((len(sizes), 1)) if kind == "weak" else np.stack([np.ones_like(sizes), 1 / sizes], axis=1)
    terms = _solve(("parallel_s",) if kind == "weak" else TERMS[:2], columns, measured, measured)
    is_strong = kind == "strong"
    return _finish("Amdahl" if is_strong else "no growth", kind, terms, times, num_terms=2 if is_strong else 1)


def fit_communication(kind: str, times: Sequence[RankTimes]) -> ScalingFit:
    """Fit Amdahl's terms and those of collectives that grow with the ranks.

    Where communication was measured on every number of ranks, it is fitted by itself, and the rest by Amdahl's terms.
    Otherwise the step times have to tell latency (weak scaling: bandwidth too) from what does not grow.

    Args:
        kind: strong or weak.
        times: of 3 or more numbers of ranks.

    Raises:
        ValueError: as `check_times` does.
    """
    is_measured = all(one.communication_s is not None for one in times)
    check_times(kind, times, at_least=3)
    sizes, measured = _columns(times)
    ones, ring = np.ones_like(sizes), np.stack([sizes - 1, 1 - 1 / sizes], axis=1)
    own = ones[:, None] if kind == "weak" else np.stack([ones, 1 / sizes], axis=1)
    own_names = ("parallel_s",) if kind == "weak" else TERMS[:2]
    terms: dict[str, float] = {}
    if is_measured:
        waits = np.array([np.mean(one.communication_s or (0.0,)) for one in times])
        terms |= _solve(own_names, own, measured - waits, measured)
        terms |= _solve(TERMS[2:], ring, waits, measured)
    else:
        columns = np.concatenate([own, ring[:, : 1 if kind == "strong" else 2]], axis=1)
        terms |= _solve((*own_names, *TERMS[2 : 3 if kind == "strong" else 4]), columns, measured, measured)
    # Measured by itself, communication has two terms too, and one rank, which sends nothing, is no point for them.
    return _finish(COMMUNICATION, kind, terms, times, num_terms=3, has_measured_communication=is_measured)


@dataclass(frozen=True, kw_only=True)
class GustafsonFit:
    """The serial fraction with which Gustafson's law describes weak scaling best."""

    serial_fraction: float
    """Of the time on N ranks."""
    residual_fraction: float
    """As in `ScalingFit`, of speed-ups."""

    def __str__(self) -> str:
        share, off = 100 * self.serial_fraction, 100 * self.residual_fraction
        poor = "" if self.residual_fraction <= GOOD_FIT_FRACTION else f"; {POOR_FIT}"
        return f"Gustafson: {share:.1f} % of a step brings no more samples with more ranks; off by {off:.1f} %{poor}"


def fit_gustafson(times: Sequence[RankTimes]) -> GustafsonFit:
    """Fit Gustafson's law to the scaled speed-ups N T(1) / T(N) of weak scaling, by least squares.

    Args:
        times: of 1 rank and others, in weak scaling.

    Raises:
        ValueError: as `check_times` does, and without times of 1 rank.
    """
    check_times("weak", times)
    sizes, measured = _columns(times)
    if 1 not in sizes:
        raise ValueError(f"times of {sizes.astype(int).tolist()} ranks: the scaled speed-up needs those of 1 rank too")
    speedups = sizes * float(measured[sizes == 1][0]) / measured
    lost = float(((sizes - 1) * (sizes - speedups)).sum() / ((sizes - 1) ** 2).sum())
    fraction = min(1.0, max(0.0, lost))
    off = (sizes - fraction * (sizes - 1)) / speedups - 1
    return GustafsonFit(serial_fraction=fraction, residual_fraction=float(np.sqrt(np.mean(off**2))))


# --- Least squares --------------------------------------------------------------------------------------------------


def _columns(times: Sequence[RankTimes]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([float(one.num_ranks) for one in times]), np.array([one.mean_s for one in times])


def _solve(names: Sequence[str], columns: np.ndarray, values: np.ndarray, scale: np.ndarray) -> dict[str, float]:
    """Return the terms of 0 or more that come nearest to the values, errors counted relative to `scale`."""
    from scipy.optimize import lsq_linear  # half a second, which every import of the planner would wait for

    solved = lsq_linear(columns / scale[:, None], values / scale, bounds=(0, math.inf), method="bvls").x
    return {name: float(value) for name, value in zip(names, solved, strict=True)}


def _finish(
    law: str,
    kind: str,
    terms: dict[str, float],
    times: Sequence[RankTimes],
    *,
    num_terms: int,
    has_measured_communication: bool = False,
) -> ScalingFit:
    """Make a fit of its terms, with its error."""
    fit = ScalingFit(law=law, kind=kind, serial_s=0.0, parallel_s=0.0)
    fit = replace(fit, **terms)
    off = np.array([fit.predict_s(one.num_ranks) / one.mean_s - 1 for one in times])
    return replace(
        fit,
        residual_fraction=float(np.sqrt(np.mean(off**2))),
        num_sizes=len(times),
        num_terms=num_terms,
        has_measured_communication=has_measured_communication,
    )
