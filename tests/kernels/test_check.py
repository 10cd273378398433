import json

import jax.numpy as jnp
import pytest

from moelib.core.errors import UserError
from moelib.kernels import backend
from moelib.kernels import check as kernel_check
from moelib.kernels.backend import BACKENDS, kernel_backends
from moelib.kernels.flash_attention import xla as attention
from moelib.kernels.gmm import xla as grouped
from tests.python_process import finish, free_port, start


@pytest.fixture(autouse=True)
def _on_every_platform(monkeypatch):
    monkeypatch.setattr(kernel_check, "PLATFORMS", ("cpu",))


def _plant(monkeypatch, module, name, change):
    """Replaces a function of a backend by one with changed results."""
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kw: change(function(*args, **kw)))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param(None, marks=pytest.mark.slow)])
def test_right_backends_pass(dtype, monkeypatch):
    compared, compare = [], kernel_check._compare
    monkeypatch.setattr(
        kernel_check, "_compare", lambda *args: [compared.append(args[:3]), compare(*args)]
    )
    kernel_check.check_kernels(dtype)
    gradients = [("gmm", "xla", f"gradient of {n}") for n in ("down", "rows", "up", "up_bias")]
    gradients += [("flash_attention", "xla", f"gradient of {name}") for name in "kqv"]
    values = [(kernel, "xla", "value") for kernel in ("flash_attention", "gmm")]
    assert sorted(compared) == sorted(gradients + values)


@pytest.mark.parametrize(
    ("module", "name", "change", "kernel", "what"),
    [
        (grouped, "forward", lambda out: (out[0].at[75].multiply(1.5), out[1]), "gmm", "value"),
        (
            grouped,
            "weight_gradient",
            lambda out: (out[0].at[1].add(jnp.nan), out[1]),  # Of the group without rows.
            "gmm",
            "gradient of (down|up)",
        ),
        (attention, "forward", lambda out: (1.1 * out[0], out[1]), "flash_attention", "value"),
        (
            attention,
            "backward",
            lambda out: (out[0], out[1].at[0, 10].set(0), out[2]),
            "flash_attention",
            "gradient of k",
        ),
    ],
    ids=["gmm", "gmm_weight_gradient", "attention", "attention_backward"],
)
def test_a_wrong_backend_stops_with_both_values(monkeypatch, module, name, change, kernel, what):
    _plant(monkeypatch, module, name, change)
    monkeypatch.setattr(kernel_check, "_CASES", {kernel: kernel_check._CASES[kernel]})
    match = rf"{kernel}.*'xla'.*{what}.*MOELIB_KERNEL_BACKEND={kernel}=xla.*--skip_kernel_check"
    with pytest.raises(UserError, match=match):
        kernel_check.check_kernels("float32")


def test_nothing_is_computed_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(kernel_check, "PLATFORMS", ("gpu", "tpu"))
    monkeypatch.setattr(kernel_check, "_CASES", None)
    kernel_check.check_kernels("float32")


_PROCESS = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from moelib.kernels import check as kernel_check
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
kernel_check.PLATFORMS = ("cpu",)
if sys.argv[2] == "1":  # Only one of the two is wrong, and only it fails: none waits.
    kernel_check.TOLERANCE = -1.0
with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(data=-1))):
    try:
        kernel_check.check_kernels("float32")
        print(json.dumps("right"))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.slow
def test_each_process_checks_a_device_of_its_own():
    address = f"localhost:{free_port()}"
    outputs = finish(*(start("-c", _PROCESS, address, index) for index in range(2)))
    found = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert found[0] == "right", outputs
    assert "gmm by backend 'xla' is wrong" in found[1]


def test_backends_hold_inside_the_context():
    with kernel_backends({"gmm": "reference"}):
        assert backend.chosen_backend("gmm") == "reference"
    assert backend.chosen_backend("gmm") is None
    assert {"gmm", "flash_attention", "cross_entropy"} <= set(BACKENDS)


def test_unknown_names_are_errors_of_the_user(monkeypatch):
    with pytest.raises(UserError, match=r"kernel_backends=.*'cudnn'"):
        kernel_backends({"gmm": "cudnn"}).__enter__()
    monkeypatch.setenv(backend.ENVIRONMENT, "gmn=xla")
    with pytest.raises(UserError, match=r"MOELIB_KERNEL_BACKEND=gmn=xla:.*'gmn'"):
        kernel_backends().__enter__()


def test_a_backend_that_cannot_compute_is_an_error_of_the_user_with_the_notes_of_the_layer():
    error = backend.UserError("gmm: backend 'gpu' needs a Hopper GPU")
    error.add_note("in model.decoder")
    with pytest.raises(UserError, match="'gpu' needs") as raised, kernel_backends():
        raise error
    assert raised.value.__notes__ == ["in model.decoder"]
