"""The backward pass of a function in two parts: gradients of its inputs, then of its weights."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from moelib.core.jaxpr import bind

_CALLS = ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2")


class SplitBackward(NamedTuple):
    """Two functions that compute a backward pass together."""

    of_input: Callable[..., Any]  # (params, x, others, gradients) -> (gradient of x, kept).
    of_weights: Callable[..., Any]  # (params, kept) -> gradients of params.
    kept: Any  # What the first hands to the second, as `jax.ShapeDtypeStruct`s.


def split_backward(fn: Callable[..., Any], params: Any, x: Any, *others: Any) -> SplitBackward:
    """Returns the backward pass of `fn(params, x, *others)` in two parts.

    Operations that the gradient of `x` needs belong to the first part, the others to the second;
    none is in both. A loop is one operation.

    Args:
        fn: The function.
        params: Its parameters, as arrays or `jax.ShapeDtypeStruct`s.
        x: Its input.
        *others: Arguments without gradients.
    """

    def backward(params: Any, x: Any, others: Any, gradients: Any) -> Any:
        _, vjp = jax.vjp(lambda params, x: fn(params, x, *others), params, x)
        return vjp(gradients)

    arguments = params, x, others, jax.eval_shape(fn, params, x, *others)
    closed, (of_params, of_x) = jax.make_jaxpr(backward, return_shape=True)(*arguments)
    flat = jax.make_jaxpr(lambda *args: _evaluate(closed, args))(*closed.in_avals)
    jaxpr, num_params = flat.jaxpr, len(jax.tree.leaves(of_params))
    first, needed = _needed(jaxpr.eqns, jaxpr.outvars[num_params:])
    rest = [eqn for eqn in jaxpr.eqns if eqn not in first]
    second, needed = _needed(rest, jaxpr.outvars[:num_params])
    given = jaxpr.invars[:num_params]  # To the second part again.
    known = {v for eqn in second for v in eqn.outvars}.union(given, jaxpr.constvars)
    kept = [v for v in needed if v not in known]
    constants = dict(zip(jaxpr.constvars, flat.consts, strict=True))

    def run(eqns: Sequence[Any], values: dict[Any, Any], results: Sequence[Any]) -> list[Any]:
        values = constants | values
        read = lambda v: v.val if isinstance(v, Literal) else values[v]
        for eqn in eqns:
            values |= dict(zip(eqn.outvars, bind(eqn, list(map(read, eqn.invars))), strict=True))
        return list(map(read, results))

    def of_input(params: Any, x: Any, others: Any, gradients: Any) -> Any:
        values = jax.tree.leaves((params, x, others, gradients))
        values = dict(zip(jaxpr.invars, values, strict=True))
        results = run(first, values, [*jaxpr.outvars[num_params:], *kept])
        num = len(results) - len(kept)
        return jax.tree.unflatten(jax.tree.structure(of_x), results[:num]), results[num:]

    def of_weights(params: Any, values: Sequence[Any]) -> Any:
        arrays = dict(zip([*given, *kept], [*jax.tree.leaves(params), *values], strict=True))
        results = run(second, arrays, jaxpr.outvars[:num_params])
        return jax.tree.unflatten(jax.tree.structure(of_params), results)

    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept]
    return SplitBackward(of_input, of_weights, structs)


def _needed(eqns: Sequence[Any], results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the equations that some results need, and all variables that they read."""
    needed = dict.fromkeys(v for v in results if not isinstance(v, Literal))
    kept = []
    for eqn in reversed(eqns):
        if any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed |= dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal))
    return kept[::-1], list(needed)


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr, and those that it calls in place."""
    jaxpr = getattr(closed, "jaxpr", closed)
    values = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]
    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        if eqn.primitive.name in _CALLS:
            if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
                operands = jax.lax.optimization_barrier(operands)  # Recomputed, not kept.
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            results = _evaluate(inner, operands)
        else:
            results = bind(eqn, operands)
        values |= dict(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))
