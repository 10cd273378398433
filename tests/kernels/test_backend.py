import logging

import jax
import jax.numpy as jnp
import pytest

from moelib.core.errors import UserError
from moelib.kernels import backend
from moelib.kernels.backend import chosen_backend, kernel_backends, run, warn_once
from tests.kernels.comparing import compiled_for

FORMS = {"xla": lambda x: x + 1, "tpu": lambda x, interpret=False: x + (2 if interpret else 3)}


def test_the_argument_then_the_context_then_the_environment_decides(monkeypatch):
    monkeypatch.delenv(backend.ENVIRONMENT, raising=False)
    assert chosen_backend("gmm") is None
    monkeypatch.setenv(backend.ENVIRONMENT, "gmm=tpu, flash_attention=cudnn,")
    assert chosen_backend("gmm") == "tpu"
    with kernel_backends({"gmm": "xla"}):
        assert chosen_backend("gmm") == "xla"
        assert chosen_backend("flash_attention") == "cudnn"  # Of the environment.
        assert chosen_backend("gmm", "reference") == "reference"
        with kernel_backends({"flash_attention": "xla"}):
            assert chosen_backend("gmm") == "xla"
            assert chosen_backend("flash_attention") == "xla"
        with kernel_backends({"gmm": "gpu"}):
            assert chosen_backend("gmm") == "gpu"
    assert chosen_backend("gmm") == "tpu"


def test_a_function_is_traced_again_for_another_context():
    seen = []

    @jax.jit
    def f(x):
        seen.append(chosen_backend("gmm"))
        return x

    for _ in range(2):
        f(1)
        with kernel_backends({"gmm": "reference"}):
            f(1)
    assert seen == [None, "reference"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("gmn=xla", "'gmn'.*cross_entropy, flash_attention"),
        ("gmm=cudnn", "'cudnn'"),
        ("xla", "xla: .*kernel=backend"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(environment, message, monkeypatch):
    kernel, _, name = environment.partition("=")
    if name:
        with pytest.raises(UserError, match=message), kernel_backends({kernel: name}):
            pass
    monkeypatch.setenv(backend.ENVIRONMENT, environment)
    with pytest.raises(UserError, match=f"MOELIB_KERNEL_BACKEND=.*{message}"):
        chosen_backend("gmm")


def test_without_a_choice_the_platform_lowered_for_decides():
    forms = {"tpu": jnp.sin, "xla": jnp.cos}
    traced = jax.jit(lambda x: run("gmm", None, forms, {"tpu": None}, x)).trace(jnp.float32(0))
    on_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "sine" in on_tpu
    assert "cosine" not in on_tpu
    assert "cosine" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert run("gmm", None, forms, {}, jnp.float32(0)) == 1


def test_operands_that_the_kernel_of_the_platform_cannot_take_are_computed_in_plain_xla(caplog):
    warn_once.cache_clear()
    reasons = {"tpu": "takes bfloat16; cast to it."}
    with compiled_for("TPU v6 lite"), caplog.at_level(logging.WARNING):
        assert run("gmm", None, FORMS, reasons, 0) == 1
        with pytest.raises(UserError, match=r"backend 'tpu' takes bfloat16.*=gmm=xla"):
            run("gmm", "tpu", FORMS, reasons, 0)
    (message,) = caplog.messages
    assert "the kernel for TPUs takes bfloat16; cast to it." in message


def test_a_kernel_of_another_platform_is_interpreted_on_cpus_and_refused_elsewhere(caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert run("gmm", chosen_backend("gmm", "tpu"), FORMS, {}, 0) == 2
        assert not caplog.records  # The caller names it; a setting is a warning.
        with kernel_backends({"gmm": "tpu"}):
            assert [run("gmm", chosen_backend("gmm"), FORMS, {}, 0) for _ in range(2)] == [2, 2]
    assert [r.getMessage().split(" on CPUs")[0] for r in caplog.records] == [
        "gmm: backend 'tpu' is interpreted"
    ]
    with compiled_for("TPU v6 lite"):
        assert run("gmm", "tpu", FORMS, {}, 0) == 3
    with (
        compiled_for("NVIDIA H100"),
        pytest.raises(UserError, match=r"'tpu'.*NVIDIA H100.*=gmm=xla"),
    ):
        run("gmm", "tpu", FORMS, {}, 0)
    with pytest.raises(UserError, match="'cudnn'"):
        run("flash_attention", "cudnn", {"cudnn": FORMS["xla"]}, {}, 0)


def test_a_backend_without_the_part_asked_for_is_refused():
    with pytest.raises(UserError, match=r"'cudnn' .*MOELIB_KERNEL_BACKEND=flash_attention=xla"):
        run("flash_attention", "cudnn", FORMS, {}, 0)
