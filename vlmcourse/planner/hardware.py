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
- L4: www.nvidia.com/en-us/data-center/l4 as quoted in github.com/efeslab/fiddler/issues/7: PCIe 4.0 x16, 64 GB/s. Its
  300 GB/s: resellers' tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator."""

    name: str
    memory_bytes: int
    dense_flop_per_s: Mapping[str, float]
    """Peak by dtype (fp32, tf32, fp16, bf16, fp8); a dtype that is missing has no fast hardware path."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To the other devices of its node, one direction; for a card without NVLink, its PCIe slot."""
    host_link_bytes_per_s: float
    """To its node's main memory, one direction."""
    source: str

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
    **tera_flop_per_s: float,
) -> DeviceSpec:
    """Build a `DeviceSpec` from a datasheet's units: GB, GB/s and TFLOP/s."""
    return DeviceSpec(
        name=name,
        memory_bytes=memory_gb * GB,
        dense_flop_per_s=MappingProxyType({dtype: peak * TERA for dtype, peak in tera_flop_per_s.items()}),
        memory_bytes_per_s=memory_gb_per_s * GB,
        link_bytes_per_s=link_gb_per_s * GB,
        host_link_bytes_per_s=host_link_gb_per_s * GB,
        source=source,
    )


DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _spec("t4-16", 16, 320, 16, 16, "NVIDIA T4 product brief", fp32=8.1, fp16=65),
        _spec("v100-32", 32, 900, 150, 16, "NVIDIA V100 SXM2 datasheet", fp32=15.7, fp16=125),
        _spec(
            "l4-24",
            24,
            300,
            32,
            32,
            "NVIDIA L4 datasheet, halved from sparse",
            fp32=30.3,
            tf32=60,
            fp16=121,
            bf16=121,
            fp8=242.5,
        ),
        _spec("a100-40", 40, 1555, 300, 32, "NVIDIA A100 SXM datasheet", fp32=19.5, tf32=156, fp16=312, bf16=312),
        _spec("a100-80", 80, 2039, 300, 32, "NVIDIA A100 SXM datasheet", fp32=19.5, tf32=156, fp16=312, bf16=312),
        _spec(
            "h100",
            80,
            3350,
            450,
            64,
            "NVIDIA H100 SXM datasheet, halved from sparse",
            fp32=67,
            tf32=494.5,
            fp16=989.5,
            bf16=989.5,
            fp8=1979,
        ),
        _spec(
            "h200",
            141,
            4800,
            450,
            64,
            "NVIDIA H200 SXM datasheet, halved from sparse",
            fp32=67,
            tf32=494.5,
            fp16=989.5,
            bf16=989.5,
            fp8=1979,
        ),
    )
}


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
    "NVIDIA H200": "h200",
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
