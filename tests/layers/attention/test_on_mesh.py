"""Attention on meshes: against the reference on one device, values and all gradients."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import jaxpr
from moelib.kernels.flash_attention import MaskSpec, flash_attention
from moelib.layers.attention.on_mesh import attend
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from tests.kernels.tpu_topology import compile_apart, needs_libtpu
from tests.layers.calling import normal

B, S, H, G, DH, DV = 4, 32, 4, 2, 8, 12
Q, GRAD = (jnp.asarray(normal(B, S, H, dim, seed=s)) for s, dim in enumerate((DH, DV)))
K, V = (jnp.asarray(normal(B, S, G, dim, seed=s)) for s, dim in ((2, DH), (3, DV)))
PLAIN = MaskSpec(DH**-0.5)
SINKS = jnp.asarray(normal(H, seed=4))
LENGTHS = np.array(
    [[32, 0, 0], [5, 20, 4], [1, 1, 1], [16, 16, 0]]
)  # Of the documents of a sequence.
SEGMENTS = jnp.asarray(
    [np.repeat([1, 2, 3, 0], [*row, S - row.sum()]) for row in LENGTHS], jnp.int32
)
MESHES = [
    {"seq": 4, "model": 2},
    *(
        pytest.param(axes, marks=pytest.mark.slow)
        for axes in (
            {"seq": 8},
            {"expert": 2, "seq": 2, "model": 2},
            {"fsdp": 2, "expert": 2, "model": 2},
        )
    ),
]
CASES = {
    "plain": (PLAIN, None, None),
    "packed": (PLAIN, SEGMENTS, None),
    "window and sinks": (PLAIN._replace(window=5), None, SINKS),
    "not causal": (PLAIN._replace(causal=False), SEGMENTS, SINKS),
    "all": (MaskSpec(0.3, window=9, logit_cap=2.0), SEGMENTS, SINKS),
    "all in zigzag": (MaskSpec(0.3, window=20, logit_cap=2.0), SEGMENTS, SINKS),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def pulled(fn, spec, q, k, v, sinks, segments):
    """Returns (value, gradients in q, k, v and sinks)."""
    run = lambda q, k, v, sinks: fn(q, k, v, segments, sinks, spec=spec)
    value, pull = jax.vjp(run, q, k, v, sinks)
    return value, pull(GRAD.astype(value.dtype))


def reference(q, k, v, segments, sinks, spec):
    return flash_attention(q, k, v, spec, segment_ids=segments, sinks=sinks, backend="reference")


def on_mesh(axes, spec, *arrays):
    with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(**axes))):
        return jax.device_get(pulled(attend, spec, *arrays))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow)
        if case in ("packed", "window and sinks")
        else case
        for case in CASES  # Those of all options have both.
    ],
)
def test_every_mesh_equals_the_reference_on_one_device(mesh, case):
    spec, segments, sinks = CASES[case]
    got = on_mesh(mesh, spec, Q, K, V, sinks, segments)
    want = pulled(reference, spec, Q, K, V, sinks, segments)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), got, want)


@pytest.mark.parametrize(
    ("n", "mask", "rotations", "num_keys", "dealt"),
    [
        (4, {}, 3, 16, 16),
        (8, {}, 7, 8, 16),
        (4, {"causal": False}, 3, 16, 0),
        (8, {"causal": False}, 7, 8, 0),
        (4, {"window": 33}, 3, 16, 16),  # More than half the sequence.
        (4, {"window": 32}, 2, 16, 0),
        (8, {"window": 32}, 4, 8, 0),
        (8, {"window": 10}, 2, 8, 0),
        (8, {"window": 9}, 1, 8, 0),  # The query itself and all keys of one other device.
        (8, {"window": 3}, 1, 3, 0),
        (8, {"window": 1}, 0, 0, 0),
    ],
)
def test_keys_and_gradients_are_sent_as_far_as_they_are_seen(n, mask, rotations, num_keys, dealt):
    q, k, v = (jax.ShapeDtypeStruct((B, 64, heads, DH), jnp.bfloat16) for heads in (H, G, G))
    spec = PLAIN._replace(**mask)

    def pulled(q, k, v):
        value, pull = jax.vjp(lambda q, k, v: attend(q, k, v, spec=spec), q, k, v)
        return pull(value)

    with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(seq=n, data=8 // n))):
        trace = jax.make_jaxpr(pulled)(q, k, v)
    found = collections.Counter()
    for eqn, executions in jaxpr.walk(trace):
        if eqn.primitive.name == "ppermute":
            (made,) = (x.aval for x in eqn.outvars)
            found[made.shape[1], made.dtype.name] += executions
    # Keys and values forward and backward, their gradients, and two pieces of q, k, v and output.
    want = {(num_keys, "bfloat16"): 4 * rotations, (num_keys, "float32"): 2 * rotations}
    assert found == collections.Counter(want | {(32 // n, "bfloat16"): dealt})


def test_a_ring_in_bfloat16_is_summed_in_float32():
    q, k, v = (x.astype(jnp.bfloat16) for x in (Q, K, V))
    got, _ = on_mesh({"seq": 8}, PLAIN, q, k, v, None, None)
    want, _ = pulled(reference, PLAIN, *(x.astype(jnp.float32) for x in (q, k, v)), None, None)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), want, atol=2e-2)


UNEVEN = np.zeros((2, 24, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("axes", "arrays", "named"),
    [
        ({"seq": 8}, (UNEVEN, UNEVEN, UNEVEN), "seq_len=24.*16"),
        ({"model": 4, "data": 2}, (Q, K, V), "keys:.*'activation_heads'.*2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(axes, arrays, named):
    mesh = create_device_mesh(mesh_shape_from_axes(**axes))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=named):
        jax.eval_shape(functools.partial(attend, spec=PLAIN), *arrays)


@pytest.mark.parametrize("spec", [PLAIN._replace(window=8), PLAIN._replace(causal=False)])
def test_a_plain_split_needs_one_piece_for_each_device(spec):
    with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(seq=8))):
        assert jax.eval_shape(lambda x: attend(x, x, x, spec=spec), UNEVEN).shape == UNEVEN.shape


@pytest.mark.slow
@needs_libtpu
def test_keys_are_sent_during_attention_on_tpus():
    (loop,) = compile_apart("tests.layers.attention.compile_for_tpu")
    permute = "collective-permute"
    assert loop == [*[f"{permute}-start"] * 2, "tpu_custom_call", *[f"{permute}-done"] * 2]
