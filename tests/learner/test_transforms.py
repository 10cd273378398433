import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.core import tree
from moelib.learner import schedules, transforms
from tests.learner.example import SPECS, arrays


def apply(transform, updates, params=None):
    return transform.update(updates, transform.init(updates if params is None else params), params)


def test_global_norm_is_of_all_elements():
    tree = {"a": jnp.full((2, 2), 3.0), "b": {"c": jnp.asarray([8.0])}}
    assert float(transforms.global_norm(tree)) == 10.0
    assert float(transforms.global_norm({})) == 0.0


def test_global_norm_of_low_precision_is_summed_in_float32():
    norm = transforms.global_norm({"a": jnp.ones(10_000, jnp.bfloat16)})
    assert float(norm) == 100.0


def test_clipping_equals_that_of_optax():
    grads = arrays(SPECS)
    for max_norm in (0.5, 1e3):
        ours, _ = apply(transforms.clip_by_global_norm(max_norm), grads)
        theirs, _ = apply(optax.clip_by_global_norm(max_norm), grads)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def test_clipping_of_no_gradients_gives_zeros():
    out, _ = apply(transforms.clip_by_global_norm(1.0), {"a": jnp.zeros(3)})
    np.testing.assert_array_equal(out["a"], np.zeros(3))


def test_learning_rate_starts_at_step_one_and_is_in_the_state():
    transform = transforms.scale_by_learning_rate(schedules.constant(8.0, warmup_steps=4))
    state = transform.init({})
    rates = []
    for _ in range(5):
        updates, state = transform.update({"a": jnp.ones(())}, state)
        assert float(updates["a"]) == -float(state.learning_rate)
        rates.append(float(state.learning_rate))
    assert rates == [2.0, 4.0, 6.0, 8.0, 8.0]


def decayed(**arguments):
    ones = jax.tree.map(jnp.ones_like, arrays(SPECS))
    zeros = jax.tree.map(jnp.zeros_like, ones)
    out, _ = apply(transforms.add_decayed_weights(0.5, **arguments), zeros, ones)
    return {path: float(x.ravel()[0]) for path, x in tree.by_path(out).items()}


def test_decay_uses_the_scale_of_the_spec():
    out = decayed(param_specs=SPECS)
    assert out["layer/experts"] == 0.5
    assert out["layer/scale"] == 0.0


def test_decay_rules_replace_the_scale_of_the_spec():
    rules = [("emb/.*", 0.0), (".*/scale", 3.0)]
    out = decayed(param_specs=SPECS, per_param_scale=rules)
    assert (out["emb/weight"], out["layer/scale"], out["layer/qkv"]) == (0.0, 1.5, 0.5)


def test_decay_rules_without_specs():
    out = decayed(per_param_scale=[("emb/.*", 0.0)])
    assert (out["emb/weight"], out["layer/scale"]) == (0.0, 0.5)


def test_decay_by_a_function_of_the_spec():
    stacked = {"scale": SPECS["layer"]["scale"].stacked(3), "qkv": SPECS["layer"]["qkv"].stacked(3)}
    stacked["scale"] = type(stacked["scale"])((3, 6), ("layers", "norm"), weight_decay_scale=1.0)
    params = {"scale": jnp.ones((3, 6)), "qkv": jnp.ones((3, 6, 3, 2, 4))}
    transform = transforms.add_decayed_weights(
        0.5, per_param_scale=lambda spec: float(spec.fan_axes is not None), param_specs=stacked
    )
    out, _ = apply(transform, jax.tree.map(jnp.zeros_like, params), params)
    assert not np.any(out["scale"])
    assert np.all(out["qkv"] == 0.5)


def test_split_gives_each_transformation_only_its_own_parameters():
    transform = transforms.split(
        {"fast": optax.sgd(1.0), "slow": optax.adam(0.1), "none": optax.adam(1.0)},
        {"a": "fast", "b/c": "slow"},
    )
    params = {"a": jnp.ones(2), "b": {"c": jnp.ones(3)}}
    state = transform.init(params)
    assert list(state) == ["fast", "slow"]
    assert list(state["slow"][0].mu) == ["b"]
    updates, _ = transform.update(params, state, params)
    np.testing.assert_allclose(updates["a"], -np.ones(2))
    alone, _ = apply(optax.adam(0.1), {"c": jnp.ones(3)})
    np.testing.assert_array_equal(updates["b"]["c"], alone["c"])


@pytest.mark.parametrize(
    ("loss", "norm", "take"),
    [
        (1.0, 1.0, True),
        (1.0, 6.0, False),
        (1.0, jnp.nan, False),
        (1.0, jnp.inf, False),
        (jnp.nan, 1.0, False),
        (jnp.inf, 1.0, False),
        (None, 1.0, True),
    ],
)
def test_bad_steps(loss, norm, take):
    policy = transforms.skip_bad_steps(drop_norm=5.0)
    loss = None if loss is None else jnp.asarray(loss)
    assert bool(policy(loss, jnp.asarray(norm))) is take
