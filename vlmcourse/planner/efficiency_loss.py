"""Where the efficiency of N ranks goes: communication, imbalance, input, serial work, slower computing.

Enters: the parts of a step on one rank, and of each step on each of N ranks. Leaves: an `EfficiencyLoss`, five shares
of the time of all ranks that add up to 1 - efficiency, by construction and not by a fit. Chapter 6.

All in seconds of ranks: N ranks spend the sum of their step times on a step. One rank would have spent T(1) on the same
work (strong scaling), or N T(1) on N times the work (weak scaling). The difference is lost, and goes to

- communication: N times what even the rank that waits least waits, exchange by exchange: nobody was late for it.
- imbalance: all other waits, which are for a rank that is late. It is logged as communication, which it is not, so it
  counts here and there no more. With one exchange it is the sum over ranks of (longest own work - own work).
- input: what all ranks together waited for data, beyond what one rank waited for as much work.
- serial: the same for optimizer and all else that is no forward or backward: work that every rank repeats.
- computing: the same for forward and backward: smaller matrices, cores that ranks share, a slow machine's extra time.

A rank's own work is its step without its waits for others. Ranks that take turns in being slow cost as much as one that
always is. Where single waits are not known, or ranks have different numbers of them, communication is N (T - longest
own work) of each step: an upper bound then, since two ranks that are late at different exchanges of a step count as
data on their way. Where ranks reach an exchange in one step and log the wait in the next, a share may come out slightly
below 0.

Source: the efficiencies of the POP project (Wagner et al. 2017, "A structured approach to performance analysis"): load
balance is mean over longest work, communication efficiency longest work over time; here as a sum and not a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmcourse.planner.scaling import KINDS

LOSSES = ("communication", "imbalance", "input", "serial", "computing")
"""In the order in which they are drawn."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Seconds of one optimizer step on one rank."""

    data_wait_s: float
    computing_s: float
    """Forward and backward."""
    communication_s: float
    """In which the rank only waited for others, whatever for."""
    serial_s: float
    """Optimizer and everything else."""
    waits_s: tuple[float, ...] = ()
    """The waits in `communication_s` one by one; empty where they are not known."""

    @property
    def own_s(self) -> float:
        """The rank's own work."""
        return self.data_wait_s + self.computing_s + self.serial_s

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.own_s + self.communication_s


@dataclass(frozen=True, kw_only=True)
class EfficiencyLoss:
    """What N ranks lose."""

    num_ranks: int
    kind: str
    """strong or weak."""
    step_s: float
    """Mean over ranks and steps."""
    alone_s: float
    """On one rank."""
    shares: dict[str, float]
    """By `LOSSES`: shares of the time of all ranks; they add up to `lost`."""

    @property
    def efficiency(self) -> float:
        """Of N ranks against one."""
        return self.alone_s / self.step_s / (self.num_ranks if self.kind == "strong" else 1)

    @property
    def lost(self) -> float:
        """Share of the time of all ranks that brought nothing."""
        return 1 - self.efficiency

    def __str__(self) -> str:
        """Show the losses in one line, in percent."""
        parts = ", ".join(f"{name} {100 * share:.1f}" for name, share in self.shares.items())
        return f"{self.num_ranks} ranks lose {100 * self.lost:.1f} % of their time: {parts}"


def split_loss(kind: str, alone: Sequence[StepParts], steps: Sequence[Sequence[StepParts]]) -> EfficiencyLoss:
    """Split what N ranks lose against one.

    Args:
        kind: "strong", where the N ranks share the work of the one, or "weak", where each has as much.
        alone: steps of one rank.
        steps: of N ranks, each step by rank.

    Raises:
        ValueError: if the kind is unknown, there is no step, or steps have different numbers of ranks.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: must be one of {KINDS}")
    sizes = {len(step) for step in steps}
    if not alone or len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"{len(alone)} steps of one rank, and steps of {sorted(sizes)} ranks: need 1 step or more of each, all "
            "with the same number of ranks"
        )
    num_ranks = sizes.pop()
    worth = 1 if kind == "strong" else num_ranks
    total_s = _mean([sum(rank.step_s for rank in step) for step in steps])
    late_s = _mean([_late_s(step) for step in steps])
    own_s = _mean([sum(rank.own_s for rank in step) for step in steps])

    def excess_s(name: str) -> float:
        of_all = _mean([sum(getattr(rank, name) for rank in step) for step in steps])
        return of_all - worth * _mean([getattr(step, name) for step in alone])

    lost_s = {
        "communication": total_s - own_s - late_s - worth * _mean([step.communication_s for step in alone]),
        "imbalance": late_s,
        "input": excess_s("data_wait_s"),
        "serial": excess_s("serial_s"),
        "computing": excess_s("computing_s"),
    }
    return EfficiencyLoss(
        num_ranks=num_ranks,
        kind=kind,
        step_s=total_s / num_ranks,
        alone_s=_mean([step.step_s for step in alone]),
        shares={name: seconds / total_s for name, seconds in lost_s.items()},
    )


def shared_wait_s(waits_s: Sequence[Sequence[float] | None]) -> float | None:
    """Return the seconds that even the rank that waits least waits, exchange by exchange.

    Args:
        waits_s: of one step, by rank, each in order.

    Returns:
        Their sum; None where waits are not known, or ranks have different numbers of them.
    """
    known = [waits for waits in waits_s if waits]
    if len(known) < len(waits_s) or len({len(waits) for waits in known}) != 1:
        return None
    return sum(min(of_exchange) for of_exchange in zip(*known, strict=True))


def _late_s(step: Sequence[StepParts]) -> float:
    """Return the seconds that all ranks together waited for ranks that were late."""
    if shared_wait_s([rank.waits_s for rank in step]) is None:
        return sum(max(rank.own_s for rank in step) - rank.own_s for rank in step)
    by_exchange = zip(*(rank.waits_s for rank in step), strict=True)
    return sum(waited_s - min(of_exchange) for of_exchange in by_exchange for waited_s in of_exchange)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
