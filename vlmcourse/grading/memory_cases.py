"""Cases of exercise 4.4: training states on ranks, activations of a tower, and whole models, with the right bytes.

Enters: a seed. Leaves: cases, and what each of them must give, by the planner's functions. Left out, as the exercise
leaves it out: what ZeRO-3 gathers for a while, logits, the projector, the class token of a tile, the allowance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from vlmcourse.planner.layer_activations import korthikanti_layer_bytes
from vlmcourse.planner.memory import estimate_state_bytes
from vlmcourse.planner.recipes import PRECISIONS

STATE_OWNERS = ("weights", "gradients", "optimizer")
OWNERS = (*STATE_OWNERS, "activations")
PRECISION_NAMES = ("fp32", "fp16_mixed", "bf16_mixed", "bf16_fp32_grads")
"""Those that the exercise names: 16 bytes a parameter with AdamW, the last one 18."""
STAGES = (0, 1, 2, 3)
TOKENS_PER_TILE, PATCHES_PER_TILE = 256, 1024
"""Of a tile of 448 pixels: pixel shuffle makes one image token of four patches."""
GIB = 2**30


class Tower(NamedTuple):
    """A transformer: what a learner's `memory_report` is given of each of the two towers."""

    num_params: int
    num_layers: int
    hidden: int
    num_heads: int


@dataclass(frozen=True, kw_only=True)
class StateCase:
    """A model's training state on some ranks; a learner's function is asked for every stage of it."""

    num_params: int
    num_ranks: int
    precision: str

    def __str__(self) -> str:
        return f"{self.num_params:.3g} parameters on {self.num_ranks} ranks, {self.precision}"


@dataclass(frozen=True, kw_only=True)
class ActivationCase:
    """A tower and a micro-batch; a learner's function is asked with and without flash attention."""

    tower: Tower
    seq_len: int
    micro_batch: int
    precision: str

    def __str__(self) -> str:
        _, layers, hidden, heads = self.tower
        shape = f"{layers} layers of width {hidden} with {heads} heads"
        return f"{shape}, {self.micro_batch} x {self.seq_len} positions, {self.precision}"


class Strategy(NamedTuple):
    """A ZeRO stage (0 is DDP) and a precision."""

    stage: int
    precision: str

    def __str__(self) -> str:
        return f"{f'ZeRO-{self.stage}' if self.stage else 'DDP'} {self.precision}"


@dataclass(frozen=True, kw_only=True)
class ReportCase:
    """A model of two towers and its batch; a learner's function is asked for each of the strategies."""

    vision: Tower
    language: Tower
    batch: int
    seq_len: int
    image_tokens: int
    num_ranks: int
    strategies: tuple[Strategy, ...]

    def arguments(self, strategy: Strategy) -> tuple[object, ...]:
        """Return what the learner's function is called with."""
        workload = (self.batch, self.seq_len, self.image_tokens, self.num_ranks)
        return (self.vision, self.language, *workload, *strategy)

    def __str__(self) -> str:
        params = f"{self.vision.num_params / 1e9:.3g}B + {self.language.num_params / 1e9:.3g}B parameters"
        tokens = f"{self.seq_len} tokens, {self.image_tokens} of them of images"
        return f"{params} on {self.num_ranks} ranks, batch {self.batch}, {tokens}"


TEAM = ReportCase(
    vision=Tower(6_000_000_000, 45, 3200, 25),
    language=Tower(20_000_000_000, 48, 6144, 48),
    batch=16,
    seq_len=2048,
    image_tokens=1024,
    num_ranks=8,
    strategies=(Strategy(0, "fp32"), Strategy(2, "fp16_mixed"), Strategy(3, "fp16_mixed")),
)
"""The exercise's own model: depths, widths and heads are those of InternVL2-26B."""

# --- Right values ---------------------------------------------------------------------------------------------------


def state_bytes(owner: str, num_params: int, num_ranks: int, strategy: Strategy) -> int:
    """Return the bytes of weights, gradients or optimizer state on one rank (AdamW)."""
    stage, precision = strategy
    state = estimate_state_bytes(num_params, precision=precision, zero_stage=stage, shard_degree=num_ranks)
    return getattr(state, owner)


def activation_bytes(tower: Tower, seq_len: int, micro_batch: int, precision: str, *, flash: bool) -> int:
    """Return the bytes that a tower's layers keep: the formula's, which counts 16-bit elements, in fp32 twice."""
    layer = korthikanti_layer_bytes(seq_len, micro_batch, tower.hidden, tower.num_heads, keeps_scores=not flash)
    return tower.num_layers * layer * PRECISIONS[precision].compute_bytes // 2


def report_gib(case: ReportCase, strategy: Strategy) -> dict[str, float]:
    """Return GiB of one rank by owner, and their total."""
    num_params = case.vision.num_params + case.language.num_params
    found = {owner: state_bytes(owner, num_params, case.num_ranks, strategy) / GIB for owner in STATE_OWNERS}
    micro_batch, tiles = case.batch // case.num_ranks, case.image_tokens // TOKENS_PER_TILE
    precision = strategy.precision
    kept = activation_bytes(case.language, case.seq_len, micro_batch, precision, flash=True)
    kept += activation_bytes(case.vision, PATCHES_PER_TILE, micro_batch * tiles, precision, flash=True)
    found["activations"] = kept / GIB
    return found | {"total": sum(found.values())}


# --- Cases ----------------------------------------------------------------------------------------------------------


def make_state_cases(seed: int, num_cases: int) -> list[StateCase]:
    """Draw models and numbers of ranks; every four cases have all precisions."""
    rng = random.Random(f"memory:{seed}")
    precisions = [PRECISION_NAMES[number % 4] for number in range(num_cases)]
    return [
        StateCase(
            num_params=rng.randrange(3, 900) * 10**8, num_ranks=rng.choice((2, 3, 4, 8, 16, 24, 64)), precision=name
        )
        for name in precisions
    ]


def make_activation_cases(seed: int, num_cases: int) -> list[ActivationCase]:
    """Draw towers in which the scores of attention are a good part of what a layer keeps, or the larger one."""
    rng = random.Random(f"activations:{seed}")
    cases: list[ActivationCase] = []
    for number in range(num_cases):
        heads, width = rng.choice((12, 16, 20, 24, 25, 32, 40, 48)), rng.choice((64, 80, 96, 128))
        tower = Tower(0, rng.randrange(12, 81), heads * width, heads)
        seq_len, micro_batch = 256 * rng.randrange(3, 33), rng.randrange(2, 9)
        precision = PRECISION_NAMES[number % 4]
        cases.append(ActivationCase(tower=tower, seq_len=seq_len, micro_batch=micro_batch, precision=precision))
    return cases


def make_report_cases(seed: int, num_cases: int) -> list[ReportCase]:
    """Return the team's model, and others in all stages with drawn precisions."""
    rng = random.Random(f"report:{seed}")
    cases = [TEAM]
    while len(cases) < num_cases:
        heads, width = rng.choice((16, 25)), rng.choice((64, 80, 128))
        vision = Tower(rng.randrange(3, 90) * 10**8, rng.randrange(20, 50), heads * width, heads)
        heads = rng.choice((32, 40, 48, 64))
        language = Tower(rng.randrange(10, 700) * 10**8, rng.randrange(24, 81), heads * 128, heads)
        num_ranks, tiles = rng.choice((2, 4, 8, 16, 32)), rng.randrange(2, 9)
        names = rng.sample(PRECISION_NAMES, k=4)
        cases.append(
            ReportCase(
                vision=vision,
                language=language,
                batch=num_ranks * rng.randrange(2, 7),
                seq_len=tiles * TOKENS_PER_TILE + 128 * rng.randrange(3, 12),
                image_tokens=tiles * TOKENS_PER_TILE,
                num_ranks=num_ranks,
                strategies=tuple(Strategy(stage, name) for stage, name in zip(STAGES, names, strict=True)),
            )
        )
    return cases
