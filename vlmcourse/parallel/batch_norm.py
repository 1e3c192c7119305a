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

        Sums are fp32 (fp64 for an fp64 input) and the output has the input's type. The mean comes first, the squares
        are those of what is left: E[x^2] - E[x]^2 would lose a small variance beside a large mean. The mean of the
        first round is only an origin, on which no result depends, so gradients pass through the second round alone.

        Communicates: in training two all-reduces forward, of a number a channel and one more, and of 2 numbers a
        channel; one backward, of 2 numbers a channel.
        """
        if not self.training:
            return super().forward(input)
        x_BCHW = input.to(torch.promote_types(input.dtype, torch.float32))
        with torch.no_grad():
            count = x_BCHW.new_tensor([x_BCHW.numel() // x_BCHW.shape[1]])
            total = sum_over_group(torch.cat((x_BCHW.sum(dim=(0, 2, 3)), count)), self.group)
            count, origin_C = total[-1], total[:-1] / total[-1]
        x_BCHW = x_BCHW - origin_C[:, None, None]
        sums = torch.cat((x_BCHW.sum(dim=(0, 2, 3)), x_BCHW.square().sum(dim=(0, 2, 3))))
        mean_C, square_C = (sum_over_group(sums, self.group) / count).chunk(2)  # the mean: what rounding has left of it
        var_C = (square_C - mean_C.square()).clamp(min=0)
        self._remember((origin_C + mean_C).detach(), var_C.detach(), float(count))
        normal_BCHW = (x_BCHW - mean_C[:, None, None]) * (var_C[:, None, None] + self.eps).rsqrt()
        if self.affine:
            normal_BCHW = normal_BCHW * self.weight[:, None, None] + self.bias[:, None, None]
        return normal_BCHW.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean_C: Tensor, var_C: Tensor, count: float) -> None:
        """Move the running statistics towards those of this pass; variance divides by count - 1, as PyTorch's does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), share)
        unbiased_C = var_C * (count / max(1.0, count - 1))
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), share)


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
