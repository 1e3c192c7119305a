"""InternViT: image tiles in, one vector a patch out.

A pre-norm transformer without a causal mask: a class token, a learned position embedding (interpolated for other image
sizes), LayerNorm or RMSNorm, a learned scale on every residual branch and, in the 6B tower, normalised queries and
keys. The class token takes part in attention but does not leave; there is no norm after the last block.
Source: Chen et al. 2024, "InternVL: Scaling up Vision Foundation Models" (arXiv:2312.14238).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vlmcourse.presets import VisionShape

QK_NORM_EPS = 1e-6


def build_norm(kind: str, hidden_size: int, eps: float) -> nn.Module:
    """Return the normalisation layer that `VisionShape.norm` names.

    Raises:
        ValueError: if `kind` is neither layernorm nor rmsnorm.
    """
    if kind == "layernorm":
        return nn.LayerNorm(hidden_size, eps=eps)
    if kind == "rmsnorm":
        return nn.RMSNorm(hidden_size, eps=eps)
    raise ValueError(f"vision.norm = {kind!r}: choose 'layernorm' or 'rmsnorm'")


class VisionAttention(nn.Module):
    """Every patch attends to every patch of the same tile."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        D = shape.hidden_size
        self.head_width = D // shape.num_heads
        self.q_proj = nn.Linear(D, D, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(D, D, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(D, D, bias=shape.qkv_bias)
        self.q_norm = nn.RMSNorm(D, eps=QK_NORM_EPS) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(D, eps=QK_NORM_EPS) if shape.qk_norm else nn.Identity()
        self.out_proj = nn.Linear(D, D)

    def forward(self, x_IPD: Tensor) -> Tensor:
        """Mix the positions of each tile; [tiles, positions, width] in and out."""
        # The norms see the whole width, so they come before the split into heads.
        q_IHPE = self._split_heads(self.q_norm(self.q_proj(x_IPD)))
        k_IHPE = self._split_heads(self.k_norm(self.k_proj(x_IPD)))
        v_IHPE = self._split_heads(self.v_proj(x_IPD))
        mixed_IHPE = F.scaled_dot_product_attention(q_IHPE, k_IHPE, v_IHPE)
        return self.out_proj(mixed_IHPE.transpose(1, 2).flatten(2))

    def _split_heads(self, x_IPD: Tensor) -> Tensor:
        # The number of heads is inferred: it is smaller than in the shape when the projections are split by heads.
        return x_IPD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class VisionMLP(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size)

    def forward(self, x_IPD: Tensor) -> Tensor:
        """Transform each position alone; [tiles, positions, width] in and out."""
        return self.down_proj(F.gelu(self.up_proj(x_IPD)))


class VisionBlock(nn.Module):
    """Attention and MLP, each on a residual branch that a learned vector scales (LayerScale)."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.norm1 = build_norm(shape.norm, shape.hidden_size, shape.norm_eps)
        self.attention = VisionAttention(shape)
        self.layer_scale1 = nn.Parameter(torch.empty(shape.hidden_size))
        self.norm2 = build_norm(shape.norm, shape.hidden_size, shape.norm_eps)
        self.mlp = VisionMLP(shape)
        self.layer_scale2 = nn.Parameter(torch.empty(shape.hidden_size))

    def forward(self, x_IPD: Tensor) -> Tensor:
        """Apply the block; [tiles, positions, width] in and out."""
        x_IPD = torch.addcmul(x_IPD, self.attention(self.norm1(x_IPD)), self.layer_scale1)
        return torch.addcmul(x_IPD, self.mlp(self.norm2(x_IPD)), self.layer_scale2)


class VisionTower(nn.Module):
    """The whole tower; see the module's docstring."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        D = shape.hidden_size
        self.patch_embedding = nn.Conv2d(3, D, kernel_size=shape.patch_size_px, stride=shape.patch_size_px)
        self.class_token = nn.Parameter(torch.empty(1, 1, D))
        self.position_embedding = nn.Parameter(torch.empty(1, 1 + shape.num_patches, D))
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.num_layers))

    def patch_grid(self, pixel_values_ICHW: Tensor) -> tuple[int, int]:
        """Return how many patches a tile has, as (rows, columns).

        Args:
            pixel_values_ICHW: tiles [tiles, 3, height, width]; only the shape is read.

        Raises:
            ValueError: if the tensor is not a batch of RGB tiles whose sides the patch size divides.
        """
        shape, patch = tuple(pixel_values_ICHW.shape), self.shape.patch_size_px
        if len(shape) != 4 or shape[1] != 3:
            raise ValueError(f"pixel_values has shape {list(shape)}: it must be [tiles, 3, height, width]")
        height, width = shape[2:]
        if height % patch or width % patch or not height or not width:
            raise ValueError(
                f"A tile of {height} x {width} px does not split into patches of {patch} px: "
                f"resize it to a multiple of {patch} (this model's tiles are {self.shape.image_size_px} px)"
            )
        return height // patch, width // patch

    def forward(self, pixel_values_ICHW: Tensor) -> Tensor:
        """Encode each tile on its own.

        Args:
            pixel_values_ICHW: normalised RGB tiles [tiles, 3, height, width], floating point.

        Returns:
            One vector a patch [tiles, patches, width], patches row by row; the class token is left out.

        Raises:
            ValueError: if the tiles do not split into patches.
        """
        x_IPD = self.embed(pixel_values_ICHW)
        for block in self.blocks:
            x_IPD = block(x_IPD)
        return x_IPD[:, 1:]

    def embed(self, pixel_values_ICHW: Tensor) -> Tensor:
        """Return what the first block takes [tiles, 1 + patches, width]: class token and patches, with positions."""
        rows, columns = self.patch_grid(pixel_values_ICHW)
        pixels = pixel_values_ICHW.to(self.patch_embedding.weight.dtype)
        patches_IPD = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        # From [1, width], not [1, 1, width]: for a single tile an expansion hands its gradient on as a view with other
        # strides than the weight has, and what keeps gradients in one buffer warns of those.
        class_I1D = self.class_token[0].expand(patches_IPD.shape[0], -1, -1).to(patches_IPD.dtype)
        return torch.cat((class_I1D, patches_IPD), dim=1) + self._positions(rows, columns)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Return the position embedding [1, 1 + rows * columns, width], interpolated where the grid is another one."""
        side = self.shape.image_size_px // self.shape.patch_size_px
        if (rows, columns) == (side, side):
            return self.position_embedding
        class_11D, patches_1PD = self.position_embedding[:, :1], self.position_embedding[:, 1:]
        grid_1DRC = patches_1PD.transpose(1, 2).unflatten(2, (side, side))
        resized_1DRC = F.interpolate(grid_1DRC, size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat((class_11D, resized_1DRC.flatten(2).transpose(1, 2)), dim=1)
