"""BaseLayer: parameters, their keys, dtypes and initializers; the end of a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import REQUIRED, Required, config_class, config_for_function
from moelib.core.errors import UserError
from moelib.core.metrics import reading
from moelib.core.module import functional
from moelib.core.param import FanAxes, ParameterSpec
from moelib.layers import initializers
from moelib.layers.base import BaseLayer
from tests.layers.calling import build, call_and_collect, initial


class Scale(BaseLayer):
    """Multiplies by a weight; counts steps in a parameter that is not trained."""

    @config_class
    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED

    def _create_layer_parameter_specs(self):
        fans = FanAxes((0,), (0,))
        return {
            "weight": ParameterSpec((self.config.dim,), ("norm",), fan_axes=fans),
            "writes": ParameterSpec(
                (2,), (None,), initializer=self._initializer("output_init"), fan_axes=fans
            ),
            "steps": ParameterSpec(
                (), (), dtype="int32", initializer=initializers.constant(0), trainable=False
            ),
        }

    def forward(self, x):
        return x * self.parameters["weight"].astype(x.dtype)

    def own_names(self):
        return sorted(self.own_parameters)

    def _end_step(self, params):
        return {**params, "steps": params["steps"] + 1}


class Pair(BaseLayer):
    """Two scales."""

    @config_class
    class Config(BaseLayer.Config):
        first: BaseLayer.Config = Scale.default_config()
        second: BaseLayer.Config = Scale.default_config()
        swapped: bool = False

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        names = ["first", "second"]
        for name in reversed(names) if cfg.swapped else names:
            self._add_child(name, getattr(self.config, name).clone(dim=3))

    def forward(self, x):
        return self.second(self.first(x))

    def own_names(self):
        return sorted(self.own_parameters)


def pair(**fields):
    return build(Pair.default_config(), **fields)


def test_values_depend_on_the_path_and_not_on_the_order():
    params = initial(pair())
    jax.tree.map(np.testing.assert_array_equal, initial(pair(swapped=True)), params)
    assert not np.array_equal(params["first"]["weight"], params["second"]["weight"])
    assert not np.array_equal(initial(pair(), seed=1)["first"]["weight"], params["first"]["weight"])


def test_dtype_is_that_of_the_nearest_layer_above_that_sets_one():
    layer = pair(dtype="bfloat16", second=Scale.default_config().set(dtype="float32"))
    params = initial(layer)
    assert params["first"]["weight"].dtype == jnp.bfloat16
    assert params["second"]["weight"].dtype == jnp.float32
    assert params["first"]["steps"].dtype == jnp.int32
    specs = layer.create_parameter_specs_recursively()
    assert specs["first"]["weight"].dtype == "bfloat16"


def test_initializers_come_from_the_nearest_layer_above_that_sets_them():
    ones = config_for_function(initializers.constant).set(value=1.0)
    twos = config_for_function(initializers.constant).set(value=2.0)
    params = initial(pair(param_init=ones))
    assert float(params["first"]["weight"][0]) == float(params["first"]["writes"][0]) == 1
    params = initial(pair(param_init=ones, output_init=twos))
    assert float(params["first"]["weight"][0]) == 1
    assert float(params["first"]["writes"][0]) == 2
    params = initial(pair(param_init=ones, first=Scale.default_config().set(param_init=twos)))
    assert (float(params["first"]["weight"][0]), float(params["second"]["weight"][0])) == (2, 1)


def test_specs_and_values_agree():
    layer = pair()
    specs = layer.create_parameter_specs_recursively()
    shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), initial(layer))
    assert shapes == jax.tree.map(lambda s: (s.shape, s.dtype), specs)


def test_prebuilt_values_are_taken_and_the_rest_made():
    weight = jnp.full(3, 7.0)
    params = pair().initialize_parameters_recursively(
        jax.random.key(0), prebuilt={"second": {"weight": weight}}
    )
    want = initial(pair())
    assert params["second"]["weight"] is weight
    np.testing.assert_array_equal(params["first"]["weight"], want["first"]["weight"])


@pytest.mark.parametrize(
    ("prebuilt", "message"),
    [
        ({"secnd": {}}, r"layer:.*'secnd'"),
        ({"first": {"wieght": 1}}, "first"),
        ({"second": {"weight": np.ones(4)}}, r"'weight'.*shape \(4,\)"),
    ],
)
def test_prebuilt_values_that_do_not_fit_are_refused(prebuilt, message):
    with pytest.raises(ValueError, match=message):
        pair().initialize_parameters_recursively(jax.random.key(0), prebuilt=prebuilt)


def test_a_step_ends_in_every_layer_and_leaves_the_rest_alone():
    params = initial(pair())
    after = pair().end_step_recursively(params)
    assert int(after["first"]["steps"]) == int(after["second"]["steps"]) == 1
    np.testing.assert_array_equal(after["first"]["weight"], params["first"]["weight"])
    assert int(params["first"]["steps"]) == 0


def test_own_parameters_exclude_those_of_children():
    names = functools.partial(functional, prng_key=None, inputs={}, is_training=True)
    layer, scale = pair(), build(Scale.default_config(), dim=3)
    assert names(layer, state=initial(layer), method="own_names")[0] == []
    want = ["steps", "weight", "writes"]
    assert names(scale, state=initial(scale), method="own_names")[0] == want


def test_activation_summaries_are_those_of_the_valid_tokens():
    class Probe(BaseLayer):
        def forward(self, x, mask=None):
            self.add_activation_summary("hidden", x, mask)

    x, mask = (
        np.arange(-6.0, 6.0, dtype=np.float32).reshape(1, 3, 4),
        np.array([[True, True, False]]),
    )
    for mask_or_none, values in ((mask, x[0, :2]), (None, x)):
        _, outputs = call_and_collect(build(Probe.default_config()), {}, x, mask=mask_or_none)
        got = {name: float(reading(value)) for name, value in outputs.summaries.items()}
        rms = np.sqrt(np.mean(values**2))
        want = {"hidden_mean": values.mean(), "hidden_rms": rms, "hidden_max": 6.0}
        assert got == pytest.approx(want)
        assert outputs.summaries["hidden_mean"].weight == values.size


def test_active_parameters_are_the_trainable_ones_and_flops_two_per_entry_with_fan_axes():
    assert pair().active_parameters() == 2 * (3 + 2)
    assert pair().forward_flops_per_token(8) == 2 * 2 * (3 + 2)


@pytest.mark.parametrize("dim", [0, -3])
def test_sizes_below_one_are_refused_with_the_layer_and_the_shape(dim):
    layer = build(Scale.default_config(), dim=dim)
    with pytest.raises(ValueError, match=rf"layer:.*'weight'.*\({dim},\)"):
        layer.create_parameter_specs_recursively()


def test_a_weight_without_fan_axes_is_refused_with_the_layer_and_the_parameter():
    class Bare(Scale):
        def _create_layer_parameter_specs(self):
            return {"weight": ParameterSpec((4, 4), ("embed", "ffn"))}

    layer = build(Pair.default_config(), second=Bare.default_config())
    with pytest.raises(UserError, match=r"second:.*'weight':.*fan_axes=FanAxes"):
        layer.initialize_parameters_recursively(jax.random.key(0))
