"""Generated cases for exercise 4.1: a model, a cluster, and the cheapest kind of plan that is possible.

Enters: the name of a group and a seed. Leaves: scenarios, always the same for the same seed. Each is drawn at random
until it has the trait that its group is about ("one Adam moment less and it would fit"), and so that the right
decision does not hang on the last per cent of an estimate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from vlmcourse.grading.kinds import (
    Need,
    fill_fraction,
    find_need,
    plain_plan,
    plans_of_kind,
    vision_state_bytes,
    zero_plan,
)
from vlmcourse.planner import Plan, check_plan, count_params, estimate_rank_memory, get_device
from vlmcourse.presets import CLUSTERS, MODELS, Cluster, LanguageShape, VisionShape, VLMShape

MAX_DRAWS = 20_000

WIDTHS = ((1536, 12, 2), (2048, 16, 8), (2560, 20, 4), (3072, 24, 8), (3584, 28, 4), (4096, 32, 8), (5120, 40, 8))
WIDER = ((6144, 48, 8), (7168, 56, 8), (8192, 64, 8))
"""Language widths with their query and key/value heads, as in published decoders."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One case: the question, and the dearest kind of plan that is accepted."""

    model: VLMShape
    cluster: Cluster
    need: Need

    def __str__(self) -> str:
        """Say what the case is, in one line."""
        return f"{self.model.name} on {self.cluster.name}"


def draw_model(rng: random.Random) -> VLMShape:
    """Draw a model of 1 to 100 billion parameters with widths and head counts of published ones."""
    width, num_heads, num_kv_heads = rng.choice(WIDTHS + WIDER[: rng.randint(0, 3)])
    language = LanguageShape(
        vocab_size=rng.choice((32064, 92553, 128256)),
        num_layers=rng.randrange(16, 81, 2),
        hidden_size=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mlp_size=round(width * rng.choice((2.75, 3.0, 3.5)) / 256) * 256,
    )
    big = width >= 3072 and rng.random() < 0.6
    vision = VisionShape(
        image_size_px=448,
        patch_size_px=14,
        num_layers=rng.randrange(12, 46) if big else 24,
        hidden_size=3200 if big else 1024,
        num_heads=25 if big else 16,
        mlp_size=12800 if big else 4096,
        norm="rmsnorm" if big else "layernorm",
        qk_norm=big,
        qkv_bias=not big,
    )
    shape = VLMShape(name="", vision=vision, language=language, image_token_id=0, source="generated")
    params = count_params(shape)
    towers = f"vision {params.vision / 1e9:.1f}, language {params.language / 1e9:.1f}"
    return dataclasses.replace(shape, name=f"a VLM of {params.total / 1e9:.1f} B parameters ({towers})")


def draw_cluster(
    rng: random.Random,
    *,
    devices: tuple[str, ...] = ("a100-40", "a100-80", "h100", "h200"),
    per_node: tuple[int, ...] = (2, 4, 8),
    nodes: tuple[int, ...] = (1,),
    host_gb: tuple[int, ...] = (1000, 2000),
) -> Cluster:
    """Draw a cluster from lists of choices."""
    device, num_nodes, num, host = rng.choice(devices), rng.choice(nodes), rng.choice(per_node), rng.choice(host_gb)
    return Cluster(
        name=f"{num_nodes} x {num} {device} ({host} GB of main memory a node)",
        device=device,
        num_nodes=num_nodes,
        devices_per_node=num,
        host_memory_bytes=host * 10**9,
        network_bytes_per_s=25e9 if num_nodes > 1 else 0.0,
        source="generated",
    )


Trait = Callable[[VLMShape, Cluster], bool]


def is_plain(model: VLMShape, cluster: Cluster) -> bool:
    """DDP fits with room to spare."""
    return fill_fraction(plain_plan(cluster), model, cluster) <= 0.92


def needs_stage_1_or_2(model: VLMShape, cluster: Cluster) -> bool:
    """DDP does not fit; ZeRO-1 or ZeRO-2 does."""
    fits = [stage for stage in (1, 2) if fill_fraction(zero_plan(cluster, stage), model, cluster) <= 0.93]
    return bool(fits) and fill_fraction(plain_plan(cluster), model, cluster) >= 1.05


def needs_full_shard(model: VLMShape, cluster: Cluster) -> bool:
    """ZeRO-2 does not fit; ZeRO-3 does."""
    too_full = fill_fraction(zero_plan(cluster, 2), model, cluster) >= 1.05
    return too_full and fill_fraction(zero_plan(cluster, 3), model, cluster) <= 0.93


def needs_remedy(model: VLMShape, cluster: Cluster) -> bool:
    """Nothing fits on the devices as it is; offloading or 8-bit Adam does."""
    remedies = (zero_plan(cluster, 3, offload_optimizer=True), zero_plan(cluster, 3, optimizer="adamw_8bit"))
    fits = [check_plan(plan, model, cluster).ok and fill_fraction(plan, model, cluster) <= 0.96 for plan in remedies]
    if not any(fits) or fill_fraction(zero_plan(cluster, 3), model, cluster) < 1.04:
        return False
    return all(fill_fraction(plan, model, cluster) >= 1.04 for plan in plans_of_kind(Need.SHARDED, cluster))


def would_fit_without(left_out_bytes: float, plan: Plan, model: VLMShape, cluster: Cluster) -> bool:
    """Tell whether a plan would fit if a rank needed so many bytes less than it does."""
    needed = estimate_rank_memory(plan, model).device_total - left_out_bytes
    return needed <= 0.97 * get_device(cluster.device).memory_bytes


def needs_split(model: VLMShape, cluster: Cluster) -> bool:
    """DDP does not fit; splitting the state over the ranks is enough."""
    return needs_stage_1_or_2(model, cluster) or needs_full_shard(model, cluster)


def one_moment_less_would_fit(model: VLMShape, cluster: Cluster) -> bool:
    """A remedy is needed, but 12 bytes a parameter in place of 16 would fit on the devices."""
    plan = zero_plan(cluster, 3)
    moment = estimate_rank_memory(plan, model).optimizer // 3
    return would_fit_without(moment, plan, model, cluster) and needs_remedy(model, cluster)


def ddp_would_fit_with_one_moment(model: VLMShape, cluster: Cluster) -> bool:
    """State has to be split, but with 12 bytes a parameter in place of 16 DDP would fit."""
    plan = plain_plan(cluster)
    moment = estimate_rank_memory(plan, model).optimizer // 3
    return would_fit_without(moment, plan, model, cluster) and needs_split(model, cluster)


def vision_decides(model: VLMShape, cluster: Cluster) -> bool:
    """A remedy is needed, but without the vision tower's state ZeRO-3 would fit."""
    plan = zero_plan(cluster, 3)
    return would_fit_without(vision_state_bytes(plan, model), plan, model, cluster) and needs_remedy(model, cluster)


def vision_decides_on_ddp(model: VLMShape, cluster: Cluster) -> bool:
    """State has to be split, but without the vision tower's state DDP would fit."""
    plan = plain_plan(cluster)
    return would_fit_without(vision_state_bytes(plan, model), plan, model, cluster) and needs_split(model, cluster)


def state_alone_would_fit(model: VLMShape, cluster: Cluster) -> bool:
    """A remedy is needed, but only because of activations, gathered layers and the allowance."""
    state = fill_fraction(zero_plan(cluster, 3), model, cluster, state_only=True)
    return state <= 0.97 and needs_remedy(model, cluster)


def only_eight_bit(model: VLMShape, cluster: Cluster) -> bool:
    """A remedy is needed, and main memory is too small for offloading."""
    offloaded = check_plan(zero_plan(cluster, 3, offload_optimizer=True), model, cluster)
    return "host_memory" in offloaded.codes and needs_remedy(model, cluster)


def only_offload(model: VLMShape, cluster: Cluster) -> bool:
    """A remedy is needed, and 8-bit Adam is not enough."""
    fill = fill_fraction(zero_plan(cluster, 3, optimizer="adamw_8bit"), model, cluster)
    return fill >= 1.05 and needs_remedy(model, cluster)


def nearly_full(model: VLMShape, cluster: Cluster) -> bool:
    """ZeRO-2 does not fit; ZeRO-3 does, with so little room that it would not in GiB."""
    too_full = fill_fraction(zero_plan(cluster, 2), model, cluster) >= 1.2
    return too_full and 0.95 <= fill_fraction(zero_plan(cluster, 3), model, cluster) <= 0.98


def slightly_too_full(model: VLMShape, cluster: Cluster) -> bool:
    """A remedy is needed, but ZeRO-3 is short of so little that it would fit in GiB."""
    return 1.02 <= fill_fraction(zero_plan(cluster, 3), model, cluster) <= 1.05


def is_impossible(model: VLMShape, cluster: Cluster) -> bool:
    """No plan fits, but one would with at most four times the cluster."""
    best = fill_fraction(zero_plan(cluster, 3, optimizer="adamw_8bit", offload_optimizer=True), model, cluster)
    if not 1.05 <= best <= 3.5:  # cheap to compute, and true of few pairs
        return False
    if any(fill_fraction(plan, model, cluster) < 1.05 for plan in plans_of_kind(Need.REMEDY, cluster)):
        return False
    return grown(model, cluster) is not None


def grown(model: VLMShape, cluster: Cluster) -> Cluster | None:
    """Return the cluster with more nodes, as few as are needed for a plan with room to spare; None above four times."""
    for factor in (2, 3, 4):
        num_nodes = cluster.num_nodes * factor
        name = cluster.name.replace(f"{cluster.num_nodes} x", f"{num_nodes} x", 1)
        bigger = dataclasses.replace(cluster, name=name, num_nodes=num_nodes, network_bytes_per_s=25e9)
        if needs_remedy(model, bigger) or needs_full_shard(model, bigger):
            return bigger
    return None


def draw(rng: random.Random, trait: Trait, **choices: tuple) -> Scenario:
    """Draw models and clusters until one pair has a trait.

    Args:
        rng: the generator.
        trait: tells whether a pair has it.
        choices: lists that `draw_cluster` chooses from.

    Raises:
        RuntimeError: if no pair has it after `MAX_DRAWS`.
    """
    for _ in range(MAX_DRAWS):
        model, cluster = draw_model(rng), draw_cluster(rng, **choices)
        if trait(model, cluster):
            return Scenario(model=model, cluster=cluster, need=find_need(model, cluster))
    raise RuntimeError(f"No pair with the trait {trait.__name__!r} in {MAX_DRAWS} draws: widen its choices")


# --- Groups ---------------------------------------------------------------------------------------------------------

Recipe = tuple[Trait, dict[str, tuple]]
SMALL = ("a100-40", "a100-80", "h100")

GROUPS: dict[str, tuple[Recipe, ...]] = {
    "plain": (
        (is_plain, {"per_node": (2, 4, 8)}),
        (is_plain, {"devices": ("h200",)}),
        (is_plain, {"per_node": (1, 2)}),
    ),
    "sharded": (
        (needs_full_shard, {}),
        (vision_decides_on_ddp, {}),
        (ddp_would_fit_with_one_moment, {}),
        (needs_full_shard, {"devices": ("a100-40",)}),
        (needs_stage_1_or_2, {}),
        (needs_full_shard, {}),
    ),
    "remedy": (
        (one_moment_less_would_fit, {}),
        (vision_decides, {}),
        (only_eight_bit, {"host_gb": (64, 128, 192)}),
        (only_offload, {}),
        (state_alone_would_fit, {}),
        (one_moment_less_would_fit, {}),
    ),
    "ranks": (
        (needs_full_shard, {"nodes": (2, 3)}),
        (needs_full_shard, {"per_node": (6,)}),
        (needs_stage_1_or_2, {"nodes": (2, 4)}),
        (is_plain, {"nodes": (2,), "per_node": (6, 8)}),
        (needs_remedy, {"nodes": (2,)}),
    ),
    "precision": (
        (needs_full_shard, {"devices": ("v100-32",)}),
        (is_plain, {"devices": ("v100-32", "t4-16")}),
        (needs_remedy, {"devices": ("v100-32",)}),
    ),
    "limits": (
        (is_impossible, {"per_node": (4,), "devices": ("a100-40",)}),
        (is_impossible, {"per_node": (2, 3), "devices": SMALL}),
    ),
}
"""What each group's cases are drawn from, in turn."""

UNGRADED: dict[str, tuple[Recipe, ...]] = {"edges": ((nearly_full, {}), (slightly_too_full, {}))}
"""Groups that earn no points: their cases hang on the last per cents, and so show an error of unit."""


@functools.lru_cache(maxsize=64)
def make_scenarios(group: str, seed: int, num_cases: int) -> tuple[tuple[Scenario, ...], ...]:
    """Make a group's cases. A case is a tuple of scenarios that must all be answered right.

    All have one scenario but those of "limits": there an impossible one is paired with the same model on a larger
    cluster, so that always answering "impossible" earns nothing. The first case of "remedy" is the exercise's own.

    Args:
        group: a name in `GROUPS` or `UNGRADED`.
        seed: of the draws.
        num_cases: how many.

    Raises:
        ValueError: if there is no such group.
    """
    recipes = GROUPS | UNGRADED
    if group not in recipes:
        raise ValueError(f"There is no group {group!r}: choose one of {', '.join(recipes)}")
    rng = random.Random(f"{group}:{seed}")
    cases = []
    for trait, choices in itertools.islice(itertools.cycle(recipes[group]), num_cases):
        scenario = draw(rng, trait, **choices)
        pair = [scenario]
        if group == "limits":
            bigger = grown(scenario.model, scenario.cluster)
            if bigger is not None:
                pair.append(Scenario(model=scenario.model, cluster=bigger, need=find_need(scenario.model, bigger)))
        cases.append(tuple(pair))
    if group == "remedy":
        model, cluster = MODELS["vlm-13b"], CLUSTERS["a100-40x4"]
        cases[0] = (Scenario(model=model, cluster=cluster, need=find_need(model, cluster)),)
    return tuple(cases)
