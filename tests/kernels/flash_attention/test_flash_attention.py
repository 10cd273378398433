import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.kernels.flash_attention import flash_attention, reference, xla
from moelib.kernels.flash_attention.reference import MaskSpec, Places
from tests.kernels.flash_attention.cases import CASES, Case, assert_close, exact, pulled
from tests.kernels.flash_attention.cases import operands as operands_of

BACKENDS = ["xla", "reference", None]


def operands(seq_len=7, heads=4, groups=2, dim=8, dtype=jnp.float32):
    rng = np.random.default_rng(seq_len)
    shapes = (2, seq_len, heads, dim), (2, seq_len, groups, dim), (2, seq_len, groups, dim)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def segments(seq_len, seed=0):
    """Returns two rows of segments, the second with padding at its end."""
    rng = np.random.default_rng(seed)
    rows = np.cumsum(rng.random((2, seq_len)) < 0.3, axis=1) + 1
    rows[1, seq_len - seq_len // 4 :] = 0
    return jnp.asarray(rows, jnp.int32)


def by_loop(q, k, v, segment_ids, causal, scale):
    """Each query by itself, in float64, over the keys that it may see."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = np.arange(k.shape[1])
        if causal:
            seen = seen[seen <= i]
        if segment_ids is not None:
            row = np.asarray(segment_ids)[b]
            seen = seen[row[seen] == row[i]]
        group = h // (q.shape[2] // k.shape[2])
        scores = k[b, seen, group] @ q[b, i, h] * scale
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, seen, group] / weights.sum()
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_values_are_those_of_each_query_by_itself(backend, causal, packed, heads, groups):
    q, k, v = operands(heads=heads, groups=groups)
    ids = segments(7) if packed else None
    got = flash_attention(q, k, v, ids, causal=causal, backend=backend)
    want = by_loop(q, k, v, ids, causal, 8**-0.5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_scale_multiplies_the_scores():
    q, k, v = operands()
    want = by_loop(q, k, v, None, True, 0.7)
    np.testing.assert_allclose(flash_attention(q, k, v, scale=0.7), want, rtol=1e-5, atol=1e-6)


# The others are computed by the TPU's kernels in every run.
SOME = [pytest.param(c, marks=pytest.mark.slow) if i % 4 else c for i, c in enumerate(CASES)]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_blocks_give_the_values_and_gradients_of_the_reference(case):
    got = pulled(*operands_of(case), **case.options(), backend="xla")
    dtype = got[0].dtype
    want = jax.tree.map(lambda x: x.astype(dtype), exact(case))
    assert_close(got, want, 1e-5 if dtype == jnp.float32 else 2**-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_are_as_separate_ones(backend):
    (q, k, v), sinks = operands(90), jnp.asarray([0.5, -1.0, 2.0, 0.0])
    options = {"window": 16, "sinks": sinks, "backend": backend}
    ids = jnp.asarray([[1] * 40 + [2] * 50] * 2, jnp.int32)
    packed = flash_attention(q, k, v, ids, **options)
    for part in np.s_[:, :40], np.s_[:, 40:]:
        alone = flash_attention(q[part], k[part], v[part], **options)
        np.testing.assert_allclose(packed[part], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_that_see_nothing_give_zeros_and_zero_gradients(backend, with_sinks):
    """Places where no query may see any key: their positions come before all keys."""
    q, k, v = operands(8)
    index = jnp.arange(8, dtype=jnp.int32)
    places, spec = Places(index, index + 4), MaskSpec(1.0)
    sinks = jnp.ones(4) if with_sinks else None

    def attend(q, k, v):
        if backend == "reference":
            return reference.attention(q, k, v, sinks, places, spec)
        return xla.forward(q, k, v, sinks, places, spec, in_order=False)[0]

    out = attend(q, k, v)
    assert not np.any(out[:, :4])
    assert np.all(np.any(out[:, 4:], axis=-1))
    if backend == "reference":
        grads = jax.grad(lambda q, k, v: attend(q, k, v).sum(), (0, 1, 2))(q, k, v)
    else:
        lse, delta = (
            xla.forward(q, k, v, sinks, places, spec, in_order=False)[1],
            jnp.ones((2, 4, 8)),
        )
        grads = xla.backward(q, k, v, lse, delta, q, places, spec, in_order=False)
    assert all(np.isfinite(grad).all() for grad in grads)
    assert not np.any(grads[0][:, :4])
    assert not np.any(grads[1][:, 4:])
    assert not np.any(grads[2][:, 4:])


@pytest.mark.parametrize("backend", ["xla", "tpu"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_rows_that_may_attend_to_it(place, wrong, backend):
    clean = operands(20, heads=2, groups=1, dim=64)
    ids = jnp.asarray([[1] * 12 + [2] * 8] * 2, jnp.int32)
    broken = list(clean)
    broken[place] = broken[place].at[0, 8, 0, 3].set(wrong)
    run = functools.partial(pulled, sinks=None, ids=ids, grad=clean[0], causal=True, window=3)
    (out, grads), (clean_out, clean_grads) = (
        run(*x, logit_cap=None, backend=backend) for x in (broken, clean)
    )
    sees = np.zeros((2, 20), bool)
    sees[0, 8:11] = True  # The rows within the window of token 8.
    if place == 0:
        sees[0, 9:11] = False  # A query is seen by none but itself.
    for a, b in zip((out, grads[0]), (clean_out, clean_grads[0]), strict=True):
        np.testing.assert_array_equal(a[~sees], b[~sees])
    assert np.isnan(out[sees]).any(axis=(1, 2)).all()
    # The keys that such a row may see.
    seen = np.zeros((2, 20), bool)
    seen[0, 6 : 9 if place == 0 else 11] = True
    for a, b in zip(grads[1:3], clean_grads[1:3], strict=True):
        np.testing.assert_array_equal(a[~seen], b[~seen])


def test_it_works_in_shard_map_with_replicated_sinks():
    case = Case(72, 4, 2, 64, window=20, sinks=True, packed=True)
    q, k, v, sinks, ids, grad = operands_of(case)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(q, k, v, sinks, ids, grad):
        out = flash_attention(q, k, v, ids, window=20, sinks=sinks)
        return jax.lax.psum(jnp.sum(out * grad), "data")

    specs = (split, split, split, whole, split, split)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=whole)
    got = jax.jit(jax.grad(run, argnums=(0, 1, 2, 3)))(q, k, v, sinks, ids, grad)
    want = pulled(q, k, v, sinks, ids, grad, **case.options(), backend="reference")[1]
    assert_close(got, want, 1e-5)


def test_what_comes_later_and_other_segments_change_nothing():
    q, k, v = operands()
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2]] * 2, jnp.int32)
    before = flash_attention(q, k, v, ids)
    k, v = k.at[:, 6].set(9.0), v.at[:, 6].set(-9.0)
    k, v = k.at[:, 0].set(9.0), v.at[:, 0].set(-9.0)
    after = flash_attention(q, k, v, ids)
    np.testing.assert_array_equal(after[:, 3:6], before[:, 3:6])
    assert not np.allclose(after[:, 6], before[:, 6])


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_window_of_one_each_token_gives_its_own_value(backend):
    q, k, v = operands(heads=2, groups=2)
    out = flash_attention(q, k, v, window=1, backend=backend)
    np.testing.assert_allclose(out, v, rtol=1e-6)


def test_a_first_token_gives_its_own_value():
    q, k, v = operands(heads=2, groups=2)
    np.testing.assert_allclose(flash_attention(q, k, v)[:, 0], v[:, 0], rtol=1e-6)


def test_large_scores_neither_overflow_nor_leave_the_mask():
    q, k, v = operands()
    got = flash_attention(1e4 * q, 1e4 * k, v)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, by_loop(1e4 * q, 1e4 * k, v, None, True, 8**-0.5), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_within_its_rounding_of_float32(backend):
    q, k, v = operands(dtype=jnp.bfloat16)
    got = flash_attention(q, k, v, backend=backend)
    assert got.dtype == jnp.bfloat16
    want = by_loop(q, k, v, None, True, 8**-0.5)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2**-6)


def test_heads_that_do_not_divide_into_groups_are_refused():
    q, k, v = operands(heads=4, groups=3)
    with pytest.raises(ValueError, match="4 query heads do not divide into 3 groups"):
        flash_attention(q, k, v)


def test_an_unknown_backend_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"has no backend 'xlaa'; .*xla"):
        flash_attention(*operands(), backend="xlaa")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is 0; .*set 1 or more"),
        ({"window": 4, "causal": False}, "window is 4 with causal=False; .*set causal=True"),
        ({"logit_cap": 0.0}, "logit_cap is 0.0; set a number above 0"),
        ({"sinks": jnp.ones(3)}, r"sinks have shape \[3\]; .*\[4\]"),
    ],
)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_what_makes_no_sense_is_refused(options, message, backend, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        flash_attention(*operands(), **options, backend=backend)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda q, k, v: (q, k[:, :5], v[:, :5]), r"k has shape \(2, 5, 2, 8\);.* \(2, 7, 2, 8\)"),
        (lambda q, k, v: (q[:, :5], k, v), r"k has shape \(2, 7, 2, 8\);.* \(2, 5, 2, 8\)"),
        (lambda q, k, v: (q, k[:1], v[:1]), r"k has shape \(1, 7, 2, 8\)"),
        (lambda q, k, v: (q, k[..., :4], v), r"k has shape \(2, 7, 2, 4\)"),
        (lambda q, k, v: (q, k, v[:, :5]), r"v has shape \(2, 5, 2, 8\);.* \(2, 7, 2, 8\)"),
        (lambda q, k, v: (q, k, v[:, :, :1]), r"v has shape \(2, 7, 1, 8\)"),
        (lambda q, k, v: (q, k, v[..., :4]), r"v has shape \(2, 7, 2, 4\)"),
        (lambda q, k, v: (q[0], k, v), r"q \(7, 4, 8\) and k .* must be \[B, S, H, Dh\]"),
        (lambda q, k, v: (q, k[0], v), r"k \(7, 2, 8\) must be"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]), "have a size of 0; set .*head_dim"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "have a size of 0; set .*heads"),
        (lambda q, k, v: (q[:0], k[:0], v[:0]), "have a size of 0; set batch"),
    ],
)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_shapes_that_do_not_fit_together_are_named(cut, message, backend, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        flash_attention(*cut(*operands()), backend=backend)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (jnp.ones((2, 5), jnp.int32), r"int32\[2, 5\]; they must be integers, \[2, 7\]"),
        (jnp.ones(7, jnp.int32), r"int32\[7\]"),
        (jnp.ones((2, 7)), r"float32\[2, 7\]; they must be integers"),
    ],
    ids=["short", "one row", "floats"],
)
def test_segment_ids_are_integers_one_a_token(ids, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    q, k, v = operands()
    with pytest.raises(ValueError, match=f"segment_ids of q are {message}"):
        flash_attention(q, k, v, ids)


def test_operands_of_two_dtypes_are_refused():
    q, k, v = operands()
    with pytest.raises(ValueError, match="k is bfloat16 and v is float32; cast them"):
        flash_attention(q, k.astype(jnp.bfloat16), v)
