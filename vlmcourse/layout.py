"""How ranks share the work, as plain numbers: a `ParallelConfig` and a number of ranks become a `Layout`.

Enters: the degrees that a person chose. Leaves: what each rank is, in a grid of five axes, or one error that lists
everything that does not fit. No torch: the same checks serve a configuration file, the planner and the ranks.

The axes, outermost first, so that ranks which talk most are neighbours:

- pp: stages of the pipeline, each with a part of the layers
- dp_replicate: whole copies of the training state, each with samples of its own
- dp_shard: one copy's state in shards, each rank with samples of its own
- cp: parts of the sequence of the same samples
- tp: parts of each matrix, for the same positions of the same samples
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from vlmcourse.strategies import ENGINES, OTHER_NAMES, PAPER_NAMES, SHARDED, STRATEGIES, WHOLE_WEIGHTS
from vlmcourse.values import ConfigError, at_least_one, at_least_zero, check_types, check_values, suggest_choice

VISION_HEADS = ("split", "pad_heads", "mlp_only")
VISION_PLANS = (*VISION_HEADS, "replicate")
"""What tensor parallelism may do with the vision tower."""
GRADIENT_SYNCS = ("last", "every")
COMPRESSIONS = ("fp16", "bf16", "powersgd")
CONTEXT_METHODS = ("ring", "allgather", "ulysses")
CONTEXT_ORDERS = ("zigzag", "contiguous")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": STRATEGIES,
    "vision_heads": VISION_HEADS,
    "compression": ("none", *COMPRESSIONS),
    "gradient_sync": GRADIENT_SYNCS,
    "cp_method": CONTEXT_METHODS,
    "cp_order": CONTEXT_ORDERS,
    "pp_schedule": SCHEDULES,
}
"""What fields of a `ParallelConfig` may be."""
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
CHOSEN_BY_AUTO = ("tp", "cp", "pp", "vision_tp", "vision_heads", "vision_stages")
"""Fields of a `ParallelConfig`."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks share the work."""

    strategy: str = "single"
    """What data-parallel ranks split: single (there is one), ddp (nothing), zero1 (optimizer state), zero2 (gradients
    too), fsdp (weights too; zero3 is the same), hsdp (as fsdp, in several copies). auto chooses, and the degrees too.
    deepspeed-zero0 (nothing), -zero1, -zero2, -zero3 and accelerate-ddp leave the same to these libraries, and
    accelerate-deepspeed-zero1, -zero2, -zero3 to both."""
    dp_replicate: int = 0
    """hsdp only: whole copies of the training state; 0 takes what the other degrees leave over."""
    dp_shard: int = 0
    """hsdp only: ranks that split one copy between them; 0 takes what the other degrees leave over."""
    tp: int = 1
    """Tensor parallelism: ranks that split each matrix of the language tower. With tp or pp above 1 every rank begins
    with the whole model in CPU memory and keeps its part; without, under zero2, fsdp and hsdp, rank 0 alone does."""
    cp: int = 1
    """Context parallelism: ranks that split the sequence of each sample."""
    pp: int = 1
    """Pipeline parallelism: ranks that split the layers."""
    vision_tp: int = 0
    """Ranks that split each matrix of the vision tower: 0 (as `tp`), or 1 (each holds all of it)."""
    vision_heads: str = "split"
    """What becomes of vision heads under `vision_tp`: split (it must divide them), pad_heads (heads of zeros are added
    until it does), mlp_only (each rank computes all heads, and a part of the MLP)."""
    sequence_parallel: bool = True
    """Split norms and residuals between the ranks of a tp group along the sequence, instead of repeating them."""
    cp_method: str = "ring"
    """How a rank sees the keys of the others: ring, allgather, ulysses."""
    cp_order: str = "zigzag"
    """Which positions a rank has: zigzag (a chunk of the beginning and one of the end, equal work for all) or
    contiguous."""
    pp_schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, zbv, dualpipev."""
    compression: str = "none"
    """ddp only: what gradients travel as: none (themselves), fp16, bf16, powersgd (low rank, with error feedback)."""
    prefetch: int = 0
    """zero2, fsdp, hsdp: blocks whose weights are asked for ahead of the one that computes; 0 leaves it to PyTorch."""
    gradient_sync: str = "last"
    """zero2, fsdp, hsdp: with which micro-batches ranks exchange gradients: last (one exchange a step; until then each
    rank keeps whole gradients) or every (an exchange a micro-batch; shards are kept)."""
    adaptive: bool = False
    """pp only: measure the layers in the first steps, and move them between ranks where that makes steps faster."""
    vision_stages: int = 0
    """Pipeline stages for the vision tower alone; 0 lets it share stages with language layers."""
    deepspeed_config: str = ""
    """DeepSpeed's strategies only: a ds_config.json to take its settings from, instead of those made from this file.
    What both say must agree; 'auto' in it is filled in from here."""
    timeout_s: float = 60.0
    """Seconds that a rank waits for the others before it fails. Raise it where rank 0 alone is busy for longer, as in
    removing an old checkpoint of a large model, or where ranks finish an evaluation far apart."""

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str):
            object.__setattr__(self, "strategy", PAPER_NAMES.get(self.strategy, self.strategy))

    @property
    def vision_plan(self) -> str:
        """What becomes of the vision tower under tensor parallelism: replicate, or one of `VISION_HEADS`."""
        return "replicate" if self.vision_degree == 1 else self.vision_heads

    @property
    def vision_degree(self) -> int:
        """Ranks that split a matrix of the vision tower."""
        return self.vision_tp or self.tp

    def problems(self) -> list[str]:
        """Return what is wrong with these values, one sentence each."""
        if found := check_types(self, "parallel", CHOICES):
            return found
        found = check_values(self, "parallel", ("timeout_s",), lambda value: value > 0, "must be greater than 0")
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                found.append(f"parallel.{name} = {value!r}: {OTHER_NAMES.get(value) or suggest_choice(value, known)}")
        found += at_least_one(self, "parallel", "tp", "cp", "pp")
        found += at_least_zero(self, "parallel", "dp_replicate", "dp_shard", "vision_tp", "vision_stages", "prefetch")
        return found or self._contradictions()

    def _contradictions(self) -> list[str]:
        """Return which of these values, each right alone, do not go together."""
        found = []
        if self.strategy != "hsdp":
            found += [
                f"parallel.{name} = {getattr(self, name)}: only strategy = 'hsdp' reads it, and the strategy is "
                f"{self.strategy!r}; leave it out"
                for name in ("dp_replicate", "dp_shard")
                if getattr(self, name)
            ]
        elif not (self.dp_replicate or self.dp_shard):
            found.append("parallel.strategy = 'hsdp': say how many copies there are, parallel.dp_replicate = 2 or more")
        if self.strategy == "auto":
            found += [
                f"parallel.{name} = {getattr(self, name)!r}: strategy = 'auto' chooses it; leave it out"
                for name in CHOSEN_BY_AUTO
                if getattr(self, name) != getattr(ParallelConfig, name)
            ]
        if self.vision_tp not in (0, 1, self.tp):
            found.append(
                f"parallel.vision_tp = {self.vision_tp} with parallel.tp = {self.tp}: must be 1 or equal to tp"
            )
        if self.strategy in ("ddp", "zero1") and (self.tp > 1 or self.pp > 1):
            found.append(
                f"parallel.strategy = {self.strategy!r} with tp = {self.tp}, pp = {self.pp}: its ranks exchange the "
                "gradients of a whole model; choose 'fsdp' or 'zero2', or 'single' if no rank is left over for data"
            )
        if self.compression != "none" and self.strategy != "ddp":
            found.append(
                f"parallel.compression = {self.compression!r} with strategy = {self.strategy!r}: only ddp has a hook "
                "for it; leave it out"
            )
        if self.adaptive and (self.pp == 1 or self.tp > 1):
            found.append(
                f"parallel.adaptive = true with pp = {self.pp}, tp = {self.tp}: whole layers move between the ranks of "
                "a pipeline, so pp must be 2 or more and tp 1; leave it out"
            )
        if self.prefetch and self.strategy not in SHARDED:
            found.append(
                f"parallel.prefetch = {self.prefetch} with strategy = {self.strategy!r}: it gathers no weights ahead; "
                "leave it out"
            )
        if self.gradient_sync == "every" and (self.strategy not in SHARDED or self.pp > 1):
            found.append(
                f"parallel.gradient_sync = 'every' with strategy = {self.strategy!r}, pp = {self.pp}: only "
                "shards become smaller by it (zero2, fsdp, hsdp), and a pipeline exchanges with the last micro-batch; "
                "leave it out"
            )
        if self.strategy == "single" and self.cp > 1:
            found.append(
                f"parallel.strategy = 'single' with cp = {self.cp}: ranks with parts of a sequence must add up their "
                "gradients; choose 'ddp' (whole weights) or 'fsdp' (shards)"
            )
        if self.vision_stages >= self.pp and self.vision_stages:
            found.append(
                f"parallel.vision_stages = {self.vision_stages} with pp = {self.pp}: at least one stage must be left "
                "for the language tower"
            )
        return found + self._refused_by_engine() + self._unread()

    def _refused_by_engine(self) -> list[str]:
        """Return which axes an engine of another project does not know, in one sentence."""
        if self.strategy not in ENGINES or self.tp * self.cp * self.pp == 1:
            return []
        return [
            f"parallel.strategy = {self.strategy!r} with tp = {self.tp}, cp = {self.cp}, pp = {self.pp}: the engine "
            "shares samples between all ranks and knows of no other axis; choose 'ddp', 'zero2' or 'fsdp', or leave "
            "these degrees at 1"
        ]

    def _unread(self) -> list[str]:
        """Return which values nothing would read, one sentence each."""
        found = []
        if self.cp == 1:
            found += [
                f"parallel.{name} = {getattr(self, name)!r} with cp = 1: no rank splits a sequence; leave it out"
                for name in ("cp_method", "cp_order")
                if getattr(self, name) != getattr(ParallelConfig, name)
            ]
        if self.strategy == "auto":
            return found  # it may choose a pipeline; what else it chooses, nobody may set
        if self.pp == 1 and self.pp_schedule != ParallelConfig.pp_schedule:
            found.append(f"parallel.pp_schedule = {self.pp_schedule!r} with pp = 1: no pipeline reads it; leave it out")
        if self.vision_degree == 1 and self.vision_heads != ParallelConfig.vision_heads:
            degree = "tp = 1" if self.tp == 1 else "vision_tp = 1"
            found.append(
                f"parallel.vision_heads = {self.vision_heads!r} with {degree}: each rank has the whole vision tower; "
                "leave it out"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The grid of ranks; the last axis varies fastest with the rank's number."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of `AXES`, in their order."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def world_size(self) -> int:
        """Ranks in the grid."""
        return math.prod(self.sizes)

    @property
    def dp_degree(self) -> int:
        """Ranks with samples of their own: those that differ in pp, cp or tp alone share their samples (F4)."""
        return self.dp_replicate * self.dp_shard

    @property
    def summed_degree(self) -> int:
        """Ranks over which gradients of the same weights are added up: their samples or positions differ."""
        return self.dp_degree * self.cp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank is on each axis.

        Raises:
            ValueError: if there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: must be from 0 to {self.world_size - 1}")
        found = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}

    def dp_rank(self, rank: int) -> int:
        """Return which of the `dp_degree` sets of samples a rank works on."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    @property
    def used_axes(self) -> tuple[str, ...]:
        """The axes with more than one rank, outermost first."""
        return tuple(axis for axis, size in zip(AXES, self.sizes, strict=True) if size > 1)

    def describe_samples(self, rank: int) -> str:
        """Say which part of the samples of a step a rank works on; ranks with the same part share its work."""
        return "all" if self.dp_degree == 1 else f"part {self.dp_rank(rank)} of {self.dp_degree}"

    def table(self, max_ranks: int = 32) -> str:
        """Return a line for each rank, up to `max_ranks`: its coordinates on the axes in use, and its samples.

        `planner.grid.share_table` knows a model too, and adds layers and weights.
        """
        rows = [["rank", *self.used_axes, "samples"]]
        for rank in range(min(self.world_size, max_ranks)):
            at = self.coordinates(rank)
            rows.append([str(rank), *(str(at[axis]) for axis in self.used_axes), self.describe_samples(rank)])
        more = f"\n... and {self.world_size - max_ranks:,} ranks more" if self.world_size > max_ranks else ""
        return align(rows) + more

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on one axis only, itself among them, in the order of that axis."""
        at = self.coordinates(rank)
        del at[axis]
        return tuple(other for other in range(self.world_size) if at.items() <= self.coordinates(other).items())

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in self.used_axes) or "one rank"


def align(rows: list[list[str]]) -> str:
    """Return rows of words with their columns under each other; the first row is a header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def check_usable(config: ParallelConfig) -> None:
    """Refuse a configuration that no model can be distributed by, however it was made: in Python or from a file.

    Raises:
        ConfigError: listing every wrong value and contradiction.
        ValueError: if the strategy is auto; the message says what chooses.
    """
    if found := config.problems():
        raise ConfigError("The parallel configuration", found)
    if config.strategy == "auto":
        raise ValueError(
            "parallel.strategy = 'auto' is not chosen yet: planner.degrees.settle(config, world_size, shape, "
            "accumulation_steps) chooses by the number of ranks, planner.auto.settle_run as a Trainer does; pass on "
            "what they return, or name a strategy"
        )


def find_layout(config: ParallelConfig, world_size: int) -> Layout:
    """Spread the ranks over the axes as a configuration says.

    Args:
        config: without contradictions in itself.
        world_size: ranks of the run.

    Raises:
        ValueError: if the degrees and the number of ranks do not fit together; the message says what to change.
    """
    if config.strategy == "auto":
        return Layout(dp_replicate=world_size)  # whatever is chosen fits the number of ranks
    model_ranks = config.tp * config.cp * config.pp
    product = f"tp x cp x pp = {config.tp} x {config.cp} x {config.pp} = {model_ranks}"
    if world_size % model_ranks:
        raise ValueError(
            f"parallel.{product} does not divide {world_size} rank(s): start a multiple of {model_ranks} ranks "
            f"('--nproc {model_ranks}', '%%torchrun -n {model_ranks}'), or lower a degree"
        )
    left = world_size // model_ranks
    copies, shards = _data_degrees(config, left)
    layout = Layout(pp=config.pp, dp_replicate=copies, dp_shard=shards, cp=config.cp, tp=config.tp)
    if config.strategy == "single" and left > 1:
        raise ValueError(
            f"parallel.strategy = 'single' with {world_size} ranks: {_each_group(model_ranks)} would train a model of "
            f"its own; choose 'ddp' or 'fsdp', or start {_name_start(model_ranks)}"
        )
    if config.strategy != "single" and layout.summed_degree < 2:
        needed = 2 * model_ranks
        taken = f"; {product} takes all of them, and nothing is left to share" if model_ranks > 1 else ""
        raise ValueError(
            f"parallel.strategy = {config.strategy!r} with {_count(world_size)}: it shares samples between 2 or more"
            f"{taken}; start {needed} with '--nproc {needed}' ('%%torchrun -n {needed}' in a notebook), or choose "
            "'single'"
        )
    if config.strategy == "hsdp" and (copies * shards != left or copies < 2 or shards * config.cp < 2):
        raise ValueError(
            f"parallel.dp_replicate x dp_shard = {copies} x {shards} with {left} data-parallel rank(s): the product "
            "must be their number, with 2 or more copies of 2 or more shards each; one copy alone is 'fsdp', whole "
            "copies are 'ddp'"
        )
    return layout


def sequence_multiple(config: ParallelConfig, at_least: int = 8) -> int:
    """Return what a padded sequence's length must be a multiple of: each cp rank takes two chunks, which tp splits."""
    return math.lcm(at_least, 2 * config.cp * config.tp if config.cp > 1 else config.tp)


def _data_degrees(config: ParallelConfig, left: int) -> tuple[int, int]:
    """Return dp_replicate and dp_shard for the `left` ranks of one tp, cp and pp position."""
    if config.strategy in WHOLE_WEIGHTS:
        return left, 1
    if config.strategy != "hsdp":
        return 1, left
    copies = config.dp_replicate or max(1, left // config.dp_shard)
    return copies, config.dp_shard or max(1, left // copies)


def _count(num_ranks: int) -> str:
    return f"{num_ranks} rank" if num_ranks == 1 else f"{num_ranks} ranks"


def _each_group(model_ranks: int) -> str:
    return f"each group of {model_ranks} (tp x cp x pp)" if model_ranks > 1 else "each"


def _name_start(model_ranks: int) -> str:
    return "one process (without --nproc)" if model_ranks == 1 else f"{model_ranks} (--nproc {model_ranks})"
