"""What the frameworks behind published figures keep in memory, as few constants: derived from code, or fitted.

Enters: a run as a table's row says it. Leaves: a `Software`, or the run with one. Derived from nanotron's code: bytes
of the output matrix and loss, packed queries, buckets, gather buffers. The constants with FITTED in their description
are fitted on the playbook's rows; `bench/validate_planner.py` fits them without a part of the rows and has the errors
on that part. Chapter 7.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from vlmcourse.planner.decoder_run import DecoderRun, Software
from vlmcourse.planner.peak import estimate_peak

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class SweepRule:
    """Which rows of the playbook's table come from its first sweep; FITTED.

    The table mixes two states of the software and does not say which row is which: of plans that differ little some
    have kept the gathered inputs of tensor-parallel products (and, in pipelines, part of one more micro-batch), others
    not, and these took about as long for each micro-batch whatever its size. Large jobs are mostly of the second kind.
    The rule is read off the table and holds for this table only; it is often wrong, which is most of the planner's
    error there (the bench says what is left where the kind is known).
    """

    one_stage_below: int = 512
    """Without a pipeline, first sweep where the run has fewer GPUs."""
    one_stage_tp_from: int = 32
    """Without a pipeline, first sweep too where the tensor-parallel degree is this or more."""
    two_stages_up_to: int = 16
    """With two stages, first sweep up to so many GPUs."""
    four_stages_up_to: int = 128
    """With three or four."""
    more_stages_up_to: int = 256
    """With more."""
    pipeline_tp_below: int = 32
    """With a pipeline, first sweep only where the tensor-parallel degree is less."""
    fits_gib: int = 70
    """Plans that would have needed more than this in the first sweep are of the second."""

    def is_first(self, *, tp: int, pp: int, num_gpus: int) -> bool:
        """Whether a plan's row is taken to be of the first sweep."""
        if pp == 1:
            return num_gpus < self.one_stage_below or tp >= self.one_stage_tp_from
        largest = self.two_stages_up_to if pp == 2 else self.four_stages_up_to if pp <= 4 else self.more_stages_up_to
        return tp < self.pipeline_tp_below and num_gpus <= largest


@dataclass(frozen=True, kw_only=True)
class NanotronConstants:
    """What is fitted of nanotron's memory and time; FITTED, all of it."""

    fixed_bytes: int = 300 * MIB
    """As in `Software`; so are the next two, in the first sweep."""
    late_micro_batches: float = 0.6
    gathered_after: float = 2.0
    layer_s: float = 0.0028
    """Of a layer and a micro-batch, forward and backward, whatever its size."""
    second_sweep_s: float = 0.61
    """Of a micro-batch in the second sweep: its steps took about as long for each micro-batch whatever its size."""
    rule: SweepRule = SweepRule()


def nanotron(constants: NanotronConstants, *, is_first: bool, tp: int, grad_accum_steps: int) -> Software:
    """Return what nanotron keeps in a run of the playbook's table.

    The output matrix: logits in 16 bits and in fp32, and the loss's own fp32 copy, 10 bytes a token and word. The first
    sweep held one fp32 copy of the micro-batch before until the next was through (4 more), and freed the 16-bit logits
    and a copy early where there was one micro-batch only (2 less); both read off its rows with one pipeline stage.
    """
    return Software(
        name="nanotron, first sweep" if is_first else "nanotron, second sweep",
        head_bytes=10.0 if not is_first or tp == 1 else 14.0 if grad_accum_steps > 1 else 8.0,
        packed_qkv=True,
        bucket_bytes=2,
        late_gradient_bytes=2,
        gather_buffers=2,
        keeps_gathered=is_first,
        gathered_after=constants.gathered_after if is_first else 0.0,
        late_micro_batches=constants.late_micro_batches if is_first else 0.0,
        fixed_bytes=constants.fixed_bytes,
        layer_s=constants.layer_s,
        micro_batch_s=0.0 if is_first else constants.second_sweep_s,
    )


def of_sweep(run: DecoderRun, constants: NanotronConstants, *, is_first: bool) -> DecoderRun:
    """Return a run of the playbook's table with the software of one of its sweeps."""
    software = nanotron(constants, is_first=is_first, tp=run.tp, grad_accum_steps=run.grad_accum_steps)
    return dataclasses.replace(run, software=software)


def choose_sweep(run: DecoderRun, constants: NanotronConstants) -> DecoderRun:
    """Return a run of the playbook's table with the software of the sweep that it is taken to be of.

    Args:
        run: with any software.
        constants: of nanotron, with the rule.
    """
    rule = constants.rule
    if rule.is_first(tp=run.tp, pp=run.pp, num_gpus=run.num_ranks):
        first = of_sweep(run, constants, is_first=True)
        if estimate_peak(first, 0).total_bytes <= rule.fits_gib * GIB:
            return first
    return of_sweep(run, constants, is_first=False)


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
