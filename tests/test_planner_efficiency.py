from __future__ import annotations

import dataclasses

import pytest

from vlmcourse.planner.efficiency import (
    AMPERE,
    HOPPER,
    OTHERS,
    Speeds,
    attention_s,
    measured_speeds,
    move_s,
    product_s,
    speeds_of,
)
from vlmcourse.planner.hardware import DEVICES, DeviceSpec, calibrated_device, find_peak_flop_per_s, get_device

A100 = get_device("a100-80")
IDEAL = Speeds(product_fraction=1.0, attention_fraction=1.0, half_inner=0.0, memory_fraction=1.0)


def multiply(rows: float, inner: float, columns: float, speeds: Speeds = IDEAL, device: DeviceSpec = A100) -> float:
    return product_s(device, speeds, "bf16", rows, inner, columns, 2)


def test_a_large_product_takes_its_flops_at_the_peak() -> None:
    # 108 x 128 rows and 20 x 128 columns: 20 tiles for each unit.
    assert multiply(108 * 128, 8192, 2560) == pytest.approx(2 * 108 * 128 * 8192 * 2560 / 312e12)


def test_a_tile_too_much_takes_another_wave() -> None:
    full, over = multiply(108 * 128, 8192, 2560), multiply(108 * 128 + 1, 8192, 2560)
    assert over == pytest.approx(21 / 20 * full)


def test_short_inner_sizes_reach_half_at_half_inner() -> None:
    speeds = dataclasses.replace(IDEAL, half_inner=1024.0)
    assert multiply(108 * 1280, 1024, 1280, speeds) == pytest.approx(2 * multiply(108 * 1280, 1024, 1280))
    with_longer = multiply(108 * 1280, 1024 * 31, 1280, speeds) / multiply(108 * 1280, 1024 * 31, 1280)
    assert with_longer == pytest.approx(32 / 31)


def test_a_thin_product_takes_as_long_as_its_bytes() -> None:
    # One row of 108 tiles: its FLOPs would be quick; the matrix has to be read.
    width = 108 * 128
    assert multiply(1, 128, width) == pytest.approx(2 * (128 + 128 * width + width) / 2039e9)
    half = dataclasses.replace(IDEAL, memory_fraction=0.5)
    assert multiply(1, 128, width, half) == pytest.approx(2 * multiply(1, 128, width))
    assert move_s(A100, half, 2039e9) == pytest.approx(2.0)


def test_nothing_takes_no_time_and_fractions_divide() -> None:
    assert multiply(0, 10, 10) == 0
    assert attention_s(A100, dataclasses.replace(IDEAL, attention_fraction=0.5), "bf16", 312e12) == 2.0
    slow = dataclasses.replace(IDEAL, product_fraction=0.5)
    assert multiply(108 * 128, 8192, 2560, slow) == pytest.approx(2 * multiply(108 * 128, 8192, 2560))


def test_a_type_without_hardware_is_refused() -> None:
    with pytest.raises(ValueError, match="a100-80 has no hardware path for 'fp8'"):
        product_s(A100, IDEAL, "fp8", 128, 128, 128, 1)


def test_speeds_are_those_of_the_generation() -> None:
    assert speeds_of(A100) is AMPERE and speeds_of(get_device("h200")) is HOPPER
    assert speeds_of(get_device("b200")) is OTHERS


def test_a_calibrated_device_takes_what_was_measured() -> None:
    core = calibrated_device("core", memory_bytes=10**9, flop_per_s=1e10, memory_bytes_per_s=1e12, link_bytes_per_s=1e9)
    assert product_s(core, measured_speeds(), "fp32", 100, 50, 10, 4) == pytest.approx(2 * 100 * 50 * 10 / 1e10)
    with pytest.raises(ValueError, match="flop_per_s = 0 must be above 0; measure it again"):
        calibrated_device("core", memory_bytes=1, flop_per_s=0, memory_bytes_per_s=1, link_bytes_per_s=1)


def test_every_device_has_its_units_power_and_a_sane_order_of_speeds() -> None:
    for device in DEVICES.values():
        assert device.num_units >= 40 and device.power_w >= 70 and device.source, device.name
        assert device.host_link_bytes_per_s <= device.link_bytes_per_s < device.memory_bytes_per_s
        if device.supports("bf16"):
            assert device.peak_flop_per_s("bf16") == device.peak_flop_per_s("fp16")
            assert device.peak_flop_per_s("bf16") > device.peak_flop_per_s("fp32")


def test_new_devices_are_those_of_their_datasheets() -> None:
    a800, b200, titan = get_device("a800-80"), get_device("b200"), get_device("h100-96")
    assert a800.link_bytes_per_s == A100.link_bytes_per_s * 2 / 3
    assert b200.peak_flop_per_s("bf16") == 2.25e15 and b200.memory_bytes == 180 * 10**9
    assert (titan.memory_bytes_per_s, titan.power_w) == (2.4e12, 500)
    assert find_peak_flop_per_s("NVIDIA H100 PCIe", "bf16") == 756e12
    assert find_peak_flop_per_s("NVIDIA GeForce RTX 4090", "bf16") == 165.2e12
    with pytest.raises(ValueError, match="did you mean 'l40s-48'"):
        get_device("l40s-40")
