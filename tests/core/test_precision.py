import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.core.jaxpr import walk
from moelib.core.param import Cast, ParameterSpec
from moelib.core.precision import (
    CastAtUse,
    cast_at_use,
    cast_floats,
    cast_parameters,
    check_float,
    check_gradients,
    compute_dtype,
    gradient_dtype,
    read_parameters,
    tensordot,
)


def spec(dtype="float32", **fields):
    return ParameterSpec((3,), (None,), dtype, **fields)


@pytest.mark.parametrize(
    ("dtype", "cure"),
    [
        ("int8", "bfloat16 or float32"),
        ("float8_e4m3fn", "bfloat16, and quantization"),
        ("float64", "float32, or JAX_ENABLE_X64=1"),
    ],
)
def test_dtypes_that_nothing_computes_in_are_refused(dtype, cure):
    with pytest.raises(UserError, match=f"train_dtype is {dtype}, .* set {cure}"):
        check_float("train_dtype", dtype)


@pytest.mark.parametrize(("stored", "train_dtype"), [("float16", None), ("float32", "float16")])
def test_gradients_in_float16_are_refused(stored, train_dtype):
    check_gradients({"weight": spec("bfloat16"), "norm": spec(cast=Cast.NEVER)}, None)
    with pytest.raises(UserError, match=f"is {train_dtype} .* layer/weight is {stored}"):
        check_gradients({"layer": {"weight": spec(stored)}}, train_dtype)


def test_floats_of_16_bits_or_more_are_allowed():
    for dtype in ("bfloat16", "float16", "float32"):
        check_float("train_dtype", dtype)
    with jax.enable_x64(True):
        check_float("train_dtype", "float64")


@pytest.mark.parametrize(
    ("of", "compute", "gradient"),
    [
        (spec(), "bfloat16", "bfloat16"),
        (spec(cast=Cast.READ), "bfloat16", "float32"),
        (spec("bfloat16", cast=Cast.READ), "bfloat16", "float32"),
        (spec(cast=Cast.NEVER), "float32", "float32"),
        (spec(trainable=False), "float32", "float32"),
        (spec("int32"), "int32", "int32"),
    ],
)
def test_dtypes_of_a_pass_in_bfloat16(of, compute, gradient):
    assert compute_dtype(of, "bfloat16") == compute
    assert gradient_dtype(of, "bfloat16") == gradient
    params = {"x": jnp.ones(3, of.dtype)}
    assert cast_parameters(params, {"x": of}, "bfloat16")["x"].dtype == compute
    read = read_parameters(params, {"x": of}, "bfloat16", {})
    assert cast_at_use(read)["x"].dtype == compute


def test_without_a_compute_dtype_nothing_is_cast():
    specs = {"x": spec("bfloat16", cast=Cast.READ)}
    assert compute_dtype(specs["x"], None) == gradient_dtype(specs["x"], None) == "bfloat16"
    params = {"x": jnp.ones(3)}  # Parameters that were loaded in another dtype.
    for cast in (cast_parameters(params, specs, None), read_parameters(params, specs, None, {})):
        assert cast["x"] is params["x"]


def test_gradients_go_to_other_arrays_than_the_values_that_are_read():
    value, unread = jnp.asarray([1.0, 1 + 2.0**-9, -3.0]), jnp.full(3, jnp.nan, jnp.bfloat16)
    values = {"x": CastAtUse(value, None, "bfloat16")}
    total = lambda params: jnp.sum(
        cast_at_use(read_parameters(params, {"x": spec()}, "bfloat16", values))["x"]
    )
    result, gradient = jax.value_and_grad(total)({"x": unread})
    assert float(result) == 1 + 1 - 3
    assert gradient["x"].dtype == jnp.bfloat16
    assert gradient["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cast_slice_reads_no_zeros_and_its_gradient_has_their_dtype(dtype):
    value = np.asarray([1.0, 1 + 2.0**-9, -3.0], np.float32)
    factors = np.arange(1, 4).astype(jnp.bfloat16)
    product = lambda zeros: jnp.sum(CastAtUse(value, zeros, "bfloat16").cast() * factors)
    result, gradient = jax.value_and_grad(product)(np.full(3, np.nan, dtype))
    assert float(result) == 1 + 2 - 9
    assert gradient.dtype == dtype
    assert gradient.tolist() == [1, 2, 3]


@pytest.mark.parametrize(("platform", "constrained"), [("cuda", True), ("tpu", False)])
def test_gpus_lay_out_a_slice_and_not_its_stack_for_its_gather(platform, constrained):
    """Held twice, the weights of olmoe-1b-7b take 21.2 GiB of each of 8 H100 instead of 17.9."""

    def total(stack):
        cast = lambda carry, x: (carry + CastAtUse(x, x, "bfloat16").cast(), None)
        return jax.lax.scan(cast, jnp.zeros((8, 16), "bfloat16"), stack)[0]

    traced = jax.jit(total).trace(jnp.ones((4, 8, 16)))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("@LayoutConstraint" in text) == constrained


def test_only_floats_are_cast():
    values = {"x": jnp.ones(2), "n": jnp.ones(2, jnp.int32), "k": jax.random.key(0)}
    cast = cast_floats(values, jnp.bfloat16)
    assert (cast["x"].dtype, cast["n"].dtype) == (jnp.bfloat16, jnp.int32)
    assert cast["k"].dtype == values["k"].dtype


@pytest.mark.parametrize("inputs", [(5,), (4, 5)])
def test_a_weights_gradient_is_rounded_after_its_sum(inputs):
    draw = lambda i, shape: jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16)
    x, weight, g = draw(0, (30, *inputs)), draw(1, (*inputs, 6)), draw(2, (30, 6))
    y, pull = jax.vjp(lambda x, w: tensordot(x, w, len(inputs)), x, weight)
    want, plain = jax.vjp(lambda x, w: jnp.tensordot(x, w, len(inputs)), x, weight)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(pull(g)[0], plain(g)[0])
    exact = np.tensordot(np.float64(x), np.float64(g), ([0], [0]))
    np.testing.assert_allclose(np.float64(pull(g)[1]), exact, rtol=2**-8, atol=1e-6)
    dots = (
        s.eqn.outvars[0].aval
        for s in walk(jax.make_jaxpr(pull)(g))
        if s.eqn.params.get("dimension_numbers")
    )
    assert {x.dtype for x in dots if x.shape[-1] == 6} == {np.dtype("float32")}
