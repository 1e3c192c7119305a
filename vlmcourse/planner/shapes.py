"""Parameter counts of a model shape, by tower and by layer: arithmetic that a test holds equal to the built model.

Enters: a `VLMShape`. Leaves: counts (parameters, not bytes). What a parameter costs in bytes is in `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.presets import LanguageShape, VisionShape, VLMShape


@dataclass(frozen=True, kw_only=True)
class TowerParams:
    """Parameters of each tower of one model."""

    vision: int
    projector: int
    language: int

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.vision + self.projector + self.language


def count_params(shape: VLMShape) -> TowerParams:
    """Count the parameters of a model by tower.

    Args:
        shape: the model's shape.

    Returns:
        Parameters of the vision tower, the projector and the language tower.
    """
    vision, language = shape.vision, shape.language
    vision_total = count_vision_embedding_params(vision) + vision.num_layers * count_vision_layer_params(vision)
    language_total = (
        count_embedding_params(language)
        + language.num_layers * count_language_layer_params(language)
        + count_head_params(language)
    )
    return TowerParams(vision=vision_total, projector=count_projector_params(shape), language=language_total)


def count_vision_embedding_params(shape: VisionShape) -> int:
    """Count what stands before the first ViT layer: patch convolution with bias, class token, positions."""
    width = shape.hidden_size
    patch_convolution = 3 * shape.patch_size_px**2 * width + width
    return patch_convolution + width + (shape.num_patches + 1) * width


def count_vision_layer_params(shape: VisionShape) -> int:
    """Count one ViT layer: attention, a two-matrix MLP with biases, two norms and two LayerScales.

    LayerNorm has a weight and a bias, RMSNorm a weight; QK-norm adds two weights of the full width.
    """
    width, mlp = shape.hidden_size, shape.mlp_size
    attention = 4 * width**2 + width + (3 * width if shape.qkv_bias else 0)
    norms = 2 * width * (2 if shape.norm == "layernorm" else 1) + (2 * width if shape.qk_norm else 0)
    layer_scales = 2 * width
    return attention + 2 * width * mlp + mlp + width + norms + layer_scales


def count_projector_params(shape: VLMShape) -> int:
    """Count the projector: LayerNorm, then two linear layers with biases.

    Pixel shuffle by a fraction f stacks 1/f^2 neighbouring patches, so its input is that much wider than the ViT.
    """
    wide = round(shape.vision.hidden_size / shape.pixel_shuffle_fraction**2)
    width = shape.language.hidden_size
    return 2 * wide + wide * width + width + width**2 + width


def count_embedding_params(shape: LanguageShape) -> int:
    """Count the token embedding."""
    return shape.vocab_size * shape.hidden_size


def count_language_layer_params(shape: LanguageShape) -> int:
    """Count one decoder layer: grouped-query attention, a three-matrix SwiGLU MLP, two RMSNorms."""
    width = shape.hidden_size
    kv_width = width // shape.num_heads * shape.num_kv_heads
    attention = 2 * width**2 + 2 * width * kv_width
    bias = width + 2 * kv_width if shape.qkv_bias else 0
    return attention + bias + 3 * width * shape.mlp_size + 2 * width


def count_head_params(shape: LanguageShape) -> int:
    """Count what stands after the last decoder layer: the final norm, and the output matrix unless it is tied."""
    return shape.hidden_size + (0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size)
