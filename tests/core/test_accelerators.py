import pytest

from moelib.core.accelerators import ACCELERATORS, peak_flops_per_second


@pytest.mark.parametrize(
    ("kind", "dtype", "teraflops"),
    [
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "bfloat16", 459),
        ("NVIDIA H100 80GB HBM3", "float16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA L40S", "float8_e4m3fn", 733),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "float32", 156),
        ("NVIDIA A100-SXM4-80GB", "float8_e4m3fn", None),
        ("NVIDIA H200", "int8", None),
        ("cpu", "float32", None),
    ],
)
def test_peak_rates_follow_the_longest_known_name(kind, dtype, teraflops):
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_flops_per_second(kind, dtype) == expected


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_accelerator_has_a_peak_rate(name):
    device = ACCELERATORS[name]
    assert device.flops_per_second == peak_flops_per_second(device.device_kind)
    assert peak_flops_per_second(device.device_kind, "float32") <= device.flops_per_second
