"""The kernels as Mosaic-GPU's interpreter runs them, as its compiler takes them, and on a GPU.

How fast they are: JAX_PLATFORMS=cuda,cpu pytest -m gpu -s tests/kernels/gmm/test_gpu.py
"""

import functools
import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from moelib.kernels import backend as backends
from moelib.kernels.gmm import gmm, gmm_activated, gpu
from moelib.kernels.gmm.gpu_product import row_visits
from moelib.kernels.gmm.gpu_tiles import GpuTiles, choose, choose_for_gradient, smem_bytes
from moelib.kernels.gmm.groups import row_ranges
from moelib.kernels.hopper import SMEM_BYTES, is_hopper
from tests.kernels.comparing import assert_close, compiled_for, pulled
from tests.kernels.gmm.cases import by_group, operands
from tests.kernels.gpu_topology import A100, B200, H100, needs_hopper, printed

# Finds races between warpgroups and copies, and fills uninitialized memory with NaN.
_STRICT = plgpu.InterpretGPUParams(detect_races=True)

# Groups among 203 rows: straddling; more than there are; empty; one only.
_SIZES = [[70, 0, 10, 64], [1, 127, 3, 90], [0, 0, 0, 0], [0, 203, 0, 0]]


def _quick(index):
    """Returns the sizes, all but one of them marked slow."""
    return [
        s if i == index else pytest.param(s, marks=pytest.mark.slow) for i, s in enumerate(_SIZES)
    ]


def _by_group(arrays, sizes):
    return by_group(arrays, np.diff(np.minimum(np.cumsum([0, *sizes]), 203)))


@pytest.mark.parametrize("sizes", _quick(0), ids=str)
def test_rows_times_matrices_equal_one_matmul_per_group(sizes):
    *arrays, group_sizes = operands(sizes, 203, 128, 192, jnp.bfloat16)
    lhs, rhs, bias, _ = arrays
    kw = {"activation": None, "save": False, "tiles": GpuTiles(64, 128, 3), "interpret": _STRICT}
    got, _ = gpu.forward(lhs, rhs[:, None], group_sizes, bias[:, None], **kw)
    assert_close(got, _by_group(arrays, sizes)[0], 2**-8)


def _second(arrays):
    """Returns another rhs and gradient: those of a second matrix per group."""
    _, rhs, _, grad = arrays
    return jnp.flip(rhs, 1) * 2, jnp.flip(grad, 1)


_num_parts = pytest.mark.parametrize(
    "num_parts", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["one", "two"]
)


@_num_parts
@pytest.mark.parametrize("sizes", _quick(1), ids=str)
def test_input_gradients_equal_the_sum_of_one_matmul_per_matrix(sizes, num_parts):
    *arrays, group_sizes = operands(sizes, 203, 128, 192, jnp.bfloat16)
    lhs, rhs, bias, grad = arrays
    pairs = [(rhs, grad), _second(arrays)][:num_parts]
    matrices, grads = zip(*pairs, strict=True)
    kw = {"tiles": GpuTiles(128, 64, 2), "interpret": _STRICT}
    got = gpu.input_gradient(grads, jnp.stack(matrices, 1), group_sizes, **kw)
    want = [_by_group((lhs, each, bias, grad), sizes)[1][0] for each, grad in pairs]
    assert_close(got, sum(want), 2**-8)


@_num_parts
@pytest.mark.parametrize("sizes", _quick(0), ids=str)
def test_weight_gradients_equal_one_matmul_per_group(sizes, num_parts):
    *arrays, group_sizes = operands(sizes, 203, 192, 128, jnp.bfloat16)
    lhs, rhs, bias, grad = arrays
    grads = (grad, _second(arrays)[1])[:num_parts]
    kw = {"with_sums": False, "tiles": GpuTiles(128, 64, 2), "interpret": _STRICT}
    got, _ = gpu.weight_gradient(lhs, grads, group_sizes, **kw)
    want = [_by_group((lhs, rhs, bias, each), sizes)[1][1] for each in grads]
    assert_close(got, np.stack(want, 1), 2**-8)


@pytest.mark.slow
def test_nan_stays_in_its_row_and_its_groups_gradient():
    lhs, rhs, _, grad, sizes = operands([37, 0, 60], 104, 64, 64, jnp.bfloat16)
    stale = lhs.at[40].set(jnp.nan).at[97:].set(jnp.nan)  # Of the last group, and of none.
    out = gmm(stale, rhs, sizes, backend="gpu")
    assert np.flatnonzero(np.isnan(out).any(axis=1)).tolist() == [40]
    np.testing.assert_array_equal(np.asarray(out[97:], np.float32), 0)
    stale_grad = grad.at[41].set(jnp.nan)
    for part in gpu.weight_gradient(stale, (stale_grad,), sizes, with_sums=True, interpret=True):
        assert np.isfinite(part[:2]).all()
        np.testing.assert_array_equal(part[1], 0)  # Empty.


@pytest.mark.slow
def test_the_entry_gives_values_and_gradients_of_one_matmul_per_group():
    lhs, rhs, bias, grad, sizes = operands([20, 30, 8], 72, 64, 128, jnp.bfloat16)
    run = lambda lhs, rhs, bias: gmm(lhs, rhs, sizes, bias=bias, backend="gpu")
    got = jax.jit(functools.partial(pulled, run))(grad, lhs, rhs, bias)
    assert_close(got, by_group((lhs, rhs, bias, grad), [20, 30, 8]), 2**-8)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "n"), [(128, 192), (24, 64)])  # A side below 64 is padded.
def test_gated_experts_give_values_and_gradients_of_the_reference(k, n):
    lhs, gate, _, grad, sizes = operands([20, 0, 30, 1], 59, k, n, jnp.bfloat16)
    rhs = jnp.stack([gate, jnp.flip(gate, 1)], 1)
    bias = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, n)), jnp.bfloat16)
    swiglu = lambda gate, up: jax.nn.silu(gate) * up

    def run(backend):
        each = lambda lhs, rhs, bias: gmm_activated(
            lhs, rhs, sizes, activation=swiglu, bias=bias, backend=backend
        )
        return jax.jit(functools.partial(pulled, each))(grad, lhs, rhs, bias)

    assert_close(run("gpu"), run("reference"), 2**-6)


@pytest.mark.slow
def test_values_equal_those_of_the_kernel_that_jax_shows_as_an_example():
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    lhs, rhs, _, _, sizes = operands([37, 0, 91], 128, 128, 64, jnp.bfloat16)
    kernel = {"block_m": 64, "block_n": 64, "block_k": 64}
    kernel |= {"max_concurrent_steps": 2, "grid_block_n": 1}
    interpreted = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    with interpreted, jax.numpy_dtype_promotion("standard"):
        want = ragged_dot(lhs, rhs, group_sizes=sizes, **kernel)
    assert_close(gmm(lhs, rhs, sizes, backend="gpu"), want)


@pytest.fixture
def warnings_of(caplog):
    """Returns a function: the warnings of tracing `gmm` twice for a kind of GPU."""

    def run(kind, shape=(64, 64), backend=None):
        backends.warn_once.cache_clear()
        caplog.clear()
        shapes = [((8, shape[0]), "bfloat16"), ((1, *shape), "bfloat16"), ((1,), "int32")]
        arrays = [jax.ShapeDtypeStruct(*each) for each in shapes]
        with compiled_for(kind), caplog.at_level(logging.WARNING):
            for _ in range(2):
                jax.eval_shape(functools.partial(gmm, backend=backend), *arrays)
        return [record.getMessage() for record in caplog.records]

    return run


def test_it_is_the_default_for_hopper_only(warnings_of):
    for kind in (H100, "NVIDIA H200", "NVIDIA GH200 480GB"):
        assert is_hopper(kind)
        assert warnings_of(kind) == []
    for kind in (A100, B200, "NVIDIA GB200", "NVIDIA RTX A6000"):
        assert not is_hopper(kind)
        with pytest.raises(ValueError, match=rf"'gpu'.*Hopper GPU.*{kind}"):
            warnings_of(kind, backend="gpu")


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [(H100, (128, 200), "200 elements; .*256"), ("NVIDIA B300", (64, 64), "Hopper .*NVIDIA B300")],
)
def test_the_slow_form_is_logged_once_with_its_reason_and_the_override(
    warnings_of, kind, shape, reason
):
    (message,) = warnings_of(kind, shape)
    assert re.search(reason, message)
    assert "MOELIB_KERNEL_BACKEND=gmm=" in message
    assert warnings_of(kind, shape, backend="xla") == []


def test_under_remat_it_can_be_differentiated_because_it_is_not_interpreted():
    shapes = [((16, 64), "bfloat16"), ((2, 2, 64, 64), "bfloat16"), ((2,), "int32")]
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def trace(backend):
        @jax.checkpoint
        def run(rows, matrices, sizes):
            join = lambda gate, up: gate * up
            out = gmm_activated(rows, matrices, sizes, activation=join, backend=backend)
            return jnp.sum(out, dtype=jnp.float32)

        return str(jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(*arrays))

    with compiled_for(H100):
        for made in (trace(None), trace("gpu")):
            assert "wgmma" in made
            assert "callback" not in made  # Of the interpreter.


@pytest.mark.parametrize("seed", range(8))
def test_visits_write_every_row_once_and_fit_their_array(seed):
    rng = np.random.default_rng(seed)
    m, g = int(rng.integers(1, 900)), int(rng.integers(1, 12))
    window = int(rng.choice([64, 128]))
    sizes = rng.multinomial(rng.integers(0, m + 50), rng.dirichlet(np.full(g, 0.3)))
    visits, count = jax.jit(lambda sizes: row_visits(*row_ranges(sizes, m), m, window))(sizes)
    count = int(count[0])
    assert count <= len(visits.group)
    owners = np.full(m, -2)
    for group, row, start, end in zip(*(np.asarray(x)[:count] for x in visits), strict=True):
        assert row % 8 == 0
        own = np.arange(max(row, start), min(row + window, end))
        assert len(own)
        assert (owners[own] == -2).all()
        owners[own] = group
    want = np.append(np.repeat(np.arange(g), sizes), np.full(m, -1))[:m]
    np.testing.assert_array_equal(owners, want)


def test_tiles_fit_and_follow_the_rows_of_a_group():
    for m, k, n, g in [(16384, 2048, 2048, 16), (64, 64, 64, 1), (4096, 7168, 4096, 256)]:
        for tiles in (choose(m, k, n, g, 132), choose_for_gradient(m, k, n, g, 1, 132)):
            assert smem_bytes(tiles) <= SMEM_BYTES
            assert tiles.stages >= 3
    assert choose(16384, 2048, 2048, 16, 132) == GpuTiles(128, 256, 4)
    assert choose(4096, 7168, 4096, 256, 132).m == 64


# ------------------------------------------------------------------------------------------------
# Compiled for a GPU that is not there


def _compiled(name, num_devices):
    """Returns the lines printed, and the figures of each case."""
    lines = printed("tests.kernels.gmm.compile_for_gpu", name, str(num_devices)).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return lines, {each["case"]: each for each in found}


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 8])
def test_values_and_gradients_compile_for_h100_without_spilling_or_dense_copies(num_devices):
    lines, found = _compiled(H100, num_devices)
    spills = [int(x) for line in lines for x in re.findall(r"(\d+) bytes spill", line)]
    assert spills
    assert not any(spills)
    plain = found["plain"]
    assert plain["kernels"] == 3
    # The result and its gradient; dense copies of lhs per group would be 16 of 64 MiB.
    assert plain["temp_bytes"] < 2.1 * 16384 * 2048 * 2
    assert found["few rows per group"]["kernels"] == 4  # The sums for the bias, too.
    if num_devices == 1:
        experts = found["gated experts"]
        # Gate and up, down; one of each gradient for down, and one for gate and up together.
        assert experts["kernels"] == 7
        # XLA reads both products and a gradient, and writes the hidden rows and two gradients.
        assert experts["bytes_outside_kernels"] < 6.1 * 40960 * 768 * 2
    assert found["sides that do not fit"]["kernels"] == found["float32"]["kernels"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [A100, B200])
def test_other_gpus_get_the_loops(name):
    _, found = _compiled(name, 1)
    assert [each["kernels"] for each in found.values()] == [0] * 6


# ------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("shape", [(1003, 256, 320, 8), (4096, 2048, 1536, 16), (300, 64, 64, 32)])
def test_a_gpu_gives_the_values_and_gradients_of_the_xla_form(shape):
    m, k, n, g = shape
    lhs, rhs, bias, grad, _ = operands([0] * g, m, k, n, jnp.bfloat16)
    rng = np.random.default_rng(1)

    @functools.partial(jax.jit, static_argnums=1)
    def run(sizes, backend):
        each = lambda lhs, rhs, bias: gmm(lhs, rhs, sizes, bias=bias, backend=backend)
        return pulled(each, grad, lhs, rhs, bias)

    for total in (m, m // 2, 0):
        sizes = jnp.asarray(rng.multinomial(total, rng.dirichlet(np.full(g, 0.4))), jnp.int32)
        assert_close(run(sizes, "gpu"), run(sizes, "xla"), 2**-7)
