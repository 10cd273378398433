import jax
import jax.numpy as jnp
import pytest

from moelib.kernels.backend import check_backend, run_on_backend

BACKENDS = {"one": lambda x: x + 1, "two": lambda x: x + 2}


def test_the_named_backend_runs():
    assert run_on_backend("sum", "two", BACKENDS, {"default": "one"}, jnp.int32(0)) == 2


def test_the_default_runs_where_the_platform_has_no_backend_of_its_own():
    platforms = {"tpu": "two", "default": "one"}
    assert run_on_backend("sum", None, BACKENDS, platforms, jnp.int32(0)) == 1
    assert run_on_backend("sum", None, BACKENDS, {"default": "one"}, jnp.int32(0)) == 1


def test_the_platform_compiled_for_decides_not_the_one_traced_on():
    backends = {"sin": jnp.sin, "cos": jnp.cos}

    def run(x: jax.Array) -> jax.Array:
        return run_on_backend("wave", None, backends, {"tpu": "sin", "default": "cos"}, x)

    traced = jax.jit(run).trace(jnp.float32(0))
    on_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    on_cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "sine" in on_tpu
    assert "cosine" not in on_tpu
    assert "cosine" in on_cpu


def test_an_unknown_backend_is_refused_with_the_list():
    with pytest.raises(ValueError, match="gmm has no backend 'cuda'; set one of one, two"):
        check_backend("gmm", "cuda", BACKENDS)
    with pytest.raises(ValueError, match="no backend"):
        run_on_backend("gmm", "cuda", BACKENDS, {"default": "one"}, jnp.int32(0))
