"""Jaxprs: abstract traces of a model, and one walk over everything that a trace computes.

Nothing here runs on a device: arrays are `jax.ShapeDtypeStruct`s.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
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
            jaxpr = getattr(each, "jaxpr", each)  # Of a closed jaxpr.
            if hasattr(jaxpr, "eqns"):
                yield InnerJaxpr(f"{name}[{i}]" if several else name, jaxpr, trip_count)


@contextlib.contextmanager
def name_scope_of(eqn: Any) -> Iterator[None]:
    """Gives operations the names of an equation, which reports of compiled programs read."""
    name = str(eqn.source_info.name_stack)
    with jax.named_scope(name) if name else contextlib.nullcontext():
        yield


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation for these operands."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # Before JAX 0.12.
    with eqn.ctx.manager, name_scope_of(eqn):
        results = eqn.primitive.bind(*functions, *args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


_CALLS = ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2")


def inlined(closed: Any) -> Any:
    """Returns a closed jaxpr with the functions that it calls in place of their calls.

    In bodies of loops, branches and `shard_map` too.
    """
    return jax.make_jaxpr(lambda *args: _evaluate(closed, args))(*closed.in_avals)


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
            with name_scope_of(eqn):
                results = _evaluate(inner, operands)
        elif eqn.primitive.name == "shard_map":
            run = functools.partial(_evaluate, eqn.params["jaxpr"])
            with name_scope_of(eqn):
                results = bind_shard_map(eqn, run, operands)
        else:
            results = bind(_with_inlined_bodies(eqn), operands)
        values |= dict(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _with_inlined_bodies(eqn: Any) -> Any:
    new = lambda value: inlined(value) if hasattr(value, "in_avals") else value
    if eqn.primitive.name not in ("cond", "scan", "while"):
        return eqn
    params = {
        name: tuple(map(new, value)) if isinstance(value, tuple) else new(value)
        for name, value in eqn.params.items()
    }
    return eqn.replace(params=params)


def bind_shard_map(
    eqn: Any, run: Callable[[Sequence[Any]], Any], args: Sequence[Any], **specs: Any
) -> list[Any]:
    """Returns `run(args)` in the mesh and with the specs of a `shard_map` equation.

    Args:
        eqn: The equation.
        run: Function of a sequence of this device's parts.
        args: Operands.
        **specs: `in_specs` and `out_specs` in place of the equation's.
    """
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    axes = set(shard_map_axes(eqn))
    mapped = jax.shard_map(lambda *args: tuple(run(args)), axis_names=axes, **options | specs)
    return list(mapped(*args))


def shard_map_axes(eqn: Any) -> frozenset[str]:
    """Returns the mesh axes that a `shard_map` equation makes manual."""
    params = eqn.params
    return params.get("newly_manual_axes", params.get("manual_axes"))  # JAX renamed it.


def num_consts_and_carries(eqn: Any) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants and carries; they come in this order."""
    if "num_consts" in eqn.params:  # Before JAX 0.12.
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carries)


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
