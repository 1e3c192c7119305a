"""BatchNorm whose statistics span the ranks: on GPUs PyTorch's SyncBatchNorm, elsewhere the same in a few lines.

Enters: a model with `BatchNorm2d` layers. Leaves: the model with layers that normalize by the mean and variance of the
samples of all ranks of one forward pass. They do not span the micro-batches of a step (F19): those of a later one are
not there yet when the first is normalized. Chapter 2.

Source: torch.nn.SyncBatchNorm documentation, which takes GPU tensors only.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlmcourse.parallel.differentiable import sum_over_group


class SyncBatchNorm2d(nn.BatchNorm2d):
    """As `BatchNorm2d`, with statistics over all ranks of a group, for devices that PyTorch's own refuses."""

    def __init__(self, norm: nn.BatchNorm2d, group: dist.ProcessGroup) -> None:
        """Take over weights (the same objects) and running statistics (copies) of `norm`."""
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.load_state_dict(norm.state_dict())
        self.weight, self.bias, self.group = norm.weight, norm.bias, group

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [batch, channels, height, width]; in evaluation by the running statistics, as any BatchNorm.

        Communicates: in training an all-reduce of 2 numbers a channel and one more, forward and backward.
        """
        if not self.training:
            return super().forward(input)
        x_BCHW = input
        count = x_BCHW.new_tensor([x_BCHW.numel() / x_BCHW.shape[1]])
        sums = torch.cat((x_BCHW.sum(dim=(0, 2, 3)), x_BCHW.square().sum(dim=(0, 2, 3)), count))
        sums = sum_over_group(sums, self.group)
        mean_C, square_C = (sums[:-1] / sums[-1]).chunk(2)
        var_C = square_C - mean_C.square()
        self._remember(mean_C.detach(), var_C.detach(), float(sums[-1].detach()))
        normal_BCHW = (x_BCHW - mean_C[:, None, None]) * (var_C[:, None, None] + self.eps).rsqrt()
        return normal_BCHW * self.weight[:, None, None] + self.bias[:, None, None]

    @torch.no_grad()
    def _remember(self, mean_C: Tensor, var_C: Tensor, count: float) -> None:
        """Move the running statistics towards those of this pass; variance divides by count - 1, as PyTorch's does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean_C, share)
        self.running_var.lerp_(var_C * count / max(1.0, count - 1), share)


def sync_batch_norms(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> nn.Module:
    """Replace every BatchNorm2d of a model by one whose statistics span the ranks of a group.

    Args:
        model: changed in place; wrap it in DDP afterwards.
        group: the ranks.
        device: where the model will run.

    Returns:
        The model, which on GPUs is the one that PyTorch's own conversion returns.
    """
    if device.type == "cuda":
        return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(model, group))
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.BatchNorm2d:
                setattr(parent, name, SyncBatchNorm2d(child, group))
    return model
