"""What the frameworks behind published figures keep in memory and wait for, as few constants: derived, or fitted.

Enters: what a table's row says. Leaves: a `Software`. Derived from nanotron's code: bytes of the output matrix and
loss, packed queries, buckets, gather buffers, messages that block, copies of shards. The constants with FITTED in their
description are fitted on the playbook's rows; `bench/validate_planner.py` fits them without a part of the rows and has
the errors on that part. Chapter 7.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.decoder_run import Software
from vlmcourse.planner.network import Link

MIB = 2**20
RANKS_PER_NODE = 8
JEAN_ZAY = Link(latency_s=14e-6, bytes_per_s=0.8 * 4 * 12.5e9 / RANKS_PER_NODE)
"""BigScience's machine: four Omni-Path links of 100 Gbit/s for the 8 GPUs of a node, of which collectives reach as much
as of others. Source: arXiv:2211.05100, section 3.4."""


@dataclass(frozen=True, kw_only=True)
class NanotronConstants:
    """What is FITTED of nanotron's memory and time on the playbook's machines: bytes, seconds of the host, a latency.

    Host seconds and latency are as good as the same whatever numbers of GPUs are left out when fitting: see the bench.
    """

    fixed_bytes: int = 400 * MIB
    """As in `Software`."""
    host_layer_s: float = 0.00446
    """As in `Software`."""
    host_rank_s: float = 0.0024
    """Of the host for a layer, forward and backward, more for each tensor rank where a pipeline spans nodes; see
    `nanotron`."""
    host_step_layer_s: float = 0.004
    """As in `Software`."""
    network: Link = Link(latency_s=0.00077, bytes_per_s=40e9)
    """Between nodes, for each GPU: a FITTED latency; a card of 400 Gbit/s, of which as much is reached as of others."""


def nanotron(constants: NanotronConstants, *, pp: int, tp: int, num_ranks: int) -> Software:
    """Return what nanotron keeps, and what its Python and its network take, in a run of the playbook's table.

    The output matrix: logits in 16 bits and in fp32, and the loss's own fp32 copy, 10 bytes a token and word.

    Gathered inputs of column-parallel products are kept by runs without a pipeline. They are gathered by asynchronous
    collectives, whose tensors PyTorch's allocator gives away anew only when the device is seen to be done with them; a
    host that runs ahead of its device allocates the next before. Between stages of a pipeline nanotron sends the shapes
    of tensors first, and the host waits for them with every micro-batch. This is why the rule is taken to hold; that it
    does for most rows is read off the table, and where hosts were slow it fails: the table has pairs of nearly equal
    plans on both sides.

    Its Python launches layers more slowly than an H100 computes small ones. Where a pipeline of tensor ranks spans
    nodes, host seconds of a layer are several times as many, and grow with the tensor ranks: read off the table, where
    2, 4, 8 and 16 of them fit one line (32 take about twice as long) and large micro-batches hide it; why is not known.
    Its messages between stages block: a stage sends, then receives, on the stream that computes, with shapes ahead that
    the host waits for. Weights of ZeRO-1 are gathered into a buffer of its own for each rank, from which each rank's
    part of each of a layer's six matrices and norms is copied.

    Source: nanotron's parallel/pipeline_parallel/p2p.py (metadata is read on the host; messages),
    parallel/tensor_parallel/functional.py (asynchronous all-gathers), distributed.py (`all_gather_coalesced`).

    Args:
        constants: what is fitted.
        pp: stages of the run's pipeline.
        tp: its tensor ranks.
        num_ranks: of the whole run.
    """
    crosses = pp > 1 and tp > 1 and num_ranks > RANKS_PER_NODE
    return Software(
        name="nanotron",
        head_bytes=10.0,
        packed_qkv=True,
        bucket_bytes=2,
        late_gradient_bytes=2,
        gather_buffers=2,
        keeps_gathered=pp == 1,
        fixed_bytes=constants.fixed_bytes,
        host_layer_s=constants.host_layer_s + (constants.host_rank_s * tp if crosses else 0.0),
        host_step_layer_s=constants.host_step_layer_s,
        shard_copies_per_layer=6,
        blocking_messages=True,
    )


TORCHTITAN = Software(
    name="torchtitan",
    # 16-bit logits and their gradient, and in fp32 the cast, its log-softmax and the gradient of that; counted with the
    # table's two rows in view.
    head_bytes=16.0,
)
MEGATRON_DEEPSPEED = Software(
    name="Megatron-DeepSpeed",
    # Logits in 16 bits and fp32, and the loss's softmax in place.
    head_bytes=10.0,
    # FITTED by eye to the BigScience rows. They are what nvidia-smi shows, so the CUDA context is in them, and what the
    # allocator has cached.
    fixed_bytes=2048 * MIB,
    # Its softmax of 2021 and 2022 is fused with scale and mask, its attention is not.
    fused_attention=False,
    # DeepSpeed sends and receives between its stages on the stream that computes.
    blocking_messages=True,
)
