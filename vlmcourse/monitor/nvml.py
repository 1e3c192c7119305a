"""What NVML says about one GPU: use, memory, power, temperature, throttling, PCIe and NVLink traffic.

Enters: the GPU that torch uses. Leaves: one `GpuSample` a question. The GPU is found by its UUID, or else by its place
on the PCI bus, never by its index: `CUDA_VISIBLE_DEVICES` renumbers the GPUs of torch and not those of NVML. What a
card does not tell is None, never 0.

Source: NVIDIA's NVML API reference, by its Python names in the package nvidia-ml-py.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

KIB = 1024
ALL_LINKS = 2**32 - 1
"""Scope of a field value: the sum over all NVLinks."""
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's `nvmlClocksEventReasons` that hold the clock below what the work could use."""


class NvmlError(RuntimeError):
    """NVML cannot be asked; the message says why."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One look at a GPU; None where the card does not tell."""

    utilisation_percent: float | None = None
    """Part of the last fraction of a second in which any kernel ran; says nothing of how well it used the GPU."""
    memory_used_bytes: int | None = None
    """Of all processes, the CUDA contexts included."""
    power_watts: float | None = None
    energy_joules: float | None = None
    """Of the board, since the driver was loaded."""
    temperature_celsius: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """Why the clock is held down now; empty where it is not."""
    pcie_rx_bytes_per_s: float | None = None
    """Received by the GPU, over the last 20 ms."""
    pcie_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    """Over all links, since the sample before."""
    nvlink_tx_bytes_per_s: float | None = None


class GpuProbe:
    """Asks NVML about one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Find the GPU.

        Args:
            device: a CUDA device of torch.

        Raises:
            NvmlError: if there is no nvidia-ml-py or driver, or NVML does not know the GPU.
        """
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlError(
                f"the package nvidia-ml-py cannot be imported ({error}): pip install nvidia-ml-py"
            ) from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NvmlError(f"NVML does not start ({error}): is the NVIDIA driver loaded?") from error
        self._handle = _find_handle(self._nvml, torch.cuda.get_device_properties(device))
        self._last_links: tuple[float, int, int] | None = None

    def sample(self) -> GpuSample:
        """Ask for everything once; takes about 20 ms for each direction of PCIe."""
        nvml, handle = self._nvml, self._handle
        use = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        millijoules = self._ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        kib_in = self._ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES))
        kib_out = self._ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES))
        link_in, link_out = self._ask_links()
        return GpuSample(
            utilisation_percent=use,
            memory_used_bytes=self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            energy_joules=None if millijoules is None else millijoules / 1000,
            temperature_celsius=self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            throttle_reasons=None if reasons is None else name_reasons(reasons),
            pcie_rx_bytes_per_s=None if kib_in is None else kib_in * KIB,
            pcie_tx_bytes_per_s=None if kib_out is None else kib_out * KIB,
            nvlink_rx_bytes_per_s=link_in,
            nvlink_tx_bytes_per_s=link_out,
        )

    def close(self) -> None:
        """Let NVML go."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return NVML's answer, or None where this card or driver has none."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None

    def _ask_links(self) -> tuple[float | None, float | None]:
        """Return bytes per second received and sent over all NVLinks since this was last asked."""
        nvml = self._nvml
        fields = [nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX]
        values = self._ask(
            lambda: nvml.nvmlDeviceGetFieldValues(self._handle, [(field, ALL_LINKS) for field in fields])
        )
        now_s = time.monotonic()
        if values is None or any(value.nvmlReturn != nvml.NVML_SUCCESS for value in values):
            return None, None
        received_kib, sent_kib = (int(value.value.ullVal) for value in values)
        last, self._last_links = self._last_links, (now_s, received_kib, sent_kib)
        if last is None or now_s <= last[0] or received_kib < last[1] or sent_kib < last[2]:
            return None, None  # the first look, or counters that were reset
        seconds = now_s - last[0]
        return (received_kib - last[1]) * KIB / seconds, (sent_kib - last[2]) * KIB / seconds


def name_reasons(bits: int) -> tuple[str, ...]:
    """Return the words for the reasons that hold a clock down; none for an idle GPU or clocks that a person set."""
    return tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)


def _find_handle(nvml: Any, properties: Any) -> Any:
    """Return NVML's handle of the GPU that torch describes by these properties.

    Raises:
        NvmlError: if NVML knows it neither by its UUID nor by its place on the bus.
    """
    tried = []
    if uuid := str(getattr(properties, "uuid", "")):
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        for name in (f"GPU-{bare}", f"MIG-{bare}"):  # a part of a GPU has a UUID too
            try:
                return nvml.nvmlDeviceGetHandleByUUID(name)
            except nvml.NVMLError as error:
                tried.append(f"{name}: {error}")
    if hasattr(properties, "pci_bus_id"):
        place = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        try:
            return nvml.nvmlDeviceGetHandleByPciBusId(place)
        except nvml.NVMLError as error:
            tried.append(f"{place}: {error}")
    raise NvmlError(f"NVML does not know the GPU that torch calls {properties.name} ({'; '.join(tried) or 'no UUID'})")
