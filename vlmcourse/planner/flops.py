"""FLOPs of an optimizer step, counted exactly from shapes: forward, backward and recomputation, tower by tower.

Enters: a `VLMShape`, how much went through it (`Work`), which towers are trained and what is recomputed. Leaves:
`StepFlops`. A multiplication and an addition are 2 FLOPs, and only matrix products count (linear layers, the patch
convolution, attention's scores and mixing), as in PyTorch's `FlopCounterMode`, with which tests compare it to the FLOP;
norms, softmax, GELU and the optimizer are left out, well under 1 % in models worth a GPU. Chapter 6.

- Forward: a matrix of n x m costs 2 n m a position. Attention costs 4 x width for each pair of positions (2 for the
  score, 2 for the mixing), whether the causal mask hides the pair or not: "full". Grouped keys and values cost what
  their projections are smaller; each query head still scores on its own.
- Backward: as much again for the gradient of a product's input, and once more for that of its weights: 3 x forward
  where all is trained, the `6 N` of the formula 6 N + 12 L H Q T. A frozen part has no weight gradient. What stands
  before the first trained parameter has no backward at all. Pixels get no gradient. Attention costs 2 x forward; that a
  fused kernel computes scores again in backward is its own business, and not counted.
- Recomputation: a block that was not kept runs forward again, up to the last product whose input backward needs.

MFU (model FLOP utilisation) divides forward and backward of the real tokens by the time and the machine's peak. HFU
(hardware FLOP utilisation) divides what was executed: recomputation, padding and blank tiles too.

Source: Chowdhery et al. 2022, "PaLM" (arXiv:2204.02311), appendix B, for MFU and its formula; Korthikanti et al. 2022
(arXiv:2205.05198), section 5, for HFU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from vlmcourse.presets import LanguageShape, VisionShape, VLMShape
from vlmcourse.recompute import plan_segments

TOWERS = ("vision", "projector", "language")


@dataclass(frozen=True)
class Work:
    """What goes through a model; FLOPs are proportional to these three."""

    num_tiles: float = 0.0
    num_positions: float = 0.0
    """Of the language tower."""
    num_pairs: float = 0.0
    """Pairs of positions of one sequence: its length squared, summed over the sequences."""

    @classmethod
    def of_sequences(cls, lengths: Iterable[int], num_tiles: int) -> Work:
        """Return the work of sequences of these lengths, image tokens included, with their tiles."""
        listed = list(lengths)
        return cls(num_tiles, sum(listed), sum(length**2 for length in listed))

    def __add__(self, other: Work) -> Work:
        return Work(
            self.num_tiles + other.num_tiles,
            self.num_positions + other.num_positions,
            self.num_pairs + other.num_pairs,
        )


@dataclass(frozen=True)
class StepFlops:
    """FLOPs by what they are for."""

    forward: float = 0.0
    input_gradients: float = 0.0
    """Backward to the inputs of each product."""
    weight_gradients: float = 0.0
    recomputed: float = 0.0

    @property
    def model(self) -> float:
        """What training needs, however it is done: the numerator of MFU."""
        return self.forward + self.input_gradients + self.weight_gradients

    @property
    def hardware(self) -> float:
        """What is executed: the numerator of HFU, where padding is counted as work too."""
        return self.model + self.recomputed

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(
            *(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def count_step_flops(
    shape: VLMShape,
    work: Work,
    trained: Collection[str] = TOWERS,
    recompute: Mapping[str, str] | None = None,
) -> StepFlops:
    """Count the FLOPs of forward and backward of some work, by tower and together.

    Args:
        shape: the model.
        work: of one step, or of anything else.
        trained: towers whose weights get gradients.
        recompute: activation policy by tower, vision and language; none where it is not named. Of a tower whose blocks
            are shared out over a pipeline, sqrt is counted as if it were whole.

    Returns:
        The sum over the towers; see `count_tower_flops` for each.
    """
    return sum(count_tower_flops(shape, work, trained, recompute).values(), StepFlops())


def count_tower_flops(
    shape: VLMShape,
    work: Work,
    trained: Collection[str] = TOWERS,
    recompute: Mapping[str, str] | None = None,
) -> dict[str, StepFlops]:
    """Count FLOPs by tower; arguments as those of `count_step_flops`.

    Raises:
        ValueError: if `trained` names a tower that there is not.
    """
    unknown = sorted(set(trained) - set(TOWERS))
    if unknown:
        raise ValueError(f"trained = {unknown[0]!r}: a tower is one of {', '.join(TOWERS)}")
    policies = recompute or {}
    vision, language = shape.vision, shape.language
    patches = work.num_tiles * count_patch_flops(vision)
    linear = work.num_tiles * count_vision_linear_flops(vision)
    attention = work.num_tiles * count_vision_attention_flops(vision)
    of_vision = _count(linear + attention, attention, "vision" in trained, "vision" in trained)
    of_vision += StepFlops(forward=patches, weight_gradients=patches if "vision" in trained else 0.0)
    of_vision += _recompute(policies.get("vision", "none"), vision.num_layers, linear + attention, 0.0, of_vision)

    reaches_projector = "vision" in trained or "projector" in trained
    of_projector = _count(work.num_tiles * count_projector_flops(shape), 0.0, reaches_projector, "projector" in trained)

    attention = work.num_pairs * language.num_layers * 4 * language.hidden_size
    linear = work.num_positions * count_language_linear_flops(language)
    head = work.num_positions * 2 * language.hidden_size * language.vocab_size
    of_language = _count(linear + attention + head, attention, bool(trained), "language" in trained)
    last = work.num_positions * 2 * language.hidden_size * language.mlp_size
    of_language += _recompute(
        policies.get("language", "none"), language.num_layers, linear + attention, last, of_language
    )
    return {"vision": of_vision, "projector": of_projector, "language": of_language}


def count_patch_flops(shape: VisionShape) -> int:
    """Count the patch convolution of one tile."""
    return 2 * 3 * shape.patch_size_px**2 * shape.hidden_size * shape.num_patches


def count_vision_linear_flops(shape: VisionShape) -> int:
    """Count the linear layers of all blocks for one tile: four of attention, two of the MLP, class token included."""
    width = shape.hidden_size
    return shape.num_layers * 2 * (1 + shape.num_patches) * (4 * width**2 + 2 * width * shape.mlp_size)


def count_vision_attention_flops(shape: VisionShape) -> int:
    """Count scores and mixing of all blocks for one tile."""
    return shape.num_layers * 4 * shape.hidden_size * (1 + shape.num_patches) ** 2


def count_projector_flops(shape: VLMShape) -> int:
    """Count the two linear layers for the visual tokens of one tile."""
    wide, width = round(shape.vision.hidden_size / shape.pixel_shuffle_fraction**2), shape.language.hidden_size
    return 2 * shape.num_visual_tokens_per_tile * (wide * width + width**2)


def count_language_linear_flops(shape: LanguageShape) -> int:
    """Count the linear layers of all blocks for one position: q and output, k and v, three of the MLP."""
    width = shape.hidden_size
    kv_width = width // shape.num_heads * shape.num_kv_heads
    return shape.num_layers * 2 * (2 * width**2 + 2 * width * kv_width + 3 * width * shape.mlp_size)


def _count(forward: float, attention: float, has_backward: bool, is_trained: bool) -> StepFlops:
    """Count a tower's backward; both operands of attention's products are activations."""
    if not has_backward:
        return StepFlops(forward)
    return StepFlops(forward, forward + attention, forward - attention if is_trained else 0.0)


def _recompute(policy: str, num_layers: int, blocks: float, last_product: float, of_tower: StepFlops) -> StepFlops:
    """Count what a tower's policy runs again.

    Args:
        policy: of `plan_segments`; selective repeats no product.
        num_layers: of the tower.
        blocks: forward of all of them.
        last_product: forward of a block's last product, if its result is kept by nothing that backward needs.
        of_tower: only a tower with a backward recomputes.
    """
    if not of_tower.input_gradients:
        return StepFlops()
    segments = [segment for segment in plan_segments(policy, num_layers) if not segment.selective]
    num_blocks = sum(segment.num_blocks for segment in segments)
    return StepFlops(recomputed=num_blocks * blocks / num_layers - len(segments) * last_product)
