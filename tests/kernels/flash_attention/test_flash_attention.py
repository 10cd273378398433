import logging

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

from moelib.kernels.backend import warn_once
from moelib.kernels.flash_attention import MaskSpec, flash_attention
from tests.kernels.flash_attention.cases import CASES, Case, assert_close, exact, pulled
from tests.kernels.flash_attention.cases import operands as operands_of
from tests.kernels.gpu_topology import H100

BACKENDS = ["xla", "reference"]
SPEC = MaskSpec(8**-0.5)
attend = jax.jit(flash_attention, static_argnames=("spec", "backend"))  # One program per call.


def operands(seq_len=7, heads=4, groups=2, dim=8, dtype=jnp.float32):
    rng = np.random.default_rng(seq_len)
    shapes = (2, seq_len, heads, dim), (2, seq_len, groups, dim), (2, seq_len, groups, dim)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


IDS = jnp.asarray([[1, 1, 2, 2, 2, 2, 3], [1, 1, 1, 2, 2, 0, 0]], jnp.int32)


def by_loop(q, k, v, segment_ids=None, causal=True, scale=SPEC.scale):
    """Each query by itself, in float64, over the keys that it may see."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = np.arange(k.shape[1])
        if causal:
            seen = seen[seen <= i]
        if segment_ids is not None:
            ids = np.asarray(segment_ids)[b]
            seen = seen[ids[seen] == ids[i]]
        group = h // (q.shape[2] // k.shape[2])
        scores = k[b, seen, group] @ q[b, i, h] * scale
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, seen, group] / weights.sum()
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "packed"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_values_are_those_of_each_query_by_itself(backend, causal, ids, heads, groups):
    q, k, v = operands(heads=heads, groups=groups)
    spec = SPEC._replace(causal=causal)
    got = attend(q, k, v, spec, segment_ids=ids, backend=backend)
    np.testing.assert_allclose(got, by_loop(q, k, v, ids, causal), rtol=1e-5, atol=1e-6)


# The kernels for TPUs compute the others in every run.
SOME = [pytest.param(c, marks=pytest.mark.slow) if i % 4 else c for i, c in enumerate(CASES)]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_blocks_give_the_values_and_gradients_of_the_reference(case):
    got = pulled(*operands_of(case), spec=case.spec(), backend="xla")
    dtype = got[0].dtype
    want = jax.tree.map(lambda x: x.astype(dtype), exact(case))
    assert_close(got, want, 1e-5 if dtype == jnp.float32 else 2**-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_are_as_separate_ones(backend):
    (q, k, v), sinks = operands(90), jnp.asarray([0.5, -1.0, 2.0, 0.0])
    spec, options = SPEC._replace(window=16), {"sinks": sinks, "backend": backend}
    ids = jnp.asarray([[1] * 40 + [2] * 50] * 2, jnp.int32)
    packed = attend(q, k, v, spec, segment_ids=ids, **options)
    for part in np.s_[:, :40], np.s_[:, 40:]:
        alone = attend(q[part], k[part], v[part], spec, **options)
        np.testing.assert_allclose(packed[part], alone, rtol=1e-5, atol=1e-6)


def test_it_works_in_shard_map_with_replicated_sinks():
    case = Case(72, 4, 2, 64, window=20, sinks=True, packed=True)
    q, k, v, sinks, ids, grad = operands_of(case)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(q, k, v, sinks, ids, grad):
        out = flash_attention(q, k, v, case.spec(), segment_ids=ids, sinks=sinks)
        return jax.lax.psum(jnp.sum(out * grad), "data")

    specs = (split, split, split, whole, split, split)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=whole)
    got = jax.jit(jax.grad(run, argnums=(0, 1, 2, 3)))(q, k, v, sinks, ids, grad)
    want = pulled(q, k, v, sinks, ids, grad, spec=case.spec(), backend="reference")[1]
    assert_close(got, want, 1e-5)


def test_later_tokens_and_other_segments_change_nothing():
    q, k, v = operands()
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2]] * 2, jnp.int32)
    before = attend(q, k, v, SPEC, segment_ids=ids)
    k, v = k.at[:, 6].set(9.0), v.at[:, 6].set(-9.0)
    k, v = k.at[:, 0].set(9.0), v.at[:, 0].set(-9.0)
    after = attend(q, k, v, SPEC, segment_ids=ids)
    np.testing.assert_array_equal(after[:, 3:6], before[:, 3:6])
    assert not np.allclose(after[:, 6], before[:, 6])


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_window_of_one_each_token_gives_its_own_value(backend):
    q, k, v = operands(heads=2, groups=2)
    out = attend(q, k, v, SPEC._replace(window=1), backend=backend)
    np.testing.assert_allclose(out, v, rtol=1e-6)


def test_large_scores_neither_overflow_nor_leave_the_mask():
    q, k, v = operands()
    got = attend(1e4 * q, 1e4 * k, v, SPEC)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, by_loop(1e4 * q, 1e4 * k, v), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_within_its_rounding_of_float32(backend):
    q, k, v = operands(dtype=jnp.bfloat16)
    got = attend(q, k, v, SPEC, backend=backend)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), by_loop(q, k, v), atol=2**-6)


def test_the_xla_form_on_a_gpu_is_logged_once_with_its_reason_and_the_override(caplog):
    warn_once.cache_clear()
    device = AbstractDevice(device_kind=H100, num_cores=132, platform="gpu")
    q, kv = (jax.ShapeDtypeStruct((1, 64, heads, 64), jnp.bfloat16) for heads in (4, 2))
    run = lambda **kw: jax.eval_shape(lambda *x: flash_attention(*x, spec=SPEC, **kw), q, kv, kv)
    with caplog.at_level(logging.WARNING):
        run()
        assert not caplog.records  # On a CPU it is the fastest form.
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            run(backend="xla")
            assert not caplog.records  # It was asked for.
            run()
            run()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert H100 in record.getMessage()
    assert "MOELIB_KERNEL_BACKEND=flash_attention=gpu" in record.getMessage()
    assert "flash_attention=cudnn" in record.getMessage()


# Errors.


@pytest.fixture(autouse=True)
def _no_shape_checks(request, monkeypatch):
    """Tests of errors run without jaxtyping, as users do, so that our own errors are seen."""
    if "refused" in request.node.name:
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 4, "causal": False}, "window=4 with causal=False"),
        ({"logit_cap": 0.0}, r"logit_cap=0\.0"),
    ],
)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_spec_that_makes_no_sense_is_refused(change, match, backend):
    with pytest.raises(ValueError, match=match):
        flash_attention(*operands(), spec=SPEC._replace(**change), backend=backend)


@pytest.mark.parametrize(
    ("cut", "match"),
    [
        (lambda q, k, v: (q, k[:, :5], v[:, :5]), r"\[2, 5, 2, 8\].*\[B, Q, G, D\]"),
        (lambda q, k, v: (q[:, :5], k, v), r"q \[2, 5, 4, 8\]"),
        (lambda q, k, v: (q, k[:1], v[:1]), r"k \[1, 7, 2, 8\]"),
        (lambda q, k, v: (q, k[..., :4], v), r"k \[2, 7, 2, 4\]"),
        (lambda q, k, v: (q, k, v[:, :, :1]), r"v \[2, 7, 1, 8\]"),
        (lambda q, k, v: (q[0], k, v), r"q \[7, 4, 8\]"),
        (lambda q, k, v: (q[:0], k[:0], v[:0]), "above 0"),
    ],
)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_shapes_that_disagree_are_refused(cut, match, backend):
    with pytest.raises(ValueError, match=match):
        flash_attention(*cut(*operands()), spec=SPEC, backend=backend)


def test_sinks_and_segments_that_disagree_are_refused():
    arrays = operands()
    with pytest.raises(ValueError, match=r"sinks \[3\]"):
        flash_attention(*arrays, spec=SPEC, sinks=jnp.ones(3))
    with pytest.raises(ValueError, match=r"segment_ids \[2, 5\]"):
        flash_attention(*arrays, spec=SPEC, segment_ids=jnp.ones((2, 5), jnp.int32))
    with pytest.raises(ValueError, match="q_segments are float32"):
        flash_attention(*arrays, spec=SPEC, segment_ids=jnp.ones((2, 7)))


def test_heads_and_dtypes_that_disagree_are_refused():
    q, k, v = operands(heads=4, groups=3)
    with pytest.raises(ValueError, match=r"4 query.*into 3"):
        flash_attention(q, k, v, SPEC)
    q, k, v = operands()
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        flash_attention(q, k.astype(jnp.bfloat16), v, SPEC)
