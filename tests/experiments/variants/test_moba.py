"""Block attention against the paper's equations, with documents; its limits."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.variants import moba
from experiments.variants.moba import BlockAttention
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from tests.experiments.variants.compare import assert_equal_to_reference
from tests.layers.calling import build, call, initial, normal
from tests.oracles.moe import softmax
from tests.oracles.rope import rotated

B, S, D, H, G, Dh, SIZE, BEST = 2, 19, 6, 4, 2, 4, 3, 2
# A document that begins inside a block of the sequence, and padding.
LENGTHS = [(7, 12), (15, 2)]
SEGMENTS = np.array([[1] * a + [2] * b + [0] * (S - a - b) for a, b in LENGTHS], np.int32)
POSITIONS = np.array([[*range(a), *range(b), *range(S - a - b)] for a, b in LENGTHS], np.int32)
AT, IN = jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS)
CFG = BlockAttention.default_config().set(
    input_dim=D, num_heads=H, num_kv_heads=G, head_dim=Dh, block_size=SIZE, num_blocks=BEST
)


def reference(p, x):
    """Returns equations 2 to 6 of each document and query alone."""
    q = rotated(np.einsum("bsd,dhk->bshk", x, p["q"]), POSITIONS[..., None])
    kv = np.einsum("bsd,dngk->bsngk", x, p["kv"])
    k, v = rotated(kv[:, :, 0], POSITIONS[..., None]), kv[:, :, 1]
    out = np.zeros((B, S, D))
    for b, s, h in np.ndindex(B, S, H):
        g = h // (H // G)
        own = np.flatnonzero(SEGMENTS[b] == SEGMENTS[b, s])  # In order of positions.
        at = POSITIONS[b, s]
        starts = range(0, at // SIZE * SIZE, SIZE)  # Of earlier blocks.
        scores = [q[b, s, h] @ k[b, own[i : i + SIZE], g].mean(0) for i in starts]
        best = np.argsort(-np.array(scores))[: BEST - 1]
        seen = [*(SIZE * i + j for i in best for j in range(SIZE))]
        seen += range(at // SIZE * SIZE, at + 1)
        keys = own[np.array(seen, int)]
        probs = softmax(k[b, keys, g] @ q[b, s, h] / np.sqrt(Dh))
        out[b, s] += probs @ v[b, keys, g] @ p["output"][h]
    return out


@pytest.mark.parametrize("chunk", [64, 4])  # Whole sequences, and chunks that do not divide them.
def test_values_and_gradients_are_those_of_the_equations(chunk, monkeypatch):
    monkeypatch.setattr(moba, "_CHUNK", chunk)
    made = build(CFG)
    run = lambda operands: functional(
        made,
        None,
        operands["p"],
        {"x": operands["x"], "positions": AT, "segment_ids": IN},
        is_training=True,
    )[0]
    operands = {"p": initial(made), "x": normal(B, S, D)}
    at = lambda operands: reference(operands["p"], operands["x"])
    assert_equal_to_reference(run, at, operands)


def test_all_blocks_are_full_attention():
    plain = GroupedQueryAttention.default_config().set(
        input_dim=D, num_heads=H, num_kv_heads=G, head_dim=Dh
    )
    made, params, x = build(CFG.clone(num_blocks=S)), initial(build(plain)), normal(B, S, D)
    want = call(build(plain), params, x, positions=AT, segment_ids=IN)
    got = call(made, params, x, positions=AT, segment_ids=IN)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", 4), ("sinks", True), ("logit_cap", 5.0), ("block_size", 0), ("num_blocks", 0)],
)
def test_refused_fields_are_named(name, value):
    with pytest.raises(UserError, match=f"{name}={value}"):
        build(CFG, **{name: value})
