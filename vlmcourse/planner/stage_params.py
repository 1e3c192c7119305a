"""Which parameters a rank holds, unit by unit: what tensor parallelism splits of them, and what every rank keeps whole.

Enters: a model's shape, a split into stages, degrees. Leaves: `Unit`s of a stage, each a layer or one of the parts
around the layers, and their sizes on one rank. A unit is what FSDP gathers and frees together, or it belongs to the
root unit. What is whole on all ranks (norms, biases behind a sum, patch embedding) is little, but counted. Chapters 1
and 7.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from vlmcourse.planner import shapes
from vlmcourse.planner.stages import StageSplit
from vlmcourse.presets import LanguageShape, VisionShape, VLMShape


class Unit(NamedTuple):
    """Some equal parts of a model on one stage."""

    tower: str
    """vision, projector or language."""
    kind: str
    """layer, patches, projector, embedding, norm or output."""
    number: int
    """How many there are."""
    split: int
    """Parameters of one of them that the ranks of a tensor-parallel group split."""
    whole: int
    """Those that each of these ranks keeps."""

    def on_rank(self, tp: int) -> int:
        """Return the parameters of one of them on a rank of a group of `tp`; uneven splits round up."""
        return -(-self.split // tp) + self.whole


@lru_cache(maxsize=4096)
def list_units(shape: VLMShape, split: StageSplit, stage: int, vision_plan: str = "split") -> tuple[Unit, ...]:
    """Return what stands on a stage.

    A tied output matrix on another stage than the embedding is a copy, of kind output.

    Args:
        shape: the model's.
        split: which layers stand where.
        stage: of the split, from 0.
        vision_plan: what tensor parallelism does with the vision tower, one of `layout.VISION_PLANS`; pad_heads counts
            as split, without the heads of zeros.
    """
    language, found = shape.language, list[Unit]()
    width, matrix = language.hidden_size, shapes.count_embedding_params(language)
    is_last = stage == split.num_stages - 1
    has_vision = shape.vision.num_layers > 0  # else a decoder alone
    if stage == 0 and has_vision:
        found.append(Unit("vision", "patches", 1, 0, shapes.count_vision_embedding_params(shape.vision)))
    if blocks := split.vision_blocks(stage):
        found.append(Unit("vision", "layer", len(blocks), *_split_vision_layer(shape.vision, vision_plan)))
    if stage == split.fusion_stage and has_vision:
        folded = round(shape.vision.hidden_size / shape.pixel_shuffle_fraction**2)
        whole = 2 * folded + width  # the norm, and the bias that is added to the ranks' sum
        found.append(Unit("projector", "projector", 1, shapes.count_projector_params(shape) - whole, whole))
    if stage == split.fusion_stage:
        found.append(Unit("language", "embedding", 1, matrix, 0))
    if blocks := split.language_blocks(stage):
        found.append(Unit("language", "layer", len(blocks), *_split_language_layer(language)))
    if is_last:
        found.append(Unit("language", "norm", 1, 0, width))
        if not language.tied_embeddings or stage != split.fusion_stage:
            found.append(Unit("language", "output", 1, matrix, 0))
    return tuple(found)


def _split_vision_layer(shape: VisionShape, vision_plan: str) -> tuple[int, int]:
    """Return the parameters of a vision layer that are split and that are whole."""
    total, width, mlp = shapes.count_vision_layer_params(shape), shape.hidden_size, shape.mlp_size
    of_mlp = 2 * width * mlp + mlp
    if vision_plan == "replicate":
        return 0, total
    if vision_plan == "mlp_only":
        return of_mlp, total - of_mlp
    of_attention = 4 * width**2 + (3 * width if shape.qkv_bias else 0) + (2 * width if shape.qk_norm else 0)
    return of_mlp + of_attention, total - of_mlp - of_attention


def _split_language_layer(shape: LanguageShape) -> tuple[int, int]:
    norms = 2 * shape.hidden_size
    return shapes.count_language_layer_params(shape) - norms, norms


def degree_of(unit: Unit, tp: int, vision_tp: int) -> int:
    """Return over how many ranks tensor parallelism splits a unit's matrices."""
    return vision_tp if unit.tower == "vision" else tp


def count_local(units: tuple[Unit, ...], tp: int, vision_tp: int) -> dict[str, int]:
    """Return the parameters of each tower on one rank, before any sharding over data-parallel ranks."""
    held = {"vision": 0, "projector": 0, "language": 0}
    for unit in units:
        held[unit.tower] += unit.number * unit.on_rank(degree_of(unit, tp, vision_tp))
    return held


def unit_sizes(
    units: tuple[Unit, ...], tp: int, vision_tp: int, *, tied_embeddings: bool, layered: bool = False
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return tower and parameters on one rank of what FSDP's root unit holds, and of each other kind of unit.

    Units are the layers and, where they are two, the embedding and the output matrix; all the rest is the root.

    Args:
        units: of a stage.
        tp: degree of the language tower and the projector.
        vision_tp: of the vision tower.
        tied_embeddings: whether embedding and output share one matrix.
        layered: whether the projector is a unit of its own.
    """
    root: list[tuple[str, int]] = []
    others: list[tuple[str, int]] = []
    for unit in units:
        is_matrix = unit.kind in ("embedding", "output") and not tied_embeddings
        is_unit = unit.kind == "layer" or is_matrix or (layered and unit.kind == "projector")
        (others if is_unit else root).append((unit.tower, unit.on_rank(degree_of(unit, tp, vision_tp))))
    return root, others
