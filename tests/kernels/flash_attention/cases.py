"""Cases of attention: together they cover every pair of options, on sizes on and off the block."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moelib.kernels.flash_attention import MaskSpec, flash_attention
from tests.kernels.comparing import assert_close


class Case(NamedTuple):
    seq_len: int
    heads: int
    groups: int
    dim: int
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    cap: float | None = None
    packed: bool = False
    dtype: str = "float32"
    v_dim: int | None = None  # None for that of queries and keys.

    def spec(self):
        return MaskSpec(self.dim**-0.5, self.causal, self.window, self.cap)


CASES = [
    Case(128, 1, 1, 64),
    Case(257, 4, 1, 64, window=70, sinks=True, packed=True),
    Case(200, 8, 1, 128, sinks=True, cap=2.0),
    Case(65, 4, 2, 192, causal=False, packed=True, v_dim=128),
    Case(256, 2, 2, 128, window=2, cap=3.0),
    Case(300, 8, 2, 64, window=128, packed=True, cap=1.5, dtype="bfloat16"),
    Case(130, 4, 4, 192, causal=False, sinks=True, cap=2.0, dtype="bfloat16"),
    Case(384, 3, 1, 64, window=200, sinks=True, dtype="bfloat16"),
    Case(100, 6, 3, 128, packed=True, dtype="bfloat16"),
    Case(256, 2, 1, 64, causal=False),
]


def operands(case):
    """Returns q, k, v, sinks, segments and a gradient of the output."""
    rng = np.random.default_rng(case.seq_len)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), case.dtype)
    v_dim = case.v_dim or case.dim
    q, grad = (normal(2, case.seq_len, case.heads, dim) for dim in (case.dim, v_dim))
    k, v = (normal(2, case.seq_len, case.groups, dim) for dim in (case.dim, v_dim))
    sinks = normal(case.heads) if case.sinks else None
    return q, k, v, sinks, segments(case.seq_len) if case.packed else None, grad


def segments(seq_len, seed=0):
    """Returns segments of two sequences, the second with padding at its end."""
    rng = np.random.default_rng(seed)
    rows = np.cumsum(rng.random((2, seq_len)) < max(0.05, 2 / seq_len), axis=1) + 1
    rows[1, seq_len - seq_len // 4 :] = 0
    return jnp.asarray(rows, jnp.int32)


@functools.partial(jax.jit, static_argnames=("spec", "backend"))
def pulled(q, k, v, sinks, ids, grad, *, spec, backend):
    """Returns the value, and the gradients in q, k, v and sinks."""
    options = {"segment_ids": ids, "backend": backend}
    attend = lambda q, k, v, sinks: flash_attention(q, k, v, spec, sinks=sinks, **options)
    value, pull = jax.vjp(attend, q, k, v, sinks)
    return value, pull(grad)


@functools.cache
def exact(case):
    """Returns value and gradients of the reference in float32."""
    *arrays, ids, grad = operands(case)
    *wide, grad = (None if x is None else np.asarray(x, np.float32) for x in (*arrays, grad))
    return pulled(*wide, ids, grad, spec=case.spec(), backend="reference")


def assert_equals_reference(case, backend):
    """Asserts that values and gradients are of the case's dtype, and near the exact ones."""
    got = pulled(*operands(case), spec=case.spec(), backend=backend)
    assert {str(x.dtype) for x in jax.tree.leaves(got)} == {case.dtype}
    assert_close(got, exact(case), 1e-5 if case.dtype == "float32" else 2**-5)
