import logging

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.kernels.backend import warn_once
from moelib.kernels.flash_attention import MaskSpec, flash_attention
from tests.kernels.comparing import assert_close, compiled_for
from tests.kernels.flash_attention.cases import (
    CASES,
    Case,
    assert_equals_reference,
    operands,
    pulled,
)
from tests.kernels.gpu_topology import A100, H100
from tests.oracles.attention import attention

SPEC = MaskSpec(8**-0.5)
attend = jax.jit(flash_attention, static_argnames=("spec", "backend"))  # One program per call.


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        Case(7, 4, 4, 8, causal=False),
        Case(7, 3, 1, 8, causal=False, packed=True, sinks=True, v_dim=5),
        Case(7, 4, 2, 8, window=3, cap=0.5),
        Case(90, 4, 2, 8, window=16, packed=True, sinks=True),
        Case(7, 4, 2, 8, dtype="bfloat16"),
    ],
    ids=str,
)
def test_values_are_those_of_each_query_by_itself(backend, case):
    q, k, v, sinks, ids, _ = operands(case)
    got = attend(q, k, v, case.spec(), sinks=sinks, segment_ids=ids, backend=backend)
    want = attention(q, k, v, **case.spec()._asdict(), sinks=sinks, segment_ids=ids)
    assert got.dtype == case.dtype
    rtol, atol = (1e-5, 1e-6) if case.dtype == "float32" else (0, 2**-6)
    np.testing.assert_allclose(np.float64(got), want, rtol, atol)


def test_documents_that_begin_at_blocks_see_no_token_before_them():
    ids = np.repeat([1, 2, 3, 4, 0], [64, 36, 28, 64, 8])[None].astype(np.int32)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 200, 2, 8)).astype(np.float32)
    got = attend(q, k, v, SPEC, segment_ids=ids, backend="xla")
    want = attention(q, k, v, **SPEC._asdict(), segment_ids=ids)
    np.testing.assert_allclose(np.float64(got), want, 1e-5, 1e-6)


# The kernels for TPUs compute the others in every run.
SOME = [pytest.param(c, marks=pytest.mark.slow) if i % 4 else c for i, c in enumerate(CASES)]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_blocks_give_the_values_and_gradients_of_the_reference(case):
    assert_equals_reference(case, "xla")


def test_it_works_in_shard_map_with_replicated_sinks():
    case = Case(72, 4, 2, 64, window=20, sinks=True, packed=True)
    q, k, v, sinks, ids, grad = operands(case)
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


def test_large_scores_neither_overflow_nor_leave_the_mask():
    q, k, v, *_ = (1e4 * np.asarray(x) for x in operands(Case(7, 4, 2, 8))[:3])
    got = attend(q, k, v / 1e4, SPEC)
    np.testing.assert_allclose(got, attention(q, k, v / 1e4, scale=SPEC.scale), atol=1e-5)


def test_the_xla_form_on_a_gpu_is_logged_once_with_its_reason_and_the_override(caplog):
    warn_once.cache_clear()
    q, kv = (jax.ShapeDtypeStruct((1, 64, heads, 64), jnp.bfloat16) for heads in (4, 2))
    run = lambda **kw: jax.eval_shape(lambda *x: flash_attention(*x, spec=SPEC, **kw), q, kv, kv)
    with caplog.at_level(logging.WARNING):
        run()
        assert not caplog.records  # On a CPU it is the fastest form.
        with compiled_for(A100):
            run(backend="xla")
            assert not caplog.records  # It was asked for.
            run()
            run()
    (message,) = caplog.messages
    for named in (A100, "=flash_attention=xla", "flash_attention=cudnn"):
        assert named in message


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def alike(*shape, dtype="float32", **others):
    """Returns queries, keys and values of one shape, and other arguments."""
    return dict.fromkeys("qkv", array(*shape, dtype=dtype)) | others


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"spec": SPEC._replace(window=0)}, "window=0"),
        ({"spec": SPEC._replace(window=4, causal=False)}, "window=4 .*causal=False"),
        ({"spec": SPEC._replace(logit_cap=0.0)}, r"logit_cap=0\.0"),
        ({"k": array(2, 5, 2, 8), "v": array(2, 5, 2, 8)}, r"\[2, 5, 2, 8\].*\[B, Q, G, D\]"),
        ({"q": array(2, 5, 4, 8)}, r"q \[2, 5, 4, 8\]"),
        ({"k": array(1, 7, 2, 8), "v": array(1, 7, 2, 8)}, r"k \[1, 7, 2, 8\]"),
        ({"k": array(2, 7, 2, 4)}, r"k \[2, 7, 2, 4\]"),
        ({"v": array(2, 7, 1, 8)}, r"v \[2, 7, 1, 8\]"),
        ({"q": array(7, 4, 8)}, r"q \[7, 4, 8\]"),
        (alike(0, 7, 2, 8), "above 0"),
        ({"k": array(2, 7, 3, 8), "v": array(2, 7, 3, 8)}, "4 query.* 3"),
        ({"k": array(2, 7, 2, 8, dtype="bfloat16")}, r"bfloat16.*float32"),
        ({"sinks": array(3)}, r"sinks \[3\]"),
        ({"segment_ids": array(2, 5, dtype="int32")}, r"segment_ids \[2, 5\]"),
        ({"segment_ids": array(2, 7)}, "q_segments .*float32"),
        (alike(1, 8, 1, 32, backend="tpu"), "'tpu'.* 32; .*64.*=flash_attention=xla"),
        (alike(1, 8, 1, 90, backend="tpu"), "'tpu'.* 90; .*96"),
        (alike(1, 8, 1, 64, dtype="float16", backend="tpu"), "'tpu'.*float16"),
        (alike(1, 2**20, 1, 64, backend="tpu"), r"\b2098176 of 1048576 queries"),
        (
            alike(1, 2**21, 1, 64, backend="tpu") | {"spec": SPEC._replace(window=128)},
            r"of 2097152 queries .*more devices",
        ),
        (alike(1, 9, 1, 64, backend="cudnn"), "'cudnn'.*float32.*=flash_attention=xla"),
        (alike(1, 9, 1, 92, dtype="bfloat16", backend="cudnn"), "'cudnn'.* 92; .*96"),
        (alike(1, 9, 1, 256, dtype="bfloat16", backend="cudnn"), "'cudnn'.* 256; .*128"),
        (
            alike(1, 9, 1, 64, dtype="bfloat16", backend="cudnn")
            | {"sinks": array(1, dtype="bfloat16")},
            "'cudnn'.*sinks",
        ),
        (
            alike(1, 9, 1, 64, dtype="bfloat16", backend="cudnn")
            | {"spec": SPEC._replace(logit_cap=2.0)},
            r"'cudnn'.*logit_cap=2\.0",
        ),
        (
            alike(1, 9, 1, 64, dtype="bfloat16", backend="cudnn")
            | {"segment_ids": array(1, 9, dtype="int32")},
            "'cudnn'.* 9; .*10",
        ),
    ],
)
def test_operands_that_make_no_sense_or_have_no_kernel_are_refused(change, named, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # As for users.
    arrays = {"q": array(2, 7, 4, 8), "k": array(2, 7, 2, 8), "v": array(2, 7, 2, 8)} | change
    options = {name: arrays.pop(name) for name in ("spec", "backend") if name in arrays}
    with pytest.raises(ValueError, match=named):
        jax.eval_shape(lambda x: flash_attention(**x, **{"spec": SPEC} | options), arrays)


def test_a_missing_cudnn_is_named_with_its_package(monkeypatch):
    def missing(*args, **kw):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    x = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
    run = lambda x: flash_attention(x, x, x, MaskSpec(1.0), backend="cudnn")
    with compiled_for(H100), pytest.raises(ValueError, match="nvidia-cudnn-cu13"):
        jax.eval_shape(run, x)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_values_and_gradients_are_those_of_the_xla_form(window, packed):
    case = Case(128, 4, 2, 64, window=window, packed=packed, dtype="bfloat16")
    got = pulled(*operands(case), spec=case.spec(), backend="cudnn")
    want = pulled(*operands(case), spec=case.spec(), backend="xla")
    assert_close(got, want, 2**-5)
