"""What a dry run would play wrongly or not at all, refused by name.

Enters: a configuration. Leaves: nothing, or one error that lists everything.
"""

from __future__ import annotations

from vlmcourse.config import TrainConfig
from vlmcourse.layout import ParallelConfig
from vlmcourse.strategies import DEEPSPEED
from vlmcourse.values import ConfigError


def check_playable(config: TrainConfig, parallel: ParallelConfig) -> None:
    """Refuse what a dry run does not play.

    Args:
        config: the run.
        parallel: as settled, no longer auto.

    Raises:
        ConfigError: listing each key and what to do instead.
    """
    found = []
    if parallel.strategy in DEEPSPEED or parallel.strategy == "accelerate-ddp":
        found.append(
            f"parallel.strategy = {parallel.strategy!r}: an engine of another project sets itself up with values that "
            "fake tensors do not have; choose 'ddp', 'zero1', 'zero2', 'fsdp' or 'hsdp'"
        )
    if parallel.pp > 1:
        found.append(
            f"parallel.pp = {parallel.pp}: stages of a pipeline are not played yet; set pp = 1, or use the planner's "
            "estimate (planner.estimate_rank_memory)"
        )
    if parallel.compression != "none":
        found.append(f"parallel.compression = {parallel.compression!r}: its hook reads values; leave it out")
    if config.train.precision in ("fp16", "fp8"):
        found.append(
            f"train.precision = {config.train.precision!r}: its scales are values, which fake tensors do not have; "
            "choose 'bf16', 'bf16_master', 'bf16_pure' or 'fp32'"
        )
    if not config.offload.is_plain or config.activations.offload:
        found.append(
            "offload: a played rank has one memory, its device's, and what lies in main memory would count there too; "
            "leave [offload] and activations.offload out"
        )
    if found:
        raise ConfigError("The dry run", found)
