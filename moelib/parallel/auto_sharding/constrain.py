"""Parameters stored by FSDP, gathered where the computation reads them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import AxisType, PartitionSpec

from moelib.core.errors import UserError
from moelib.core.jaxpr import bind
from moelib.parallel.auto_sharding.classes import ALIASES, split_of_scan
from moelib.parallel.sharding import current_mesh, keep_axes


def constrain_at_use(fn: Callable[..., Any], use_specs: Any) -> Callable[..., Any]:
    """Returns `fn` with each parameter gathered to its spec just before each operation.

    Inside scans and rematerialized functions this happens in their bodies: a step then gathers one
    layer at a time, after the cast of its parameters, instead of moving activations. Without a mesh
    (`jax.set_mesh`) it changes nothing.

    Args:
        fn: Function of (params, *args).
        use_specs: PartitionSpecs of the parameters, as `auto_partition_specs` returns them.

    The returned function raises UserError if axes of the mesh are of the type `AxisType.Explicit`.
    """

    def constrained(params: Any, *args: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit in mesh.axis_types:
            raise UserError(
                f"mesh: its axes {mesh.axis_names} have the types {mesh.axis_types}; make it with "
                f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}."
            )
        if current_mesh() is None:
            return fn(params, *args)
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(params, *args)
        arguments = jax.tree.leaves((params, args))
        specs = [keep_axes(spec, mesh.auto_axes) for spec in jax.tree.leaves(use_specs)]
        known = [*specs, *(None,) * (len(arguments) - len(specs))]
        results = _evaluate(closed, arguments, known)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return constrained


def _evaluate(closed: Any, args: Sequence[Any], known: Sequence[PartitionSpec | None]) -> list[Any]:
    """Evaluates a jaxpr; arguments with a spec are constrained where they are read."""
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    specs = {v: spec for v, spec in zip(jaxpr.invars, known, strict=True) if spec is not None}
    gathered: dict[Any, Any] = {}
    stored = lambda v: v.val if isinstance(v, Literal) else values[v]

    def used(v: Any) -> Any:
        if isinstance(v, Literal) or v not in specs:
            return stored(v)
        if v not in gathered:
            gathered[v] = jax.lax.with_sharding_constraint(values[v], specs[v])
        return gathered[v]

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = [None if isinstance(v, Literal) else specs.get(v) for v in eqn.invars]
        is_parameter = any(spec is not None for spec in inner)
        if is_parameter and name == "scan":
            results = _scan(eqn, list(map(stored, eqn.invars)), inner)
        elif is_parameter and name in ("jit", "remat2", "checkpoint"):
            results = _call(eqn, list(map(stored, eqn.invars)), inner)
        elif name in ALIASES and inner[0] is not None:
            results = bind(eqn, [stored(eqn.invars[0])])
            specs[eqn.outvars[0]] = inner[0]
        else:
            results = bind(eqn, list(map(used, eqn.invars)))
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [used(v) for v in jaxpr.outvars]


def _call(eqn: Any, args: list[Any], known: Sequence[PartitionSpec | None]) -> list[Any]:
    body, params = lambda *args: _evaluate(eqn.params["jaxpr"], args, known), eqn.params
    if eqn.primitive.name != "jit":
        body = jax.checkpoint(body, policy=params["policy"], prevent_cse=params["prevent_cse"])
    return body(*args)


def _scan(eqn: Any, args: list[Any], known: Sequence[PartitionSpec | None]) -> list[Any]:
    num_fixed, num_carried = split_of_scan(eqn)
    consts, carry, entries = (
        args[: num_fixed - num_carried],
        args[num_fixed - num_carried : num_fixed],
        args[num_fixed:],
    )
    inside = [
        spec if spec is None or i < num_fixed else PartitionSpec(*spec[1:])
        for i, spec in enumerate(known)
    ]

    def step(carry: Any, entries: Any) -> Any:
        results = _evaluate(eqn.params["jaxpr"], [*consts, *carry, *entries], inside)
        return results[:num_carried], results[num_carried:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, outputs = jax.lax.scan(step, carry, entries, **options)
    return [*carry, *outputs]
