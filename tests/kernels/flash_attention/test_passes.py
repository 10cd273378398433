import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.kernels.flash_attention import MaskSpec, Positions
from moelib.kernels.flash_attention.passes import (
    add_sinks,
    attention_backward,
    attention_forward,
    merge,
    output_times_gradient,
    sinks_gradient,
)
from tests.kernels.comparing import assert_close
from tests.kernels.flash_attention.cases import Case, operands, pulled
from tests.oracles.attention import attention


def zigzag(seq_len, shards):
    """Returns each shard's positions: a piece of the front and its mirror image at the back."""
    pieces = np.arange(seq_len, dtype=np.int32).reshape(2 * shards, -1)
    return [np.concatenate([pieces[i], pieces[2 * shards - 1 - i]]) for i in range(shards)]


SPEC = MaskSpec(64**-0.5)
_STATIC = "backend", "spec"
_forward = jax.jit(attention_forward, static_argnames=_STATIC)  # Compiled once for all pairs.
_backward = jax.jit(attention_backward, static_argnames=_STATIC)
_merge = jax.jit(merge)


def by_shards(q, k, v, sinks, ids, grad, index, *, shards, **run):
    """Returns the result of `pulled`, from all pairs of a shard of queries and a shard of keys."""
    rows = np.split(index, shards)
    of = lambda x, i: None if x is None else np.asarray(x)[:, rows[i]]
    out, grads, of_sinks = np.zeros_like(q), [np.zeros_like(x) for x in (q, k, v)], 0.0
    for i in range(shards):
        at = [Positions(rows[i], rows[j], of(ids, i), of(ids, j)) for j in range(shards)]
        pairs = [_forward(of(q, i), of(k, j), of(v, j), at[j], **run) for j in range(shards)]
        part = functools.reduce(_merge, pairs)
        if sinks is not None:
            part = jax.jit(add_sinks)(part, sinks)
            delta = jax.jit(output_times_gradient)(part[0], of(grad, i))
            of_sinks += jax.jit(sinks_gradient)(sinks, part[1], delta)
        out[:, rows[i]] = part[0]
        for j in range(shards):
            operands = of(q, i), of(k, j), of(v, j), *part, of(grad, i)
            made = _backward(*operands, at[j], **run)
            for n, (side, value) in enumerate(zip((i, j, j), made, strict=True)):
                grads[n][:, rows[side]] += value
    return out, (*grads, None if sinks is None else of_sinks)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("xla", Case(96, 4, 1, 64, window=30, sinks=True, packed=True, cap=2.0)),
        ("tpu", Case(96, 4, 1, 64, window=30, sinks=True, packed=True, cap=2.0)),
        ("xla", Case(96, 2, 2, 64, causal=False, sinks=True)),
        pytest.param("tpu", Case(96, 2, 2, 64, causal=False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pairs_of_shards_in_zigzag_give_the_attention_of_the_whole_sequence(backend, case):
    index = np.concatenate(zigzag(96, 3))
    got = by_shards(*operands(case), index, shards=3, backend=backend, spec=case.spec())
    want = pulled(*operands(case), spec=case.spec(), backend="reference")
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("backend", ["xla", "tpu"])
def test_keys_that_no_query_sees_give_zeros_and_change_no_merge(backend):
    q, k, v, *_ = operands(Case(16, 2, 1, 64))
    early, late = np.arange(32, dtype=np.int32).reshape(2, 16)
    run = {"spec": SPEC, "backend": backend}
    unseen = _forward(q, k, v, Positions(early, late), **run)
    assert not np.any(unseen[0])
    own = _forward(q, k, v, Positions(early, early), **run)
    for got in _merge(own, unseen), _merge(unseen, own), _merge(_merge(unseen, unseen), own):
        assert_close(got, own, 1e-6)
    grads = _backward(q, k, v, *own, q, Positions(early, late), **run)
    assert not any(np.any(grad) for grad in grads)


def test_the_logsumexp_is_that_of_jax():
    q, k, v, *_ = operands(Case(16, 2, 1, 64))
    index = np.arange(16, dtype=np.int32)
    _, got = _forward(q, k, v, Positions(index, index), spec=SPEC)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, return_residual=True)
    _, want = jax.jit(attend)(q, k, v)
    np.testing.assert_allclose(got, want.transpose(0, 2, 1), rtol=1e-5, atol=1e-6)


def test_keys_in_tiles_and_in_reverse_order_give_the_same(monkeypatch):
    monkeypatch.setattr("moelib.kernels.flash_attention.xla._KEY_TILE", 32)
    case = Case(96, 2, 1, 64, window=30)
    q, k, v, *_ = operands(case)
    index = np.arange(95, -1, -1, dtype=np.int32)
    back = [np.asarray(x)[:, ::-1] for x in (q, k, v)]
    forward = jax.jit(attention_forward, static_argnames="spec")  # With the tile set above.
    out, _ = forward(*back, Positions(index, index), spec=case.spec())
    want = attention(q, k, v, **case.spec()._asdict())
    assert_close(out[:, ::-1], want, 1e-5)


def test_a_ring_of_devices_gives_the_attention_of_the_whole_sequence():
    """Positions vary over devices, and varying axes are checked."""
    case = Case(96, 4, 2, 64, window=30, packed=True)
    q, k, v, _, ids, grad = operands(case)
    mesh = jax.make_mesh((3,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    turn = lambda x: jax.lax.ppermute(x, "seq", [(0, 1), (1, 2), (2, 0)])

    def local(q, k, v, ids, grad, index):
        keys, parts, grads = (k, v, index, ids), [], []
        for _ in range(3):
            k, v, k_index, k_ids = keys
            positions = Positions(index, k_index, ids, k_ids)
            parts.append(attention_forward(q, k, v, positions, case.spec()))
            keys = jax.tree.map(turn, keys)
        part = functools.reduce(merge, parts)
        sums = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), (k, v))
        for _ in range(3):
            k, v, k_index, k_ids = keys
            positions = Positions(index, k_index, ids, k_ids)
            of_q, *made = attention_backward(q, k, v, *part, grad, positions, case.spec())
            grads.append(of_q)
            sums = tuple(turn(a + b) for a, b in zip(sums, made, strict=True))
            keys = jax.tree.map(turn, keys)
        return part[0], (sum(grads), *sums, None)

    split = PartitionSpec(None, "seq")
    specs = split, split, split, split, split, PartitionSpec("seq")
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split)
    index = np.concatenate(zigzag(96, 3))
    moved = [np.asarray(x)[:, index] for x in (q, k, v, ids, grad)]
    got = jax.device_get(jax.jit(run)(*moved, index))
    got = jax.tree.map(lambda x: x[:, np.argsort(index)], got)
    want = pulled(q, k, v, None, ids, grad, spec=case.spec(), backend="reference")
    assert_close(got, want, 1e-5)


INDEX, IDS = np.arange(16, dtype=np.int32), np.ones((2, 16), np.int32)


@pytest.mark.parametrize(
    ("positions", "change", "named"),
    [
        ((INDEX, INDEX), {"v": np.s_[:, :8]}, r"v \[2, 8, 1, 64\]"),
        ((INDEX, INDEX, IDS, IDS[:, :8]), {}, r"segment_ids.*\[2, 8\]"),
        ((INDEX, INDEX[:8]), {}, r"k_index \[8\]"),
        ((INDEX, INDEX, IDS), {}, "segments"),
        ((INDEX, INDEX), {"spec": SPEC._replace(window=0)}, "window=0"),
        ((INDEX, INDEX), {"backend": "cudnn"}, "'cudnn'"),
    ],
)
def test_shards_that_disagree_are_refused(positions, change, named, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    q, k, v, *_ = operands(Case(16, 2, 1, 64))
    v = v[change.get("v", np.s_[:])]
    run = {"spec": SPEC} | {name: change[name] for name in change if name != "v"}
    with pytest.raises(ValueError, match=named):
        attention_forward(q, k, v, Positions(*positions), **run)
