"""The kernels as Mosaic-GPU's interpreter runs them, as its compiler takes them, and on a GPU.

How fast they are: JAX_PLATFORMS=cuda,cpu pytest -m gpu -s tests/kernels/gmm/test_gpu.py
"""

import functools
import json
import logging
import pathlib
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from moelib.kernels.gmm import gmm, gmm_activated, gmm_weight_gradient, gpu, reference, swiglu
from moelib.kernels.gmm.gpu_tiles import (
    SMEM_BYTES,
    GpuTiles,
    choose,
    choose_for_gradient,
    smem_bytes,
)
from moelib.kernels.gmm.gpu_visits import row_visits
from moelib.kernels.gmm.groups import row_ranges
from tests.kernels import gpu_topology

_ROOT = pathlib.Path(__file__).parents[3]

# Finds races between warpgroups and copies, and fills what nothing wrote with NaN.
_STRICT = plgpu.InterpretGPUParams(detect_races=True)

# Groups among 203 rows: straddling, empty, one only, with rows of no group, more than there are.
_SIZES = [[70, 0, 10, 64], [0, 0, 0, 0], [0, 203, 0, 0], [1, 127, 3, 90]]


def _operands(m, k, n, g, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (m, k), (g, k, n), (m, n), (g, n)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def _assert_close(value, expected, tolerance=1e-5):
    assert value.dtype == expected.dtype
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(value / scale, expected / scale, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("tiles", "turned"), [(GpuTiles(128, 64, 2), False), (GpuTiles(64, 128, 3), True)], ids=str
)
def test_rows_times_matrices_equal_the_reference(tiles, turned):
    lhs, rhs, _, bias = _operands(203, 128, 192, 4)
    rhs = rhs.transpose(0, 2, 1) if turned else rhs
    options = {"transpose_rhs": turned, "out_dtype": jnp.float32}
    run = jax.jit(functools.partial(gpu.gmm, tiles=tiles, interpret=_STRICT, **options))
    for sizes in _SIZES:
        sizes = jnp.asarray(sizes, jnp.int32)
        want = reference.gmm(lhs, rhs, sizes, bias, **options)
        _assert_close(run(lhs, rhs, sizes, bias), want)


def test_weight_gradients_equal_the_reference():
    lhs, _, grad, _ = _operands(203, 192, 128, 4)
    options = {"out_dtype": jnp.bfloat16}  # One block of columns a tile: always the same slot.
    kernel = {"tiles": GpuTiles(128, 64, 2), "interpret": _STRICT}
    run = jax.jit(functools.partial(gpu.gmm_weight_gradient, **kernel, **options))
    for sizes in _SIZES:
        sizes = jnp.asarray(sizes, jnp.int32)
        want = reference.gmm_weight_gradient(lhs, grad, sizes, **options)
        _assert_close(run(lhs, grad, sizes), want, 2**-8)


@pytest.mark.slow
def test_nan_stays_in_its_row_and_its_groups_gradient():
    lhs, rhs, grad, _ = _operands(104, 64, 64, 3)
    sizes = jnp.asarray([37, 0, 60], jnp.int32)
    stale = lhs.at[40].set(jnp.nan).at[97:].set(jnp.nan)  # Of the last group, and of none.
    out = gpu.gmm(stale, rhs, sizes, transpose_rhs=False, out_dtype=jnp.bfloat16)
    assert np.flatnonzero(np.isnan(out).any(axis=1)).tolist() == [40]
    np.testing.assert_array_equal(np.asarray(out[97:], np.float32), 0)
    made = gpu.gmm_weight_gradient(
        stale, grad.at[41].set(jnp.nan), sizes, out_dtype=jnp.float32, bias_dtype=jnp.float32
    )
    for part in made:
        assert np.isfinite(part[:2]).all()
        np.testing.assert_array_equal(part[1], 0)  # Empty.


def test_the_entry_gives_the_references_values_and_gradients():
    """Some of the groups counted, with a bias, rounded to bfloat16."""
    lhs, rhs, grad, bias = _operands(72, 64, 128, 2)
    sizes, offset = jnp.asarray([9, 20, 30, 8], jnp.int32), jnp.int32(1)

    def pulled(backend):
        run = lambda lhs, rhs, bias: gmm(
            lhs, rhs, sizes, bias=bias, group_offset=offset, backend=backend
        )
        value, pull = jax.vjp(run, lhs, rhs, bias)
        return value, *pull(grad)

    for got, want in zip(
        jax.jit(pulled, static_argnums=0)("gpu"), pulled("reference"), strict=True
    ):
        _assert_close(got, want, 2**-8)


@pytest.mark.slow
def test_values_equal_those_of_the_kernel_that_jax_shows_as_an_example():
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    lhs, rhs, *_ = _operands(128, 128, 64, 3)
    sizes = jnp.asarray([37, 0, 91], jnp.int32)
    kernel = {"block_m": 64, "block_n": 64, "block_k": 64}
    kernel |= {"max_concurrent_steps": 2, "grid_block_n": 1}
    interpreted = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    with interpreted, jax.numpy_dtype_promotion("standard"):
        want = ragged_dot(lhs, rhs, group_sizes=sizes, **kernel)
    _assert_close(gmm(lhs, rhs, sizes, backend="gpu"), want)


def test_what_does_not_fit_is_refused_and_says_what_does():
    lhs, rhs, grad, _ = _operands(16, 64, 72, 2)
    sizes = jnp.asarray([5, 6], jnp.int32)
    with pytest.raises(ValueError, match="not 72 elements; pad them to 128"):
        gmm(lhs, rhs, sizes, backend="gpu")
    with pytest.raises(ValueError, match="not 72 elements; pad them to 128"):
        gmm_weight_gradient(lhs, grad, sizes, backend="gpu")
    wide = lhs.astype(jnp.float32), rhs[..., :64].astype(jnp.float32)
    with pytest.raises(ValueError, match="multiplies bfloat16 and float16, not float32"):
        gmm(*wide, sizes, backend="gpu")


def _compiled_for(kind):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def test_it_is_the_default_for_hopper_only():
    fitting = "gmm", jnp.bfloat16, (128, 64), jnp.bfloat16
    shapes = [((8, 64), "bfloat16"), ((1, 64, 64), "bfloat16"), ((1,), "int32")]
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    assert gpu.default_on_cuda(*fitting) == {}  # Compiled for a CPU.
    for kind in (gpu_topology.H100, "NVIDIA H200", "NVIDIA GH200 480GB"):
        with _compiled_for(kind):
            assert gpu.default_on_cuda(*fitting) == {"cuda": "gpu"}
    for kind in (gpu_topology.A100, gpu_topology.B200, "NVIDIA GB200", "NVIDIA RTX A6000"):
        with _compiled_for(kind):
            assert gpu.default_on_cuda(*fitting) == {}
            with pytest.raises(ValueError, match="needs a Hopper GPU"):
                jax.eval_shape(functools.partial(gmm, backend="gpu"), *operands)


def test_under_remat_it_can_be_differentiated_for_it_is_not_interpreted_on_the_way():
    operands = [((16, 64), "bfloat16"), ((2, 2, 64, 64), "bfloat16"), ((2,), "int32")]

    @jax.checkpoint
    def run(rows, matrices, sizes):
        return jnp.sum(gmm_activated(rows, matrices, sizes, activation=swiglu), dtype=jnp.float32)

    with _compiled_for(gpu_topology.H100):
        shapes = (jax.ShapeDtypeStruct(*shape) for shape in operands)
        made = jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(*shapes)
    assert "wgmma" in str(made)
    assert "callback" not in str(made)  # Of the interpreter.


def test_another_form_in_its_place_is_reported_once(caplog):
    with _compiled_for(gpu_topology.H100), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert gpu.default_on_cuda("gmm", jnp.bfloat16, (128, 200), jnp.bfloat16) == {}
    (message,) = [r.getMessage() for r in caplog.records if "not 200 elem" in r.getMessage()]
    assert message.startswith("gmm runs as XLA's loops over blocks of rows")


def test_a_gpu_for_which_there_is_no_kernel_is_reported_once(caplog):
    with _compiled_for("NVIDIA B300"), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert gpu.default_on_cuda("gmm", jnp.bfloat16, (128, 64), jnp.bfloat16) == {}
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("loops over blocks of rows: no kernel is for NVIDIA B300.")


@pytest.mark.parametrize("seed", range(20))
def test_visits_write_every_row_once_and_fit_their_array(seed):
    rng = np.random.default_rng(seed)
    m, g = int(rng.integers(1, 900)), int(rng.integers(1, 12))
    window = int(rng.choice([64, 128]))
    sizes = rng.multinomial(rng.integers(0, m + 50), rng.dirichlet(np.full(g, 0.3)))
    held = int(rng.integers(1, g + 1))
    offset = jnp.int32(rng.integers(0, g - held + 1))
    starts, ends = row_ranges(jnp.asarray(sizes), m, held, offset)
    visits, count = row_visits(starts, ends, m, window)
    count = int(count[0])
    assert count <= len(visits.group)
    owners = np.full(m, -2)
    for group, row, start, end in zip(*(np.asarray(x)[:count] for x in visits), strict=True):
        assert row % 8 == 0
        own = np.arange(max(row, start), min(row + window, end))
        assert len(own)
        assert (owners[own] == -2).all()
        owners[own] = group
    want = np.full(m, -1)
    for group in range(held):
        want[int(starts[group]) : int(ends[group])] = group
    np.testing.assert_array_equal(owners, want)


def test_tiles_fit_and_follow_the_rows_of_a_group():
    for m, k, n, g in [(16384, 2048, 2048, 16), (64, 64, 64, 1), (4096, 7168, 4096, 256)]:
        for tiles in (choose(m, k, n, g, 132), choose_for_gradient(m, k, n, g, 132)):
            assert smem_bytes(tiles) <= SMEM_BYTES
            assert tiles.stages >= 3
    assert choose(16384, 2048, 2048, 16, 132) == GpuTiles(128, 256, 4)
    assert choose(4096, 7168, 4096, 256, 132).m == 64


# ------------------------------------------------------------------------------------------------
# Compiled for a GPU that is not there


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 8])
def test_values_and_gradients_compile_for_h100_without_spilling_or_dense_copies(num_devices):
    pytest.importorskip(gpu_topology.PLUGIN)
    command = [sys.executable, "-m", "tests.kernels.gmm.compile_for_gpu", gpu_topology.H100]
    done = subprocess.run(
        [*command, str(num_devices)], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    spills = [int(x) for line in lines for x in re.findall(r"(\d+) bytes spill", line)]
    assert spills
    assert not any(spills)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {each["case"]: each for each in found}
    plain = found["plain"]
    assert plain["kernels"] == 3
    # The result and its gradient; with a dense copy of lhs a group there would be 16 of 64 MiB.
    assert plain["temp_bytes"] < 2.1 * 16384 * 2048 * 2
    assert found["few rows a group"]["kernels"] == 4  # The sums for the bias, too.
    assert found["some groups of all"]["kernels"] == 3
    assert found["sides that do not fit"]["kernels"] == found["float32"]["kernels"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [gpu_topology.A100, gpu_topology.B200])
def test_other_gpus_get_the_loops(name):
    pytest.importorskip(gpu_topology.PLUGIN)
    command = [sys.executable, "-m", "tests.kernels.gmm.compile_for_gpu", name, "1"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["kernels"] for each in found] == [0] * 6


# ------------------------------------------------------------------------------------------------
# On a GPU

_needs_hopper = pytest.mark.skipif(
    "jax.default_backend() != 'gpu' or jax.devices()[0].compute_capability != '9.0'",
    reason="no Hopper GPU",
)


@pytest.mark.gpu
@_needs_hopper
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(1003, 256, 320, 8), (4096, 2048, 1536, 16), (300, 64, 64, 32)])
def test_a_gpu_gives_the_references_values_and_gradients(shape, turned):
    m, _, _, g = shape
    lhs, rhs, grad, bias = _operands(*shape)
    rhs = rhs.transpose(0, 2, 1) if turned else rhs
    rng = np.random.default_rng(1)

    @functools.partial(jax.jit, static_argnums=1)
    def pulled(sizes, backend):
        options = {"transpose_rhs": turned, "backend": backend}
        run = lambda lhs, rhs, bias: gmm(lhs, rhs, sizes, bias=bias, **options)
        value, pull = jax.vjp(run, lhs, rhs, bias)
        return value, *pull(grad)

    for total in (m, m // 2, 0):
        sizes = jnp.asarray(rng.multinomial(total, rng.dirichlet(np.full(g, 0.4))), jnp.int32)
        for got, want in zip(pulled(sizes, "gpu"), pulled(sizes, "cpu"), strict=True):
            _assert_close(got, want, 2**-7)


def _seconds(function, *operands, times=20):
    jax.block_until_ready(function(*operands))
    start = time.perf_counter()
    for _ in range(times):
        out = function(*operands)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / times


@pytest.mark.gpu
@_needs_hopper
@pytest.mark.parametrize(
    "shape", [(16384, 2048, 2048, 16), (65536, 2048, 1536, 64), (32768, 7168, 2048, 32)]
)
def test_how_fast_it_is_beside_a_matmul_for_each_group(shape):
    """Prints TFLOP/s of two that give the same; the compiler of the other knows the sizes."""
    m, k, n, g = shape
    lhs, rhs, grad, _ = _operands(*shape)
    sizes = jnp.full((g,), m // g, jnp.int32)
    rows, grads = lhs.reshape(g, -1, k), grad.reshape(g, -1, n)
    each = lambda form: lambda a, b: [jnp.einsum(form, a[i], b[i]) for i in range(g)]
    ours = functools.partial(gmm, backend="gpu", group_sizes=sizes)
    turned = functools.partial(ours, transpose_rhs=True)
    weights = functools.partial(gmm_weight_gradient, backend="gpu", group_sizes=sizes)
    for name, run, operands, form, parts in [
        ("forward", ours, (lhs, rhs), "mk,kn->mn", (rows, rhs)),
        ("input gradient", turned, (grad, rhs), "mn,kn->mk", (grads, rhs)),
        ("weight gradient", weights, (lhs, grad), "mk,mn->kn", (rows, grads)),
    ]:
        flops = 2 * m * k * n / 1e12
        run, loop = jax.jit(run), jax.jit(each(form))
        want = np.asarray(jnp.stack(loop(*parts)), np.float32)
        got = np.asarray(run(*operands), np.float32).reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=0, atol=2**-7 * np.abs(want).max(), err_msg=name)
        own, other = _seconds(run, *operands), _seconds(loop, *parts)
        print(f"{shape} {name}: {flops / own:.0f} TFLOP/s, by group {flops / other:.0f}")
