"""Embedding: lookups, ids outside the table, and the tied head."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.precision import CastAtUse
from moelib.core.varying import vary
from moelib.layers.embedding import Embedding
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from tests.layers.calling import build, call, float64, initial, normal

LAYER = build(Embedding.default_config(), num_embeddings=5, dim=4)
PARAMS = initial(LAYER)


def test_a_lookup_gives_the_rows_of_the_ids():
    ids = np.array([[0, 4, 4], [2, 1, 0]])
    got = call(LAYER, PARAMS, jnp.asarray(ids))
    np.testing.assert_array_equal(got, np.asarray(PARAMS["weight"])[ids])


def test_a_scale_multiplies_lookups_and_not_a_tied_head():
    scaled = build(Embedding.default_config(), num_embeddings=5, dim=4, scale=3.0)
    ids = jnp.array([[0, 4]])
    np.testing.assert_array_equal(call(scaled, PARAMS, ids), 3 * call(LAYER, PARAMS, ids))
    x = jnp.asarray(normal(1, 2, 4))
    logits = [call(layer, PARAMS, x, method="attend") for layer in (scaled, LAYER)]
    np.testing.assert_array_equal(*logits)


def test_an_id_outside_of_the_table_gives_nan_and_no_other_row():
    got = np.asarray(call(LAYER, PARAMS, jnp.array([[-1, 5, -5, 1]])))
    assert np.isnan(got[0, :3]).all()
    np.testing.assert_array_equal(got[0, 3], PARAMS["weight"][1])


def test_gradients_of_a_lookup_add_up_over_equal_ids():
    ids = jnp.array([[1, 1, 3]])
    grad = jax.grad(lambda p: jnp.sum(call(LAYER, p, ids)))(PARAMS)["weight"]
    np.testing.assert_array_equal(grad[:, 0], [0, 2, 0, 1, 0])


def test_gradients_of_many_uses_in_bfloat16_are_not_lost():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    ids, grad = jnp.full((1, 4096), 2), jnp.asarray(normal(1, 4096, 4) + 1, jnp.bfloat16)
    pull = jax.vjp(lambda p: call(LAYER, p, ids), params)[1]
    got = np.asarray(pull(grad)[0]["weight"], np.float64)
    np.testing.assert_allclose(got[2], np.asarray(grad, np.float64).sum((0, 1)), rtol=2**-8)
    assert np.count_nonzero(got) == 4


def test_the_gradient_of_a_hundred_thousand_uses_in_bfloat16_is_the_exact_sum():
    ids = jnp.full((1, 100_000), 2)
    grad = jnp.asarray(normal(1, 100_000, 4) + 1, jnp.bfloat16)
    zeros = jnp.zeros((5, 4))
    rows = lambda zeros: call(
        LAYER, {"weight": CastAtUse(PARAMS["weight"], zeros, "bfloat16")}, ids
    )
    out, pull = jax.vjp(rows, zeros)
    assert out.dtype == jnp.bfloat16
    got, want = np.asarray(pull(grad)[0][2], np.float64), np.asarray(grad, np.float64).sum((0, 1))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_of_a_table_cast_at_use_only_rows_are_cast():
    ids = jnp.array([[1, 1, 3]])
    unread = jnp.full((5, 4), jnp.nan, jnp.float32)
    rows = lambda value, zeros: call(LAYER, {"weight": CastAtUse(value, zeros, "bfloat16")}, ids)
    got, pull = jax.vjp(rows, PARAMS["weight"], unread)
    np.testing.assert_array_equal(got, PARAMS["weight"][ids].astype(jnp.bfloat16))
    value_grad, grad = pull(jnp.ones_like(got))
    assert grad.dtype == jnp.float32
    assert grad[:, 0].tolist() == [0, 2, 0, 1, 0]
    assert not value_grad.any()
    text = jax.jit(rows).lower(PARAMS["weight"], unread).compile().as_text()
    computed = text[text.index("ENTRY") :]
    assert "bf16[1,3,4]" in computed
    assert set(re.findall(r" = \w+\[5,4\]\S* (\w+)", computed)) == {"parameter"}


def test_a_lookup_is_differentiated_in_a_shard_map():
    ids, spec = jnp.arange(24).reshape(8, 3) % 5, jax.sharding.PartitionSpec
    rows = lambda ids, params: jnp.sum(call(LAYER, params, ids))

    def gradient(ids, params):
        grad = jax.grad(rows, 1)(ids, vary(params, ["data"]))
        return jax.tree.map(lambda x: jax.lax.psum(x, "data"), grad)

    with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(data=8))):
        specs = (spec("data"), spec())
        got = jax.jit(jax.shard_map(gradient, in_specs=specs, out_specs=spec()))(ids, PARAMS)
    np.testing.assert_array_equal(got["weight"][:, 0], [5, 5, 5, 5, 4])


def test_the_tied_head_is_the_inner_product_with_every_row():
    x = normal(2, 3, 4)
    got = call(LAYER, PARAMS, jnp.asarray(x), method="attend")
    np.testing.assert_allclose(got, x.astype(np.float64) @ float64(PARAMS)["weight"].T, rtol=1e-5)


def test_a_lookup_costs_no_matmul():
    assert LAYER.forward_flops_per_token(8) == 0
    assert LAYER.active_parameters() == 20
