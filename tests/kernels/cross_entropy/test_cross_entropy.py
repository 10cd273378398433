import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.kernels.cross_entropy import cross_entropy
from moelib.kernels.cross_entropy.xla import chunk_size_for
from tests.kernels.comparing import assert_close
from tests.oracles import losses

T, D, V = 37, 12, 50
BACKENDS = ["xla", "reference"]


def _operands(num_tokens=T):
    """Returns (hidden, head, labels); ignored tokens, the last two too, hold NaN."""
    rng = np.random.default_rng(0)
    hidden, head = (
        rng.normal(size=shape).astype(np.float32) for shape in ((num_tokens, D), (D, V))
    )
    labels = rng.integers(0, V, num_tokens).astype(np.int32)
    labels[[0, 5, *range(num_tokens - 2, num_tokens)]] = -1, -100, -1, -1
    hidden[labels < 0] = np.nan
    return hidden, head, labels


def _kernel(hidden, head, labels, **options):
    if options.get("transposed_head"):
        head = head.T
    out = cross_entropy(hidden, head, labels, **options)
    return out.loss, (out.nll, out.lse)


def _with_gradients(function):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))


@functools.cache
def program(backend=None):
    """Returns a function: value and gradients, compiled once for all tests of a backend."""
    return _with_gradients(functools.partial(_kernel, backend=backend))


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("reference", {}),
        ("reference", {"transposed_head": True, "z_loss": 0.1}),
        ("xla", {}),
        ("xla", {"chunk_size": 8, "z_loss": 0.1}),
        ("xla", {"chunk_size": 16, "transposed_head": True, "z_loss": 0.1}),
    ],
    ids=str,
)
def test_values_and_gradients_equal_the_definition(backend, options):
    arrays = _operands()
    expected = losses.cross_entropy(*arrays, options.get("z_loss", 0.0))
    run = functools.partial(_kernel, backend=backend, **options)
    assert_close(_with_gradients(run)(*arrays), expected)
    assert_close(jax.jit(run)(*arrays), expected[0])


def test_a_uniform_prediction_costs_log_v():
    zeros, ones = np.zeros((3, D), np.float32), np.ones((D, V), np.float32)
    loss, (_, lse) = jax.jit(_kernel)(zeros, ones, np.arange(3, dtype=np.int32))
    np.testing.assert_allclose(loss, 3 * np.log(V), rtol=1e-6)
    np.testing.assert_allclose(lse, np.full(3, np.log(V)), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_has_float32_logits_and_sums(backend):
    hidden, head, labels = _operands()
    hidden, head = (x.astype(jnp.bfloat16) for x in (hidden, head))
    run = functools.partial(_kernel, backend=backend, chunk_size=8)
    (loss, aux), grads = _with_gradients(run)(hidden, head, labels)
    exact = losses.cross_entropy(hidden, head, labels)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]
    assert loss.dtype == jnp.float32
    assert_close((loss, aux), exact[0])
    assert_close(grads, exact[1], 2**-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_stay_finite(backend):
    hidden, head, labels = _operands()
    out = program(backend)(1e4 * np.nan_to_num(hidden), head, labels)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_beyond_the_vocabulary_makes_its_loss_and_gradients_nan(backend):
    hidden, head, labels = _operands()
    labels[7] = V
    (loss, (nll, _)), grads = program(backend)(hidden, head, labels)
    assert np.isnan(loss)
    assert np.flatnonzero(np.isnan(nll)).tolist() == [7]
    assert np.isnan(grads[0][7]).all()
    assert np.isnan(grads[1]).any()


def test_ignored_tokens_alone_cost_nothing():
    hidden, head, labels = _operands()
    for leaf in jax.tree.leaves(program("xla")(hidden, head, np.full_like(labels, -1))):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nll_and_lse_are_not_differentiable(backend):
    @jax.grad
    def run(*arrays):
        out = cross_entropy(*arrays, backend=backend)
        return jnp.sum(out.nll) + jnp.sum(out.lse)

    np.testing.assert_array_equal(jax.jit(run)(*_operands()), 0)


def test_it_works_under_remat_in_a_scan_with_its_cotangent():
    arrays, weights = _operands(), np.float32([1.0, 0.5])

    def twice(hidden, head, labels):
        run = lambda w: 0.25 * _kernel(hidden * w, head, labels, chunk_size=8)[0]
        step = jax.checkpoint(lambda total, w: (total + run(w), None))
        return jax.lax.scan(step, jnp.float32(0), weights)[0], None

    (loss, _), grads = _with_gradients(twice)(*arrays)
    expected = [losses.cross_entropy(arrays[0] * w, *arrays[1:]) for w in weights]
    assert_close(loss, np.asarray(sum(value for (value, _), _ in expected) / 4))
    of_hidden = sum(w * grads[0] for w, (_, grads) in zip(weights, expected, strict=True)) / 4
    assert_close(grads, (of_hidden, sum(grads[1] for _, grads in expected) / 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_works_in_shard_map_with_split_tokens(backend):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(*arrays):
        loss, aux = _kernel(*arrays, backend=backend, z_loss=0.1, chunk_size=8)
        return jax.lax.psum(loss, "data"), aux

    specs = (split, whole, split)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(whole, split))
    arrays = _operands(num_tokens=64)
    assert_close(_with_gradients(run)(*arrays), losses.cross_entropy(*arrays, z_loss=0.1))


@pytest.mark.parametrize(
    ("shapes", "options", "named"),
    [
        (((T, D), (V, D), (T,)), {}, r"head \[50, 12\], .*\[D, V\]"),
        (((T, D), (D, V), (T,)), {"transposed_head": True}, r"head \[12, 50\], .*\[V, D\]"),
        (((T, D), (D, V), (T - 1,)), {}, r"labels \[36\]"),
        (((T, D), (D, V), (T,)), {"backend": "tpu"}, "'tpu'"),
    ],
)
def test_bad_input_is_refused(shapes, options, named, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    dtypes = ("float32", "float32", "int32")
    arrays = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match=named):
        jax.eval_shape(functools.partial(cross_entropy, **options), *arrays)


@pytest.mark.parametrize(
    ("num_tokens", "dim", "vocab_size", "expected"),
    [
        (4096, 2048, 32768, 1024),
        (4096, 2048, 8192, 4096),
        (1100, 64, 32768, 552),  # Two equal chunks rather than one whole and one nearly empty.
        (4096, 2048, 151936, 1024),  # More than 128 MiB: few passes over the head's gradient.
        (4096, 4096, 128256, 4096),  # One chunk, whose logits take no more than that gradient.
        (5120, 4096, 128256, 5120),
        (5128, 4096, 128256, 856),
        (1500, 256, 151936, 752),
        (5, 8, 10**9, 5),
    ],
)
def test_chunks_are_equal_and_fit_the_budget(num_tokens, dim, vocab_size, expected):
    assert chunk_size_for(num_tokens, dim, vocab_size) == expected


@pytest.mark.parametrize(("most", "expected"), [(512, 512), (500, 456), (9000, 4096), (1, 8)])
def test_a_chunk_size_can_be_set(most, expected):
    assert chunk_size_for(4096, 4096, 32768, most) == expected


def test_on_cpus_no_more_than_512_tokens_have_logits():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(600, 8), (8, 100)]]
    labels = jax.ShapeDtypeStruct((600,), jnp.int32)
    program = str(jax.make_jaxpr(lambda *x: cross_entropy(*x).loss)(*shapes, labels))
    assert "f32[304,100]" in program
    assert "f32[600,100]" not in program


@pytest.mark.parametrize("transposed", [False, True])
def test_all_logits_are_never_held_and_no_head_is_transposed(transposed):
    num_tokens, dim, vocab_size, chunk = 512, 8, 4096, 32
    head = (vocab_size, dim) if transposed else (dim, vocab_size)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(num_tokens, dim), head]]
    labels = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)

    def loss(hidden, head, labels):
        return cross_entropy(
            hidden, head, labels, transposed_head=transposed, chunk_size=chunk
        ).loss

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes, labels).compile()
    chunk_bytes, head_bytes = 4 * chunk * vocab_size, 4 * dim * vocab_size
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * chunk_bytes + 2.5 * head_bytes
