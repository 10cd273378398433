"""Precision: the dtype of every value of a training step, and the casts of parameters.

| Values | Dtype | Setting | Cast by |
| --- | --- | --- | --- |
| Stored (master) parameters | float32 | `dtype` of layers; `layers.base.FLOAT32` | initializers |
| Matrices in both passes | `train_dtype` | `Cast.STEP` | the step; stacked layers one by one |
| Rows of embedding tables | `train_dtype` | `Cast.READ` | the lookup |
| Routers, norms, biases, sinks | float32 | `Cast.NEVER` | none; biases where they are added |
| Activations | that of the rows | `train_dtype` | layers, which keep it |
| Routing, norms, softmax, angles, losses | float32 | none | layers and kernels |
| Operands of quantized matmuls | 8 bits | `quantization` of layers | `layers.quantization` |
| Gradients of matrices | `train_dtype` | `Cast.STEP` | the matmuls |
| Gradients of tables, norms, ... | float32 | `Cast.READ`, `Cast.NEVER` | the lookup; layers |
| Sums of gradients over devices | that of the gradient | `reduce_dtype` | the matmuls; gathers |
| Sums over micro-batches | float32 | none | `learner.accumulation`, `parallel.pipeline` |
| Clipping, optimizers, averages | float32 | none | `learner.learner`, `learner.ema` |
| Stored moments of optimizers | float32 | `first_moment`, `second_moment` | `learner.moments` |
| Parameters after the update | as stored | `stochastic_rounding` | `learner.moments` |

`train_dtype`, a field of the trainer, is the compute dtype; None computes in the stored dtypes.
`Cast` is that of a `ParameterSpec`, and the settings of the last rows are the learner's. Layers
also cast matrices to the dtype of their inputs, because `dtype` may differ between layers.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.param import Cast, ParameterSpec, is_spec, specs_by_path
from moelib.core.tree import Nested
from moelib.core.varying import vary, varying_axes

# Whether the gradients of weights are summed over devices in float32; in the keys of JAX's traces.
_in_float32 = jax.make_user_context(False)


def check_float(field: str, dtype: Any) -> None:
    """Raises UserError if parameters or activations cannot have the dtype that a field sets."""
    if not jnp.issubdtype(dtype, jnp.floating):
        reason = "is not floating-point; set bfloat16 or float32, for example"
    elif jnp.finfo(dtype).bits < 16:
        reason = "has fewer than 16 bits; set bfloat16, and quantization for matmuls in 8 bits"
    elif jax.dtypes.canonicalize_dtype(dtype) != dtype:
        reason = "JAX computes in float32; set float32, or JAX_ENABLE_X64=1 in the environment"
    else:
        return
    raise UserError(f"{field} is {dtype}, which {reason}.")


def check_gradients(specs: Nested, dtype: Any) -> None:
    """Raises UserError if gradients of passes in a compute dtype would be float16."""
    for path, spec in specs_by_path(specs).items():
        if spec.trainable and jnp.dtype(gradient_dtype(spec, dtype)) == jnp.float16:
            raise UserError(
                f"train_dtype is {dtype} and the dtype of {path} is {spec.dtype}: gradients in "
                "float16 below 6e-8 are 0, and the loss is not scaled; set bfloat16 or float32."
            )


def activation_dtype(cfg: Any) -> str:
    """Returns the dtype of activations and matmuls of a trainer's config."""
    stored = getattr(cfg.model, "dtype", None)  # None too of what is no layer.
    return cfg.train_dtype or (stored if isinstance(stored, str) else "float32")


def is_cast(spec: ParameterSpec, dtype: Any) -> bool:
    """Returns whether passes in a compute dtype cast a parameter; none does if it is None."""
    floating = jnp.issubdtype(jnp.dtype(spec.dtype), jnp.floating)
    return dtype is not None and spec.cast is not Cast.NEVER and spec.trainable and floating


def compute_dtype(spec: ParameterSpec, dtype: Any) -> Any:
    """Returns the dtype in which passes in a compute dtype read a parameter."""
    return dtype if is_cast(spec, dtype) else spec.dtype


def gradient_dtype(spec: ParameterSpec, dtype: Any) -> Any:
    """Returns the dtype of a parameter's gradient in passes in a compute dtype."""
    exact = spec.cast is Cast.READ and is_cast(spec, dtype)
    return "float32" if exact else compute_dtype(spec, dtype)


def cast_parameters(params: Nested, specs: Nested, dtype: Any) -> Nested:
    """Returns parameters in the dtypes of passes that take no gradient."""
    cast = lambda spec, x: x.astype(dtype) if is_cast(spec, dtype) else x
    return jax.tree.map(cast, specs, params, is_leaf=is_spec)


def read_parameters(
    params: Nested, specs: Mapping[str, ParameterSpec], dtype: Any, values: Mapping[str, Any]
) -> Nested:
    """Returns parameters as layers read them in a pass that is differentiated.

    Args:
        params: Arrays that take the gradients.
        specs: Specs of the parameters, by path.
        dtype: The compute dtype, or None.
        values: Each a `CastAtUse` or `QuantizedWeight` without `gradient_of`, by path: values that
            are read instead of those in `params`.
    """

    def read(path: str, x: jax.Array) -> Any:
        if path in values:
            return dataclasses.replace(values[path], gradient_of=x)
        if not is_cast(specs[path], dtype):
            return x
        return CastAtUse(x, x, dtype) if specs[path].cast is Cast.READ else x.astype(dtype)

    return tree.map_by_path(read, params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CastAtUse:
    """A parameter that is cast where it is read: a layer of a stack, or rows of a table.

    No copy of all of it in the compute dtype is then held next to the parameters.
    """

    value: Any  # The parameter in its own dtype.
    gradient_of: Any  # Array of its shape that takes the gradient, in its dtype; never read.
    dtype: Any = dataclasses.field(metadata={"static": True})  # The compute dtype.
    # Whether the gradient is added to a slice of a float32 sum, which `gradient_of` stands for.
    is_summed: bool = dataclasses.field(default=False, metadata={"static": True})

    def cast(self) -> jax.Array:
        """Returns the value in the compute dtype."""
        at = self.gradient_of
        if self.is_summed:
            # Rounds the gradient. In the shape of the slice, XLA for GPUs adds it to the sum in one
            # kernel; otherwise it copies the slice before.
            limits = jnp.finfo(self.dtype)
            at = jax.lax.reduce_precision(at, limits.nexp, limits.nmant).astype(self.dtype)
            at = jax.lax.optimization_barrier(at[None])[0]
        return _cast_with_gradient_of(self.value, at, self.dtype)


def row_major(x: jax.Array) -> jax.Array:
    """Returns x, on NVIDIA GPUs with its last dimension contiguous in memory.

    XLA gathers arrays along their major dimension there. To gather slices of a stack along another
    one, it would transpose the weights of all layers before the scan, and hold them twice.
    """
    constrain = lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return jax.lax.platform_dependent(x, cuda=constrain, default=lambda x: x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _cast_with_gradient_of(value: jax.Array, gradient_of: jax.Array, dtype: Any) -> jax.Array:
    """Returns `value` in a dtype; the gradient goes to `gradient_of`."""
    del gradient_of
    limits = jnp.finfo(dtype)
    if limits.bits < jnp.finfo(value.dtype).bits:
        # Without a rounding of its own, XLA would cast all layers at once, before the scan.
        value = jax.lax.reduce_precision(row_major(value), limits.nexp, limits.nmant)
    return value.astype(dtype)


@_cast_with_gradient_of.defjvp
def _cast_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _cast_with_gradient_of(*primals, dtype), tangents[1].astype(dtype)


def cast_at_use(params: Any) -> Any:
    """Returns parameters with each `CastAtUse` cast."""
    late = lambda x: isinstance(x, CastAtUse)
    return jax.tree.map(lambda x: x.cast() if late(x) else x, params, is_leaf=late)


def cast_floats(arrays: Any, dtype: Any) -> Any:
    """Returns a tree with its floating-point arrays cast to `dtype`."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, arrays)


# -- Sums of gradients over devices ----------------------------------------------------------------


@contextlib.contextmanager
def reduce_dtype(dtype: str | None) -> Iterator[None]:
    """Sets the dtype of sums of weights' gradients over devices, for what is traced inside.

    None is that of the gradient; a sum over n devices in bfloat16 is rounded up to n - 1 times.
    """
    with _in_float32(dtype == "float32"):
        yield


def is_reduced_in_float32(dtype: Any) -> bool:
    """Returns whether gradients of a dtype are summed over devices in float32 instead."""
    is_float = jnp.issubdtype(dtype, jnp.floating)  # As quantized integers are not.
    return bool(_in_float32.value) and is_float and jnp.finfo(dtype).bits < 32


def gathered(gather: Callable[[jax.Array], jax.Array], shard: jax.Array) -> jax.Array:
    """Returns `gather(shard)`, a linear function, whose transpose sums in the `reduce_dtype`."""
    if not is_reduced_in_float32(shard.dtype):
        return gather(shard)
    shape, dtype, axes = shard.shape, shard.dtype, sorted(varying_axes(shard))

    def scatter(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        pull: Any = jax.vjp(gather, vary(jnp.zeros(shape, jnp.float32), axes))[1]
        return (pull(gradient.astype(jnp.float32))[0].astype(dtype),)

    run = jax.custom_vjp(gather)
    run.defvjp(lambda shard: (gather(shard), None), scatter)
    return run(shard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def tensordot(x: jax.Array, weight: jax.Array, num_inputs: int) -> jax.Array:
    """Returns `jnp.tensordot`, whose gradient of the weight is rounded after it is summed."""
    return jnp.tensordot(x, weight, num_inputs)


def _tensordot_fwd(x: jax.Array, weight: jax.Array, num_inputs: int) -> Any:
    return jnp.tensordot(x, weight, num_inputs), (x, weight)


def _tensordot_bwd(num_inputs: int, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> Any:
    x, weight = saved
    tokens, outputs = range(x.ndim - num_inputs), range(num_inputs, weight.ndim)
    of_outputs = [*range(x.ndim - num_inputs, g.ndim)], [*outputs]
    of_tokens = [*tokens], [*tokens]
    of_weight = jnp.tensordot(x, g, of_tokens, preferred_element_type=jnp.float32)
    return jnp.tensordot(g, weight, of_outputs), of_weight.astype(weight.dtype)


tensordot.defvjp(_tensordot_fwd, _tensordot_bwd)
