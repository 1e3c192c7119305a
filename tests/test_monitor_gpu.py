"""What a rank takes from its hardware, with a made-up NVML and a made-up RAPL, and the energy of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmcourse.monitor import energy, gpu, nvml
from vlmcourse.monitor.cpu_power import ESTIMATE, RAPL, WATTS_PER_BUSY_CORE, CpuProbe, Rapl
from vlmcourse.monitor.energy import EnergyMeter, RunEnergy, read_energy, read_grid_intensity
from vlmcourse.monitor.gpu import HardwareSampler, build_probe, row_values, watch_hardware
from vlmcourse.monitor.nvml import GpuProbe, GpuSample, NvmlError, name_reasons
from vlmcourse.parallel.ranks import Ranks

DEVICE = torch.device("cuda", 0)
UUID = "11111111-2222-3333-4444-555555555555"


class FakeNvml:
    """The part of pynvml that is used, with its signatures, for cards that know what `answers` has."""

    NVML_SUCCESS, NVML_TEMPERATURE_GPU = 0, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    class NVMLError(Exception):
        pass

    def __init__(self, handles: dict[str, str], **answers: Any) -> None:
        self.handles, self.answers, self.is_up = handles, answers, False

    def nvmlInit(self) -> None:
        if self.answers.get("no_driver"):
            raise self.NVMLError("Driver Not Loaded")
        self.is_up = True

    def nvmlShutdown(self) -> None:
        self.is_up = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return self._handle(uuid)

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> str:
        return self._handle(pciBusId)

    def _handle(self, key: str) -> str:
        if key not in self.handles:
            raise self.NVMLError("Not Found")
        return self.handles[key]

    def _of(self, handle: str, name: str) -> Any:
        assert handle in self.handles.values() and self.is_up
        if name not in self.answers:
            raise self.NVMLError("Not Supported")
        return self.answers[name]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=self._of(handle, "use"), memory=99)

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: Any = None) -> Any:
        return SimpleNamespace(used=self._of(handle, "used"), total=80 * 10**9, free=0)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._of(handle, "milliwatts")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self._of(handle, "millijoules")

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._of(handle, "celsius")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self._of(handle, "reasons")

    def nvmlDeviceGetPcieThroughput(self, device: str, counter: int) -> int:
        return self._of(device, "pcie")[counter]

    def nvmlDeviceGetFieldValues(self, handle: str, fieldIds: Any) -> Any:
        kib = self._of(handle, "links")
        assert all(scope == 2**32 - 1 for _, scope in fieldIds)
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=kib[field])) for field, _ in fieldIds]


def use(monkeypatch: pytest.MonkeyPatch, fake: Any, **properties: Any) -> Any:
    """Let torch know one GPU of these properties, and nvml.py this NVML."""
    shape = {"name": "card", "uuid": UUID, "pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0} | properties
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**shape))
    monkeypatch.setattr(nvml.importlib, "import_module", lambda name: fake)
    return fake


def test_the_fake_takes_what_the_real_package_takes() -> None:
    pynvml = pytest.importorskip("pynvml")
    import inspect

    for name in [name for name in vars(FakeNvml) if name.startswith("nvmlDevice")]:
        real, ours = (list(inspect.signature(getattr(place, name)).parameters) for place in (pynvml, FakeNvml))
        assert ours[1:] == real, name
    for name in [name for name in vars(FakeNvml) if name.startswith("NVML_")]:
        assert getattr(FakeNvml, name) == getattr(pynvml, name), name
    for bit in nvml.THROTTLE_REASONS:
        assert bit in {value for name, value in vars(pynvml).items() if name.startswith("nvmlClocksEventReason")}


def test_every_number_of_a_card_has_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"use": 93, "used": 40 * 10**9, "milliwatts": 350_500, "millijoules": 7_000, "celsius": 61}
    fake = use(
        monkeypatch,
        FakeNvml({f"GPU-{UUID}": "h"}, **known, reasons=0x41, pcie=[10, 20], links={138: 0, 139: 0}),
    )
    now_s = iter([10.0, 12.0])
    monkeypatch.setattr(nvml, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    probe = GpuProbe(DEVICE)
    assert probe.sample().nvlink_rx_bytes_per_s is None  # of one look there is no rate
    fake.answers["links"] = {138: 4, 139: 2}
    sample = probe.sample()
    assert (sample.utilisation_percent, sample.memory_used_bytes, sample.power_watts) == (93, 40 * 10**9, 350.5)
    assert (sample.energy_joules, sample.temperature_celsius) == (7.0, 61)
    assert sample.throttle_reasons == ("hardware thermal slowdown",)  # 0x1 is an idle GPU, which nothing holds back
    assert (sample.pcie_rx_bytes_per_s, sample.pcie_tx_bytes_per_s) == (20 * 1024, 10 * 1024)
    assert (sample.nvlink_rx_bytes_per_s, sample.nvlink_tx_bytes_per_s) == (1024, 2048)
    assert row_values(sample)["performance/gpu_util"] == 93 and row_values(sample)["performance/memory_used_gb"] == 40
    probe.close()
    assert not fake.is_up


def test_what_a_card_does_not_tell_is_left_out_and_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeNvml({f"GPU-{UUID}": "h"}, use=0))
    sample = GpuProbe(DEVICE).sample()
    assert sample == GpuSample(utilisation_percent=0)
    assert row_values(sample) == {"performance/gpu_util": 0}
    assert name_reasons(0) == ()


@pytest.mark.parametrize(
    ("handles", "properties"),
    [
        ({f"GPU-{UUID}": "it", "0": "first"}, {}),
        ({f"GPU-{UUID}": "it"}, {"uuid": f"GPU-{UUID}"}),
        ({f"MIG-{UUID}": "it"}, {}),
        ({"00000000:3b:00.0": "it", "00000000:00:00.0": "first"}, {}),
    ],
)
def test_a_gpu_is_found_by_uuid_or_bus_and_never_by_index(
    monkeypatch: pytest.MonkeyPatch, handles: dict[str, str], properties: dict[str, Any]
) -> None:
    use(monkeypatch, FakeNvml(handles), **properties)
    assert GpuProbe(DEVICE)._handle == "it"


def test_a_gpu_that_cannot_be_asked_is_named_and_the_process_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for fake, words in ((FakeNvml({}), "NVML does not know"), (FakeNvml({}, no_driver=True), "Driver Not Loaded")):
        use(monkeypatch, fake)
        assert isinstance(build_probe(DEVICE, 0, said.append)[0], CpuProbe)
        assert words in said[-1] and "\n" not in said[-1]

    def missing(name: str) -> Any:
        raise ImportError("No module named 'pynvml'")

    monkeypatch.setattr(nvml.importlib, "import_module", missing)
    with pytest.raises(NvmlError, match="pip install nvidia-ml-py"):
        GpuProbe(DEVICE)


def zone(root: Path, number: str, name: str, microjoules: int, limit: int = 999) -> Path:
    place = root / f"intel-rapl:{number}"
    place.mkdir()
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", limit)):
        (place / file).write_text(f"{value}\n")
    return place


def test_rapl_adds_packages_and_memory_counts_no_part_twice_and_sees_a_counter_wrap(tmp_path: Path) -> None:
    package, memory = zone(tmp_path, "0", "package-0", 990), zone(tmp_path, "0:1", "dram", 100)
    zone(tmp_path, "0:0", "core", 0)
    rapl = Rapl(tmp_path)
    (package / "energy_uj").write_text("10")  # 990 -> 999, 0 -> 10: 20
    (memory / "energy_uj").write_text("105")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("900")
    assert rapl.take_joules() == pytest.approx(25e-6)
    assert rapl.take_joules() == 0
    probe = CpuProbe(tmp_path)
    sample = probe.sample()
    assert sample.source == RAPL and sample.watts_low == sample.watts_high


def test_without_rapl_power_is_a_range_that_says_it_is_an_estimate(tmp_path: Path) -> None:
    probe = CpuProbe(tmp_path)
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    sample = probe.sample()
    cores = sample.cpu_percent / 100
    assert sample.source == ESTIMATE and sample.rss_bytes > 10**7 and cores > 0
    assert [sample.watts_low, sample.watts_high] == pytest.approx([cores * watts for watts in WATTS_PER_BUSY_CORE])
    assert "hardware/estimated_cpu_watts" in row_values(sample)


class Script:
    """A probe with given answers; the last one stays."""

    def __init__(self, *samples: Any) -> None:
        self.samples, self.is_closed = list(samples), False

    def sample(self) -> Any:
        found = self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.is_closed = True


def test_a_sampler_gives_means_since_the_last_row_and_the_energy_of_the_cards_counter() -> None:
    probe = Script(
        GpuSample(utilisation_percent=100, energy_joules=50.0, throttle_reasons=("power cap",)),
        GpuSample(utilisation_percent=20, energy_joules=57.0, throttle_reasons=()),
    )
    sampler = HardwareSampler(probe, period_s=60)  # one look at once, one as it closes
    sampler.close()
    row = sampler.take_row()
    assert row["performance/gpu_util"] == 60 and row["hardware/gpu_is_throttled"] == 0.5
    assert row["hardware/throttle_reasons"] == "power cap"
    assert row["energy/joules_low"] == row["energy/joules_high"] == 7
    assert "performance/gpu_util" not in sampler.take_row() and probe.is_closed


def test_a_probe_that_fails_ends_the_looking_and_nothing_else() -> None:
    sampler = HardwareSampler(Script(OSError("gone")), period_s=60)
    sampler.close()
    assert sampler.failed == "gone" and sampler.take_row() == {}
    with pytest.raises(ValueError, match=r"period_s = 0"):
        HardwareSampler(Script(), period_s=0)


def test_energy_is_power_times_time() -> None:
    meter = EnergyMeter()
    for now_s, watts in ((0.0, 100.0), (2.0, 200.0), (3.0, 200.0)):
        meter.add_power(now_s, watts, "card")
    assert (meter.joules_low, meter.joules_high, meter.seconds) == (500, 500, 3)  # 2 s at 150 W, 1 s at 200 W
    meter.add_mean(2.0, 10.0, 30.0, "cores")
    assert (meter.joules_low, meter.joules_high) == (520, 560)
    counter = EnergyMeter()
    for now_s, joules in ((0.0, 1000.0), (1.0, 1300.0), (2.0, 5.0), (3.0, 10.0)):  # the driver was loaded anew
        counter.add_counter(now_s, joules, "card")
    assert counter.joules_low == 305


def test_a_run_adds_up_its_ranks_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no energy of a run"):
        read_energy(tmp_path)
    for rank in (0, 1):
        meter = EnergyMeter()
        meter.add_mean(10.0, 1.0, 5.0, ESTIMATE)
        meter.save(tmp_path, rank)
    again = EnergyMeter()
    again.go_on(tmp_path, 1)
    again.add_mean(5.0, 2.0, 2.0, ESTIMATE)
    again.save(tmp_path, 1)
    assert read_energy(tmp_path) == RunEnergy(10 + 20, 50 + 60, 2, 15, (ESTIMATE,))


def test_co2_is_a_range_from_codecarbons_table_and_the_line_says_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = RunEnergy(1.8e6, 3.6e6, 2, 60.0, (ESTIMATE,))
    assert found.joules_per_token(1000) == (1800, 3600)
    pytest.importorskip("codecarbon")
    name, year, intensity = read_grid_intensity("FRA")
    assert name == "France" and year > 2020 and 10 < intensity < 100
    co2 = found.co2("FRA")
    assert (co2.grams_low, co2.grams_high) == pytest.approx((0.25 * intensity, 1.5 * intensity))
    line = found.describe(1000, "FRA")
    assert "\n" not in line and all(
        word in line for word in (ESTIMATE, "left out", "France", "taken to vary", "J a token")
    )
    with pytest.raises(ValueError, match="three capital letters"):
        found.co2("Atlantis")
    with pytest.raises(ValueError, match="num_tokens = 0"):
        found.joules_per_token(0)
    monkeypatch.setattr(energy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install codecarbon"):
        found.co2("FRA")


def test_energy_of_rapl_counts_once_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts(source: str, local_rank: int) -> bool:
        monkeypatch.setattr(gpu, "CpuProbe", lambda: SimpleNamespace(source=source))
        return build_probe(torch.device("cpu"), local_rank, print)[1]

    assert [counts(RAPL, 0), counts(RAPL, 1), counts(ESTIMATE, 0), counts(ESTIMATE, 1)] == [True, False, True, True]


def test_energy_is_kept_while_a_run_goes_on_and_a_disk_that_takes_none_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "KEEP_EVERY_S", 0.0)
    looks = [GpuSample(energy_joules=50.0 + i) for i in range(500)]
    sampler = HardwareSampler(Script(*looks), period_s=0.01)

    def wait_for(is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 20
        while not is_so() and time.monotonic() < until_s:
            time.sleep(0.005)
        assert is_so()

    def kept() -> float:
        return read_energy(tmp_path).joules_low

    wait_for(lambda: sampler.meter.joules_low > 0)
    assert not (tmp_path / energy.FOLDER_NAME).exists()  # the folder may still be an earlier run's
    sampler.keep_in(tmp_path, 3)
    wait_for((tmp_path / energy.FOLDER_NAME / "rank0003.json").exists)
    before = kept()
    wait_for(lambda: kept() > before)
    again = EnergyMeter()
    again.go_on(tmp_path, 3)
    assert again.joules_low >= before
    sampler.keep_in(tmp_path / "gone", 3)
    num_looks = sampler.meter.joules_low
    wait_for(lambda: sampler.meter.joules_low > num_looks + 3)
    sampler.close()
    assert len(caplog.records) == 1 and "rank 3: the energy so far is not kept in" in caplog.text
    monkeypatch.setattr(gpu, "KEEP_EVERY_S", 3600.0)
    for counts in (True, False):
        folder = tmp_path / str(counts)
        folder.mkdir()
        sampler = HardwareSampler(Script(*looks), period_s=0.005, counts_energy=counts)
        sampler.keep_in(folder, 0)
        if counts:  # once, and not with each look
            wait_for((folder / energy.FOLDER_NAME / "rank0000.json").exists)
        first = read_energy(folder).joules_low if counts else 0.0
        wait_for(lambda sampler=sampler, first=first: sampler.meter.joules_low > first + 3)
        sampler.close()
        assert read_energy(folder).joules_low == first if counts else not (folder / energy.FOLDER_NAME).exists()


def test_a_rank_is_watched_from_start_to_end_and_keeps_its_energy(tmp_path: Path) -> None:
    said: list[str] = []
    ranks = Ranks(rank=1, local_rank=0, world_size=2, device=torch.device("cpu"), backend="gloo")
    assert watch_hardware(ranks, tmp_path, 0.0, said.append, continues=False) is None
    for continues in (False, True):
        sampler = watch_hardware(ranks, tmp_path, 0.01, said.append, continues=continues)
        assert sampler is not None
        time.sleep(0.05)
        assert sampler.finish(tmp_path, ranks.rank) == ""
        assert sampler.take_row()["hardware/rss_gb"] > 0  # type: ignore[operator]
    assert read_energy(tmp_path).seconds > 0.08 and not said
    (tmp_path / "file").touch()
    sampler = watch_hardware(ranks, tmp_path / "file", 0.01, said.append, continues=True)
    assert sampler is not None
    time.sleep(0.03)
    assert "not kept (Not a directory)" in sampler.finish(tmp_path / "file", 1)
