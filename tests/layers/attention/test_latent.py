"""Latent attention against the paper's formulas in float64, on a mesh, and its sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_for_function
from moelib.core.param import is_spec
from moelib.layers import initializers
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.remat import remat
from moelib.layers.rope import YarnRotaryEmbedding
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.parallel.sharding import named_shardings
from tests.layers.calling import build, call, float64, in_module, initial, normal
from tests.oracles.attention import attention
from tests.oracles.rope import rotated

B, S, D, H, NOPE, ROPE, V = 4, 8, 8, 4, 6, 4, 3
X = normal(B, S, D)
SEGMENTS = np.repeat([[1, 2, 0]], B, 0).repeat([3, 4, 1], axis=1)  # 3 tokens, 4, and padding.
SEGMENTS[1] = 5
IN_ROWS = np.broadcast_to(np.arange(S), (B, S))
IN_DOCUMENTS = IN_ROWS - np.argmax(SEGMENTS[:, :, None] == SEGMENTS[:, None], axis=-1)
QUERY_LATENT = {"q_lora_rank": 6}


def latent_attention(**fields):
    sizes = {"kv_lora_rank": 4, "nope_head_dim": NOPE, "rope_head_dim": ROPE, "v_head_dim": V}
    # Larger weights than the default, so that scores differ.
    init = config_for_function(initializers.normal).set(std=0.5)
    fields = {"input_dim": D, "num_heads": H, "param_init": init, **sizes, **fields}
    return build(LatentAttention.default_config(), **fields)


def parameters(layer):
    """Returns initial parameters, with random scales of the norms."""
    params = initial(layer)
    norms = {
        n: {"scale": v["scale"] + normal(*v["scale"].shape) / 3}
        for n, v in params.items()
        if n.endswith("norm")
    }
    return params | norms


def run(layer, params, x, positions=IN_ROWS, segment_ids=None):
    return call(layer, params, x, positions=positions, segment_ids=segment_ids)


def normalised(x, norm):
    return x / np.sqrt(np.mean(x**2) + 1e-6) * norm["scale"]


def by_hand(layer, params, positions, segment_ids):
    """Returns eq. 9 to 19 of the paper in float64: token by token, then one query at a time."""
    cfg, p, x = layer.config, float64(params), X.astype(np.float64)
    query = np.zeros((B, S, H, NOPE + ROPE))
    key, value = np.zeros_like(query), np.zeros((B, S, H, cfg.v_head_dim))
    for b, t in np.ndindex(B, S):
        h = x[b, t]
        latent = normalised(h @ p["kv_down"], p["kv_norm"])  # Eq. 9.
        shared = rotated(h @ p["k_rope"], positions[b, t])  # Eq. 15.
        if "q" in p:
            queries = np.einsum("d,dhk->hk", h, p["q"])
        else:
            latent_q = normalised(h @ p["q_down"], p["q_norm"])  # Eq. 12.
            queries = np.einsum("d,dhk->hk", latent_q, p["q_up"])  # Eq. 13.
        for i in range(H):
            key[b, t, i] = *(latent @ p["kv_up"][:, i, :NOPE]), *shared  # Eq. 10, 17.
            value[b, t, i] = latent @ p["kv_up"][:, i, NOPE:]  # Eq. 11.
            turned = rotated(queries[i, NOPE:], positions[b, t])  # Eq. 14.
            query[b, t, i] = *queries[i, :NOPE], *turned  # Eq. 16.
    scale = cfg.score_factor / np.sqrt(NOPE + ROPE)
    heads = attention(query, key, value, scale=scale, segment_ids=segment_ids)  # Eq. 18.
    return np.einsum("bshv,hvd->bsd", heads, p["output"])  # Eq. 19.


@pytest.mark.parametrize(
    ("fields", "positions", "segment_ids"),
    [
        ({}, IN_ROWS, None),
        (QUERY_LATENT, IN_DOCUMENTS, SEGMENTS),
        ({"score_factor": 1.6}, IN_ROWS, None),
        ({"v_head_dim": NOPE + ROPE + 2}, IN_DOCUMENTS, SEGMENTS),  # Values wider than keys.
    ],
    ids=["plain", "query latent, packed", "score factor", "wide values, packed"],
)
def test_the_output_is_that_of_the_papers_formulas(fields, positions, segment_ids):
    layer = latent_attention(**fields)
    params = parameters(layer)
    got = run(layer, params, X, positions, segment_ids)
    want = by_hand(layer, params, positions, segment_ids)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(layer, params, x):
    def objective(params, x):
        y = run(layer, params, x, IN_DOCUMENTS, SEGMENTS)
        return jnp.sum(jnp.square(y)), y

    return jax.value_and_grad(objective, (0, 1), has_aux=True)(params, x)


@pytest.mark.parametrize(
    "fields", [{}, pytest.param(QUERY_LATENT, marks=pytest.mark.slow)], ids=str
)
def test_a_mesh_gives_the_values_of_one_device_and_every_parameter_a_gradient(fields):
    layer = latent_attention(**fields)
    params = parameters(layer)
    want = value_and_grads(layer, params, X)
    for grad in jax.tree.leaves(want[1]):
        assert float(jnp.min(jnp.max(jnp.abs(grad), 0))) > 1e-3
    mesh = create_device_mesh(mesh_shape_from_axes(fsdp=2, seq=2, model=2))
    with jax.set_mesh(mesh):
        shardings = named_shardings(layer.create_parameter_specs_recursively(), mesh)
        placed = jax.device_put(params, shardings)
        assert placed["kv_up"].sharding.shard_shape((4, H, NOPE + V)) == (2, H // 2, NOPE + V)
        got = value_and_grads(layer, placed, X)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Small elements are differences of large ones, whose rounding differs between machines.
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6 * float(jnp.max(jnp.abs(y))))


def test_what_remat_may_keep_has_the_names_of_other_attention():
    layer = latent_attention(**QUERY_LATENT)
    params = parameters(layer)
    names = ["attention_q", "attention_kv", "attention_context", "attention_output"]
    loss = lambda x: jnp.sum(jnp.square(run(layer, params, x)))
    kept = jax.jit(jax.grad(in_module(remat(keep=names, prevent_cse=True)(loss))))(X)
    np.testing.assert_allclose(kept, jax.jit(jax.grad(loss))(X), rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_near_float32():
    layer = latent_attention(**QUERY_LATENT)
    params = parameters(layer)
    got = run(layer, params, X.astype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), run(layer, params, X), atol=0.1)


def lite(**fields):
    sizes = {"input_dim": 2048, "num_heads": 16, "kv_lora_rank": 512, "v_head_dim": 128}
    rope = YarnRotaryEmbedding.default_config().set(factor=40.0, original_context=4096)
    return latent_attention(**sizes, nope_head_dim=128, rope_head_dim=64, rope=rope, **fields)


def test_sizes_and_flops_are_those_of_deepseek_v2_lite():
    specs = jax.tree.leaves(lite().create_parameter_specs_recursively(), is_leaf=is_spec)
    # q_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, and the norm of the latent.
    matrices = 3072 * 2048 + 576 * 2048 + 4096 * 512 + 2048 * 2048
    assert sum(spec.size for spec in specs) == lite().active_parameters() == matrices + 512
    # A token sees 1, 2, ... S keys, of 192 entries, and as many values, of 128.
    seen = sum(range(1, S + 1)) / S
    assert lite().forward_flops_per_token(S) == 2 * matrices + 2 * seen * 16 * (192 + 128)
    small = lite(q_lora_rank=32).forward_flops_per_token(S)
    latent = 2048 * 32 + 32 * 3072
    assert small == lite().forward_flops_per_token(S) + 2 * (latent - 3072 * 2048)
