import pytest

from moelib.core.errors import UserError
from moelib.kernels import backend
from moelib.layers.kernel_backends import BACKENDS, kernel_backends


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
    error = backend.BackendError("gmm: backend 'gpu' needs a Hopper GPU")
    error.add_note("in model.decoder")
    with pytest.raises(UserError, match="'gpu' needs") as raised, kernel_backends():
        raise error
    assert raised.value.__notes__ == ["in model.decoder"]
