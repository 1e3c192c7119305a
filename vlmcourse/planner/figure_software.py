"""What the frameworks behind published figures keep in memory, as few constants: derived from code, or fitted.

Enters: what a table's row says. Leaves: a `Software`. Derived from nanotron's code: bytes of the output matrix and
loss, packed queries, buckets, gather buffers. The constants with FITTED in their description are fitted on the
playbook's rows; `bench/validate_planner.py` fits them without a part of the rows and has the errors on that part.
Chapter 7.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.decoder_run import Software

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class NanotronConstants:
    """What is FITTED of nanotron's memory and time: one number of bytes, two of seconds."""

    fixed_bytes: int = 400 * MIB
    """As in `Software`."""
    layer_s: float = 0.0028
    """As in `Software`."""
    pipeline_s: float = 0.1
    """Of a micro-batch at every stage of a pipeline, whatever its size."""


def nanotron(constants: NanotronConstants, *, pp: int) -> Software:
    """Return what nanotron keeps in a run of the playbook's table.

    The output matrix: logits in 16 bits and in fp32, and the loss's own fp32 copy, 10 bytes a token and word.

    Gathered inputs of column-parallel products are kept by runs without a pipeline. They are gathered by asynchronous
    collectives, whose tensors PyTorch's allocator gives away anew only when the device is seen to be done with them; a
    host that runs ahead of its device allocates the next before. Between stages of a pipeline nanotron sends the shapes
    of tensors first, and the host waits for them with every micro-batch. This is why the rule is taken to hold; that it
    does for most rows is read off the table, and where hosts were slow it fails: the table has pairs of nearly equal
    plans on both sides.

    Source: nanotron's parallel/pipeline_parallel/p2p.py (metadata is read on the host) and
    parallel/tensor_parallel/functional.py (asynchronous all-gathers).

    Args:
        constants: what is fitted.
        pp: stages of the run's pipeline.
    """
    return Software(
        name="nanotron",
        head_bytes=10.0,
        packed_qkv=True,
        bucket_bytes=2,
        late_gradient_bytes=2,
        gather_buffers=2,
        keeps_gathered=pp == 1,
        fixed_bytes=constants.fixed_bytes,
        layer_s=constants.layer_s,
        micro_batch_s=constants.pipeline_s if pp > 1 else 0.0,
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
)
