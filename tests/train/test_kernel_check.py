"""Kernels that fail their comparison are replaced, with a warning, and compared once."""

import json
import os
import pathlib
import re
import sys
from types import SimpleNamespace

import pytest
from jaxlib import xla_client

from moelib.core.errors import UserError
from moelib.kernels.backend import traced_backends, warn_once
from moelib.kernels.check import NO_MEMORY
from moelib.runs.phases import Phase
from moelib.runtime import platforms
from moelib.train import kernel_check
from tests.python_process import finish, free_port, start
from tests.train.planted_kernel import config

MODULE = "tests.train.planted_kernel"


@pytest.fixture(autouse=True)
def _on_cpus_with_a_cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_check, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(kernel_check, "has_accelerator", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    warn_once.cache_clear()


def plant(monkeypatch, fault, seconds=100):
    command = (sys.executable, "-m", MODULE, fault, str(seconds))
    monkeypatch.setattr(kernel_check, "COMMAND", command)
    monkeypatch.setitem(kernel_check.LIMIT_SECONDS, "call", seconds)


def kept(tmp_path):
    (path,) = (tmp_path / "cache/moelib/kernel_checks").iterdir()
    found = json.loads(path.read_text())
    return {(kernel, call.partition("(")[0]): fault for kernel, call, _, fault in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seconds", "words"),
    [
        ("wrong", 100, "is wrong: its value at"),
        ("raising", 100, "fails (JaxRuntimeError"),
        ("crashing", 100, "its process ended with status 3"),
        ("hanging", 20, "does not end within 20 s"),
    ],
)
def test_a_kernel_with_a_fault_is_replaced_once_it_is_compared(
    tmp_path, monkeypatch, caplog, fault, seconds, words
):
    plant(monkeypatch, fault, seconds)
    cfg = config(tmp_path / "run")
    assert cfg.instantiate(parent=None).run()["step"] == 1
    assert traced_backends()["gmm"] == "xla"
    (warning,) = [r.getMessage() for r in caplog.records if "REPLACED" in r.getMessage()]
    for expected in (words, "gmm by backend 'tpu'", "gmm_activated(lhs", "[32, 16]", "gmm=xla"):
        assert expected in warning
    found = kept(tmp_path)
    assert words in found.pop(("gmm", "gmm_activated"))
    assert found == {("flash_attention", "flash_attention"): None, ("gmm", "gmm"): None}

    # A second start replaces the kernel and compares nothing.
    monkeypatch.setattr(kernel_check, "COMMAND", ("false",))
    warn_once.cache_clear()
    cfg.dir = str(tmp_path / "again")
    assert cfg.instantiate(parent=None).run()["step"] == 1
    assert sum("REPLACED" in r.getMessage() for r in caplog.records) == 2


@pytest.mark.slow
def test_right_kernels_are_kept_and_compared_before_the_devices_are_opened(tmp_path, monkeypatch):
    plant(monkeypatch, "none")
    cfg = config(tmp_path / "run")
    kernel_check.compare_before_devices(cfg)
    assert set(kept(tmp_path).values()) == {None}
    monkeypatch.setattr(kernel_check, "COMMAND", ("false",))
    assert kernel_check.replaced_kernels(cfg.instantiate(parent=None)) == {}
    kernel_check.compare_before_devices(cfg.set(max_step=2))  # Of the same step.
    with monkeypatch.context() as patched:
        compared = []
        patched.setattr(kernel_check, "_in_processes", lambda *_: compared.append(1))
        kernel_check.compare_before_devices(cfg.set(num_microbatches=2))
        assert compared


@pytest.mark.slow
def test_a_process_that_compares_itself_ends_at_a_hang_and_goes_on_at_its_next_start(tmp_path):
    command = ("-m", MODULE, "hanging", 20, tmp_path, "here")
    ((_, err),) = finish(start(*command, devices=1), code=87)
    assert re.search(r"gmm_activated\(.*does not end within 20 s", err)
    assert "most recent call first" in err  # Stacks.
    ((out, _),) = finish(start(*command, devices=1))
    assert out.splitlines() == [
        "flash_attention None",
        "gmm does not end within 20 s",
        "gmm None",
    ]


_JOB = """
import json, math, sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from moelib.train import kernel_check
from tests.train.planted_kernel import config
wrong = kernel_check.Verdict("gmm", "gmm(lhs)", "tpu", "is wrong: its value")
def compared(cfg, mesh):
    assert jax.process_index() == 0 and math.prod(mesh) == 4
    return [wrong]
kernel_check.PLATFORMS, kernel_check._in_processes = ("cpu",), compared
print(json.dumps(kernel_check.replaced_kernels(config(sys.argv[3]).instantiate(parent=None))))
"""


@pytest.mark.slow
def test_all_processes_of_a_job_take_the_choice_of_the_first(tmp_path):
    address = f"localhost:{free_port()}"
    job = [start("-c", _JOB, address, index, tmp_path / "run") for index in range(2)]
    assert [json.loads(out.splitlines()[-1]) for out, _ in finish(*job)] == [{"gmm": "xla"}] * 2


def test_plain_xla_that_is_wrong_has_no_replacement():
    wrong = kernel_check.Verdict("gmm", "gmm(lhs)", "xla", "is wrong: its value")
    with pytest.raises(UserError, match=r"gmm by backend 'xla' is wrong.*--skip_kernel_check"):
        kernel_check._replaced([wrong], "TPU v6 lite", pathlib.Path("kept"))


def test_a_kernel_without_a_comparison_is_kept_with_a_warning(caplog):
    unknown = kernel_check.Verdict("gmm", "gmm(lhs)", "tpu", NO_MEMORY)
    assert kernel_check._replaced([unknown], "TPU v6 lite", pathlib.Path("kept")) == {}
    assert "gmm by backend 'tpu' is not compared, for lack of memory" in caplog.text


def test_a_comparison_that_does_not_start_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kernel_check, "COMMAND", ("false",))
    kernel_check.compare_before_devices(config(tmp_path))
    assert "could not be compared" in caplog.text
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"rewind_to": 3},
        {"phases": {"long": Phase.default_config().set(after_step=1)}, "max_step": 3},
    ],
    ids=str,
)
def test_the_calls_of_a_run_do_not_depend_on_its_course(tmp_path, fields):
    cfg = config(tmp_path)
    want = [str(call) for call in kernel_check.calls_of(cfg, None)]
    assert want
    assert [str(call) for call in kernel_check.calls_of(cfg.set(**fields), None)] == want


def test_verdicts_before_a_process_that_does_not_start_count(tmp_path, monkeypatch):
    found = ["gmm", "a call", "tpu", "fails (X)"]
    outputs = [
        (1, [json.dumps("1-cpu"), json.dumps(found), json.dumps(found)]),
        (1, []),
    ]

    def run(*arguments, **options):
        code, lines = outputs.pop(0)
        return SimpleNamespace(returncode=code, stdout="\n".join(lines).encode(), stderr=b"")

    monkeypatch.setattr(kernel_check.subprocess, "run", run)
    verdicts = kernel_check._in_processes(config(tmp_path))
    assert [tuple(each) for each in verdicts] == [tuple(found)]


def test_verdicts_in_a_folder_that_cannot_be_written_are_a_warning(tmp_path, caplog):
    (tmp_path / "cache").touch()
    path = kernel_check._path(config(tmp_path), "8-cpu")
    kernel_check._keep(path, [])
    assert f"{path}: verdicts on kernels are not kept" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[1]", '[["gmm", "gmm(lhs)"]]'])
def test_an_incomplete_file_has_no_verdicts(tmp_path, text):
    (tmp_path / "file").write_text(text)
    assert kernel_check._read(tmp_path / "file") is None


def test_a_process_next_to_open_devices_takes_one_gpu_and_little_of_its_memory(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # Of the user, for this process.
    for name, value in kernel_check._environment(is_shared=True).items():
        monkeypatch.setenv(name, value)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert (options["memory_fraction"], options["preallocate"]) == (0.05, False)


def test_nothing_is_compared_without_an_accelerator(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_check, "PLATFORMS", ("gpu", "tpu"))
    monkeypatch.setattr(kernel_check, "has_accelerator", platforms.has_accelerator)
    monkeypatch.setattr(kernel_check, "_in_processes", None)
    cfg = config(tmp_path)
    kernel_check.compare_before_devices(cfg)
    assert kernel_check.replaced_kernels(cfg.instantiate(parent=None)) == {}
