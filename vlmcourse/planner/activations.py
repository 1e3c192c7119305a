"""The activations that a rank of a plan keeps for the backward pass, at their fullest.

Enters: a plan, a model shape, a workload, a pipeline stage. Leaves: bytes. They are those of this model's own layers,
tensor by tensor (`layer_activations.py`), as `run_peak.py` counts them; chapter 4 measures them. Korthikanti et al.
2022 count s b h (10 + 24/t) bytes for a layer of s tokens, b samples and width h over t tensor-parallel ranks, with a
two-matrix GELU MLP four times as wide and dropout masks, of which this model has none.
"""

from __future__ import annotations

from vlmcourse.planner.job import describe_plan
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.rank_peak import RankLoad, list_moments
from vlmcourse.planner.run_peak import build_run_load
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import VLMShape

__all__ = ["Workload", "estimate_activation_bytes"]
OWNERS = ("activations", "logits", "temporary")


def estimate_activation_bytes(plan: Plan, model: VLMShape, workload: Workload, stage: int) -> int:
    """Estimate the activation bytes of one rank at its fullest moment, logits and gradients of activations included.

    Of layers that are recomputed, the input of each segment and one whole segment being recomputed; of others all.
    A frozen vision tower keeps nothing, as no gradient passes through it. A pipeline is assumed to run 1F1B with enough
    micro-batches, so stage i of n holds those of n - i micro-batches. Kernels are a GPU's, all activations in the
    recipe's compute type: under autocast, where sums and norms stay in fp32, it is more.

    Args:
        plan: how the ranks share the work.
        model: the model's shape.
        workload: tokens and tiles of a sample.
        stage: pipeline stage, from 0.

    Returns:
        Bytes.
    """
    return activations_of(build_run_load(describe_plan(plan, model, workload), stage))


def activations_of(load: RankLoad) -> int:
    """Return the activation bytes of a load at their fullest moment; what an update copies is none of them."""
    return max(list_activations(load))


def list_activations(load: RankLoad) -> list[int]:
    """Return the activation bytes of a load at each moment that `activations_of` takes the fullest of.

    Each is a constant, so much a token, and so much a tile (one at least); which moments there are depends on neither.
    """
    moments = (peak for peak in list_moments(load) if peak.moment != "step")
    return [sum(peak.owners[owner] for owner in OWNERS) for peak in moments]
