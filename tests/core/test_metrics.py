import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.metrics import combine, empty, is_metric, maximum, reading, weighted


def test_means_combine_by_weight():
    both = combine(weighted(2.0, 3), weighted(4.0, 1))
    assert (float(both.mean), float(both.weight)) == (2.5, 4.0)


def test_combining_is_associative_and_equals_the_mean_over_all():
    values = np.random.default_rng(0).normal(size=12).astype(np.float32)
    parts = [weighted(part.mean(), part.size) for part in np.split(values, [1, 4, 9])]
    a, b, c, d = parts
    left, right = combine(combine(combine(a, b), c), d), combine(combine(a, b), combine(c, d))
    np.testing.assert_allclose(left.mean, values.mean(), rtol=1e-5)
    np.testing.assert_allclose(left.mean, right.mean, rtol=1e-5)


def test_nothing_has_mean_and_weight_zero():
    nothing = combine(weighted(3.0, 0), weighted(5.0, 0))
    assert (float(nothing.mean), float(nothing.weight)) == (0.0, 0.0)
    something = combine(nothing, weighted(5.0, 2))
    assert (float(something.mean), float(something.weight)) == (5.0, 2.0)


@pytest.mark.parametrize("mean", [jnp.nan, jnp.inf])
def test_a_mean_over_no_tokens_counts_as_zero(mean):
    for pair in ((weighted(mean, 0), weighted(1.0, 5)), (weighted(1.0, 5), weighted(mean, 0))):
        both = combine(*pair)
        assert (float(both.mean), float(both.weight)) == (1.0, 5.0)
    assert jnp.isnan(combine(weighted(1.0, jnp.nan), weighted(1.0, 5)).weight)
    assert jnp.isnan(combine(weighted(jnp.nan, 2), weighted(1.0, 5)).mean)


def test_a_part_without_weight_does_not_spoil_the_gradient():
    def mean(x: jax.Array) -> jax.Array:
        return combine(weighted(x, 0), weighted(x, 0)).mean

    assert jax.grad(mean)(1.0) == 0.0


def test_weighted_scalars_are_float32():
    value = weighted(jnp.bfloat16(1.0), 2)
    assert {x.dtype for x in value} == {jnp.dtype("float32")}
    assert is_metric(value)
    assert not is_metric((1.0, 2.0))


@pytest.mark.parametrize("metric", [weighted(-2.0, 3.0), maximum(-2.0)])
def test_an_empty_metric_changes_nothing(metric):
    shapes = jax.eval_shape(lambda: metric)
    assert combine(empty(shapes), metric) == metric
    assert float(reading(metric)) == -2.0
    assert is_metric(metric)


def test_maxima_combine_to_the_largest():
    assert float(combine(maximum(-3.0), maximum(-1.0)).value) == -1.0
    assert maximum(jnp.bfloat16(1.0)).value.dtype == jnp.float32
