"""Jaxprs: abstract traces of a model, one evaluator of them, and one walk over their equations.

The evaluator computes with what its rule returns: arrays, shardings, or whether a value is zero.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Literal

from moelib.core.module import functional
from moelib.core.param import is_spec
from moelib.core.precision import compute_dtype
from moelib.core.tree import Batch, Nested


def abstract_parameters(specs: Nested, train_dtype: str | None = None) -> Nested:
    """Returns shapes and dtypes of the parameters that a step in `train_dtype` computes with."""
    array = lambda spec: jax.ShapeDtypeStruct(spec.shape, compute_dtype(spec, train_dtype))
    return jax.tree.map(array, specs, is_leaf=is_spec)


def forward_pass(model: Any) -> Callable[[Nested, Batch], Any]:
    """Returns a model's forward pass in training: `functional` of (parameters, batch).

    `jax.make_jaxpr`, `jax.eval_shape` and `jax.vjp` take it; its random key is constant.
    """

    def forward(params: Nested, batch: Batch) -> Any:
        return functional(model, jax.random.key(0), params, (batch,), is_training=True)

    return forward


Rule = Callable[[Any, list[Any]], Sequence[Any]]

# Equations that compute the jaxpr in their parameters once, from all of their operands.
_CALLS = ("custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "jit", "remat2")


def evaluate(
    jaxpr: Any, args: Sequence[Any], rule: Rule, constant: Callable[[Any], Any] | None = None
) -> list[Any]:
    """Returns the results of a jaxpr.

    Args:
        jaxpr: A jaxpr, or a closed one.
        args: Values of its inputs.
        rule: Returns the values of an equation's results, given the equation and the values of its
            operands. `bind` computes them.
        constant: Returns the value of a literal or of a constant, given its variable. By default,
            the array.
    """
    closed, jaxpr = jaxpr, getattr(jaxpr, "jaxpr", jaxpr)
    if constant is None:
        arrays = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
        constant = lambda v: v.val if isinstance(v, Literal) else arrays[v]
    values = {v: constant(v) for v in jaxpr.constvars}
    values |= zip(jaxpr.invars, args, strict=True)
    read = lambda v: constant(v) if isinstance(v, Literal) else values[v]
    for eqn in jaxpr.eqns:
        results = rule(eqn, list(map(read, eqn.invars)))
        values |= zip(eqn.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars))


def called_by(eqn: Any) -> Any:
    """Returns the jaxpr that an equation computes once from its operands, None if there is none."""
    if eqn.primitive.name not in _CALLS:
        return None
    return eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]


@contextlib.contextmanager
def name_scope_of(eqn: Any) -> Iterator[None]:
    """Gives operations the names of an equation, which reports of compiled programs read."""
    name = str(eqn.source_info.name_stack)
    with jax.named_scope(name) if name else contextlib.nullcontext():
        yield


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation for these operands."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager, name_scope_of(eqn):
        results = eqn.primitive.bind(*args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def inlined(closed: Any) -> Any:
    """Returns a closed jaxpr with the functions that it calls in place of their calls.

    In bodies of loops, branches and `shard_map` too.
    """
    return jax.make_jaxpr(lambda *args: evaluate(closed, args, _inline))(*closed.in_avals)


def _inline(eqn: Any, operands: list[Any]) -> list[Any]:
    """Evaluates an equation, and what it calls in its place."""
    if inner := called_by(eqn):
        if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
            operands = lax.optimization_barrier(operands)  # Recomputed, not kept.
        with name_scope_of(eqn):
            return evaluate(inner, operands, _inline)
    if eqn.primitive.name == "shard_map":
        body = lambda args: evaluate(eqn.params["jaxpr"], args, _inline)
        with name_scope_of(eqn):
            return bind_shard_map(eqn, body, operands)
    if eqn.primitive.name in ("cond", "scan", "while"):
        flat = lambda value: inlined(value) if hasattr(value, "in_avals") else value
        params = {
            name: tuple(map(flat, value)) if isinstance(value, tuple) else flat(value)
            for name, value in eqn.params.items()
        }
        eqn = eqn.replace(params=params)
    return bind(eqn, operands)


def bind_shard_map(
    eqn: Any, body: Callable[[Sequence[Any]], Any], args: Sequence[Any], **specs: Any
) -> list[Any]:
    """Returns `body(args)` in the mesh and with the specs of a `shard_map` equation.

    Args:
        eqn: The equation.
        body: Function of a sequence of this device's shards.
        args: Operands.
        **specs: `in_specs` and `out_specs` in place of the equation's.
    """
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    axes = set(eqn.params["newly_manual_axes"])
    mapped = jax.shard_map(lambda *args: tuple(body(args)), axis_names=axes, **options | specs)
    return list(mapped(*args))


def bind_scan(eqn: Any, step: Callable[[Any, Any], Any], carry: Any, xs: Any) -> Any:
    """Returns `lax.scan(step, carry, xs)` with the options of a scan equation."""
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(step, carry, xs, **options)


def num_consts_and_carries(eqn: Any) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants and carries; they come in this order."""
    consts, carries, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carries)


class InnerJaxpr(NamedTuple):
    """A jaxpr inside an equation."""

    name: str  # Parameter of the equation, such as "body_jaxpr" or "branches[1]".
    jaxpr: Any
    trip_count: int | None  # Runs per run of the equation; None for a `while`, where it is unknown.


def inner_jaxprs(eqn: Any) -> Iterator[InnerJaxpr]:
    """Yields the jaxprs inside an equation: loop bodies, branches, wrapped functions, kernels."""
    trip_count = {"scan": eqn.params.get("length"), "while": None}.get(eqn.primitive.name, 1)
    for name, value in eqn.params.items():
        several = isinstance(value, tuple | list)
        for i, each in enumerate(value if several else (value,)):
            jaxpr = getattr(each, "jaxpr", each)  # The jaxpr of a closed one.
            if hasattr(jaxpr, "eqns"):
                yield InnerJaxpr(f"{name}[{i}]" if several else name, jaxpr, trip_count)


class Site(NamedTuple):
    """An equation of a trace, at any depth."""

    eqn: Any
    executions: int  # Product of the trip counts around it; a loop of unknown length counts as 1.


def walk(jaxpr: Any, *, opaque: Collection[str] = (), executions: int = 1) -> Iterator[Site]:
    """Yields every equation of a jaxpr, each before the equations inside it.

    Args:
        jaxpr: A jaxpr, or a closed one.
        opaque: Names of primitives whose inner jaxprs are not entered.
        executions: Number of times that the jaxpr itself runs.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield Site(eqn, executions)
        if eqn.primitive.name not in opaque:
            for inner in inner_jaxprs(eqn):
                times = executions * (1 if inner.trip_count is None else inner.trip_count)
                yield from walk(inner.jaxpr, opaque=opaque, executions=times)
