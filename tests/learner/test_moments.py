"""Optimizer state in 8 bits and in bfloat16: error bounds, rounding, steps of optimizers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.layers.base import weight_spec
from moelib.learner import optimizers
from moelib.learner.learner import Learner
from moelib.learner.moments import (
    MomentFormat,
    QuantizedMoment,
    dequantize_moment,
    quantize_moment,
    round_to_bfloat16,
    stored_as,
)

BLOCK = 64


def levels(signed):
    """Returns the shares that codes stand for, by the definition."""
    top = 6 if signed else 7
    return np.array(
        [0.0]
        + [
            (0.1 + 0.9 * (j + 1) / 2**i) * 10.0 ** (i - top)
            for i in range(top + 1)
            for j in range(2**i)
        ]
    )


def values(signed):
    """Returns 16 blocks over ten decades; one is 0, one has a single element that is not."""
    rng = np.random.default_rng(0)
    x = 10.0 ** rng.uniform(-9, 1, (4, 4 * BLOCK)) * (rng.choice([-1, 1], (4, 1)) if signed else 1)
    x[0, :BLOCK], x[1, 1:BLOCK] = 0.0, 0.0
    return jnp.asarray(x, jnp.float32)


run = functools.partial(jax.jit, static_argnames="signed")
encode = run(lambda x, signed, key=None: quantize_moment(x, BLOCK, signed=signed, key=key))
decode = run(lambda x, signed: dequantize_moment(x, signed=signed))


@pytest.mark.parametrize("signed", [True, False])
def test_every_element_becomes_the_nearest_level(signed):
    x = values(signed)
    code = encode(x, signed=signed)
    assert code.codes.dtype == jnp.uint8
    assert code.scales.shape == (4, 4)
    got = np.asarray(decode(code, signed=signed), np.float64).reshape(4, 4, BLOCK)
    blocks = np.asarray(x, np.float64).reshape(4, 4, BLOCK)
    scales = np.abs(blocks).max(-1, keepdims=True)
    of = levels(signed)
    distance = np.abs(np.abs(blocks)[..., None] - of * scales[..., None]).min(-1)
    if not signed:  # Nothing above 0 becomes 0.
        lowest = np.abs(blocks - of[1] * scales)
        distance = np.where((blocks > 0) & (blocks < of[1] / 2 * scales), lowest, distance)
    np.testing.assert_allclose(np.abs(got - blocks), distance, rtol=0, atol=1e-6 * scales.max())
    assert np.all(np.abs(got - blocks) <= 0.45 / 2 ** (6 if signed else 7) * scales * (1 + 1e-5))
    if not signed:
        assert np.all(got[blocks > 0] > 0)


@pytest.mark.parametrize("signed", [True, False])
def test_encoding_again_changes_nothing(signed):
    first = encode(values(signed), signed=signed)
    again = encode(decode(first, signed=signed), signed=signed)
    np.testing.assert_array_equal(first.codes, again.codes)
    np.testing.assert_allclose(first.scales, again.scales, rtol=1e-6)


def test_values_that_are_not_finite_are_not_hidden():
    x = jnp.ones((2, BLOCK)).at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf)
    got = decode(encode(x, signed=True), signed=True)
    assert not np.isfinite(got[0]).all()
    assert not np.isfinite(got[1]).all()
    assert np.isnan(round_to_bfloat16(x, jax.random.key(0))[0, 3])
    assert np.isinf(round_to_bfloat16(x, jax.random.key(0))[1, 5])


def test_stochastic_rounding_is_exact_on_average():
    x = jnp.full((4096, BLOCK), 0.537).at[:, 0].set(1.0)
    got = np.asarray(decode(encode(x, signed=False, key=jax.random.key(0)), signed=False))[:, 1:]
    assert len(np.unique(got)) == 2
    np.testing.assert_allclose(np.mean(got, dtype=np.float64), 0.537, rtol=2e-5)
    third = jnp.full(300_000, 1 / 3, jnp.float32)
    low = np.asarray(round_to_bfloat16(third, jax.random.key(1)), np.float64)
    assert len(np.unique(low)) == 2
    np.testing.assert_allclose(low.mean(), 1 / 3, rtol=2e-5)
    exact = jnp.asarray([1.0, -2.5, 0.0, 3e38], jnp.float32).astype(jnp.bfloat16)
    kept = round_to_bfloat16(exact.astype(jnp.float32), jax.random.key(2))
    np.testing.assert_array_equal(kept, exact)


@pytest.mark.parametrize("signed", [True, False])
def test_small_elements_are_rounded_at_random_without_bias(signed):
    x = jnp.full((2048, BLOCK), 5e-7).at[:, 0].set(1.0)
    got = np.asarray(decode(encode(x, signed=signed, key=jax.random.key(0)), signed=signed))[:, 1:]
    np.testing.assert_allclose(np.mean(got, dtype=np.float64), 5e-7, rtol=0.01)


@pytest.mark.parametrize("signed", [True, False])
def test_the_last_block_may_be_shorter(signed):
    x = values(signed)[:, :197]  # A prime: 4 blocks, of 50 elements but for the last.
    code = encode(x, signed=signed)
    assert (code.codes.shape, code.scales.shape) == ((4, 197), (4, 4))
    padded = encode(jnp.pad(x, ((0, 0), (0, 3))).reshape(4, 4, 50), signed=signed)
    want = decode(padded, signed=signed).reshape(4, 200)[:, :197]
    np.testing.assert_array_equal(decode(code, signed=signed), want)


# -- Steps ---------------------------------------------------------------------------------------

SHAPES = {"w": (32, 256), "scale": (256,)}


def learner_of(**fields):
    specs = {
        name: weight_spec(shape, (None,) * len(shape), dtype="float32")
        for name, shape in SHAPES.items()
    }
    optimizer = config_for_function(optimizers.adamw_optimizer).set(learning_rate=0.01, b2=0.99)
    fields = {"optimizer": optimizer, **fields}
    cfg = Learner.default_config().set(name="learner", **fields)
    return cfg.instantiate(parent=None, param_specs=specs)


def steps_of(learner, num, dtype=jnp.float32, scale=1.0):
    """Returns parameters and state after steps on a noisy quadratic around 1."""
    params = {name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}

    def step(carry, i):
        params, state = carry
        key = jax.random.fold_in(jax.random.key(0), i)
        noise = lambda p: jax.random.normal(key, p.shape) * 0.1
        grads = jax.tree.map(lambda p: scale * (p.astype(jnp.float32) - 1 + noise(p)), params)
        done = learner.update(gradients=grads, state=state, params=params, key=key)
        return (done.params, done.state), None

    start = params, learner.init(params)
    return jax.jit(lambda start: jax.lax.scan(step, start, jnp.arange(num))[0])(start)


@pytest.mark.parametrize(
    ("format_", "stochastic"),
    [
        (MomentFormat.EIGHT_BIT, False),
        pytest.param(MomentFormat.EIGHT_BIT, True, marks=pytest.mark.slow),
        pytest.param(MomentFormat.BFLOAT16, False, marks=pytest.mark.slow),
        pytest.param(MomentFormat.BFLOAT16, True, marks=pytest.mark.slow),
    ],
)
def test_adamw_in_fewer_bits_follows_adamw(format_, stochastic):
    want, _ = steps_of(learner_of(), 100)
    learner = learner_of(
        first_moment=format_, second_moment=format_, stochastic_rounding=stochastic
    )
    got, state = steps_of(learner, 100)
    moved = float(jnp.sqrt(jnp.mean(want["w"] ** 2)))
    error = float(jnp.sqrt(jnp.mean((got["w"] - want["w"]) ** 2)))
    assert moved > 0.5
    assert error < (0.02 if format_ is MomentFormat.BFLOAT16 else 0.05) * moved
    np.testing.assert_array_equal(got["scale"], want["scale"])  # Small arrays stay in float32.
    kinds = {"bfloat16"} if format_ is MomentFormat.BFLOAT16 else {"uint8", "float32"}
    found = optax.tree.get(state.optimizer, "mu")["w"], optax.tree.get(state.optimizer, "nu")["w"]
    assert {str(x.dtype) for x in jax.tree.leaves(found)} == kinds


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        (optimizers.sgd_optimizer, {"momentum": 0.9}),
        (optimizers.lion_optimizer, {}),
        (optimizers.adafactor_optimizer, {"b1": 0.9}),
        (optimizers.muon_optimizer, {"adam_axes": ()}),
        (optax.adamw, {}),
    ],
)
def test_the_first_moment_of_every_optimizer_is_stored_so(optimizer, fields):
    fn = config_for_function(optimizer).set(learning_rate=0.1, **fields)
    learner = learner_of(optimizer=fn, first_moment=MomentFormat.BFLOAT16)
    specs = jax.tree.leaves(learner.state_specs().optimizer)
    low = [spec.shape for spec in specs if spec.dtype == "bfloat16"]
    assert low == [SHAPES["w"]]


@pytest.mark.parametrize(
    ("optimizer", "signed", "squares"),
    [
        (optax.adan, {"m", "v"}, {"n"}),
        (optax.amsgrad, {"mu"}, {"nu", "nu_max"}),
        (optax.adadelta, set(), {"e_g", "e_x"}),
        (optax.contrib.prodigy, {"exp_avg"}, {"exp_avg_sq"}),
        (optax.contrib.schedule_free_adamw, set(), {"nu"}),
        (optax.contrib.muon, {"mu"}, set()),
    ],
)
def test_only_moments_are_stored_in_fewer_bits(optimizer, signed, squares):
    inner = optimizer(0.1)
    stored = stored_as(inner, MomentFormat.BFLOAT16, MomentFormat.EIGHT_BIT)
    params = {"w": jnp.ones(SHAPES["w"])}
    state = jax.eval_shape(stored.init, params)
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        found.setdefault(str(leaf.dtype), set()).update(fields)
    containers = {"base_optimizer_state", "inner_states", "inner_state", "codes"}
    assert found.get("bfloat16", set()) - containers == signed
    assert found.get("uint8", set()) - containers == squares


def test_signs_of_means_in_8_bits_are_kept():
    params = {"w": jnp.zeros(SHAPES["w"])}
    plain = optax.adan(0.1)
    stored = stored_as(plain, MomentFormat.EIGHT_BIT, MomentFormat.EIGHT_BIT)
    states = [plain.init(params), stored.init(params)]
    for i in range(3):
        grads = {"w": jax.random.normal(jax.random.key(i), SHAPES["w"])}
        (want, states[0]), (got, states[1]) = (
            jax.jit(tx.update)(grads, state, params)
            for tx, state in zip((plain, stored), states, strict=True)
        )
    error = jnp.linalg.norm(got["w"] - want["w"]) / jnp.linalg.norm(want["w"])
    assert error < 0.03


@pytest.mark.parametrize(
    ("optimizer", "field", "value"),
    [
        (optax.sgd, "first_moment", MomentFormat.BFLOAT16),
        (optimizers.lion_optimizer, "second_moment", MomentFormat.BFLOAT16),
        (optax.adagrad, "second_moment", MomentFormat.BFLOAT16),
        (optax.contrib.schedule_free_adamw, "first_moment", MomentFormat.BFLOAT16),
        (optax.adamw, "stochastic_rounding", True),
        (optimizers.sgd_optimizer, "offload_state", True),
    ],
)
def test_a_setting_without_an_effect_is_refused(optimizer, field, value):
    fn = config_for_function(optimizer).set(learning_rate=0.1)
    learner = learner_of(optimizer=fn, **{field: value})
    with pytest.raises(UserError, match=rf"learner\.{field} is {value}"):
        learner.state_specs()


class ScaleByAdamState(NamedTuple):
    """Has the name of a class of Optax, and other contents."""

    mu: Any


def test_state_that_is_no_known_moment_stays_in_float32_with_a_warning(caplog):
    sums = optax.GradientTransformation(
        lambda params: ScaleByAdamState(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, state),
    )
    optimizer = config_for_function(lambda: optax.chain(optax.adam(0.1), sums))
    learner = learner_of(optimizer=optimizer, first_moment=MomentFormat.BFLOAT16)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    learner.init(params)
    state = learner.init(params)
    moments = optax.tree.get_all_with_path(state.optimizer, "mu")
    assert {str(moment["w"].dtype) for _, moment in moments} == {"bfloat16", "float32"}
    assert caplog.text.count("stay in float32") == 1


def test_an_indivisible_dimension_is_stored_in_8_bits():
    params = {"head": jnp.zeros((8, 50257))}
    stored = stored_as(optax.adam(0.1), MomentFormat.EIGHT_BIT, MomentFormat.EIGHT_BIT)
    state = jax.eval_shape(stored.init, params)[0]
    for moment in (state.mu["head"], state.nu["head"]):
        assert moment.codes.shape == (8, 50257)
        assert moment.scales.shape == (8, 197)


def test_small_updates_of_bfloat16_parameters_are_kept_on_average():
    nearest, _ = steps_of(learner_of(), 100, jnp.bfloat16)
    random, _ = steps_of(learner_of(stochastic_rounding=True), 100, jnp.bfloat16)
    exact, _ = steps_of(learner_of(), 100)
    assert random["w"].dtype == jnp.bfloat16
    error = lambda x: abs(float(jnp.mean(x["w"].astype(jnp.float32)) - jnp.mean(exact["w"])))
    assert error(random) < 0.2 * max(error(nearest), 1e-3)


def test_state_in_8_bits_is_sharded_as_its_parameter():
    spec = ParameterSpec((64, 512), ("embed", "ffn"), "float32")
    optimizer = config_for_function(optimizers.adamw_optimizer).set(learning_rate=0.01)
    cfg = Learner.default_config().set(
        name="learner", optimizer=optimizer, second_moment=MomentFormat.EIGHT_BIT
    )
    learner = cfg.instantiate(parent=None, param_specs={"layer": {"w": spec}})
    found = optax.tree.get(learner.state_specs().optimizer, "nu")["layer"]["w"]
    assert isinstance(found, QuantizedMoment)
    assert found.codes.axes == ("embed", "ffn")
    assert (found.scales.axes, found.scales.shape) == (("embed", None), (64, 2))
