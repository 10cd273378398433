"""BaseLayer: a module that has parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from moelib.core.config import ConfigOr, DType, config_class, did_you_mean, maybe_instantiate
from moelib.core.context import Nested, fold_name
from moelib.core.module import Module, nowrap
from moelib.core.param import Initializer, ParameterSpec
from moelib.layers import initializers

_CACHE = "cache"  # What a layer's cache is called in its state, beside its parameters.


class BaseLayer(Module):
    """A module with parameters, which it describes by `_create_layer_parameter_specs`.

    `dtype`, `param_init` and `output_init` that are None are those of the layer that holds it.
    """

    @config_class
    class Config(Module.Config):
        dtype: DType | None = None  # Of the stored parameters; float32 at the root.
        param_init: ConfigOr[Callable] | None = None  # Of weights; N(0, 1 / fan-in) at the root.
        output_init: ConfigOr[Callable] | None = None  # Of weights that write to the residual
        # stream; `param_init` if no layer above sets it.

    @nowrap
    def _inherited(self, field: str) -> Any:
        """Returns a config field of this layer, or of the nearest one above that sets it."""
        layer: Module | None = self
        while isinstance(layer, BaseLayer):
            value = getattr(layer.config, field)
            if value is not None:
                return value
            layer = layer.parent
        return None

    def _initializer(self, field: str = "param_init") -> Initializer:
        """Returns the initializer of this layer's weights ("param_init" or "output_init")."""
        init = self._inherited(field)
        if init is None and field == "output_init":
            init = self._inherited("param_init")
        return initializers.fan_in_normal() if init is None else maybe_instantiate(init)

    def _layers(self) -> "dict[str, BaseLayer]":
        """Returns the children that are layers, by name."""
        return {n: c for n, c in self.children.items() if isinstance(c, BaseLayer)}

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        """Returns the specs of the parameters of this layer itself, by name."""
        return {}

    @nowrap
    def layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        """Returns the specs of this layer's own parameters, dtype and initializer filled in.

        Raises:
            ValueError: If a dimension is below 1.
        """
        dtype = self._inherited("dtype") or "float32"
        specs = self._create_layer_parameter_specs()
        for name, spec in specs.items():
            if any(size < 1 for size in spec.shape):
                raise ValueError(
                    f"{self._title()}: the shape of {name!r} is {spec.shape} (axes {spec.axes}); "
                    "set the sizes of which it is made to 1 or more."
                )
        return {
            name: dataclasses.replace(
                spec,
                dtype=dtype if spec.dtype == "" else spec.dtype,
                initializer=spec.initializer or self._initializer(),
            )
            for name, spec in specs.items()
        }

    @nowrap
    def create_parameter_specs_recursively(self) -> Nested:
        """Returns the specs of all parameters of this layer and the layers inside."""
        specs: Nested = dict(self.layer_parameter_specs())
        for name, child in self._layers().items():
            specs[name] = child.create_parameter_specs_recursively()
        return _without_empty(specs)

    @nowrap
    def initialize_parameters_recursively(
        self, prng_key: jax.Array, *, prebuilt: Nested | None = None
    ) -> Nested:
        """Returns initial parameters. `prebuilt` ones are taken as they are.

        A parameter's values depend on the key and its path only.

        Raises:
            ValueError: If a prebuilt one is none of this layer's.
        """
        prebuilt = prebuilt or {}
        params: Nested = {}
        specs = self.layer_parameter_specs()
        self._check_known(prebuilt, specs)
        for name, spec in specs.items():
            assert spec.initializer is not None
            key = fold_name(prng_key, name)
            params[name] = prebuilt[name] if name in prebuilt else spec.initializer(key, spec)
        for name, child in self._layers().items():
            params[name] = child.initialize_parameters_recursively(
                fold_name(prng_key, name), prebuilt=prebuilt.get(name)
            )
        return _without_empty(params)

    def _check_known(self, prebuilt: Nested, specs: Nested) -> None:
        for name in prebuilt:
            if name not in specs and name not in self.children:
                raise ValueError(
                    f"{self._title()}: no parameter or layer for the prebuilt {name!r}; "
                    + did_you_mean(name, {*specs, *self.children})
                )

    # What layers keep of earlier tokens when a text is written token by token.

    def _create_layer_cache_specs(self, batch_size: int, length: int) -> dict[str, ParameterSpec]:
        """Returns the specs of what this layer itself keeps of each row's tokens, by name.

        An empty dtype is that of the activations. A layer that has such specs finds the arrays in
        `cache`, and puts out new ones by `put_cache`.

        Args:
            batch_size: Rows.
            length: The most tokens of a row.
        """
        del batch_size, length
        return {}

    @property
    def sees_other_tokens(self) -> bool:
        """Whether this layer itself needs other tokens without a cache that keeps them."""
        return False

    @nowrap
    def create_cache_specs_recursively(self, batch_size: int, length: int) -> Nested:
        """Returns the specs of what this layer and the layers inside keep of earlier tokens.

        Arrays of these specs, merged into the parameters, are a state with a cache.
        """
        specs: Nested = {_CACHE: dict(self._create_layer_cache_specs(batch_size, length))}
        for name, child in self._layers().items():
            specs[name] = child.create_cache_specs_recursively(batch_size, length)
        return _without_empty(specs)

    @property
    def cache(self) -> dict[str, jax.Array] | None:
        """What this layer has kept of earlier tokens, or None if nothing is to be kept."""
        return self.state.get(_CACHE)

    @nowrap
    def put_cache(self, **arrays: jax.Array) -> None:
        """Puts out what this layer keeps, the tokens of this call included."""
        self.get_invocation_context().add("state_updates", _CACHE, arrays)

    # What happens between steps.

    def _end_step(self, params: Nested) -> Nested:
        """Returns this layer's own parameters as they are after an optimizer step."""
        return params

    @nowrap
    def end_step_recursively(self, state: Nested) -> Nested:
        """Returns the state after an optimizer step, in which layers update what is not trained."""
        own = {name: value for name, value in state.items() if name not in self.children}
        state = {**state, **self._end_step(own)}
        for name, child in self._layers().items():
            if name in state:
                state[name] = child.end_step_recursively(state[name])
        return state

    # Costs.

    def _own_active_parameters(self) -> int:
        """Returns how many of this layer's own parameters take part in computing one token."""
        return sum(spec.size for spec in self.layer_parameter_specs().values() if spec.trainable)

    @nowrap
    def active_parameters(self) -> int:
        """Returns how many trainable parameters take part in computing one token."""
        inside = sum(layer.active_parameters() for layer in self._layers().values())
        return self._own_active_parameters() + inside

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        """Returns the forward matmul FLOPs a token of this layer itself."""
        del seq_len
        return 0.0

    @nowrap
    def forward_flops_per_token(self, seq_len: int) -> float:
        """Returns the forward FLOPs a token: 2 for each multiply-add of a matmul, else nothing."""
        inside = sum(layer.forward_flops_per_token(seq_len) for layer in self._layers().values())
        return self._own_forward_flops_per_token(seq_len) + inside

    @property
    def parameters(self) -> Nested:
        """The parameters of this layer in the current context, those of its children inside."""
        return self.state

    @property
    def own_parameters(self) -> Nested:
        """The parameters of this layer in the current context, without those of its children."""
        others = {*self.children, _CACHE}
        return {n: value for n, value in self.state.items() if n not in others}


def _without_empty(tree: Nested) -> Nested:
    return {
        name: value for name, value in tree.items() if not (isinstance(value, dict) and not value)
    }
