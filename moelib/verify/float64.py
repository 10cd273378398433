"""Float32 programs computed in float64, with the hand-written derivatives left out.

A trace in float32 is evaluated again with float64 in the place of float32, equation by equation, so
that finite differences are exact to nine digits whatever the layers cast to float32. Functions with
rules of their own for derivatives are replaced by what they compute.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from moelib.core.jaxpr import called_by, evaluate

_WIDE = {np.dtype("float32"): np.dtype("float64")}


def in_float64(fn: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Returns the compiled function `fn` in float64, for arguments of these shapes.

    It is to be called inside `jax.enable_x64(True)`; float32 arguments are widened. It returns the
    results and, by scope, the margins of all `top_k` outside of loops: the least difference of the
    last entry that is chosen and the next one, as a share of the largest magnitude in its row. Two
    zeros, as of a ReLU, are zeros in whatever order a program adds, and have no margin. That of a
    ReLU is the least magnitude above 0 of its inputs, as a share of the largest, times 10: it is
    the error of one sum, where that of a choice adds up over layers.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    structure = jax.tree.structure(shapes)

    def run(*arguments: Any) -> Any:
        margins: dict[str, Any] = {}
        outs = _evaluate(closed, jax.tree.leaves(arguments), margins)
        return jax.tree.unflatten(structure, outs), margins

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def _evaluate(
    closed: Any, arguments: Sequence[Any], margins: dict[str, Any], outer: str = ""
) -> list[Any]:
    rule = lambda eqn, inputs: _apply(eqn, inputs, margins, outer)
    return list(map(_widened, evaluate(closed, list(map(_widened, arguments)), rule)))


def _apply(eqn: Any, inputs: list[Any], margins: dict[str, Any], outer: str) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    inputs = list(map(_widened, inputs))
    scope = "/".join(filter(None, (outer, str(eqn.source_info.name_stack))))
    if inner := called_by(eqn):
        return _evaluate(inner, inputs, margins, scope)
    if name == "top_k" and params["k"] < inputs[0].shape[-1]:
        margins[scope] = jnp.minimum(_margin(inputs[0], params["k"]), margins.get(scope, jnp.inf))
    if name == "max" and (x := _input_of_relu(eqn, inputs)) is not None:
        margins[scope] = jnp.minimum(_margin_of_relu(x), margins.get(scope, jnp.inf))
    if name in ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"):
        kept = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [getattr(lax, name.replace("-", "_"))(*inputs, **{key: params[key] for key in kept})]
    if name == "bitcast_convert_type":  # Of random bits: the bits of a float32.
        inputs = [x.astype(aval.aval.dtype) for x, aval in zip(inputs, eqn.invars, strict=True)]
    else:
        params = {key: _wide(value) for key, value in params.items()}
    outs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return list(map(_widened, outs if eqn.primitive.multiple_results else [outs]))


def _wide(value: Any) -> Any:
    """Returns a parameter of an equation with float64 in the place of float32."""
    if isinstance(value, np.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, tuple):
        return value if hasattr(value, "_fields") else tuple(map(_wide, value))
    if not hasattr(value, "eqns"):
        return value
    avals = (var.aval for var in getattr(value, "jaxpr", value).invars)  # Of the body of a loop.
    inputs = [jax.ShapeDtypeStruct(x.shape, _WIDE.get(x.dtype, x.dtype)) for x in avals]
    return jax.make_jaxpr(lambda *inputs: _evaluate(value, inputs, {}))(*inputs)


def _margin(x: Any, k: int) -> Any:
    best, _ = lax.top_k(x, k + 1)
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0), -1)
    last, following = best[..., k - 1], best[..., k]
    margins = (last - following) / jnp.maximum(largest, 1e-30)
    counts = jnp.isfinite(margins) & ((last != 0) | (following != 0))
    return jnp.min(margins, initial=jnp.inf, where=counts)


def _input_of_relu(eqn: Any, inputs: Sequence[Any]) -> Any:
    """Returns the floating-point array that a maximum compares with the constant 0, or None."""
    is_zero = [isinstance(var, Literal) and not np.any(var.val) for var in eqn.invars]
    found = [x for x, zero in zip(inputs, is_zero, strict=True) if not zero]
    return found[0] if len(found) == 1 and jnp.issubdtype(found[0].dtype, jnp.floating) else None


def _margin_of_relu(x: Any) -> Any:
    sizes = jnp.abs(x)
    least = jnp.min(sizes, initial=jnp.inf, where=sizes > 0)
    return 10 * least / jnp.maximum(jnp.max(sizes, initial=0.0), 1e-30)


def _widened(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if getattr(x, "dtype", None) in _WIDE else x
