"""Parameters stored by FSDP, gathered where the computation reads them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from moelib.core.errors import UserError
from moelib.core.jaxpr import bind, bind_scan, evaluate, num_consts_and_carries
from moelib.parallel.auto_sharding.classes import ALIASES
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
        specs = [keep_axes(spec, mesh.auto_axes) for spec in jax.tree.leaves(use_specs)]
        arguments = jax.tree.leaves((params, args))
        specs += [None] * (len(arguments) - len(specs))
        results = _evaluate(closed, arguments, specs)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return constrained


class _Stored:
    """A parameter as it is stored, which is gathered where it is first read."""

    def __init__(self, array: Any, spec: PartitionSpec) -> None:
        self.array, self.spec = array, spec

    @functools.cached_property
    def gathered(self) -> Any:
        return jax.lax.with_sharding_constraint(self.array, self.spec)


def _gathered(value: Any) -> Any:
    return value.gathered if isinstance(value, _Stored) else value


def _evaluate(jaxpr: Any, args: Sequence[Any], specs: Sequence[PartitionSpec | None]) -> list[Any]:
    """Evaluates a jaxpr; arguments with a spec are constrained where they are read."""
    pairs = zip(args, specs, strict=True)
    values = [array if spec is None else _Stored(array, spec) for array, spec in pairs]
    return list(map(_gathered, evaluate(jaxpr, values, _rule)))


def _rule(eqn: Any, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    specs = [each.spec if isinstance(each, _Stored) else None for each in operands]
    if all(spec is None for spec in specs):
        return bind(eqn, operands)
    arrays = [each.array if isinstance(each, _Stored) else each for each in operands]
    if name == "scan":
        return _scan(eqn, arrays, specs)
    if name == "jit":
        return _evaluate(eqn.params["jaxpr"], arrays, specs)
    if name == "remat2":
        body = lambda *args: _evaluate(eqn.params["jaxpr"], args, specs)
        options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
        return jax.checkpoint(body, **options)(*arrays)
    if name in ALIASES and specs[0] is not None:
        (copy,) = bind(eqn, arrays)
        return [_Stored(copy, specs[0])]
    return bind(eqn, list(map(_gathered, operands)))


def _scan(eqn: Any, args: list[Any], specs: Sequence[PartitionSpec | None]) -> list[Any]:
    num_consts, num_carries = num_consts_and_carries(eqn)
    num_whole = num_consts + num_carries
    inside = [
        spec if spec is None or i < num_whole else PartitionSpec(*spec[1:])
        for i, spec in enumerate(specs)
    ]

    def step(carry: Any, xs: Any) -> Any:
        operands = [*args[:num_consts], *carry, *xs]
        results = _evaluate(eqn.params["jaxpr"], operands, inside)
        return results[:num_carries], results[num_carries:]

    carry, outputs = bind_scan(eqn, step, args[num_consts:num_whole], args[num_whole:])
    return [*carry, *outputs]
