"""What the tests of moving layers train: the pipelines of `pipeline_cases.py`, with another split before every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline_cases import Case, Recording, build_case_model, train_plain
from torch import Tensor, nn
from torch.optim import Optimizer

from vlmcourse.config import OptimizerConfig
from vlmcourse.planner.stages import StageSplit
from vlmcourse.train.optimizer import build_optimizer

STEPS = ("mixed", "text", "pictures")
NUM_MICROBATCHES = 4
"""Of one pipeline."""
OPTIMIZER = OptimizerConfig(lr_vision=2e-3, lr_projector=1e-3, lr_language=5e-4, weight_decay=0.1, eps=1e-5)
"""A rate a tower, so that a parameter in a wrong group is noticed; eps is large for the reason in `parity.py`."""


@dataclass(frozen=True)
class Route:
    """A pipeline and the layers of its stages: at the start, then before each further step, then at the end."""

    case: Case
    splits: tuple[tuple[int, ...], ...]
    pp: int = 2


# Layers: patches, 4 vision, fusion (the sixth), 4 language, output.
ROUTES = {
    "gpipe, tied": Route(Case("gpipe", tied=True), ((5, 6), (9, 2), (2, 9), (5, 6))),
    "1f1b, vision frozen": Route(Case("1f1b", frozen=("vision",)), ((7, 4), (5, 6), (10, 1), (7, 4))),
    "interleaved, tied": Route(
        Case("interleaved", tied=True), ((3, 3, 3, 2), (1, 1, 1, 8), (6, 3, 1, 1), (3, 3, 3, 2))
    ),
    "zbv, tied": Route(Case("zbv", tied=True), ((2, 2, 4, 3), (6, 3, 1, 1), (1, 5, 4, 1), (2, 2, 4, 3))),
    "dualpipev": Route(Case("dualpipev"), ((3, 3, 3, 2), (1, 5, 1, 4), (5, 1, 4, 1), (3, 3, 3, 2))),
    "zbv on 4, tied": Route(
        Case("zbv", tied=True),
        ((1, 1, 1, 1, 1, 1, 1, 4), (4, 1, 1, 1, 1, 1, 1, 1), (1, 2, 1, 2, 1, 2, 1, 1)) + ((1, 1, 1, 1, 1, 1, 1, 4),),
        pp=4,
    ),
    # Weights gathered anew for backward move in the test of the trainer.
    "zbv over fsdp, kept, tied": Route(
        Case("zbv", tied=True, dp="fsdp", reshard_after_forward=False),
        ((3, 3, 3, 2), (2, 2, 5, 2), (4, 3, 2, 2), (3, 3, 3, 2)),
    ),
}


@dataclass
class Trip(Recording):
    """What one rank recorded of a route."""

    differing: list[list[str]] = field(default_factory=list)
    """For each move, what the whole model or its optimizer state had otherwise before than after, in any bit."""
    gradients_left: list[list[str]] = field(default_factory=list)
    """For each move, parameters with a gradient after it."""
    sent: list[tuple[str, ...]] = field(default_factory=list)
    received: list[tuple[str, ...]] = field(default_factory=list)
    held: list[list[str]] = field(default_factory=list)
    """Names on this rank at each step."""
    refused: str = ""
    """With what the scheduler refused to go on."""
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Learning rate and decay of each parameter at the end."""
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Weights and optimizer state on this rank at the end."""


def split_into(layers: tuple[int, ...]) -> StageSplit:
    """Return a split of the small model of the pipeline tests."""
    return StageSplit(num_vision_layers=4, num_language_layers=4, layers_per_stage=layers)


def find_rates(named: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> dict[str, tuple[float, float]]:
    """Return learning rate and decay by name."""
    names = {id(p): name for name, p in named}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


def train_alone(case: Case, num_microbatches: int) -> Trip:
    """Train a case in one process."""
    model, recording = build_case_model(case), Trip()
    optimizer = build_optimizer(model, OPTIMIZER)
    train_plain(model, optimizer, STEPS, num_microbatches, recording)
    recording.rates = find_rates(model.named_parameters(), optimizer)
    recording.state = {
        n: {"weight": p.detach().clone()} | {k: v.clone() for k, v in optimizer.state.get(p, {}).items()}
        for n, p in model.named_parameters()
    }
    return recording
