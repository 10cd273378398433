"""Platforms that cannot be used, peak rates of accelerators, and the count of memory maps."""

import importlib.util
import mmap
import os

import jax
import pytest

from moelib.core.errors import UsageError
from moelib.launch import DeviceFlags
from moelib.runtime import memory_maps
from moelib.runtime.accelerators import ACCELERATORS, peak_flops_per_second
from moelib.runtime.distributed import check_job
from moelib.runtime.platforms import check_backend, has_tpu, use_most_gpu_memory


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_a_missing_plugin_is_named_with_its_extra(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda plugin: None)
    with pytest.raises(UsageError, match=rf"--jax_backend={name}: .*'moelib\[{name}\]'"):
        check_backend(name)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(AssertionError(), "cannot load"), (RuntimeError("no driver\nat line 3"), "no driver")],
)
def test_a_missing_device_is_one_line_with_the_reason(monkeypatch, error, reason):
    def devices():
        raise error

    monkeypatch.setattr(importlib.util, "find_spec", lambda plugin: object())
    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(UsageError, match=rf"--jax_backend=gpu: no such device.*{reason}") as raised:
        check_backend("gpu")
    assert "\n" not in str(raised.value)


def test_a_platform_of_the_environment_that_is_absent_is_named(monkeypatch):
    def devices():
        raise AssertionError

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(UsageError, match="JAX_PLATFORMS=cuda: no such device"):
        DeviceFlags().set_up()
    with pytest.raises(UsageError, match=r"JAX_PLATFORMS=.*: no such device"):
        check_job()  # As `moelib.fit` calls it.


def test_settings_of_a_cloud_show_a_tpu(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    assert has_tpu()


@pytest.mark.parametrize(
    ("before", "share"),
    [
        ({}, "0.92"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, None),
    ],
)
def test_a_process_takes_most_of_a_gpus_memory_unless_the_user_sets_a_share(
    before, share, monkeypatch
):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, before.get(name, ""))
        if name not in before:
            monkeypatch.delenv(name)
    use_most_gpu_memory()
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == share


@pytest.mark.parametrize(
    ("kind", "dtype", "teraflops"),
    [
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "bfloat16", 459),
        ("NVIDIA H100 80GB HBM3", "float16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),  # 1,671 with sparsity, as of the H200 NVL.
        ("NVIDIA H200 NVL", "float8_e4m3fn", 1670.5),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bfloat16", None),
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


def test_a_new_map_is_counted():
    before = memory_maps.count()
    maps = [mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ * (i % 2)) for i in range(100)]
    assert memory_maps.count() >= before + 90
    del maps


@pytest.mark.parametrize(("share", "warns"), [(1.2, True), (1.3, False)])
def test_four_fifths_of_the_limit_are_warned_of(share, warns, tmp_path, monkeypatch, caplog):
    limit = tmp_path / "max_map_count"
    limit.write_text(f"{int(share * memory_maps.count())}\n")
    monkeypatch.setattr(memory_maps, "_LIMIT", limit)
    memory_maps.warn_if_many()
    assert [limit.read_text().strip() in caplog.text, "clear_caches" in caplog.text] == [warns] * 2


def test_another_system_has_no_count(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(memory_maps, "_MAPS", tmp_path / "absent")
    memory_maps.warn_if_many()
    assert memory_maps.count() == 0
    assert not caplog.text
