"""Platforms that cannot be used: one line with what was found and what to install."""

import importlib.util
import os

import jax
import pytest

from moelib.core.errors import UsageError
from moelib.core.platforms import check_backend, has_tpu, use_most_gpu_memory


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
    with pytest.raises(UsageError, match=rf"--jax_backend=gpu:.*GPU.*{reason}") as raised:
        check_backend("gpu")
    assert "\n" not in str(raised.value)


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
