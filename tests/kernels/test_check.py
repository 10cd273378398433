"""Each call that a step makes is compared with its definition, in values and gradients."""

import jax
import jax.numpy as jnp
import pytest

from moelib.core.errors import UserError
from moelib.kernels import backend, check
from moelib.kernels.backend import BACKENDS, Call, kernel_backends, recorded_calls
from moelib.kernels.flash_attention import MaskSpec, flash_attention
from moelib.kernels.flash_attention import xla as attention
from moelib.kernels.flash_attention.passes import attention_of_shards
from moelib.kernels.gmm import gmm, gmm_activated, gmm_weight_gradient
from moelib.kernels.gmm import xla as grouped
from moelib.kernels.quantized_matmul import Quantization, matmul_of_quantized
from moelib.kernels.quantized_matmul import xla as quantized


def gated(gate, up):
    return jax.nn.silu(gate) * up


def call(kernel, function, options, **shapes):
    whole = ("group_sizes", "segment_ids", "q_segments", "k_segments")
    named = ((n, shape, "int32" if n in whole else "float32") for n, shape in shapes.items())
    return Call(kernel, function, tuple(named), tuple(options.items()))


SPEC = {"spec": MaskSpec(64**-0.5)}
ROWS = {"lhs": (320, 128), "group_sizes": (4,)}
QKV = {"q": (2, 96, 4, 64), "k": (2, 96, 2, 64), "v": (2, 96, 2, 64)}
LONG = {"q": (1, 128, 2, 64), "k": (1, 128, 2, 64), "v": (1, 128, 2, 64)}
SEGMENTS = {"q_segments": (2, 96), "k_segments": (2, 96)}
GATED = {"rhs": (4, 2, 128, 64), "bias": (4, 2, 64)}
CALLS = {
    "gmm": call("gmm", gmm, {}, rhs=(4, 128, 64), **ROWS),
    "gated": call("gmm", gmm_activated, {"activation": gated}, **GATED, **ROWS),
    "attention": call("flash_attention", flash_attention, SPEC, segment_ids=(2, 96), **QKV),
    "window_sinks_cap": call(
        "flash_attention",
        flash_attention,
        {"spec": MaskSpec(64**-0.5, window=20, logit_cap=10.0)},
        sinks=(4,),
        **QKV,
    ),
    "shards": call("flash_attention", attention_of_shards, SPEC, **SEGMENTS, **QKV),
    "long_shards": call("flash_attention", attention_of_shards, SPEC, **LONG),
    "quantized": call(
        "quantized_matmul",
        matmul_of_quantized,
        {"scheme": Quantization.FP8_TENSOR},
        x=(2, 40, 64),
        weight=(64, 48),
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_right_backends_pass_in_values_and_in_the_gradients_of_all_floats(name, dtype, monkeypatch):
    results, run = [], check._value_and_gradients
    monkeypatch.setattr(
        check, "_value_and_gradients", lambda *args: results.append(run(*args)) or results[-1]
    )
    found = CALLS[name]
    operands = tuple((n, s, d if d == "int32" else dtype) for n, s, d in found.operands)
    assert check.compare(found._replace(operands=operands)) is None
    names = {"value"} | {f"gradient of {n}" for n, _, d in operands if d == dtype}
    assert [set(result) for result in results] == [names, names]


def _plant(monkeypatch, module, name, change):
    """Replaces a function of a backend by one with changed results."""
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kw: change(function(*args, **kw)))


@pytest.mark.parametrize(
    ("call", "module", "name", "change", "what"),
    [
        ("gmm", grouped, "forward", lambda x: (x[0].at[75].multiply(1.5), x[1]), "value"),
        (
            "gmm",
            grouped,
            "weight_gradient",
            lambda x: (x[0].at[1].add(jnp.nan), x[1]),  # Of the group without rows.
            "gradient of rhs",
        ),
        ("attention", attention, "forward", lambda x: (1.1 * x[0], x[1]), "value"),
        (
            "window_sinks_cap",
            attention,
            "backward",
            lambda x: (x[0], x[1].at[0, 10].set(0), x[2]),
            "gradient of k",
        ),
        (
            "shards",
            attention,
            "backward",
            lambda x: (*x[:2], x[2].at[0, 40].multiply(1.5)),
            "gradient of v",
        ),
        ("long_shards", attention, "attention_mask", jnp.ones_like, "value"),
        ("quantized", quantized, "dot", lambda x: 1.1 * x, "value"),
    ],
    ids=[
        "gmm",
        "gmm_weight_gradient",
        "attention",
        "attention_backward",
        "shards",
        "shards_mask",
        "quantized",
    ],
)
def test_a_wrong_backend_is_found_with_both_values(monkeypatch, call, module, name, change, what):
    _plant(monkeypatch, module, name, change)
    found = check.compare(CALLS[call])
    assert found is not None
    assert f"its {what} at [" in found
    assert "tolerance" in found


@pytest.mark.parametrize(
    ("reason", "fault"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory", check.NO_MEMORY),
        ("RESOURCE_EXHAUSTED: in vmem", "fails (RuntimeError: RESOURCE_EXHAUSTED: in vmem)"),
    ],
)
def test_only_a_kernel_that_lacks_memory_of_its_own_fails(monkeypatch, reason, fault):
    def run(call, arrays):
        raise RuntimeError(f"{reason}\nat an address")

    monkeypatch.setattr(check, "_value_and_gradients", run)
    assert check.compare(CALLS["gmm"]) == fault


def test_each_different_call_is_recorded_once_with_its_shapes():
    def run(lhs, rhs, q):
        for _ in range(2):
            lhs = gmm(lhs, rhs[:, 0], jnp.asarray([2, 3]))
        flash_attention(q, q, q, **SPEC, segment_ids=jnp.zeros((1, 8), jnp.int32))
        return gmm_activated(lhs, rhs, jnp.asarray([2, 3]), activation=gated)

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((6, 4), (2, 2, 4, 4), (1, 8, 2, 4))]
    with recorded_calls() as calls:
        jax.eval_shape(run, *shapes)
    jax.eval_shape(run, *shapes)
    assert [found.function for found in calls] == [gmm, flash_attention, gmm_activated]
    with recorded_calls() as calls_of_sums:
        jax.eval_shape(gmm_weight_gradient, shapes[0], shapes[0], jnp.asarray([2, 3]))
    assert calls_of_sums == calls[:1]  # Compared as a gradient of `gmm`.
    assert calls[0].operands[0] == ("lhs", (6, 4), "float32")
    assert calls[2].options == (("activation", gated),)
    assert str(calls[2]).startswith("gmm_activated(lhs float32[6, 4], rhs float32[2, 2, 4, 4], ")


def test_a_backend_that_cannot_compute_a_call_is_an_error_of_the_user():
    assert check.backend_of(CALLS["gmm"]) == "xla"
    with kernel_backends({"quantized_matmul": "straight_through"}):
        assert check.backend_of(CALLS["quantized"]) == "straight_through"
    blocks = CALLS["quantized"]._replace(options=(("scheme", Quantization.FP8_BLOCK),))
    with kernel_backends({"quantized_matmul": "float8"}), pytest.raises(UserError, match="float8"):
        check.backend_of(blocks)


def test_backends_hold_inside_the_context():
    with kernel_backends({"gmm": "reference"}):
        assert backend.chosen_backend("gmm") == "reference"
    assert backend.chosen_backend("gmm") is None
    assert {"gmm", "flash_attention", "cross_entropy"} <= set(BACKENDS)


def test_unknown_names_are_errors_of_the_user(monkeypatch):
    with pytest.raises(UserError, match=r"kernel_backends=.*'cudnn'"):
        kernel_backends({"gmm": "cudnn"}).__enter__()
    monkeypatch.setenv(backend.ENVIRONMENT, "gmn=xla")
    with pytest.raises(UserError, match=r"MOELIB_KERNEL_BACKEND=gmn=xla:.*'gmn'"):
        kernel_backends().__enter__()


def test_a_backend_that_cannot_compute_is_an_error_of_the_user_with_the_notes_of_the_layer():
    error = backend.UserError("gmm: backend 'gpu' needs a Hopper GPU")
    error.add_note("in model.decoder")
    with pytest.raises(UserError, match="'gpu' needs") as raised, kernel_backends():
        raise error
    assert raised.value.__notes__ == ["in model.decoder"]


@pytest.mark.parametrize("hidden", [(128, 136), (300, 316)])
def test_a_mask_that_hides_a_few_keys_from_late_queries_is_found(hidden, monkeypatch):
    calls = {"q": (1, 512, 1, 64), "k": (1, 512, 1, 64), "v": (1, 512, 1, 64)}
    attention_call = call("flash_attention", flash_attention, SPEC, segment_ids=(1, 512), **calls)
    assert check.compare(attention_call) is None
    original = check._value_and_gradients
    first, stop = hidden

    def planted(call, arrays):
        if arrays["k"].dtype == jnp.float32 and not planted.done:
            planted.done = True
            late = original(call, {**arrays, "v": arrays["v"].at[:, first:stop].set(0)})
            found = original(call, arrays)
            value = found["value"].at[:, 352:380].set(late["value"][:, 352:380])
            return found | {"value": value}
        return original(call, arrays)

    planted.done = False
    monkeypatch.setattr(check, "_value_and_gradients", planted)
    assert "is wrong: its value" in check.compare(attention_call)


def test_a_gradient_without_the_first_row_of_each_group_is_found(monkeypatch):
    many_rows = call("gmm", gmm, {}, lhs=(65536, 16), rhs=(3, 16, 8), group_sizes=(3,))
    original = grouped.weight_gradient

    def planted(lhs, grads, sizes, **options):
        return original(lhs.at[jnp.cumsum(sizes) - sizes].set(0), grads, sizes, **options)

    monkeypatch.setattr(grouped, "weight_gradient", planted)
    assert "its gradient of rhs" in (check.compare(many_rows) or "")
