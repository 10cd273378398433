"""A layer of another library: two functions, one that creates parameters and one that applies them.

Modules of Flax and Equinox, or plain functions, become part of a model: their parameters are in its
tree, and are sharded, trained, saved and restored like those of any layer.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moelib.core import tree
from moelib.core.config import REQUIRED, InstantiableConfig, Required, config_class
from moelib.core.errors import UserError
from moelib.core.module import Module
from moelib.core.param import ParameterSpec, is_spec, specs_by_path
from moelib.core.tree import Nested
from moelib.layers.base import BaseLayer
from moelib.parallel.auto_sharding.constrain import constrain_at_use
from moelib.parallel.auto_sharding.specs import with_storage
from moelib.parallel.sharding import partition_spec


class InitApply(NamedTuple):
    """The two functions of a layer."""

    init: Callable[[jax.Array], Any]  # (random key) -> parameters, any tree of arrays.
    # (parameters, inputs) -> outputs, or `Updated`. It receives the layer's inputs, and `prng_key`
    # and `is_training` if it has parameters of these names.
    apply: Callable[..., Any]


class Updated(NamedTuple):
    """The result of an `apply` that changes parameters, such as running means."""

    outputs: Any  # The layer's outputs.
    changed: Any  # New values of untrained parameters: a part of their tree.


class ExternalLayer(BaseLayer):
    """A layer that consists of an `InitApply`.

    A parameter's name is its path in the tree that `init` returns, with "/" between the parts.
    Integers and booleans are not trained. Vectors and scalars are trained without weight decay.
    """

    @config_class
    class Config(BaseLayer.Config):
        functions: Required[InstantiableConfig] = REQUIRED  # Builds an InitApply, or such a pair.
        input_dim: int | None = None  # D, passed to `functions` if it has an unset `input_dim`.
        # (regex of a parameter's name, its logical axes, None for a dimension that stays whole).
        # Parameters without a rule are replicated, or sharded automatically (`auto_sharding`).
        axes: Sequence[tuple[str, Sequence[str | None]]] = ()
        fixed: Sequence[str] = ()  # Regexes of the names of parameters that are not trained.
        # Whether apply computes each token separately; False generates text without a KV cache.
        token_by_token: bool = False
        # Forward FLOPs per token; None counts 2 per trained entry of arrays of rank 2 or more.
        flops_per_token: float | None = None

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        """Builds the functions, and traces `init` for the shapes of the parameters.

        Raises:
            UserError: If a rule matches no name, or does not fit the parameter.
        """
        super().__init__(cfg, parent=parent)
        cfg = self.config
        functions = cfg.functions
        if "input_dim" in functions and functions.input_dim in (None, REQUIRED):
            functions = functions.clone(input_dim=cfg.input_dim)
        made = functions.instantiate()
        if not (isinstance(made, tuple) and len(made) == 2 and all(map(callable, made))):
            raise UserError(
                f"{self._title()}: functions builds {type(made).__name__}; it must return the two "
                "functions (init, apply)."
            )
        self._init, self._apply = made
        named = inspect.signature(self._apply).parameters
        self._own_inputs = [name for name in ("prng_key", "is_training") if name in named]
        key = jax.eval_shape(lambda: jax.random.key(0))  # Uses no device.
        try:
            self._shapes = jax.eval_shape(self._init, key)
        except TypeError as error:
            if "valid JAX type" in str(error):
                error.add_note(f"{self._title()}: init must return a tree of arrays only.")
            raise
        self._specs = self._specs_of(self._shapes)
        self._use_specs: Any = None  # Shardings of the parameters where they are used.

    def _specs_of(self, shapes: Any) -> Nested:
        cfg: ExternalLayer.Config = self.config
        names = [name for name, _ in tree.flatten_items(shapes)]
        paths, title = tree.by_path(nested := tree.to_nested(shapes)), self._title()
        if "" in names:
            raise UserError(f"{title}: init returns an array; it must return {{name: array}}.")
        if "cache" in nested or len(paths) < len(names):
            raise UserError(
                f"{title}: init returns {', '.join(names)}; names must be unique, and must not "
                'begin with "cache".'
            )
        axes = tree.match_rules(paths, cfg.axes, default=None, field=f"{title}: axes")
        self.ruled = {name for name, found in axes.items() if found is not None}
        rules = [(pattern, True) for pattern in cfg.fixed]
        fixed = tree.match_rules(paths, rules, default=False, field=f"{title}: fixed")
        if rules and all(fixed.values()):
            raise UserError(
                f"{title}: fixed={cfg.fixed} matches every parameter; leave one to train."
            )
        spec = lambda path, leaf: self._spec(path, leaf, axes[path], fixed[path])
        return tree.map_by_path(spec, nested)

    def _spec(
        self, name: str, leaf: jax.ShapeDtypeStruct, axes: Sequence[str | None] | None, fixed: bool
    ) -> ParameterSpec:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if not floating and not jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.dtype != bool:
            raise UserError(
                f"{self._title()}: {name!r} has dtype {leaf.dtype}; init must return real numbers, "
                "integers or booleans. Random keys are arguments of the other functions; split "
                "them off (with NNX, nnx.RngState)."
            )
        if 0 in leaf.shape:
            raise UserError(
                f"{self._title()}: the shape of {name!r} is {leaf.shape}; sizes must be 1 or more."
            )
        dtype = self._inherited("dtype") if floating else None
        try:
            return ParameterSpec(
                leaf.shape,
                (None,) * leaf.ndim if axes is None else tuple(axes),
                dtype=dtype or str(leaf.dtype),
                trainable=floating and not fixed,
                weight_decay_scale=float(leaf.ndim > 1),
            )
        except ValueError as error:
            raise UserError(f"{self._title()}: axes of {name!r}: {error}") from error

    def layer_parameter_specs(self) -> Nested:
        """Returns the specs of the parameters that `init` creates."""
        return self._specs

    def set_shardings(
        self, used: Mapping[str, PartitionSpec], mesh_shape: Mapping[str, int]
    ) -> None:
        """Shards the parameters without a rule in `axes`, which must not exist yet.

        Args:
            used: Sharding of each parameter, by name, where the layer uses it.
            mesh_shape: Sizes of the mesh axes. The storage of large parameters is sharded over
                "fsdp", and over "model" too if they are used whole.
        """
        sizes = {axis: mesh_shape.get(axis, 1) for axis in ("fsdp", "model")}
        stored, at_use = tree.by_path(self._specs, is_spec), {}
        for name, spec in stored.items():
            if name in self.ruled:
                at_use[name] = partition_spec(spec.axes, mesh_shape, shape=spec.shape, array=name)
                continue
            at_use[name] = used.get(name, PartitionSpec())
            split = (*with_storage(at_use[name], spec.shape, sizes), *(None for _ in spec.shape))
            stored[name] = dataclasses.replace(spec, axes=split[: len(spec.shape)])
        self._specs = tree.unflatten(stored)
        if any(size > 1 for size in mesh_shape.values()):
            self._use_specs = tree.from_nested(tree.unflatten(at_use), self._shapes)

    def _run(self, params: Any, *inputs: Any, **named_inputs: Any) -> Any:
        """Returns the outputs of `apply`, which gathers each parameter where it is used."""
        return self._at_use(lambda params: self._apply(params, *inputs, **named_inputs))(params)

    def _at_use(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of (params, *args) that gathers each parameter where it is used."""
        return fn if self._use_specs is None else constrain_at_use(fn, self._use_specs)

    def _initialize_layer_parameters(self, prng_key: jax.Array, prebuilt: Nested) -> Nested:
        specs = tree.by_path(self._specs, is_spec)
        initial = tree.by_path(tree.to_nested(self._init(prng_key)))
        cast = {name: jnp.asarray(x, specs[name].dtype) for name, x in initial.items()}
        return tree.unflatten(cast | tree.by_path(prebuilt))

    @property
    def sees_other_tokens(self) -> bool:
        """True if a token's output may depend on other tokens, which no cache holds."""
        return not self.config.token_by_token

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Returns the outputs of `apply` for the parameters and these inputs."""
        context = self.get_invocation_context()
        if "prng_key" in self._own_inputs:
            named_inputs["prng_key"] = context.key()
        if "is_training" in self._own_inputs:
            named_inputs["is_training"] = self.is_training
        params = tree.from_nested(self.own_parameters, self._shapes)
        outputs = self._run(params, *inputs, **named_inputs)
        if not isinstance(outputs, Updated):
            return outputs
        for name, value in tree.to_nested(outputs.changed).items():
            self.add_state_update(name, value)
        return outputs.outputs

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        given = self.config.flops_per_token
        return super()._own_forward_flops_per_token(seq_len) if given is None else given

    def _own_matrix_flops_per_token(self, chosen: Callable[[str], bool], path: str = "") -> float:
        specs = specs_by_path(self._specs)
        flops = {p: 2.0 * s.size for p, s in specs.items() if s.trainable and len(s.shape) > 1}
        found = sum(n for p, n in flops.items() if chosen(path + p))
        if flops and (given := self.config.flops_per_token) is not None:
            found *= given / sum(flops.values())  # As much of those given.
        return float(found)
