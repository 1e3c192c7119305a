"""Which loggers take the rows of a run: the `[logging]` section of a configuration, without torch.

Enters: the section's values. Leaves: what is wrong with them. What each logger does is in `monitor/loggers/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.values import at_least_zero, check_values, suggest_choice

LOGGERS = ("console", "jsonl", "csv", "tensorboard", "wandb", "trackio")
MODES = ("offline", "online")
LOGGING_CHOICES: dict[str, tuple[str, ...]] = {"loggers": LOGGERS, "mode": MODES}
NOT_IN_PROJECTS = "/\\#?%:"
"""Characters that Weights & Biases refuses in a project's name."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where the rows of a run go; a logger that fails never stops the run."""

    loggers: tuple[str, ...] = ("csv", "jsonl")
    """Any of console, jsonl, csv, tensorboard, wandb, trackio."""
    project: str = "vlmcourse"
    """What wandb and trackio file the run under."""
    mode: str = "offline"
    """wandb only: offline (files in the run's folder, for `wandb sync`) or online (needs a login and a network).
    trackio always keeps its rows on this machine."""
    timeout_s: float = 30.0
    """Seconds that wandb and trackio may take to start, and again to finish; after that the run goes on without."""

    hardware_every_s: float = 1.0
    """Seconds between looks at each rank's GPU, or at its process; 0 looks at neither, and counts no energy."""
    memory_owners: bool = False
    """Whether a row has the bytes of weights, gradients and optimizer state that the fullest rank holds of each."""

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        unknown = [name for name in self.loggers if name not in LOGGERS]
        found = [f"logging.loggers names {name!r}: {suggest_choice(name, LOGGERS)}" for name in unknown]
        twice = sorted({name for name in self.loggers if self.loggers.count(name) > 1})
        found += [f"logging.loggers names {name!r} twice: it would log each row twice; name it once" for name in twice]
        if self.mode not in MODES:
            found.append(f"logging.mode = {self.mode!r}: {suggest_choice(self.mode, MODES)}")
        bad = sorted(set(self.project) & set(NOT_IN_PROJECTS))
        if not self.project.strip() or not self.project.isprintable() or bad:
            found.append(
                f"logging.project = {self.project!r}: must be a name such as 'vlmcourse', without any of "
                f"{NOT_IN_PROJECTS}"
            )
        found += check_values(self, "logging", ("timeout_s",), lambda value: value > 0, "must be greater than 0")
        found += at_least_zero(self, "logging", "hardware_every_s")
        return found
