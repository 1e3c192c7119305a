"""What the engines of other projects (DeepSpeed, accelerate) would silently do less of, refused by name.

Enters: a strategy and what a run asks of it. Leaves: one sentence for each thing that the engine would not do although
the run would look as if it did. Equal losses cannot show these; without torch. Chapter 5.

Source: DeepSpeed 0.19.8, `runtime/torch_autocast.py` and `runtime/zero/`; measured on CPU ranks.
"""

from __future__ import annotations

from vlmcourse.recompute import ActivationsConfig
from vlmcourse.strategies import DEEPSPEED, ENGINES


def engine_problems(
    strategy: str, precision: str, activations: ActivationsConfig, deepspeed_config: str = ""
) -> list[str]:
    """Return which settings of a run its engine would not carry out, one sentence each; none for other strategies.

    Args:
        strategy: `parallel.strategy`.
        precision: `train.precision`.
        activations: what is recomputed or offloaded.
        deepspeed_config: `parallel.deepspeed_config`.
    """
    found = []
    if deepspeed_config and strategy not in DEEPSPEED:
        found.append(
            f"parallel.deepspeed_config = {deepspeed_config!r} with parallel.strategy = {strategy!r}: only DeepSpeed "
            "reads it; choose 'deepspeed-zero0' to 'deepspeed-zero3' by the stage in the file, or "
            "'accelerate-deepspeed-zero1' to 'accelerate-deepspeed-zero3', or leave it out"
        )
    what = f"train.precision = {precision!r} with parallel.strategy = {strategy!r}"
    if strategy in DEEPSPEED and precision in ("bf16", "fp16"):
        found.append(
            f"{what}: a DeepSpeed engine switches off the autocast around it and would train in fp32; choose fp32, or "
            "'zero1', 'zero2' or 'fsdp'"
        )
    if strategy in ENGINES and precision in ("fp8", "bf16_master", "bf16_pure"):
        found.append(
            f"{what}: its weights, scales or master copies are this package's own, and the engine does not know them; "
            "choose fp32, or 'ddp', 'zero2' or 'fsdp'"
        )
    policies = {"vision": activations.vision, "language": activations.language}
    used = [f"activations.{tower} = {policy!r}" for tower, policy in policies.items() if policy != "none"]
    used += ["activations.offload = true"] if activations.offload else []
    if strategy in DEEPSPEED and used:
        found.append(
            f"{used[0]} with parallel.strategy = {strategy!r}: an engine gathers and frees weights in hooks of its "
            "own, and recomputation inside these is not tested; leave it out, or choose 'zero2' or 'fsdp'"
        )
    return found
