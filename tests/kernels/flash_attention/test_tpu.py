import logging

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import AxisType, PartitionSpec

from moelib.kernels.backend import warn_once
from moelib.kernels.flash_attention import MaskSpec, flash_attention, tpu, xla
from moelib.kernels.flash_attention.reference import whole_sequences
from tests.kernels.comparing import assert_close, compiled_for
from tests.kernels.flash_attention.cases import (
    CASES,
    Case,
    assert_equals_reference,
    operands,
    pulled,
)
from tests.kernels.tpu_topology import compile_apart, needs_libtpu

# The xla form computes the others in every run.
SOME = [c if i == 1 else pytest.param(c, marks=pytest.mark.slow) for i, c in enumerate(CASES)]
SOME += [
    Case(130, 4, 2, 192, packed=True, sinks=True, v_dim=128),
    pytest.param(Case(130, 2, 2, 64, v_dim=128, window=40), marks=pytest.mark.slow),
    pytest.param(Case(130, 2, 2, 80, v_dim=24), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_kernels_give_the_values_and_gradients_of_the_reference(case):
    assert_equals_reference(case, "tpu")


def _passes(case, run, **options):
    """Returns the results of the forward and of the backward pass of a module."""
    q, k, v, sinks, ids, grad = operands(case)
    positions, options = whole_sequences(case.seq_len, ids), {"in_order": True, **options}
    out, lse = run.forward(q, k, v, sinks, positions, case.spec(), **options)
    delta = jnp.sum(out * grad, -1).transpose(0, 2, 1)
    grads = run.backward(q, k, v, lse, delta, grad, positions, case.spec(), **options)
    return out, lse, grads


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case(257, 2, 1, 64, window=70, sinks=True, packed=True), Case(130, 2, 2, 64, causal=False)],
    ids=str,
)
def test_no_kernel_reads_uninitialized_memory(case):
    """The interpreter fills it with NaN."""
    got = _passes(case, tpu, interpret=pltpu.InterpretParams(uninitialized_memory="nan"))
    assert_close(got, _passes(case, xla), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [6, 12])
def test_many_heads_of_a_group_are_computed_in_chunks(heads, monkeypatch):
    monkeypatch.setattr(tpu, "_MAX_ROWS", 512)  # Chunks of 3 and 4 heads.
    case = Case(130, heads, 1, 64, sinks=True)
    assert_close(_passes(case, tpu, interpret=True), _passes(case, xla), 1e-5)


def test_long_sequences_are_computed_in_chunks_of_fewer_heads(monkeypatch):
    def blocks(length, heads=32):
        found = []

        def look(q, k):
            assert tpu.reason_against(q, k, k, MaskSpec(1.0), in_order=True) is None
            call, chunks = tpu._call(q, k, MaskSpec(1.0), interpret=False, in_order=True)
            found.append((call.block_q, call.block_k, heads // chunks))
            return q

        jax.eval_shape(
            look, *(jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (heads, 4))
        )
        return found[0]

    # Of the pairs of blocks of 128 queries and 512 keys, 131,584 are visited, of 512 and 512 as
    # many with twice as many tokens.
    assert blocks(131072) == (128, 512, 8)
    assert blocks(262144) == (512, 512, 2)
    case = Case(512, 4, 1, 64)
    want = _passes(case, xla)
    monkeypatch.setattr(tpu, "_MAX_ROWS", 512)
    monkeypatch.setattr(tpu, "MAX_VISITS", 9)  # 10 of blocks of 128.
    assert_close(_passes(case, tpu, interpret=True), want, 1e-5)


@pytest.mark.parametrize(
    ("window", "cap"),
    [
        (None, 2.0),
        pytest.param(None, None, marks=pytest.mark.slow),
        pytest.param(100, None, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_splash_attention(window, cap):
    case = Case(256, 2, 2, 128, window=window, cap=cap)
    q, k, v, _, _, grad = operands(case)
    one = splash_attention_mask.CausalMask((256, 256))
    if window is not None:
        one = splash_attention_mask.LocalMask((256, 256), (window - 1, 0), 0)
    splash = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([one] * 2),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        interpret=True,
    )
    by_head = lambda x: x.transpose(0, 2, 1, 3)
    attend = lambda q, k, v: by_head(
        jax.vmap(splash)(by_head(q) * 128**-0.5, *map(by_head, (k, v)))
    )
    value, pull = jax.vjp(attend, q, k, v)
    got = pulled(q, k, v, None, None, grad, spec=case.spec(), backend="tpu")
    assert_close(got, (value, (*pull(grad), None)), 1e-5)


@pytest.mark.parametrize(
    ("seq_len", "limit", "block"),
    [
        (1, 512, 128),
        (1024, 512, 256),
        (2048, 512, 512),
        (2048, 128, 128),
        (1100, 512, 256),
        (4200, 512, 512),
        (900, 512, 128),
    ],
)
def test_blocks_grow_with_the_sequence_without_much_padding(seq_len, limit, block):
    assert tpu._block(seq_len, limit) == block


@pytest.mark.parametrize("check_vma", [False, True])
def test_kernels_work_in_shard_map(check_vma):
    """Interpreted without the check of varying axes, which the interpreter itself does not pass."""
    case = Case(72, 4, 2, 64, window=20, sinks=True, packed=True)
    q, k, v, sinks, ids, grad = operands(case)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(q, k, v, sinks, ids, grad):
        options = {"segment_ids": ids, "backend": None if check_vma else "tpu"}
        attend = lambda q, k, v, sinks: flash_attention(
            q, k, v, case.spec(), sinks=sinks, **options
        )
        value, pull = jax.vjp(attend, q, k, v, sinks)
        *grads, sinks_grad = pull(grad)
        return value, (*grads, sinks_grad if check_vma else jax.lax.psum(sinks_grad, "data"))

    results = split, (split, split, split, whole)
    specs = split, split, split, whole, split, split
    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=results, check_vma=check_vma)
    )
    if check_vma:
        traced = run.trace(q, k, v, sinks, ids, grad)
        assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3
        return
    got = run(q, k, v, sinks, ids, grad)
    assert_close(got, pulled(*operands(case), spec=case.spec(), backend="reference"), 1e-5)


@pytest.mark.parametrize(
    ("kind", "dim", "reason"),
    [
        (AxisType.Auto, 64, "manual mesh axes, not x"),
        (AxisType.Manual, 32, "not 32; set 64"),
        (AxisType.Manual, 64, None),
    ],
)
def test_the_xla_form_on_a_tpu_is_logged_once_with_its_reason(kind, dim, reason, caplog):
    warn_once.cache_clear()
    x = jax.ShapeDtypeStruct((2, 8, 1, dim), jnp.float32)
    with caplog.at_level(logging.WARNING), compiled_for("TPU v6 lite", 2, kind):
        for _ in range(2):
            made = str(jax.make_jaxpr(lambda x: flash_attention(x, x, x, MaskSpec(1.0)))(x))
    assert ("pallas" in made) == (reason is None)
    messages = [record.getMessage() for record in caplog.records]
    assert [reason in message for message in messages] == [True] * (reason is not None)
    assert all("MOELIB_KERNEL_BACKEND=flash_attention=xla" in message for message in messages)


_COMPILE = "tests.kernels.flash_attention.compile_for_tpu"


@needs_libtpu
@pytest.mark.parametrize(
    ("program", "flops"),
    [
        # 9 matmuls; 2 blocks of 128 queries by 2 of 128 keys: 3 of 4 pairs are visited.
        ("in shard_map", 9 * 2 * 64 * 8 * 3 * 128**2),
        # 5 matmuls over 192 and 4 over 128, of 10 of 16 pairs of blocks of 256 tokens, 2 x 2 heads.
        pytest.param("latent", 2 * (5 * 192 + 4 * 128) * 4 * 10 * 256**2, marks=pytest.mark.slow),
    ],
)
def test_the_default_on_tpus_is_the_kernels(program, flops):
    (made,) = compile_apart(_COMPILE, f"v6e:2x2x1={program}")
    assert made["kernels"] == 3
    assert made["flops"] == pytest.approx(flops, rel=0.1)


@pytest.mark.slow
@needs_libtpu
def test_all_kernels_compile_for_all_generations():
    made = compile_apart(_COMPILE, "v5e:2x2", "v5p:2x2x1", "v6e:2x2x1", "tpu7x:2x2x1")
    assert len(made) == 4 * 9
    assert all(program["kernels"] == 3 for program in made)
