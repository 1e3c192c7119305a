"""What a device can hold and do, as data with sources. An unknown device is an error, never a guess.

Memory is the datasheet's gigabytes taken as 10^9 bytes. Drivers report a few per cent more on A100 and H100 and up to
one per cent less on small cards, so a plan that needs the last per cent should be measured. FLOP/s are the **dense**
peaks: vendors print twice as much for sparse matrices, which training does not have.

Links are one direction. Datasheets print NVLink and PCIe both ways together (600 and 64 GB/s for an A100), so half of
that is taken. PCIe's is moreover rounded up from 15.75, 31.5 and 63.0 GB/s, what 16 lanes of generation 3, 4 and 5
carry each way after their encoding; packets and drivers take more, so a copy reaches less than what stands here.

Checked against (vendors' own documents where their text could be read; for the others, who quotes them):

- T4: NVIDIA T4 product brief, PCIe 3.0 x16, up to 320 GB/s (the shorter datasheet prints 300).
- V100: Dell EMC Ready Solutions for AI v1.0, table of V100-SXM2: 900 GB/s, NVLink 150 GB/s and PCIe 16 GB/s one way.
- A100: glennklockwood.com/garden/processors/A100, after NVIDIA's datasheet 1758950-r4 and the Ampere white paper:
  1,555 and 2,039 GB/s, NVLink 300 and PCIe 4.0 32 GB/s each way.
- H100: glennklockwood.com/garden/processors/h100, after NVIDIA's Hopper white paper: 3.35 TB/s, NVLink 900 and PCIe 5.0
  128 GB/s both ways.
- H200: NVIDIA's system description in MLCommons inference v4.1 (H200-SXM-141GBx8): 18 links, 900 GB/s, PCIe 5.0 x16,
  504 GB/s one way for 8 devices, 63 each. Its 4.8 TB/s: wikis that quote the datasheet.
- H100 PCIe: NVIDIA product brief PB-11133-001 (350 W, over 2,000 GB/s); its peaks are the datasheet's by memory. Two
  cards may be bridged at 600 GB/s; what stands here is PCIe, which all have.
- A800: aiwiki.ai/wiki/nvidia_a800: an A100 with 400 instead of 600 GB/s of NVLink, both ways together.
- B200: glennklockwood.com/garden/processors/B200, after NVIDIA's architecture brief: 2,250 TFLOP/s dense at 1,000 W,
  8 TB/s, NVLink 900 GB/s each way. 148 multiprocessors: hmc-tech.com. Its 180 GB are those of the DGX B200.
- L40S: resellers' tables of the datasheet: 864 GB/s, PCIe 4.0, 362 TFLOP/s dense, 350 W, 142 multiprocessors.
- RTX 4090: waredb.com/processor/nvidia-geforce-rtx-4090. RTX 3090: NVIDIA's GA102 white paper by memory, as its text
  was not at hand. Peaks are those with fp32 accumulation, as training has it, half of those with fp16 accumulation.
- 96 GB H100: github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: HBM2e, 2.4 TB/s, 500 W.
  Links, multiprocessors and peaks are taken as the SXM's.
- L4: www.nvidia.com/en-us/data-center/l4 as quoted in github.com/efeslab/fiddler/issues/7: PCIe 4.0 x16, 64 GB/s. Its
  300 GB/s: resellers' tables.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator."""

    name: str
    memory_bytes: int
    dense_flop_per_s: Mapping[str, float] = field(hash=False)
    """Peak by dtype (fp32, tf32, fp16, bf16, fp8); a dtype that is missing has no fast hardware path."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To the other devices of its node, one direction; for a card without NVLink, its PCIe slot."""
    host_link_bytes_per_s: float
    """To its node's main memory, one direction."""
    source: str
    num_units: int = 1
    """That compute tiles of a product side by side: a GPU's streaming multiprocessors."""
    power_w: float = 0.0
    """The limit of the whole card or module; 0 where it is not known."""

    def peak_flop_per_s(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s for a dtype.

        Raises:
            ValueError: if this device has no hardware path for that dtype.
        """
        if dtype not in self.dense_flop_per_s:
            have = ", ".join(self.dense_flop_per_s)
            raise ValueError(f"{self.name} has no hardware path for {dtype!r}: choose one of {have}")
        return self.dense_flop_per_s[dtype]

    def supports(self, dtype: str) -> bool:
        """Tell whether the device computes in this dtype natively."""
        return dtype in self.dense_flop_per_s


def _spec(
    name: str,
    memory_gb: int,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    host_link_gb_per_s: float,
    source: str,
    *,
    units: int,
    power_w: float,
    **tera_flop_per_s: float,
) -> DeviceSpec:
    """Build a `DeviceSpec` from a datasheet's units: GB, GB/s, W and TFLOP/s."""
    return DeviceSpec(
        name=name,
        memory_bytes=memory_gb * GB,
        dense_flop_per_s=MappingProxyType({dtype: peak * TERA for dtype, peak in tera_flop_per_s.items()}),
        memory_bytes_per_s=memory_gb_per_s * GB,
        link_bytes_per_s=link_gb_per_s * GB,
        host_link_bytes_per_s=host_link_gb_per_s * GB,
        source=source,
        num_units=units,
        power_w=power_w,
    )


_AMPERE = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_HOPPER = {"fp32": 67, "tf32": 494.5, "fp16": 989.5, "bf16": 989.5, "fp8": 1979}
_HOPPER_PCIE = {"fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513}
_BLACKWELL = {"fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500}
_L4 = {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242.5}
_L40S = {"fp32": 91.6, "tf32": 183, "fp16": 362.05, "bf16": 362.05, "fp8": 733}
_RTX_4090 = {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3}
_RTX_3090 = {"fp32": 35.6, "tf32": 35.6, "fp16": 71, "bf16": 71}
_HALVED = "halved from sparse"
_TITAN = "torchtitan's benchmarks, which state memory, bandwidth and power; peaks and links taken as the H100 SXM's"

# Name, then in the datasheet's units: memory GB, its GB/s, link GB/s, link to main memory GB/s.
_SPECS = (
    _spec("t4-16", 16, 320, 16, 16, "NVIDIA T4 product brief", units=40, power_w=70, fp32=8.1, fp16=65),
    _spec("v100-32", 32, 900, 150, 16, "NVIDIA V100 SXM2 datasheet", units=80, power_w=300, fp32=15.7, fp16=125),
    _spec("l4-24", 24, 300, 32, 32, f"NVIDIA L4 datasheet, {_HALVED}", units=58, power_w=72, **_L4),
    _spec("l40s-48", 48, 864, 32, 32, f"NVIDIA L40S datasheet, {_HALVED}", units=142, power_w=350, **_L40S),
    _spec("rtx3090-24", 24, 936, 32, 32, "NVIDIA GA102 white paper", units=82, power_w=350, **_RTX_3090),
    _spec("rtx4090-24", 24, 1008, 32, 32, "NVIDIA Ada white paper", units=128, power_w=450, **_RTX_4090),
    _spec("a100-40", 40, 1555, 300, 32, "NVIDIA A100 SXM datasheet", units=108, power_w=400, **_AMPERE),
    _spec("a100-80", 80, 2039, 300, 32, "NVIDIA A100 SXM datasheet", units=108, power_w=400, **_AMPERE),
    _spec("a800-80", 80, 2039, 200, 32, "A100 datasheet, NVLink cut to 400 GB/s", units=108, power_w=400, **_AMPERE),
    _spec("h100", 80, 3350, 450, 64, f"NVIDIA H100 SXM datasheet, {_HALVED}", units=132, power_w=700, **_HOPPER),
    _spec(
        "h100-pcie", 80, 2000, 64, 64, f"NVIDIA H100 PCIe datasheet, {_HALVED}", units=114, power_w=350, **_HOPPER_PCIE
    ),
    _spec("h100-96", 96, 2400, 450, 64, _TITAN, units=132, power_w=500, **_HOPPER),
    _spec("h200", 141, 4800, 450, 64, f"NVIDIA H200 SXM datasheet, {_HALVED}", units=132, power_w=700, **_HOPPER),
    _spec("b200", 180, 8000, 900, 64, f"NVIDIA DGX B200 datasheet, {_HALVED}", units=148, power_w=1000, **_BLACKWELL),
)
DEVICES: dict[str, DeviceSpec] = {spec.name: spec for spec in _SPECS}


def calibrated_device(
    name: str,
    *,
    memory_bytes: int,
    flop_per_s: float,
    memory_bytes_per_s: float,
    link_bytes_per_s: float,
    dtype: str = "fp32",
) -> DeviceSpec:
    """Return a device of which nobody prints a datasheet, such as a core of this machine, from what was measured on it.

    What stands in it is reached, not a peak, so it goes with speeds of 1 (`efficiency.measured_speeds`).

    Args:
        name: to show.
        memory_bytes: that one rank may use.
        flop_per_s: of one rank's large matrix products.
        memory_bytes_per_s: of one rank's copies, reads and writes together.
        link_bytes_per_s: from one rank to another.
        dtype: that was measured.

    Raises:
        ValueError: if a number is not above 0.
    """
    measured = {
        "memory_bytes": memory_bytes,
        "flop_per_s": flop_per_s,
        "memory_bytes_per_s": memory_bytes_per_s,
        "link_bytes_per_s": link_bytes_per_s,
    }
    if wrong := [f"{key} = {value}" for key, value in measured.items() if not (0 < value < math.inf)]:
        raise ValueError(f"{name} is not a device: {', '.join(wrong)} must be above 0; measure it again")
    return DeviceSpec(
        name=name,
        memory_bytes=memory_bytes,
        dense_flop_per_s=MappingProxyType({dtype: flop_per_s}),
        memory_bytes_per_s=memory_bytes_per_s,
        link_bytes_per_s=link_bytes_per_s,
        host_link_bytes_per_s=memory_bytes_per_s,
        source="measured on the machine at hand",
    )


def get_device(name: str) -> DeviceSpec:
    """Return a device by name.

    Raises:
        ValueError: if the device is not known; the message names the nearest.
    """
    if name in DEVICES:
        return DEVICES[name]
    near = difflib.get_close_matches(name, DEVICES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(DEVICES)}, or pass a DeviceSpec"
    raise ValueError(f"There is no device {name!r}: {hint}")


REPORTED = {
    "Tesla T4": "t4-16",
    "NVIDIA T4": "t4-16",
    "Tesla V100-SXM2-16GB": "v100-32",
    "Tesla V100-SXM2-32GB": "v100-32",
    "NVIDIA L4": "l4-24",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA A800-SXM4-80GB": "a800-80",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s-48",
    "NVIDIA GeForce RTX 4090": "rtx4090-24",
    "NVIDIA GeForce RTX 3090": "rtx3090-24",
}
"""What a driver calls a card -> one in `DEVICES` with the same peak; its memory and links may be others. Cards that
share half a name and not the peak, such as H100 PCIe and H100 SXM, must not be taken for each other."""


def find_peak_flop_per_s(reported_name: str, dtype: str) -> float | None:
    """Return the dense peak of a card by the name that its driver gives, or None where it is not known here.

    Args:
        reported_name: as `torch.cuda.get_device_name` returns it.
        dtype: as in `DeviceSpec.peak_flop_per_s`; one without a hardware path has no peak.
    """
    name = REPORTED.get(reported_name)
    return None if name is None else DEVICES[name].dense_flop_per_s.get(dtype)
