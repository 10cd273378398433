"""BaseLayer: a module that has parameters."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from moelib.core import tree
from moelib.core.config import ConfigOr, DType, config_class, did_you_mean, maybe_instantiate
from moelib.core.context import CACHE, fold_name
from moelib.core.errors import UserError
from moelib.core.metrics import maximum, weighted
from moelib.core.module import Module
from moelib.core.param import (
    Axes,
    Cast,
    FanAxes,
    Initializer,
    ParameterSpec,
    is_spec,
    specs_by_path,
)
from moelib.core.precision import check_float
from moelib.core.tree import Nested
from moelib.layers import initializers
from moelib.layers.adapter import AdaptedWeight, LowRank
from moelib.layers.exchange import Exchange
from moelib.layers.quantization import Quantization, operand

# Fields of the spec of a parameter that is stored and trained in float32, whatever the other dtypes
# are: in bfloat16, small updates of a scale near 1 are lost, and different scores are equal.
FLOAT32: Mapping[str, Any] = {"dtype": "float32", "cast": Cast.NEVER}


def weight_spec(
    shape: Sequence[int], axes: Axes, *, inputs: int = 1, stacked: Sequence[int] = (), **fields: Any
) -> ParameterSpec:
    """Returns the spec of a matrix that multiplies an activation.

    The `stacked` dimensions hold independent matrices; of the others, the first `inputs` are summed
    over.
    """
    dims = [axis for axis in range(len(shape)) if axis not in stacked]
    fan_axes = FanAxes(tuple(dims[:inputs]), tuple(dims[inputs:]), tuple(stacked))
    return ParameterSpec(tuple(shape), axes, fan_axes=fan_axes, **fields)


def bias_spec(shape: Sequence[int], axes: Axes, **fields: Any) -> ParameterSpec:
    """Returns the spec of a parameter that starts at 0, has no weight decay and is float32."""
    start: dict[str, Any] = {"initializer": initializers.constant(0.0), "weight_decay_scale": 0.0}
    return ParameterSpec(tuple(shape), axes, **{**start, **FLOAT32, **fields})


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns the sum of y and a float32 bias of its last dimensions, in the dtype of y."""
    return y + bias.astype(y.dtype)[(None,) * (y.ndim - bias.ndim)]


class BaseLayer(Module):
    """A module with parameters.

    A layer declares its own part: `_create_layer_parameter_specs`, and where they apply
    `_create_layer_cache_specs`, `_create_layer_carry_specs`, `_end_step`, `_own_active_parameters`,
    `_own_forward_flops_per_token`, `_own_matrix_flops_per_token`, `_own_exchange`,
    `sees_other_tokens` and `copies`. The public methods that end in `_recursively`, and the counts,
    walk over the tree of layers and need no override.

    A `dtype`, `param_init` or `output_init` of None is inherited from the layer above.
    """

    # Whether documents influence each other in this layer by design, as in expert choice.
    mixes_documents: ClassVar[bool] = False
    # Whether the output of a token depends on later tokens by design, as in an encoder.
    looks_ahead: ClassVar[bool] = False
    # Whether auxiliary losses that this layer adds are to train its own parameters only.
    trains_itself: ClassVar[bool] = False
    # Names of the weights that `quantization` and `adapter` apply to: the layer takes them from
    # `operands`, and multiplies by `project`.
    projections: ClassVar[tuple[str, ...]] = ()

    @config_class
    class Config(Module.Config):
        dtype: DType | None = None  # Dtype of stored parameters; inherited, float32 at the root.
        # Initializer of weights; inherited, N(0, 1 / fan-in) at the root.
        param_init: ConfigOr[Callable] | None = None
        # Initializer of weights that write to the residual stream; inherited, else `param_init`.
        output_init: ConfigOr[Callable] | None = None
        # Scheme of the matmuls of projections and experts, such as FP8_BLOCK; inherited, NONE at
        # the root. Routers, embeddings, heads, norms and attention scores are never quantized.
        quantization: Quantization | None = None
        # Trained change of each weight in `projections`, which are then frozen; not inherited.
        adapter: LowRank.Config | None = None

        if TYPE_CHECKING:  # A field of this type holds any subclass; its fields may be set.

            def __init__(self, **values: Any) -> None: ...

    # -- What a layer declares -------------------------------------------------------------------

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        """Returns the specs of this layer's own parameters, by name.

        A spec without dtype or initializer gets the layer's `dtype` and `param_init`. Weights that
        write to the residual stream set `initializer=self._initializer("output_init")`.
        """
        return {}

    def _initializer(self, field: str = "param_init") -> Initializer:
        """Returns the initializer of this layer's weights ("param_init" or "output_init")."""
        init = self._inherited(field)
        if init is None and field == "output_init":
            init = self._inherited("param_init")
        return initializers.fan_in_normal() if init is None else maybe_instantiate(init)

    def _create_layer_cache_specs(self, batch_size: int, length: int) -> dict[str, ParameterSpec]:
        """Returns the specs of this layer's own KV cache or other state of a sequence, by name.

        A layer with such specs reads the arrays from `self.cache` and returns their new values by
        `self.put_cache`. A spec without dtype gets the activations' dtype.

        Args:
            batch_size: Number of sequences.
            length: Maximum number of tokens of a sequence.
        """
        del batch_size, length
        return {}

    def _create_layer_carry_specs(self, batch_size: int, seq_len: int) -> dict[str, ParameterSpec]:
        """Returns the specs of the values that this layer gives to the next transformer layer.

        They are zeros before the first layer; see moelib.layers.carry. A spec without dtype gets
        the activations' dtype.

        Args:
            batch_size: Number of sequences.
            seq_len: Number of tokens of a sequence.
        """
        del batch_size, seq_len
        return {}

    @property
    def sees_other_tokens(self) -> bool:
        """True if this layer itself mixes tokens without a cache, so that decoding needs them all.

        False for layers that compute each token separately, and for those with a cache.
        """
        return False

    def _end_step(self, params: Nested) -> Nested:
        """Returns this layer's own parameters after an optimizer step.

        Layers override it to update parameters that the learner does not train.
        """
        return params

    def _own_active_parameters(self) -> int:
        """Returns the number of this layer's own trainable parameters that one token uses."""
        specs = jax.tree.leaves(self.layer_parameter_specs(), is_leaf=is_spec)
        return sum(spec.size for spec in specs if spec.trainable)

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        """Returns this layer's own forward matmul FLOPs per token, without those of children.

        By default these are those of its matrices.
        """
        del seq_len
        return self._own_matrix_flops_per_token(lambda path: True)

    def _own_matrix_flops_per_token(self, chosen: Callable[[str], bool], path: str = "") -> float:
        """Returns the forward FLOPs per token of this layer's own matrices that are chosen.

        By default these are 2 per entry of the parameters with fan axes. A layer that multiplies a
        token by fewer of them, or more often, overrides this method.

        Args:
            chosen: Whether a parameter counts, given its path.
            path: That of the layer, "" or with a slash at the end.
        """
        specs = specs_by_path(self.layer_parameter_specs())
        matrices = (p for p, spec in specs.items() if spec.fan_axes is not None)
        return sum((2.0 * specs[p].size for p in matrices if chosen(path + p)), 0.0)

    def _own_exchange(self, seq_len: int) -> Exchange | None:
        """Returns what this layer itself sends where a mesh splits sequences; None for nothing."""
        del seq_len
        return None

    def copies(self, child: str) -> tuple[str, ...] | None:
        """Returns the names of the layers that a child stands for; None for a single layer.

        A child with copies has parameters, caches and outputs stacked along a first axis "layers".
        Copy i is initialized with the key of the name i, as a child of that name would be.
        """
        del child
        return None

    # -- What a layer uses while it runs ---------------------------------------------------------

    @property
    def parameters(self) -> Nested:
        """The parameters of this layer in the current context, those of its children nested."""
        return self.state

    @property
    def own_parameters(self) -> Nested:
        """The parameters of this layer in the current context, without those of its children."""
        others = {*self.children, CACHE}
        return {n: value for n, value in self.state.items() if n not in others}

    def operands(self, params: Nested, dtype: Any) -> Nested:
        """Returns parameters of this layer, or of those inside, as operands of a dtype.

        They are cast, as inputs may come from a layer of another `dtype`. Those that a layer
        quantizes are each a `QuantizedWeight`, and those with an adapter an `AdaptedWeight`.
        """
        specs = self.create_parameter_specs_recursively()
        used = {name: specs[name] for name in params}

        def cast(spec: ParameterSpec, value: Any) -> Any:
            return operand(value, spec, dtype)

        return self.with_adapters(jax.tree.map(cast, used, params, is_leaf=is_spec))

    def with_adapters(self, params: Nested) -> Nested:
        """Returns parameters of this layer with each adapted weight as an `AdaptedWeight`."""
        adapter = self.config.adapter
        return params if adapter is None else adapter.instantiate().joined(params)

    @property
    def cache(self) -> dict[str, jax.Array] | None:
        """This layer's cache of earlier tokens, by name; None when called without a cache."""
        return self.state.get(CACHE)

    def put_cache(self, **arrays: jax.Array) -> None:
        """Returns this layer's cache to the caller, with the tokens of this call included."""
        self.get_invocation_context().add("state_updates", CACHE, arrays)

    def add_activation_summary(
        self, name: str, x: jax.Array, mask: jax.Array | None = None
    ) -> None:
        """Logs the mean, root mean square and largest magnitude of an activation.

        They are the summaries `<name>_mean`, `<name>_rms` and `<name>_max`, computed in float32.

        Args:
            name: Name of the activation.
            x: Activation of any shape.
            mask: False for padding, over the first dimensions of x ([B, S]); None counts all.
        """
        x = jax.lax.stop_gradient(x).astype(jnp.float32)
        count = jnp.asarray(x.size, jnp.float32)
        if mask is not None:
            count = jnp.mean(mask, dtype=jnp.float32) * count
            x = jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, 0.0)
        total = jnp.maximum(count, 1.0)
        self.add_summary(f"{name}_mean", weighted(jnp.sum(x) / total, count))
        self.add_summary(f"{name}_rms", weighted(jnp.sqrt(jnp.sum(x * x) / total), count))
        self.add_summary(f"{name}_max", maximum(jnp.max(jnp.abs(x))))

    # -- The walk over the tree ------------------------------------------------------------------

    def _layers(self) -> "dict[str, BaseLayer]":
        """Returns the children that are layers, by name."""
        return {n: c for n, c in self.children.items() if isinstance(c, BaseLayer)}

    def walk(self, times: int = 1) -> "Iterator[tuple[BaseLayer, int]]":
        """Yields this layer and all layers inside, each with the number of its copies."""
        yield self, times
        for name, child in self._layers().items():
            yield from child.walk(times * len(self.copies(name) or (name,)))

    def _collect(self, own_specs: "Callable[[BaseLayer], Nested]") -> Nested:
        """Returns `own_specs` of this layer and all layers inside, nested; copies are stacked."""
        specs = dict(own_specs(self))
        for name, child in self._layers().items():
            inside = child._collect(own_specs)
            if (copies := self.copies(name)) is not None:
                stack = functools.partial(ParameterSpec.stacked, num=len(copies))
                inside = jax.tree.map(stack, inside, is_leaf=is_spec)
            if inside:
                specs[name] = inside
        return specs

    def _per_copy(self, child: str, fn: Callable[..., Nested]) -> Callable[..., Nested]:
        """Returns fn for a child, mapped over the first axis if the child has copies."""
        return fn if self.copies(child) is None else jax.vmap(fn)

    def _child_key(self, key: jax.Array, child: str) -> jax.Array:
        """Returns the random key of a child, or of its copies, stacked."""
        copies = self.copies(child)
        if copies is None:
            return fold_name(key, child)
        return jnp.stack([fold_name(key, name) for name in copies])

    def create_parameter_specs_recursively(self) -> Nested:
        """Returns the specs of all parameters of this layer and the layers inside.

        Raises:
            UserError: If `quantization` is set where nothing is quantized, or `dtype` is not a
                floating-point dtype of 16 bits or more.
        """
        for layer, _ in self.walk():
            if layer.config.dtype is not None:
                check_float(f"{layer._title()}.dtype", layer.config.dtype)
            scheme = layer.config.quantization
            if scheme in (None, Quantization.NONE):
                continue
            inside = [each for each, _ in layer.walk() if each.projections]
            if all(each._inherited("quantization") is not scheme for each in inside):
                advice = "remove it, or theirs" if inside else "remove it, or set it on the decoder"
                which = "that it applies to" if inside else "that can be quantized"
                raise UserError(
                    f"{layer._title()}: quantization={scheme}, but {type(layer).__qualname__} has "
                    f"no weight {which}; {advice}."
                )
        return self._collect(lambda layer: layer.layer_parameter_specs())

    def create_cache_specs_recursively(self, batch_size: int, length: int) -> Nested:
        """Returns the specs of the caches of this layer and the layers inside.

        Arrays of these specs, merged into the parameters, are a state with a cache.
        """

        def own(layer: BaseLayer) -> Nested:
            specs = layer._create_layer_cache_specs(batch_size, length)
            return {CACHE: specs} if specs else {}

        return self._collect(own)

    def initialize_parameters_recursively(
        self, prng_key: jax.Array, *, prebuilt: Nested | None = None
    ) -> Nested:
        """Returns initial parameters. The values depend on the key and each parameter's path only.

        Args:
            prng_key: Random key.
            prebuilt: Parameters that are used instead of initial ones; a part of the tree.

        Raises:
            UserError: If a prebuilt parameter does not exist, or has another shape.
        """
        prebuilt, layers = prebuilt or {}, self._layers()
        own = {name: value for name, value in prebuilt.items() if name not in layers}
        if own:
            self._check_prebuilt(own)
        params = self._initialize_layer_parameters(prng_key, own)
        for name, child in layers.items():

            def init(key: jax.Array, values: Nested, child: BaseLayer = child) -> Nested:
                return child.initialize_parameters_recursively(key, prebuilt=values)

            key = self._child_key(prng_key, name)
            if inside := self._per_copy(name, init)(key, prebuilt.get(name, {})):
                params[name] = inside
        return params

    def end_step_recursively(self, state: Nested) -> Nested:
        """Returns the parameters after an optimizer step: layers update what is not trained."""
        layers = self._layers()
        own = {name: value for name, value in state.items() if name not in layers}
        state = {**state, **self._end_step(own)}
        for name, layer in layers.items():
            if name in state:
                state[name] = self._per_copy(name, layer.end_step_recursively)(state[name])
        return state

    def merge_adapters_recursively(self, params: Nested) -> Nested:
        """Returns the parameters of the layer without adapters: W + scale A B, summed in float32.

        Weights keep their dtypes.
        """
        layers, specs = self._layers(), self.layer_parameter_specs()
        own = {name: value for name, value in params.items() if name not in layers}
        merged = {
            name: x.merged(specs[name].fan_axes) if isinstance(x, AdaptedWeight) else x
            for name, x in self.with_adapters(own).items()
        }
        for name, layer in layers.items():
            if name in params:
                merge = self._per_copy(name, layer.merge_adapters_recursively)
                merged[name] = merge(params[name])
        return merged

    def active_parameters(self) -> int:
        """Returns the number of trainable parameters that one token uses, in all layers inside."""
        return sum(times * layer._own_active_parameters() for layer, times in self.walk())

    def forward_flops_per_token(self, seq_len: int) -> float:
        """Returns the forward FLOPs per token: 2 per multiply-add of a matmul, nothing else."""
        return sum(
            times * layer._own_forward_flops_per_token(seq_len) for layer, times in self.walk()
        )

    def matrix_flops_per_token(self, chosen: Callable[[str], bool], path: str = "") -> float:
        """Returns the forward FLOPs per token of the matrices whose path "a/b/c" is chosen."""
        flops = self._own_matrix_flops_per_token(chosen, path)
        for name, child in self._layers().items():
            times = len(self.copies(name) or (name,))
            flops += times * child.matrix_flops_per_token(chosen, f"{path}{name}/")
        return flops

    def exchanges(self, seq_len: int) -> Mapping[Exchange, int]:
        """Returns what layers send where a mesh splits sequences, and how many of them send it."""
        found: collections.Counter[Exchange] = collections.Counter()
        for layer, times in self.walk():
            if exchange := layer._own_exchange(seq_len):
                found[exchange] += times
        return found

    # -- This layer's own parameters -------------------------------------------------------------

    def _inherited(self, field: str) -> Any:
        """Returns a config field of this layer, or of the nearest layer above that sets it."""
        layer: Module | None = self
        while isinstance(layer, BaseLayer):
            value = getattr(layer.config, field)
            if value is not None:
                return value
            layer = layer.parent
        return None

    def layer_parameter_specs(self) -> Nested:
        """Returns the specs of this layer's own parameters, with dtype and initializer set.

        Raises:
            UserError: If a dimension is below 1, or `adapter` is set where it applies to no weight.
        """
        dtype = self._inherited("dtype") or "float32"
        scheme = self._inherited("quantization")
        scheme = None if scheme is Quantization.NONE else scheme
        specs = self._create_layer_parameter_specs()
        for name, spec in specs.items():
            if any(size < 1 for size in spec.shape):
                raise UserError(
                    f"{self._title()}: the shape of {name!r} is {spec.shape} (axes {spec.axes}); "
                    "set the sizes of which it is made to 1 or more."
                )
        specs = {
            name: dataclasses.replace(
                spec,
                dtype=spec.dtype or dtype,
                initializer=spec.initializer or self._initializer(),
                quantization=scheme if name in self.projections else None,
            )
            for name, spec in specs.items()
        }
        return specs | self._adapter_specs(specs)

    def _adapter_specs(self, specs: dict[str, ParameterSpec]) -> dict[str, ParameterSpec]:
        """Returns the specs of the adapters of this layer's weights, and of these weights."""
        if self.config.adapter is None:
            return {}
        adapter = self.config.adapter.instantiate()
        if not (names := [name for name in specs if name in self.projections]):
            raise UserError(
                f"{self._title()}: adapter is set, but {type(self).__qualname__} has no weight "
                "that it applies to; set it to None, or on layers such as attention or experts."
            )
        adapters: dict[str, ParameterSpec] = {}
        for name in names:
            adapters |= adapter.specs(name, specs[name])
            adapters[name] = dataclasses.replace(specs[name], weight_decay_scale=0.0)  # Frozen.
        return adapters

    def _initialize_layer_parameters(self, prng_key: jax.Array, prebuilt: Nested) -> Nested:
        """Returns initial values of this layer's own parameters, or the prebuilt ones."""
        params: Nested = {}
        for name, spec in self.layer_parameter_specs().items():
            if name in prebuilt:
                params[name] = prebuilt[name]
                continue
            try:
                params[name] = spec.initializer(fold_name(prng_key, name), spec)
            except UserError as error:
                raise UserError(f"{self._title()}: the parameter {name!r}: {error}") from None
        return params

    def _check_prebuilt(self, prebuilt: Nested) -> None:
        """Raises UserError unless prebuilt own parameters exist and have the right shapes."""
        specs = dict(tree.flatten_items(self.layer_parameter_specs(), is_spec))
        for name, value in tree.flatten_items(prebuilt, lambda x: isinstance(x, dict) and not x):
            if name not in specs:
                raise UserError(
                    f"{self._title()}: no parameter or layer for the prebuilt {name!r}; "
                    + did_you_mean(name, {*specs, *self.children})
                )
            if jnp.shape(value) != specs[name].shape:
                raise UserError(
                    f"{self._title()}: the prebuilt {name!r} has shape {jnp.shape(value)}; it must "
                    f"be {specs[name].shape}."
                )
