"""The real training step of the package, played by one process as any rank of any mesh, without memory or other ranks.

Enters: a `TrainConfig`, a rank, a number of ranks. Leaves: a `DryRun`: bytes alive by owner over one optimizer step,
every collective with its axis and bytes, FLOPs. Nothing is computed: tensors are PyTorch's fake ones (a shape and a
type), the process group is its `fake` one (nothing is sent). What is not in it, since no tensor holds it: the CUDA
context, NCCL's buffers, cuBLAS's workspace, fragmentation. Chapter 7.
"""

from vlmcourse.dryrun.batch import BatchSize, largest_batch
from vlmcourse.dryrun.depths import extrapolate_run
from vlmcourse.dryrun.result import DryRun
from vlmcourse.dryrun.run import dry_run

__all__ = ["BatchSize", "DryRun", "dry_run", "extrapolate_run", "largest_batch"]
