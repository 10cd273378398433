import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.kernels.cross_entropy import cross_entropy, xla
from tests.kernels.comparing import assert_close

T, D, V = 37, 12, 50


def _operands(dtype=jnp.float32, num_tokens=T):
    """Returns (hidden, head, labels); some labels are ignored, the last two too."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(num_tokens, D)), dtype)
    head = jnp.asarray(rng.normal(size=(D, V)), dtype)
    labels = rng.integers(0, V, num_tokens)
    labels[[0, 5, *range(num_tokens - 2, num_tokens)]] = -1, -100, -1, -1
    return hidden, head, jnp.asarray(labels, jnp.int32)


def _plain(hidden, head, labels, z_loss=0.0):
    """The definition in log-probabilities, for plain differentiation."""
    counted = labels >= 0
    logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32)
    log_probs = jax.nn.log_softmax(logits)
    nll = -log_probs[jnp.arange(len(labels)), jnp.maximum(labels, 0)]
    lse = jnp.log(jnp.sum(jnp.exp(logits), axis=1))
    loss = jnp.sum(jnp.where(counted, nll + z_loss * lse**2, 0))
    return loss, (jnp.where(counted, nll, 0), jnp.where(counted, lse, 0))


def _kernel(hidden, head, labels, **options):
    if options.get("transposed_head"):
        head = head.T
    out = cross_entropy(hidden, head, labels, **options)
    return out.loss, (out.nll, out.lse)


def _chunks_of(size, monkeypatch):
    """Sets the number of tokens of a chunk."""
    monkeypatch.setattr(xla, "chunk_size_for", lambda *_: size)


def _with_gradients(function, *arrays):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(*arrays)


@pytest.mark.parametrize(
    ("backend", "chunk_size"), [("reference", 37), ("xla", 37), ("xla", 8), ("xla", 36)]
)
def test_values_and_gradients_equal_the_definition(backend, chunk_size, monkeypatch):
    _chunks_of(chunk_size, monkeypatch)
    arrays = _operands()
    run = functools.partial(_kernel, backend=backend)
    expected = _with_gradients(_plain, *arrays)
    assert_close(_with_gradients(run, *arrays), expected)
    assert_close(jax.jit(run)(*arrays), expected[0])


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("transposed_head", [False, True])
def test_z_loss_and_tables_equal_the_definition(backend, transposed_head, monkeypatch):
    _chunks_of(8, monkeypatch)
    arrays = _operands()
    run = functools.partial(_kernel, backend=backend, transposed_head=transposed_head, z_loss=0.1)
    expected = _with_gradients(functools.partial(_plain, z_loss=0.1), *arrays)
    assert_close(_with_gradients(run, *arrays), expected)


def test_a_uniform_prediction_costs_log_v():
    out = cross_entropy(jnp.zeros((3, D)), jnp.ones((D, V)), jnp.arange(3))
    np.testing.assert_allclose(out.loss, 3 * np.log(V), rtol=1e-6)
    np.testing.assert_allclose(out.lse, np.full(3, np.log(V)), rtol=1e-6)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_bfloat16_has_float32_logits_and_sums(backend, monkeypatch):
    _chunks_of(8, monkeypatch)
    arrays = _operands(jnp.bfloat16)
    run = functools.partial(_kernel, backend=backend)
    (loss, aux), grads = _with_gradients(run, *arrays)
    exact = _with_gradients(_plain, *arrays)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]
    assert loss.dtype == jnp.float32
    assert_close((loss, aux), exact[0])
    assert_close(grads, exact[1], 2**-7)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_large_logits_stay_finite(backend):
    hidden, head, labels = _operands()
    run = functools.partial(_kernel, backend=backend)
    out = _with_gradients(run, 1e4 * hidden, head, labels)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_ignored_tokens_may_hold_anything(backend, monkeypatch):
    _chunks_of(8, monkeypatch)
    hidden, head, labels = _operands()
    run = functools.partial(_kernel, backend=backend, z_loss=0.1)
    run = jax.jit(functools.partial(_with_gradients, run))  # One program for both.
    stale = jnp.where((labels < 0)[:, None], jnp.nan, hidden)
    assert_close(run(stale, head, labels), run(hidden, head, labels))


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_a_label_beyond_the_vocabulary_makes_its_loss_and_gradients_nan(backend):
    hidden, head, labels = _operands()
    run = functools.partial(_kernel, backend=backend)
    (loss, (nll, _)), grads = _with_gradients(run, hidden, head, labels.at[7].set(V))
    assert np.isnan(loss)
    assert np.flatnonzero(np.isnan(nll)).tolist() == [7]
    if backend == "xla":
        assert np.isnan(grads[0][7]).all()
        assert np.isnan(grads[1]).any()


def test_ignored_tokens_alone_cost_nothing():
    hidden, head, labels = _operands()
    for leaf in jax.tree.leaves(_with_gradients(_kernel, hidden, head, jnp.full_like(labels, -1))):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_nll_and_lse_are_not_differentiable(backend):
    hidden, head, labels = _operands()

    def run(hidden):
        out = cross_entropy(hidden, head, labels, backend=backend)
        return jnp.sum(out.nll) + jnp.sum(out.lse)

    np.testing.assert_array_equal(jax.grad(run)(hidden), 0)


def test_the_gradient_scales_with_the_cotangent():
    arrays = _operands()
    _, grads = _with_gradients(lambda *a: (0.25 * _kernel(*a)[0], None), *arrays)
    _, whole = _with_gradients(_kernel, *arrays)
    assert_close(grads, jax.tree.map(lambda g: 0.25 * g, whole))


def test_it_works_under_remat_in_a_scan(monkeypatch):
    _chunks_of(8, monkeypatch)

    def twice(run, hidden, head, labels):
        step = jax.checkpoint(lambda total, w: (total + run(hidden * w, head, labels)[0], None))
        return jax.lax.scan(step, jnp.float32(0), jnp.asarray([1.0, 0.5]))[0], None

    arrays = _operands()
    run = functools.partial(twice, _kernel)
    got = _with_gradients(run, *arrays)
    assert_close(got, _with_gradients(functools.partial(twice, _plain), *arrays))


@pytest.mark.parametrize(("backend", "chunk_size"), [("reference", 8), ("xla", 8), ("xla", 3)])
def test_it_works_in_shard_map_with_split_tokens(backend, chunk_size, monkeypatch):
    _chunks_of(chunk_size, monkeypatch)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(*arrays):
        loss, aux = _kernel(*arrays, backend=backend, z_loss=0.1)
        return jax.lax.psum(loss, "data"), aux

    specs = (split, whole, split)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(whole, split))
    arrays = _operands(num_tokens=64)
    got = _with_gradients(run, *arrays)
    assert_close(got, _with_gradients(functools.partial(_plain, z_loss=0.1), *arrays))


def test_bad_input_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    hidden, head, labels = _operands()
    with pytest.raises(ValueError, match=r"head \[50, 12\], .*\[D, V\]"):
        cross_entropy(hidden, head.T, labels)
    with pytest.raises(ValueError, match=r"head \[12, 50\], .*\[V, D\]"):
        cross_entropy(hidden, head, labels, transposed_head=True)
    with pytest.raises(ValueError, match=r"labels \[36\]"):
        cross_entropy(hidden, head, labels[1:])
    with pytest.raises(ValueError, match="'tpu'"):
        cross_entropy(hidden, head, labels, backend="tpu")
