"""Names of the strategies by which data-parallel ranks share a training state, and what they have in common.

Enters: nothing. Leaves: tables of names. No torch. What each does is said in `ParallelConfig` and in chapters 1 and 5.
"""

from __future__ import annotations

ACCELERATE_DEEPSPEED = {f"accelerate-deepspeed-zero{stage}": stage for stage in (1, 2, 3)}
"""Strategies for which accelerate starts a DeepSpeed engine -> its ZeRO stage."""
DEEPSPEED = {**{f"deepspeed-zero{stage}": stage for stage in range(4)}, **ACCELERATE_DEEPSPEED}
"""Strategies that a DeepSpeed engine carries out, whoever starts it -> its ZeRO stage."""
ENGINES = (*DEEPSPEED, "accelerate-ddp")
"""Strategies that another project's engine carries out, behind the same Trainer."""
STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp", "hsdp", "auto", *ENGINES)
PAPER_NAMES = {"zero3": "fsdp"}
"""Strategies by the name that the paper gives them -> what they are here: `ParallelConfig` takes both."""
OTHER_NAMES = {
    **dict.fromkeys(("ZeRO3", "ZeRO-3", "zero-3", "zero_3"), "it is called 'fsdp', or 'zero3'"),
    "deepspeed": "add its stage, 'deepspeed-zero0' to 'deepspeed-zero3'",
    **{f"accelerate-zero{stage}": f"it is called {name!r}" for name, stage in ACCELERATE_DEEPSPEED.items()},
}
"""Strategies by names that are near, and not ours -> what they are here."""
WHOLE_WEIGHTS = ("single", "ddp", "zero1", "accelerate-ddp", *(name for name, stage in DEEPSPEED.items() if stage < 3))
"""Strategies whose data-parallel ranks each hold all weights of their stage."""
SHARDED = ("zero2", "fsdp", "hsdp")
"""Strategies that FSDP2 carries out."""
