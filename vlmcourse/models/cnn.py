"""A small convolutional vision tower with a normalization of choice: where batches leave traces in the model itself.

Enters: scans of digits. Leaves: logits of ten classes. ViT towers normalize each token by itself; convolutional ones,
which many VLMs began with, mostly by BatchNorm: mean and variance over all samples of a forward pass, so that a
sample's output depends on its neighbors. Chapter 2 asks what becomes of that when a batch is cut.

Source: Ioffe and Szegedy 2015 (arXiv:1502.03167), BatchNorm; Wu and He 2018 (arXiv:1803.08494), GroupNorm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NORMS = ("batch", "group")
NUM_GROUPS = 4


class ConvTower(nn.Module):
    """Three convolutions, each with a normalization, then the mean over positions and a linear layer."""

    def __init__(self, norm: str = "batch", width: int = 16, num_classes: int = 10) -> None:
        """Build the tower with PyTorch's default weights.

        Args:
            norm: batch (over samples and positions) or group (over positions and a quarter of the channels).
            width: channels of the first convolution; the others have twice as many.
            num_classes: of the output.

        Raises:
            ValueError: if there is no such normalization.
        """
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"norm = {norm!r}: choose from {', '.join(NORMS)}")
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 2)):
            scale = nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(NUM_GROUPS, outputs)
            layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), scale, nn.ReLU()]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Return logits [batch, classes] of pictures [batch, 1, height, width]."""
        return self.head(self.blocks(pixels_BCHW).mean(dim=(2, 3)))


class FrozenBatchNorm2d(nn.Module):
    """A BatchNorm whose statistics and weights are constants: an affine map of each channel, whatever the batch."""

    weight: Tensor
    bias: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        """Fold the running statistics of a trained `norm` into one factor and one summand a channel."""
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError("a BatchNorm without running statistics cannot be frozen: track_running_stats must be on")
        factor = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        self.register_buffer("weight", factor)
        self.register_buffer("bias", norm.bias.detach() - norm.running_mean * factor)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the input scaled and shifted, channel by channel."""
        return x_BCHW * self.weight[:, None, None] + self.bias[:, None, None]


def freeze_batch_norms(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm2d in a model by a frozen one, in place."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, FrozenBatchNorm2d(child))
    return model


@torch.no_grad()
def measure_statistics(model: nn.Module, pixels_BCHW: Tensor) -> None:
    """Set the running statistics of every BatchNorm to those of one batch [batch, 1, height, width]."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the average of all batches seen since the reset
    was_training = model.training
    model.train()
    model(pixels_BCHW)
    model.train(was_training)
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum
