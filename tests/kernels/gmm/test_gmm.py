import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.kernels.gmm import gmm, gmm_weight_gradient, reference

BACKENDS = ["cpu", "xla", "tpu", "reference"]

# Rows, and sizes of groups among them. The mean group decides the blocks: 64, 64, 256 and 64, 8.
CASES = [
    *((128, sizes) for sizes in ([64, 64], [1, 127], [0, 128], [128, 0], [0, 0], [37, 60])),
    *((320, sizes) for sizes in ([300, 1, 0, 19, 0], [0, 0, 0, 0, 320], [63, 65, 64, 1, 127])),
    *((600, sizes) for sizes in ([600, 0], [1, 599], [321, 255])),
    *((13, sizes) for sizes in ([2, 1, 3, 0, 1], [0, 13, 0, 0, 0])),
]


def _operands(sizes, num_rows=None, k=12, n=20, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    m = max(sum(sizes), 128) if num_rows is None else num_rows
    shapes = (m, k), (len(sizes), k, n), (m, n)
    lhs, rhs, grad = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return lhs, rhs, grad, jnp.asarray(sizes, jnp.int32)


def _by_loop(lhs, rhs, sizes):
    """One NumPy matmul for each group."""
    out = np.zeros((len(lhs), rhs.shape[2]))
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - np.asarray(sizes), ends, strict=True)):
        out[start:end] = np.asarray(lhs, np.float64)[start:end] @ np.asarray(rhs, np.float64)[group]
    return out


def _assert_close(value, expected, tolerance=1e-5):
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(value / scale, expected / scale, atol=tolerance, rtol=0)


def _pull(function, grad, *primals):
    """Returns (value, gradients) of `sum(function * grad)`."""
    value, pull = jax.vjp(function, *primals)
    return value, pull(grad.astype(value.dtype))


@functools.partial(jax.jit, static_argnames="backend")
def _compiled(lhs, rhs, grad, sizes, backend):
    """Compiled once for all groups of one shape."""
    run = functools.partial(gmm, group_sizes=sizes, backend=backend)
    return _pull(run, grad, lhs, rhs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_rows", "sizes"), CASES, ids=str)
def test_values_and_gradients_equal_the_reference(backend, num_rows, sizes):
    lhs, rhs, grad, group_sizes = _operands(sizes, num_rows)
    plain = functools.partial(
        reference.gmm, group_sizes=group_sizes, transpose_rhs=False, out_dtype=jnp.float32
    )
    value, grads = _compiled(lhs, rhs, grad, group_sizes, backend)
    _, expected_grads = _pull(plain, grad, lhs, rhs)
    _assert_close(value, _by_loop(lhs, rhs, sizes))
    for got, expected in zip(grads, expected_grads, strict=True):
        _assert_close(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes",
    [
        [5, -2, 60],
        *(
            pytest.param(sizes, marks=pytest.mark.slow)
            for sizes in ([-3, 40, 5], [150, -10, 3], [40, 5, -30])
        ),
    ],
    ids=str,
)
def test_a_group_of_less_than_no_rows_has_none(backend, sizes):
    lhs, rhs, grad, group_sizes = _operands(sizes, 128)
    got = _compiled(lhs, rhs, grad, group_sizes, backend)
    want = _compiled(lhs, rhs, grad, jnp.maximum(group_sizes, 0), "reference")
    for value, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        _assert_close(value, expected)
    by_part = gmm_weight_gradient(lhs, grad, group_sizes, backend=backend)
    _assert_close(by_part, want[1][1])
    held = gmm(lhs, rhs[1:], group_sizes, group_offset=1, backend=backend)
    first = np.arange(128)[:, None] < sizes[0]
    _assert_close(held, jnp.where(first, 0, want[0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transposed_rhs_gives_the_same_values_and_transposed_gradients(backend):
    lhs, rhs, grad, sizes = _operands([5, 0, 70, 30])
    flipped = rhs.transpose(0, 2, 1)
    turned = functools.partial(gmm, group_sizes=sizes, backend=backend, transpose_rhs=True)
    value, (lhs_grad, rhs_grad) = _compiled(lhs, rhs, grad, sizes, "reference")
    turned_value, (turned_lhs_grad, turned_rhs_grad) = _pull(turned, grad, lhs, flipped)
    _assert_close(turned_value, value)
    _assert_close(turned_lhs_grad, lhs_grad)
    _assert_close(turned_rhs_grad.transpose(0, 2, 1), rhs_grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_separate_parts_are_the_gradients(backend):
    lhs, rhs, grad, sizes = _operands([5, 0, 70, 30])
    _, (lhs_grad, rhs_grad) = _compiled(lhs, rhs, grad, sizes, "reference")
    by_part = gmm(grad, rhs, sizes, transpose_rhs=True, backend=backend)
    _assert_close(by_part, lhs_grad)
    _assert_close(gmm_weight_gradient(lhs, grad, sizes, backend=backend), rhs_grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_weight_gradient_is_differentiable(backend):
    lhs, rhs, grad, sizes = _operands([5, 0, 70, 30])
    run = functools.partial(gmm_weight_gradient, group_sizes=sizes, backend=backend)
    plain = functools.partial(
        reference.gmm_weight_gradient, group_sizes=sizes, out_dtype=jnp.float32
    )
    _, grads = _pull(run, rhs, lhs, grad)
    _, expected_grads = _pull(plain, rhs, lhs, grad)
    for got, expected in zip(grads, expected_grads, strict=True):
        _assert_close(got, expected)


@pytest.mark.parametrize("seed", range(24))
def test_random_groups_equal_one_matmul_a_group(seed):
    rng = np.random.default_rng(seed)
    m, g, k, n = [(320, 5, 12, 20), (600, 2, 12, 20), (13, 5, 12, 20), (200, 9, 33, 7)][seed % 4]
    sizes = rng.multinomial(rng.integers(m // 2, m + 1), rng.dirichlet(np.full(g, 0.4))).tolist()
    lhs, rhs, grad, group_sizes = _operands(sizes, m, k, n, seed=seed)
    value, (lhs_grad, rhs_grad) = _compiled(lhs, rhs, grad, group_sizes, None)
    _assert_close(value, _by_loop(lhs, rhs, sizes))
    _assert_close(lhs_grad, _by_loop(grad, rhs.transpose(0, 2, 1), sizes))
    ends = np.cumsum(sizes)
    parts = [np.s_[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    _assert_close(rhs_grad, [np.asarray(lhs)[p].T @ np.asarray(grad)[p] for p in parts])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_no_group_may_hold_anything(backend):
    lhs, rhs, grad, sizes = _operands([30, 40], num_rows=128)
    value, grads = _compiled(lhs, rhs, grad, sizes, backend)
    stale, stale_grad = lhs.at[70:].set(jnp.nan), grad.at[70:].set(jnp.nan)
    stale_value, stale_grads = _compiled(stale, rhs, stale_grad, sizes, backend)
    np.testing.assert_array_equal(value[70:], 0)
    np.testing.assert_array_equal(grads[0][70:], 0)
    _assert_close(stale_value, value)
    for got, expected in zip(stale_grads, grads, strict=True):
        _assert_close(got, expected)


def test_nan_in_a_row_stays_in_that_row_and_its_groups_gradient():
    lhs, rhs, grad, sizes = _operands([30, 98])
    value, (lhs_grad, rhs_grad) = _compiled(lhs.at[33].set(jnp.nan), rhs, grad, sizes, None)
    assert np.isnan(value[33]).all()
    assert np.isfinite(np.delete(np.asarray(value), 33, axis=0)).all()
    assert np.isfinite(lhs_grad).all()
    assert np.isfinite(rhs_grad[0]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_summed_in_float32(backend):
    lhs, rhs, grad, sizes = _operands([1, 127], k=1024, dtype=jnp.bfloat16)
    run = functools.partial(gmm, group_sizes=sizes, backend=backend)
    value, grads = _compiled(lhs, rhs, grad, sizes, backend)
    wide = run(lhs, rhs, preferred_element_type=jnp.float32)
    exact = _by_loop(lhs, rhs, [1, 127])
    assert (value.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]
    _assert_close(value, exact, 2**-8)
    _assert_close(wide, exact)
    _, exact_grads = _pull(
        functools.partial(gmm, group_sizes=sizes, backend="reference"),
        *(x.astype(jnp.float32) for x in (grad, lhs, rhs)),
    )
    for got, expected in zip(grads, exact_grads, strict=True):
        _assert_close(got, expected, 2**-8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("m", "g", "k", "n"), [(0, 3, 4, 5), (6, 2, 0, 5), (6, 2, 4, 0)])
def test_empty_operands_give_zeros(backend, m, g, k, n):
    lhs, rhs, grad, sizes = _operands([m] + [0] * (g - 1), m, k, n)
    value, grads = _pull(functools.partial(gmm, group_sizes=sizes, backend=backend), grad, lhs, rhs)
    assert (value.shape, grads[0].shape, grads[1].shape) == ((m, n), (m, k), (g, k, n))
    np.testing.assert_array_equal(value, 0)


def test_it_works_under_remat_in_a_scan():
    lhs, rhs, grad, sizes = _operands([40, 0, 88], k=16, n=16)

    def layers(run, lhs, rhs):
        step = jax.checkpoint(lambda x, w: (jnp.tanh(run(x, w)), None))
        return jax.lax.scan(step, lhs, jnp.stack([rhs, rhs[::-1]]))[0]

    run = functools.partial(gmm, group_sizes=sizes)
    plain = functools.partial(
        reference.gmm, group_sizes=sizes, transpose_rhs=False, out_dtype=jnp.float32
    )
    value, grads = jax.jit(functools.partial(_pull, functools.partial(layers, run)))(grad, lhs, rhs)
    expected, expected_grads = _pull(functools.partial(layers, plain), grad, lhs, rhs)
    _assert_close(value, expected)
    for got, want in zip(grads, expected_grads, strict=True):
        _assert_close(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("varying_rhs", [False, True])
def test_it_works_in_shard_map(backend, varying_rhs):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(rng.multinomial(20, [0.5, 0, 0.2, 0.3], size=8), jnp.int32)  # [8, 4]
    lhs, rhs, grad, _ = _operands([1] * (32 if varying_rhs else 4), 8 * 22)
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(lhs, rhs, grad, sizes):
        value = gmm(lhs, rhs, sizes[0], backend=backend)
        return jax.lax.psum(jnp.sum(value * grad), "data")

    specs = (split, split if varying_rhs else whole, split, split)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=whole)
    got = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(lhs, rhs, grad, sizes)

    def plain(lhs, rhs):
        total = jnp.float32(0)
        for shard in range(8):
            rows = np.s_[shard * 22 : (shard + 1) * 22]
            own = rhs[4 * shard : 4 * shard + 4] if varying_rhs else rhs
            value = reference.gmm(
                lhs[rows], own, sizes[shard], transpose_rhs=False, out_dtype=jnp.float32
            )
            total += jnp.sum(value * grad[rows])
        return total

    expected = jax.value_and_grad(plain, argnums=(0, 1))(lhs, rhs)
    for value, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        _assert_close(value, want)


@pytest.fixture
def _no_shape_checks(monkeypatch):
    """What a user runs: no jaxtyping, so our own errors are seen."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("_no_shape_checks")
def test_bad_input_is_refused():
    lhs, rhs, grad, sizes = _operands([64, 64])
    with pytest.raises(ValueError, match="no backend 'cuda'; set one of cpu, gpu, reference"):
        gmm(lhs, rhs, sizes, backend="cuda")
    with pytest.raises(ValueError, match=r"lhs \(128, 12\) is not \[m, k\] to \[g, n, k\]"):
        gmm(lhs, rhs, sizes, transpose_rhs=True)
    with pytest.raises(ValueError, match="no matrix for each of 3 groups"):
        gmm(lhs, rhs, jnp.append(sizes, 0))
    with pytest.raises(ValueError, match=r"\[g\] integers, not float32\[2\]"):
        gmm(lhs, rhs, sizes.astype(jnp.float32))
    for wrong in (lhs[None], lhs[:, 0], lhs[:, None]):
        with pytest.raises(ValueError, match=r"lhs \(.*\) is not \[m, k\] to \[g, k, n\]"):
            gmm(wrong, rhs, sizes)
    for pair in ((lhs[1:], grad), (lhs[None], grad), (lhs, grad[:, None]), (lhs[:, 0], grad)):
        with pytest.raises(ValueError, match=r"and grad \(.*\) are not \[m, k\] and \[m, n\]"):
            gmm_weight_gradient(*pair, sizes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_a_bias_is_added_to_its_groups_rows(backend, transpose_rhs):
    lhs, rhs, grad, sizes = _operands([5, 0, 70, 30])
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(4, 20)), jnp.float32)
    groups = np.repeat(np.arange(4), sizes)

    def run(lhs, rhs, bias):
        rhs = rhs.transpose(0, 2, 1) if transpose_rhs else rhs
        options = {"transpose_rhs": transpose_rhs, "backend": backend}
        return gmm(lhs, rhs, sizes, bias=bias, **options)

    def plain(lhs, rhs, bias):
        options = {"transpose_rhs": False, "out_dtype": jnp.float32}
        return reference.gmm(lhs, rhs, sizes, **options) + jnp.pad(bias[groups], ((0, 23), (0, 0)))

    value, grads = jax.jit(functools.partial(_pull, run))(grad, lhs, rhs, bias)
    expected, expected_grads = _pull(plain, grad, lhs, rhs, bias)
    for got, want in zip([value, *grads], [expected, *expected_grads], strict=True):
        _assert_close(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_groups_held_in_part_give_zeros_for_the_others(backend, offset):
    all_sizes = [20, 30, 0, 25, 10]
    lhs, rhs, grad, sizes = _operands(all_sizes, 128)
    held, mine = rhs[offset : offset + 2], np.repeat(np.arange(5), all_sizes)
    mine = np.append((mine >= offset) & (mine < offset + 2), [False] * 43)[:, None]
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(2, 20)), jnp.float32)
    stale, stale_grad = jnp.where(mine, lhs, jnp.nan), jnp.where(mine, grad, jnp.nan)

    @jax.jit
    def run(lhs, grad, rhs, bias, offset):
        kernel = functools.partial(gmm, group_sizes=sizes, group_offset=offset, backend=backend)
        return _pull(lambda lhs, rhs, bias: kernel(lhs, rhs, bias=bias), grad, lhs, rhs, bias)

    value, grads = run(stale, stale_grad, held, bias, offset)

    def plain(lhs, rhs, bias):
        full = jnp.zeros((5, 12, 20)).at[offset : offset + 2].set(rhs)
        added = jnp.zeros((5, 20)).at[offset : offset + 2].set(bias)
        out = gmm(lhs, full, sizes, bias=added, backend="reference")
        return jnp.where(mine, out, 0)

    expected, expected_grads = _pull(plain, grad, lhs, held, bias)
    for got, want in zip([value, *grads], [expected, *expected_grads], strict=True):
        _assert_close(got, want)
    if backend == "cpu":  # Also by itself, where the number of groups has to be told.
        part = gmm_weight_gradient(
            stale, stale_grad, sizes, group_offset=offset, num_groups=2, backend=backend
        )
        _assert_close(part, expected_grads[1])


def test_the_gradient_of_a_bias_is_differentiable():
    lhs, rhs, grad, sizes = _operands([5, 3], 9, 3, 4)
    bias = jnp.ones((2, 4))

    def norm(backend, grad):
        run = functools.partial(gmm, group_sizes=sizes, backend=backend)
        _, (rhs_grad, bias_grad) = _pull(
            lambda rhs, bias: run(lhs, rhs, bias=bias), grad, rhs, bias
        )
        return jnp.sum(rhs_grad**2) + jnp.sum(bias_grad**2)

    _assert_close(jax.grad(norm, 1)("cpu", grad), jax.grad(norm, 1)("reference", grad))


@pytest.mark.usefixtures("_no_shape_checks")
def test_groups_and_biases_that_do_not_fit_are_refused():
    lhs, rhs, _, sizes = _operands([64, 64])
    with pytest.raises(ValueError, match="set group_offset to the first that it holds"):
        gmm(lhs, rhs[:1], sizes)
    with pytest.raises(ValueError, match="2 groups are held, but 1 are counted"):
        gmm(lhs, rhs, sizes[:1], group_offset=0)
    with pytest.raises(ValueError, match=r"bias \(2, 12\) is not \[g, n\], \(2, 20\)"):
        gmm(lhs, rhs, sizes, bias=rhs[:, :, 0])
    with pytest.raises(ValueError, match=r"group_offset is 0\.5; set one integer"):
        gmm(lhs, rhs[:1], sizes, group_offset=0.5)
    for offset in (-1, 2, np.int64(2), np.int32(-1)):
        match = f"group_offset is {offset}, but 1 of 2 groups are held; .* from 0 to 1"
        with pytest.raises(ValueError, match=match):
            gmm(lhs, rhs[:1], sizes, group_offset=offset)
        with pytest.raises(ValueError, match=match):
            gmm_weight_gradient(lhs, lhs, sizes, group_offset=offset, num_groups=1)
    with pytest.raises(ValueError, match="no kernel for float16; cast to one of"):
        gmm(lhs.astype(jnp.float16), rhs.astype(jnp.float16), sizes, backend="tpu")
