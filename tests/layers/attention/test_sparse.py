"""DeepSeek Sparse Attention against loops in float64, and against attention to all keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.core.jaxpr import walk
from moelib.layers import initializers
from moelib.layers.attention.indexer import Indexer
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.quantization import Quantization
from tests import tiny
from tests.layers.calling import build, call_and_collect, float64, initial, normal
from tests.oracles.rope import rotated

B, S, D, H, NOPE, ROPE, V = 2, 131, 8, 4, 6, 4, 3
J, DIM, K = 3, 7, 9  # Of the index. 131 tokens are 3 chunks of 44, with a query too many.
X = normal(B, S, D)
SEGMENTS = np.repeat([[1, 2, 0]], B, 0).repeat([101, 25, 5], axis=1)  # Documents, and padding.
SEGMENTS[1] = 5
IN_ROWS = np.broadcast_to(np.arange(S), (B, S))
IN_DOCUMENTS = IN_ROWS - np.argmax(SEGMENTS[:, :, None] == SEGMENTS[:, None], axis=-1)
INDEXER = Indexer.default_config().set(num_heads=J, index_dim=DIM, num_chosen=K)


def attention(indexer=INDEXER, **fields):
    sizes = {"kv_lora_rank": 5, "nope_head_dim": NOPE, "rope_head_dim": ROPE, "v_head_dim": V}
    init = config_for_function(initializers.normal).set(std=0.5)
    sizes |= {"input_dim": D, "num_heads": H, "q_lora_rank": 6, "param_init": init}
    return build(LatentAttention.default_config(), indexer=indexer, **sizes, **fields)


@functools.cache
def parameters():
    """Returns parameters of attention with an indexer, with random scales and biases of norms."""
    noise = iter(range(100))
    return jax.tree.map(
        lambda x: x + normal(*x.shape, seed=next(noise)) / 3 if x.ndim == 1 else x,
        initial(attention()),
    )


def run(layer, params, x=X, *, packed):
    """Returns (output, outputs of modules)."""
    where = {"positions": IN_DOCUMENTS, "segment_ids": SEGMENTS} if packed else {}
    where = {"positions": IN_ROWS} | where
    return call_and_collect(
        layer, params, x, **{name: of[:, : x.shape[1]] for name, of in where.items()}
    )


# -- The definition, in loops ----------------------------------------------------------------------


def normalized(x, norm):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * norm["scale"]


def by_hand(params, *, packed, num_chosen=K):
    """Returns (output, divergence [B, S]) in float64, one query at a time."""
    p, x = float64(params), X.astype(np.float64)
    positions = IN_DOCUMENTS if packed else IN_ROWS
    latent, reduced = (
        normalized(x @ p["kv_down"], p["kv_norm"]),
        normalized(x @ p["q_down"], p["q_norm"]),
    )
    shared = rotated(x @ p["k_rope"], positions)
    q = np.einsum("bsr,rhk->bshk", reduced, p["q_up"])
    turned = rotated(q[..., NOPE:], positions[..., None])
    kv = np.einsum("bsr,rhk->bshk", latent, p["kv_up"])
    index_q, index_k, weights = index_by_hand(p["indexer"], x, reduced, positions)
    heads, divergence = np.zeros((B, S, H, V)), np.zeros((B, S))
    for b, t in np.ndindex(B, S):
        seen = np.arange(t + 1)
        if packed:
            seen = seen[SEGMENTS[b, seen] == SEGMENTS[b, t]]
        scores = np.maximum(index_q[b, t] @ index_k[b, seen].T, 0).T @ weights[b, t]
        best = np.argsort(-scores, kind="stable")[:num_chosen]
        chosen, log_index = seen[best], scores[best]
        log_index = log_index - np.log(np.sum(np.exp(log_index)))
        probs = np.zeros((H, len(chosen)))
        for h in range(H):
            products = (
                kv[b, chosen, h, :NOPE] @ q[b, t, h, :NOPE] + shared[b, chosen] @ turned[b, t, h]
            )
            probs[h] = np.exp(products / np.sqrt(NOPE + ROPE))
            probs[h] /= probs[h].sum()
            heads[b, t, h] = probs[h] @ kv[b, chosen, h, NOPE:]
        target = probs.mean(0)
        divergence[b, t] = np.sum(target * (np.log(target) - log_index))
    return np.einsum("bshv,hvd->bsd", heads, p["output"]), divergence


def index_by_hand(p, x, reduced, positions):
    """Returns queries [B, S, J, i], keys [B, S, i] and weights [B, S, J] of the index."""
    q = np.einsum("bsr,rji->bsji", reduced, p["q"])
    k = x @ p["k"]
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = k * p["norm"]["scale"] + p["norm"]["bias"]
    q[..., :ROPE] = rotated(q[..., :ROPE], positions[..., None])
    k[..., :ROPE] = rotated(k[..., :ROPE], positions)
    return q, k, x @ p["head_weights"] / np.sqrt(J * DIM)


def mean_divergence(divergence, *, packed):
    return divergence[SEGMENTS > 0].mean() if packed else divergence.mean()


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_loss_are_those_of_loops(packed):
    got, outputs = run(attention(), parameters(), packed=packed)
    want, divergence = by_hand(parameters(), packed=packed)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    loss = outputs.aux_losses["indexer"]["indexer_loss"]
    np.testing.assert_allclose(loss.value, mean_divergence(divergence, packed=packed), rtol=1e-5)
    assert float(loss.num_tokens) == (np.sum(SEGMENTS > 0) if packed else B * S)


@pytest.mark.parametrize("packed", [False, True])
def test_the_first_stage_learns_from_attention_to_all_keys(packed):
    layer = attention(INDEXER.clone(sparse=False, loss_weight=0.5))
    got, outputs = run(layer, parameters(), packed=packed)
    want, divergence = by_hand(parameters(), packed=packed, num_chosen=S)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    loss = outputs.aux_losses["indexer"]["indexer_loss"]
    np.testing.assert_allclose(loss.value, mean_divergence(divergence, packed=packed), rtol=1e-5)
    assert loss.weight == 0.5


# -- Gradients -------------------------------------------------------------------------------------


def masked(params, x, *, packed):
    """Returns (output, loss) of a mask over all pairs of tokens, which autodiff differentiates."""
    p, positions = params, IN_DOCUMENTS if packed else IN_ROWS
    layer = attention(None)
    others = {name: value for name, value in p.items() if name != "indexer"}
    keep = lambda method, *args: call_and_collect(layer, others, *args, method=method)[0]
    latent, key = keep("latents", x, jnp.asarray(positions))
    k, v = keep("keys_and_values", latent, key)
    norm = lambda y, scale: y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale
    reduced = norm(x @ p["q_down"], p["q_norm"]["scale"][None, None])
    q = jnp.einsum("bsr,rhk->bshk", reduced, p["q_up"])
    turn = lambda y: call_and_collect(layer.rope, {}, y, jnp.asarray(positions))[0]
    q = jnp.concatenate([q[..., :NOPE], turn(q[..., NOPE:])], -1)
    x, reduced = jax.lax.stop_gradient((x, reduced))
    p = p["indexer"]
    index_q = jnp.einsum("bsr,rji->bsji", reduced, p["q"])
    index_k = x @ p["k"]
    centered = index_k - index_k.mean(-1, keepdims=True)
    index_k = centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6)
    index_k = index_k * p["norm"]["scale"][None, None] + p["norm"]["bias"][None, None]
    index_q = jnp.concatenate([turn(index_q[..., :ROPE]), index_q[..., ROPE:]], -1)
    index_k = jnp.concatenate([turn(index_k[:, :, None, :ROPE])[:, :, 0], index_k[..., ROPE:]], -1)
    scores = jax.nn.relu(jnp.einsum("bsji,bti->bsjt", index_q, index_k))
    scores = jnp.einsum("bsjt,bsj->bst", scores, x @ p["head_weights"]) / np.sqrt(J * DIM)
    seen = jnp.tril(jnp.ones((S, S), bool))[None]
    if packed:
        seen &= jnp.asarray(SEGMENTS[:, :, None] == SEGMENTS[:, None])
    order = jnp.argsort(jnp.argsort(jnp.where(seen, -scores, jnp.inf), -1, stable=True), -1)
    seen &= order < K
    products = jnp.einsum("bshk,bthk->bhst", q, k) / np.sqrt(NOPE + ROPE)
    probs = jax.nn.softmax(jnp.where(seen[:, None], products, -jnp.inf), -1)
    heads = jnp.einsum("bhst,bthv->bshv", probs, v)
    target = jax.lax.stop_gradient(probs.mean(1))
    log_index = jax.nn.log_softmax(jnp.where(seen, scores, -jnp.inf), -1)
    safe = jnp.where(seen, target, 1.0)
    divergence = jnp.sum(jnp.where(seen, safe * (jnp.log(safe) - log_index), 0.0), -1)
    valid = jnp.asarray(SEGMENTS > 0) if packed else jnp.ones((B, S), bool)
    loss = jnp.sum(jnp.where(valid, divergence, 0.0)) / jnp.sum(valid, dtype=jnp.float32)
    return jnp.einsum("bshv,hvd->bsd", heads, params["output"]), loss


def objective(forward, params, x):
    """Returns (a sum over outputs plus the loss, with its gradients)."""

    def total(params, x):
        y, loss = forward(params, x)
        return jnp.sum(jnp.square(y)) + loss

    return jax.jit(jax.value_and_grad(total, (0, 1)))(params, x)


def chunked(layer, params, x, *, packed):
    y, outputs = run(layer, params, x, packed=packed)
    return y, outputs.aux_losses["indexer"]["indexer_loss"].value


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_a_mask(packed):
    forward = functools.partial(chunked, attention(), packed=packed)
    got = objective(forward, parameters(), X)
    want = objective(functools.partial(masked, packed=packed), parameters(), X)
    tiny.assert_trees_close(got, want)
    assert all(np.any(grad) for grad in jax.tree.leaves(got))


@pytest.mark.parametrize("sparse", [True, False])
def test_each_loss_reaches_its_own_parameters_only(sparse):
    layer = attention(INDEXER.clone(sparse=sparse))
    parts = [
        jax.grad(lambda p, x, i=i: jnp.sum(chunked(layer, p, x, packed=True)[i] ** 2), (0, 1))
        for i in (0, 1)
    ]
    of_output, of_loss = (jax.jit(part)(parameters(), X) for part in parts)
    assert not any(np.any(x) for x in jax.tree.leaves(of_output[0]["indexer"]))
    assert all(np.any(x) for x in jax.tree.leaves(of_loss[0]["indexer"]))
    others = {name: x for name, x in of_loss[0].items() if name != "indexer"}
    assert not any(np.any(x) for x in jax.tree.leaves((others, of_loss[1])))


# -- Special cases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"num_chosen": S}, {"sparse": False}], ids=str)
def test_all_keys_give_attention_without_an_indexer(fields):
    plain = {name: x for name, x in parameters().items() if name != "indexer"}
    got, _ = run(attention(INDEXER.clone(**fields)), parameters(), packed=True)
    want, outputs = run(attention(None), plain, packed=True)
    np.testing.assert_array_equal(got, want)
    assert not outputs.aux_losses


def test_of_equal_scores_the_earliest_keys_are_chosen():
    params = parameters()
    params = params | {
        "indexer": params["indexer"] | {"head_weights": np.zeros((D, J), np.float32)}
    }
    got, _ = run(attention(), params, packed=False)
    want, _ = by_hand(params, packed=False)  # Its sort keeps the order of equal scores.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_without_a_weight_there_is_no_loss():
    _, outputs = run(attention(INDEXER.clone(loss_weight=0.0)), parameters(), packed=True)
    assert not outputs.aux_losses


def test_no_array_holds_all_pairs_of_tokens():
    size, x = 2048, normal(1, 2048, D)
    positions = np.arange(size)[None]

    def total(params):
        y, outputs = call_and_collect(attention(), params, x, positions=positions)
        return jnp.sum(y) + outputs.aux_losses["indexer"]["indexer_loss"].value

    sites = walk(jax.make_jaxpr(jax.grad(total))(parameters()).jaxpr)
    assert max(x.aval.size for site in sites for x in site.eqn.outvars) < size**2


def test_a_quantized_projection_of_latents_has_a_gradient():
    quantized = attention(quantization=Quantization.FP8_BLOCK)
    got, want = (
        objective(functools.partial(chunked, layer, packed=True), parameters(), X)[1][0]["kv_up"]
        for layer in (quantized, attention())
    )
    assert np.linalg.norm(got - want) < 0.2 * np.linalg.norm(want)


MESHES = [{"model": 2}, {"fsdp": 2, "model": 4}, {"seq": 4}, {"fsdp": 2, "seq": 2, "model": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_mesh_gives_the_values_of_one_device(axes):
    forward = functools.partial(chunked, attention(), packed=True)
    x = X[:, :128]
    want = objective(forward, parameters(), x)
    with jax.set_mesh(tiny.mesh(**axes)):
        got = objective(forward, parameters(), x)
    tiny.assert_trees_close(got, want)


@pytest.mark.parametrize(
    ("indexer", "fields", "message"),
    [
        (INDEXER, {"q_lora_rank": None}, "q_lora_rank=None"),
        (INDEXER.clone(index_dim=3), {}, "index_dim=3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(indexer, fields, message):
    with pytest.raises(UserError, match=message):
        attention(indexer).config.clone(**fields).instantiate(parent=None)


def test_flops_count_all_pairs_of_the_index_and_the_chosen_keys():
    layer, without = attention(), attention(None)
    projections = 2 * (6 * J * DIM + D * DIM + D * J)
    seen = sum(range(1, S + 1)) / S
    attended = sum(min(t, K) for t in range(1, S + 1)) / S
    want = without.forward_flops_per_token(S) + projections + 2 * seen * J * DIM
    want += 2 * H * (attended * (5 + ROPE + 5) - seen * (NOPE + ROPE + V))
    assert layer.forward_flops_per_token(S) == pytest.approx(want, rel=1e-12)
    assert layer.forward_flops_per_token(K) == pytest.approx(
        without.forward_flops_per_token(K) + projections + (K + 1) * J * DIM, rel=1e-12
    )
