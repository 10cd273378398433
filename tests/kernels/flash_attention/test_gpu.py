"""The kernels as Mosaic-GPU's interpreter runs them, as its compiler takes them, and on a GPU.

How fast they are: JAX_PLATFORMS=cuda,cpu pytest -m gpu -s tests/kernels/flash_attention/test_gpu.py
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

from moelib.kernels import hopper
from moelib.kernels.backend import warn_once
from moelib.kernels.flash_attention import MaskSpec, Positions, flash_attention, gpu, xla
from moelib.kernels.flash_attention.gpu_tiles import choose
from moelib.kernels.flash_attention.passes import attention_backward, attention_forward, merge
from moelib.kernels.flash_attention.reference import EMPTY, attention_mask, whole_sequences
from moelib.kernels.flash_attention.visits import in_blocks, lists
from tests.kernels.comparing import assert_close, compiled_for
from tests.kernels.flash_attention.cases import (
    CASES,
    Case,
    assert_equals_reference,
    operands,
    segments,
)
from tests.kernels.gpu_topology import A100, H100, needs_hopper, printed

# Finds races between warpgroups and copies, and fills uninitialized memory with NaN.
_STRICT = plgpu.InterpretGPUParams(detect_races=True)
_ALL = Case(72, 2, 1, 64, window=30, sinks=True, cap=2.0, packed=True, dtype="bfloat16")

_16_BIT = [case._replace(dtype="float16" if i % 4 else "bfloat16") for i, case in enumerate(CASES)]


def _passes(run, arrays, positions, spec, **options):
    """Returns the results of the forward and of the backward pass of a module."""
    q, k, v, sinks, grad = arrays
    out, lse = run.forward(q, k, v, sinks, positions, spec, **options)
    wide = out.astype(jnp.float32) * grad.astype(jnp.float32)
    delta = jnp.sum(wide, axis=-1).transpose(0, 2, 1)
    return out, lse, run.backward(q, k, v, lse, delta, grad, positions, spec, **options)


def _compared(arrays, positions, spec, in_order=True, interpret=_STRICT):
    """Asserts that both passes give the values of the xla form in float32."""
    options = {"in_order": in_order}
    run = functools.partial(_passes, gpu, positions=positions, spec=spec, interpret=interpret)
    got = jax.jit(lambda arrays: run(arrays, **options))(arrays)
    wide = [None if x is None else x.astype(jnp.float32) for x in arrays]
    want = jax.jit(lambda arrays: _passes(xla, arrays, positions, spec, **options))(wide)
    got = jax.tree.map(lambda x: x.astype(jnp.float32), got)
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=2e-5)  # The sums are of float32.
    assert_close(got, want, 2**-6)
    return got


def _first(case):
    """Returns the arrays and positions of a case's first sequence."""
    q, k, v, sinks, ids, grad = operands(case)
    ids = None if ids is None else ids[:1]
    return (q[:1], k[:1], v[:1], sinks, grad[:1]), whole_sequences(case.seq_len, ids)


def test_both_passes_give_the_values_of_the_xla_form_without_races():
    arrays, positions = _first(_ALL)
    _compared(arrays, positions, _ALL.spec())


@pytest.mark.slow
@pytest.mark.parametrize("case", _16_BIT, ids=str)
def test_values_and_gradients_are_those_of_the_reference(case):
    assert_equals_reference(case, "gpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(400, 2, 1, 64, dtype="bfloat16"),  # More visits than stages.
        Case(270, 1, 1, 128, packed=True, cap=2.0, dtype="bfloat16"),
        Case(200, 2, 1, 192, window=90, dtype="bfloat16", v_dim=128),
        Case(130, 2, 1, 256, causal=False, dtype="float16"),
    ],
    ids=str,
)
def test_no_kernel_races_at_any_head_dim(case):
    arrays, positions = _first(case)
    _compared(arrays, positions, case.spec())


@pytest.mark.slow
def test_heads_of_a_group_may_be_summed_in_parts(monkeypatch):
    monkeypatch.setattr(hopper, "_NUM_SMS", 2)  # One part of 4 heads instead of 4 of one.
    arrays, positions = _first(Case(200, 4, 1, 64, dtype="bfloat16"))
    q, k = arrays[:2]
    assert gpu._num_parts(q, k, 128) == 2
    _compared(arrays, positions, MaskSpec(0.125))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_shards_in_any_order_merge_to_the_whole(packed):
    """The keys come in two shards, in zigzag; the results are of float32."""
    arrays, positions = _first(Case(160, 2, 1, 64, packed=packed, dtype="bfloat16"))
    q, k, v, _, grad = arrays
    spec, ids = MaskSpec(0.125), positions.q_segments
    order = np.concatenate([np.arange(0, 40), np.arange(120, 160), np.arange(40, 120)])
    of = lambda x, rows: None if x is None else x[:, rows]
    run = {"spec": spec, "backend": "gpu"}
    shards = [order[:80], order[80:]]
    pairs = [
        (of(k, at), of(v, at), Positions(order, at, of(ids, order), of(ids, at))) for at in shards
    ]
    q, grad = q[:, order], grad[:, order]
    parts = [attention_forward(q, *pair, **run) for pair in pairs]
    assert parts[0][0].dtype == jnp.float32
    out, lse = merge(*parts)
    grads = [attention_backward(q, k, v, out, lse, grad, at, **run) for k, v, at in pairs]
    back = np.argsort(order)
    grad_q = sum(x[0] for x in grads)[:, back]
    others = [jnp.concatenate([x[i] for x in grads], axis=1)[:, back] for i in (1, 2)]
    wide = [None if x is None else x.astype(jnp.float32) for x in arrays]
    want = _passes(xla, wide, positions, spec, in_order=True)
    assert_close((out[:, back], lse[..., back], (grad_q, *others)), want, 2**-6)


@pytest.mark.slow
def test_queries_that_see_no_key_give_zeros_and_blocks_that_no_query_sees_are_not_loaded():
    (q, k, v, _, grad), _ = _first(Case(256, 1, 1, 64, dtype="bfloat16"))
    spec, index = MaskSpec(0.125), jnp.arange(256, dtype=jnp.int32)
    # The first half comes before all keys, and no query comes after the second half of the keys.
    late = Positions(index - 128, jnp.where(index < 128, index, index + 256))
    stale = [x.at[:, 128:].set(jnp.nan) for x in (k, v)]
    run = functools.partial(_passes, gpu, positions=late, spec=spec, in_order=False)
    got = run((q, *stale, None, grad), interpret=True)
    cut = Positions(late.q_index, late.k_index[:128])
    wide = [x.astype(jnp.float32) for x in (q, k[:, :128], v[:, :128], grad)]
    out, lse, grads = _passes(xla, (*wide[:3], None, wide[3]), cut, spec, in_order=False)
    zeros = jnp.zeros_like(grads[1])
    grads = grads[0], *(jnp.concatenate([x, zeros], axis=1) for x in grads[1:])
    assert not np.any(got[0][:, :128])
    np.testing.assert_allclose(got[1][:, :, :128], EMPTY, rtol=1e-6)
    assert_close((got[0], got[1][..., 128:], got[2]), (out, lse[..., 128:], grads), 2**-6)


# ------------------------------------------------------------------------------------------------
# Visits


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("spec", [MaskSpec(1.0), MaskSpec(1.0, window=9), MaskSpec(1.0, False)])
def test_each_row_visits_the_columns_that_it_sees(spec, by_keys):
    rng, length = np.random.default_rng(0), 150
    q_index, k_index = (rng.permutation(2 * length)[:length].astype(np.int32) for _ in range(2))
    q_index.sort()
    ids = np.asarray(segments(2 * length))
    positions = Positions(*map(jnp.asarray, (q_index, k_index, ids[:, q_index], ids[:, k_index])))
    mask = np.asarray(attention_mask(positions, spec))
    rows = in_blocks(q_index, k_index, 10, 5)
    pair = ids[:, q_index].reshape(2, 15, 10), ids[:, k_index].reshape(2, 30, 5)
    found, counts = map(np.asarray, lists(*rows, pair, spec, by_keys=by_keys))
    blocks = mask.reshape(2, 15, 10, 30, 5).swapaxes(2, 3)
    blocks = blocks.swapaxes(1, 2) if by_keys else blocks
    for b, row in np.ndindex(counts.shape):
        visited = found[b, row, : counts[b, row]]
        whole = {int(visit) // 2 for visit in visited if visit % 2}
        any_seen = set(np.flatnonzero(blocks[b, row].any((1, 2))))
        assert any_seen <= {int(visit) // 2 for visit in visited}
        assert whole <= set(np.flatnonzero(blocks[b, row].all((1, 2))))


def test_visits_skip_what_causality_the_window_and_other_documents_hide():
    index = np.arange(4096, dtype=np.int32)
    rows = in_blocks(index, index, 128, 128)
    counts = lambda spec, ids=None: np.asarray(lists(*rows, ids, spec, by_keys=False)[1])
    assert counts(MaskSpec(1.0, causal=False)).sum() == 32 * 32
    assert counts(MaskSpec(1.0)).sum() == 32 * 33 // 2
    assert counts(MaskSpec(1.0, window=128)).sum() == 32 + 31
    documents = np.repeat(np.arange(4), 1024).reshape(1, 32, 128)
    assert counts(MaskSpec(1.0), (documents, documents)).sum() == 4 * 8 * 9 // 2
    found, _ = lists(*rows, (documents, documents), MaskSpec(1.0), by_keys=True)
    np.testing.assert_array_equal(found[0, 9, :7], [2 * 9, *(2 * np.arange(10, 16) + 1)])


@pytest.mark.parametrize(
    ("dims", "outputs", "query_gradient", "key_gradients"),
    [
        ((64, 64), (128, 128, 4), (128, 64, 4), (128, 64, 4)),
        ((128, 128), (128, 128, 2), (128, 64, 3), (128, 64, 3)),
        ((192, 128), (128, 64, 3), (128, 64, 2), (64, 64, 3)),
        ((256, 256), (128, 64, 2), (128, 64, 1), (64, 64, 2)),
    ],
)
def test_tiles_shrink_as_heads_grow(dims, outputs, query_gradient, key_gradients):
    names = "outputs", "query_gradient", "key_gradients"
    assert [choose(name, *dims) for name in names] == [outputs, query_gradient, key_gradients]


# ------------------------------------------------------------------------------------------------
# Choice


def _traced(backend=None, dim=64, dtype="bfloat16"):
    x = jax.ShapeDtypeStruct((1, 64, 2, dim), dtype)
    run = lambda x: flash_attention(x, x, x, MaskSpec(1.0), backend=backend).astype(jnp.float32)
    return str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jax.checkpoint(run)(x))))(x))


@pytest.mark.parametrize("backend", ["gpu", None])
@pytest.mark.parametrize("kind", [H100, "NVIDIA H200", "NVIDIA GH200 480GB"])
def test_on_hopper_it_is_the_default_and_is_not_interpreted(kind, backend, caplog):
    with compiled_for(kind), caplog.at_level(logging.WARNING):
        made = _traced(backend)
    assert "name=attention_query_gradient" in made
    assert "callback" not in made  # Of the interpreter.
    assert not caplog.records


def test_its_results_vary_over_the_axes_of_a_mesh_as_its_operands_do():
    arrays = [jax.ShapeDtypeStruct((2, 64, n, 64), "bfloat16") for n in (4, 2, 2)]
    ids, sinks = jax.ShapeDtypeStruct((2, 64), "int32"), jax.ShapeDtypeStruct((4,), "float32")

    def loss(q, k, v, ids, sinks):
        options = {"segment_ids": ids, "sinks": sinks, "backend": "gpu"}
        out = flash_attention(q, k, v, MaskSpec(1.0), **options)
        return jax.lax.psum(jnp.sum(out.astype(jnp.float32)), "x")

    split, whole = jax.P("x"), jax.P()
    specs = split, split, split, split, whole
    with compiled_for(H100, 2):
        run = jax.shard_map(loss, in_specs=specs, out_specs=whole, check_vma=True)
        grads = jax.eval_shape(jax.grad(run, argnums=(0, 1, 2, 4)), *arrays, ids, sinks)
    assert [x.shape for x in grads] == [x.shape for x in (*arrays, sinks)]


@pytest.mark.parametrize(
    ("kind", "dim", "dtype", "reason"),
    [
        (H100, 96, "bfloat16", "64 .*256, not 96; set 128"),
        (H100, 512, "float16", "not 512; set 256"),
        (H100, 64, "float32", "bfloat16 .*float16, not float32"),
        (A100, 64, "bfloat16", "Hopper .*NVIDIA A100"),
    ],
)
def test_elsewhere_the_default_is_xla_with_the_reason_and_its_cost(
    kind, dim, dtype, reason, caplog
):
    warn_once.cache_clear()
    with compiled_for(kind), caplog.at_level(logging.WARNING):
        assert "wgmma" not in _traced(None, dim, dtype)
        with pytest.raises(ValueError, match=f"'gpu' .*{reason}.*=flash_attention=xla"):
            _traced("gpu", dim, dtype)
    (message,) = caplog.messages
    assert re.search(reason, message)
    assert "25 to 80 times as many bytes" in message


# ------------------------------------------------------------------------------------------------
# Compiled for a GPU that is not there


# Bytes of a thread's registers that leave for local memory, of all three kernels.
_SPILLED = {"cap and window": 44, "head dim of 256": 116}


@pytest.mark.slow
def test_values_and_gradients_compile_for_h100():
    lines = printed("tests.kernels.flash_attention.compile_for_gpu").splitlines()
    found, spilled = {}, 0
    for line in lines:  # ptxas prints a program's spills before its figures.
        spilled += sum(int(x) for x in re.findall(r"frame, (\d+) bytes spill stores", line))
        if line.startswith("{"):
            each = json.loads(line)
            found[each["case"]], spilled = each | {"spilled": spilled}, 0
    assert all(each["kernels"] == 3 for each in found.values())
    assert {name: each["spilled"] for name, each in found.items() if each["spilled"]} == _SPILLED
    plain = found["32/4 heads of 128"]
    # 9 matmuls; 528 of 1,024 pairs of blocks of 128.
    assert plain["flops"] == pytest.approx(9 * 2 * 32 * 128 * 4096**2 * 528 / 1024, rel=0.02)
    assert plain["bytes"] < 0.45 * 2**30
    assert plain["launches"] < 16


# ------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "case", [*_16_BIT, Case(3000, 8, 2, 256, packed=True, dtype="bfloat16")], ids=str
)
def test_a_gpu_gives_the_values_and_gradients_of_the_reference(case):
    assert_equals_reference(case, "gpu")
