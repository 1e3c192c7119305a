"""Tokens a second of a decoder's run by a roofline: products, memory traffic, collectives, the bubble. A stand-in.

Enters: a `DecoderRun`, a device, `Speeds`. Leaves: seconds by part. It is coarse on purpose: nothing but a pipeline's
bubble and what ZeRO-3 gathers is set against anything else, all that depends on sizes is one curve for products, and
its constants are fitted on published rows (`bench/validate_planner.py` has its errors, which are large where networks
were slow). Each of its parts can be replaced by an event simulation without changing who calls it. Chapter 7.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.planner.decoder_run import DecoderRun
from vlmcourse.planner.hardware import DeviceSpec
from vlmcourse.planner.peak import layer_bytes, stage_params

RANKS_PER_NODE = 8
HOPPER = ("h100", "h200")


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What fraction of a datasheet is reached; fitted on published rows."""

    product_fraction: float = 0.64
    """Of the peak, by large products."""
    half_width: float = 116
    """Columns of a rank's part of a matrix at which products reach half of that."""
    traffic_passes: float = 4.9
    """Times that a layer's kept activations pass through the device's memory outside of products."""
    link_fraction: float = 0.9
    """Of the links inside a node, by collectives."""
    network_bytes_per_s: float = 50e9
    """Between nodes, for each GPU, one direction."""
    network_latency_s: float = 0.00068
    """Of a tensor-parallel collective between nodes, beside its bytes."""
    hopper_fraction: float = 0.85
    """Of `product_fraction`, on H100 and H200: under full load their clocks fall below the datasheet's."""


def model_flops_per_token(run: DecoderRun) -> float:
    """FLOPs of forward and backward for one token, attention counted in full: 6 N + 12 L h s, N without the embedding.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    weights = run.shape.num_layers * run.layer_params + run.vocab_params
    return 6.0 * weights + 12.0 * run.shape.num_layers * run.shape.hidden_size * run.seq_len


def estimate_step_parts(run: DecoderRun, device: DeviceSpec, speeds: Speeds | None = None) -> dict[str, float]:
    """Estimate the seconds of one optimizer step on the slowest rank, by part.

    Args:
        run: the training run.
        device: each rank's.
        speeds: what is reached of datasheets.

    Returns:
        Seconds by part: products, traffic, tensor_parallel, launches, bubble, data_parallel, optimizer.

    Raises:
        ValueError: if the device has no hardware path for the run's 16-bit type.
    """
    speeds = speeds or Speeds()
    layers = max(run.layers_of_stages())
    tokens, width = run.num_tokens, run.shape.hidden_size
    narrow = min(width, run.shape.mlp_size) / run.tp
    rate = device.peak_flop_per_s(run.precision.compute_dtype) * speeds.product_fraction
    rate *= narrow / (narrow + speeds.half_width)
    if device.name in HOPPER:
        rate *= speeds.hopper_fraction
    passes = 4 if run.recompute == "full" else 3
    layer_flops = tokens * (2.0 * run.layer_params + 4.0 * width * run.seq_len) / run.tp
    head_flops = 6.0 * tokens * run.vocab_params / run.tp if run.pp == 1 else 0.0
    one = {
        "products": (passes * layers * layer_flops + head_flops) / rate,
        "traffic": speeds.traffic_passes * layers * layer_bytes(run) / device.memory_bytes_per_s,
        "tensor_parallel": layers * _tensor_parallel_s(run, device, speeds),
        "launches": layers * run.software.layer_s + run.software.micro_batch_s,
    }
    parts = {name: run.grad_accum_steps * seconds for name, seconds in one.items()}
    parts["bubble"] = (run.pp - 1) * sum(one.values())
    parts["data_parallel"] = _data_parallel_s(run, device, speeds, hidden_s=parts["products"])
    shards = run.dp if run.zero_stage else 1
    parts["optimizer"] = 2.0 * run.precision.state_bytes * stage_params(run, 0) / shards / device.memory_bytes_per_s
    return parts


def estimate_tokens_per_s(run: DecoderRun, device: DeviceSpec, speeds: Speeds | None = None) -> float:
    """Estimate tokens a second for each GPU; the arguments are those of `estimate_step_parts`."""
    return run.step_tokens / run.num_ranks / sum(estimate_step_parts(run, device, speeds).values())


def _link_bytes_per_s(num_ranks: int, device: DeviceSpec, speeds: Speeds) -> float:
    """What a group of neighbouring ranks reaches: the links inside a node, or the network where it spans several."""
    return device.link_bytes_per_s * speeds.link_fraction if num_ranks <= RANKS_PER_NODE else speeds.network_bytes_per_s


def _tensor_parallel_s(run: DecoderRun, device: DeviceSpec, speeds: Speeds) -> float:
    """Seconds of a layer's collectives: four all-reduces or as much in halves, forward and backward together."""
    if run.tp == 1:
        return 0.0
    sent = 8.0 * run.num_tokens * run.shape.hidden_size * run.precision.compute_bytes * (1 - 1 / run.tp)
    latency_s = 8 * speeds.network_latency_s if run.tp > RANKS_PER_NODE else 0.0
    return latency_s + sent / _link_bytes_per_s(run.tp, device, speeds)


def _data_parallel_s(run: DecoderRun, device: DeviceSpec, speeds: Speeds, hidden_s: float) -> float:
    """Seconds of adding up gradients, and of ZeRO-3's gathering as far as products do not hide it."""
    if run.dp * run.cp == 1:
        return 0.0
    weights = stage_params(run, 0)
    speed = _link_bytes_per_s(run.dp * run.cp * run.tp * run.pp, device, speeds)
    if run.zero_stage < 3:
        return 2.0 * weights * run.precision.gradient_bytes / speed
    # Weights twice and gradients once, in 16 bits, for each micro-batch.
    return max(0.0, 6.0 * weights * run.grad_accum_steps / speed - hidden_s)
