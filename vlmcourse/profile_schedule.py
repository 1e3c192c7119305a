"""Which steps of a run a profiler records: the `[profile]` section.

Enters: values of a TOML file. Leaves: what is wrong with them, one sentence each. Without torch. Chapter 6.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.values import at_least_one, at_least_zero


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps that a run records for `monitor/profiler.py`, counted from the first that it makes."""

    wait: int = 1
    """Steps before anything is done: the first ones allocate memory and start threads."""
    warmup: int = 1
    """Steps after these in which the profiler is on and what it sees is thrown away: its own start takes time."""
    active: int = 0
    """Steps after these that are recorded, one trace a rank, in the folder `profile` of the run; 0 records none."""

    @property
    def num_steps(self) -> int:
        """Steps from the first to the last recorded one."""
        return self.wait + self.warmup + self.active

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        return at_least_zero(self, "profile", "wait", "active") + at_least_one(self, "profile", "warmup")

    def contradictions(self, num_steps: int, steps_done: int = 0) -> list[str]:
        """Return why a run cannot record all these steps, one sentence at most.

        Args:
            num_steps: optimizer steps of the whole run.
            steps_done: of those, made before it was resumed.
        """
        left = num_steps - steps_done
        if not self.active or self.num_steps <= left:
            return []
        done = f", of which {steps_done} are done" if steps_done else ""
        return [
            f"profile.active = {self.active} with train.num_steps = {num_steps}{done}: wait, warmup and active take "
            f"{self.wait} + {self.warmup} + {self.active} = {self.num_steps} steps; lower them, raise "
            "train.num_steps, or set profile.active = 0"
        ]
