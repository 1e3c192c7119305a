"""Shapes of models and of clusters as plain data: no torch, no arithmetic.

A shape says how large every part is; `models/` builds it, `planner/` counts it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """An InternViT tower."""

    image_size_px: int
    """Height and width of one tile."""
    patch_size_px: int
    num_layers: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    norm: str = "layernorm"
    """layernorm or rmsnorm."""
    qk_norm: bool = False
    """Normalise queries and keys over the whole width before attention (InternViT-6B)."""
    qkv_bias: bool = True
    norm_eps: float = 1e-6
    layer_scale_init: float = 0.1

    @property
    def num_patches(self) -> int:
        """Patches of one tile, without the class token."""
        return (self.image_size_px // self.patch_size_px) ** 2


@dataclass(frozen=True, kw_only=True)
class LanguageShape:
    """A decoder-only language tower (Llama, Qwen2 or InternLM2 family)."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    tied_embeddings: bool = False
    max_seq_len: int = 8192
    """Tokens that the positions were trained for."""


@dataclass(frozen=True, kw_only=True)
class VLMShape:
    """A vision tower, a two-layer MLP projector and a language tower."""

    name: str
    vision: VisionShape
    language: LanguageShape
    image_token_id: int
    """The token whose embedding is replaced by an image feature."""
    pixel_shuffle_fraction: float = 0.5
    """Side of the patch grid after pixel shuffle over the side before: 0.5 turns 4 patches into 1 token."""
    pixel_shuffle_version: str = "v2"
    """Order of a tile's visual tokens: v2 row by row, v1 (InternVL before 1.5) column by column."""
    source: str = ""
    """Where the numbers come from."""

    @property
    def num_visual_tokens_per_tile(self) -> int:
        """Language-tower positions that one tile takes."""
        return int(self.vision.num_patches * self.pixel_shuffle_fraction**2)


_INTERNVIT_300M = VisionShape(
    image_size_px=448, patch_size_px=14, num_layers=24, hidden_size=1024, num_heads=16, mlp_size=4096
)
_INTERNVIT_6B = VisionShape(
    image_size_px=448,
    patch_size_px=14,
    num_layers=45,
    hidden_size=3200,
    num_heads=25,
    mlp_size=12800,
    norm="rmsnorm",
    qk_norm=True,
    qkv_bias=False,
)


def _internlm2(num_layers: int, hidden_size: int, num_heads: int, mlp_size: int) -> LanguageShape:
    """Return an InternLM2 tower with the nine tokens that InternVL adds: what the three sizes have in common."""
    return LanguageShape(
        vocab_size=92553,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=8,
        mlp_size=mlp_size,
        norm_eps=1e-5,
        max_seq_len=32768,
    )


_TINY = VLMShape(
    name="tiny",
    vision=VisionShape(
        image_size_px=32, patch_size_px=8, num_layers=2, hidden_size=64, num_heads=2, mlp_size=192, layer_scale_init=1.0
    ),
    language=LanguageShape(
        vocab_size=256, num_layers=3, hidden_size=96, num_heads=4, num_kv_heads=2, mlp_size=256, rope_theta=1e4
    ),
    image_token_id=3,
    source="made for the course: trains from scratch in about two minutes on two CPU cores",
)
_SMALL = VLMShape(
    name="small",
    vision=VisionShape(
        image_size_px=128,
        patch_size_px=8,
        num_layers=8,
        hidden_size=384,
        num_heads=6,
        mlp_size=1536,
        layer_scale_init=1.0,
    ),
    language=LanguageShape(
        vocab_size=256,
        num_layers=8,
        hidden_size=384,
        num_heads=6,
        num_kv_heads=2,
        mlp_size=1152,
        rope_theta=1e4,
        tied_embeddings=True,
    ),
    image_token_id=3,
    source="made for the course: the smallest preset that is worth a GPU",
)
_INTERNVL2_1B = VLMShape(
    name="internvl2-1b",
    vision=_INTERNVIT_300M,
    language=LanguageShape(
        vocab_size=151655,
        num_layers=24,
        hidden_size=896,
        num_heads=14,
        num_kv_heads=2,
        mlp_size=4864,
        qkv_bias=True,
        max_seq_len=32768,
    ),
    image_token_id=151648,
    source="config.json of OpenGVLab/InternVL2-1B: InternViT-300M-448px, Qwen2-0.5B-Instruct",
)
_INTERNVL2_2B = VLMShape(
    name="internvl2-2b",
    vision=_INTERNVIT_300M,
    language=_internlm2(num_layers=24, hidden_size=2048, num_heads=16, mlp_size=8192),
    image_token_id=92546,
    source="config.json of OpenGVLab/InternVL2-2B: InternViT-300M-448px, internlm2-chat-1_8b",
)
_INTERNVL2_8B = VLMShape(
    name="internvl2-8b",
    vision=_INTERNVIT_300M,
    language=_internlm2(num_layers=32, hidden_size=4096, num_heads=32, mlp_size=14336),
    image_token_id=92546,
    source="config.json of OpenGVLab/InternVL2-8B: InternViT-300M-448px, internlm2_5-7b-chat",
)
_INTERNVL2_26B = VLMShape(
    name="internvl2-26b",
    vision=_INTERNVIT_6B,
    language=_internlm2(num_layers=48, hidden_size=6144, num_heads=48, mlp_size=16384),
    image_token_id=92546,
    source="config.json of OpenGVLab/InternVL2-26B: InternViT-6B-448px-V1-5, internlm2-chat-20b",
)
_INTERNVL2_76B = VLMShape(
    name="internvl2-76b",
    vision=_INTERNVIT_6B,
    language=LanguageShape(
        vocab_size=128265,
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        num_kv_heads=8,
        mlp_size=28672,
        rope_theta=5e5,
        norm_eps=1e-5,
    ),
    image_token_id=128258,
    source="config.json of OpenGVLab/InternVL2-Llama3-76B: InternViT-6B-448px-V1-5, Hermes-2-Theta-Llama-3-70B",
)
_SHAPES = (_TINY, _SMALL, _INTERNVL2_1B, _INTERNVL2_2B, _INTERNVL2_8B, _INTERNVL2_26B, _INTERNVL2_76B)

MODELS: dict[str, VLMShape] = {shape.name: shape for shape in _SHAPES}


def get_model(name: str) -> VLMShape:
    """Return the shape of a preset.

    Raises:
        ValueError: if there is no preset of that name; the message names the nearest.
    """
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(MODELS)}"
    raise ValueError(f"There is no model preset {name!r}: {hint}")


# --- Clusters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal machines ("nodes") of equal devices."""

    name: str
    device: str
    """A name in `planner.hardware.DEVICES`."""
    num_nodes: int
    devices_per_node: int
    host_memory_bytes: int
    """Main memory of one node, what an offloaded optimizer lives in."""
    host_memory_bytes_per_s: float = 0.0
    """Of that memory, read and written together; 0 where it is not known. Sockets x channels x 8 bytes x transfers.

    Datasheets of machines name the processor, and few the speed of its memory: except for DGX-1 (DDR4-2133), it is
    taken as the fastest that the processor's maker allows, which gives the most that there can be."""
    network_bytes_per_s: float = 0.0
    """Between nodes, one direction, for each device; 0 where there is one node."""
    source: str = ""
    """Where the numbers come from."""

    @property
    def num_devices(self) -> int:
        """Devices of all nodes, which is the number of ranks that a plan has to use."""
        return self.num_nodes * self.devices_per_node


CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            name="a100-40x4",
            device="a100-40",
            num_nodes=1,
            devices_per_node=4,
            host_memory_bytes=512 * 10**9,
            host_memory_bytes_per_s=204.8e9,
            source="NVIDIA DGX Station A100 160GB datasheet; AMD EPYC 7742: 8 channels of DDR4-3200",
        ),
        Cluster(
            name="a100-80x8",
            device="a100-80",
            num_nodes=1,
            devices_per_node=8,
            host_memory_bytes=2_000 * 10**9,
            host_memory_bytes_per_s=409.6e9,
            source="NVIDIA DGX A100 640GB datasheet; 2 x AMD EPYC 7742: 8 channels of DDR4-3200 each",
        ),
        Cluster(
            name="v100-32x8",
            device="v100-32",
            num_nodes=1,
            devices_per_node=8,
            host_memory_bytes=512 * 10**9,
            host_memory_bytes_per_s=136.5e9,
            source="NVIDIA DGX-1 (V100 32GB) datasheet; 2 x Intel Xeon E5-2698 v4: 4 channels of DDR4-2133 each",
        ),
        Cluster(
            name="h100x8",
            device="h100",
            num_nodes=1,
            devices_per_node=8,
            host_memory_bytes=2_000 * 10**9,
            host_memory_bytes_per_s=614.4e9,
            source="NVIDIA DGX H100 datasheet; 2 x Intel Xeon Platinum 8480C: 8 channels of DDR5-4800 each",
        ),
        Cluster(
            name="h100x16",
            device="h100",
            num_nodes=2,
            devices_per_node=8,
            host_memory_bytes=2_000 * 10**9,
            host_memory_bytes_per_s=614.4e9,
            network_bytes_per_s=50e9,
            source="two NVIDIA DGX H100 (see h100x8): 8 x 400 Gb/s network cards a node",
        ),
        Cluster(
            name="h200x8",
            device="h200",
            num_nodes=1,
            devices_per_node=8,
            host_memory_bytes=2_000 * 10**9,
            host_memory_bytes_per_s=614.4e9,
            source="NVIDIA DGX H200 datasheet; 2 x Intel Xeon Platinum 8480C: 8 channels of DDR5-4800 each",
        ),
    )
}


def get_cluster(name: str) -> Cluster:
    """Return a cluster by name.

    Raises:
        ValueError: if there is no cluster of that name; the message names the nearest.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    near = difflib.get_close_matches(name, CLUSTERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(CLUSTERS)}"
    raise ValueError(f"There is no cluster {name!r}: {hint}")


# --- The model of exercise 4.1 --------------------------------------------------------------------------------------

MODELS["vlm-13b"] = VLMShape(
    name="vlm-13b",
    vision=VisionShape(
        image_size_px=448,
        patch_size_px=14,
        num_layers=16,
        hidden_size=3200,
        num_heads=25,
        mlp_size=12800,
        norm="rmsnorm",
        qk_norm=True,
        qkv_bias=False,
    ),
    language=LanguageShape(
        vocab_size=32064,
        num_layers=36,
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=8,
        mlp_size=15104,
    ),
    image_token_id=32000,
    source="made for the course: the first 16 of InternViT-6B's 45 layers, and a decoder 5120 wide as in Llama-13B",
)
