"""Dimension classes of a computation: dimensions that must be sharded together, and their prices.

Every dimension of every value of a jaxpr belongs to one class; the rule of each equation joins
classes. In a feed-forward network {up[1], gate[1], down[0]} and the hidden dimension are one class:
its sharding costs one all-reduce of the output, and one of the input's gradient (Shoeybi et al.,
arXiv:1909.08053). The analysis is that of Alabed et al. (TOAST, arXiv:2508.15010). A wrong price
makes a step slower, never wrong: the compiler inserts the collectives that its shardings need.
"""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from moelib.core.jaxpr import called_by, evaluate, inner_jaxprs, num_consts_and_carries
from moelib.parallel.auto_sharding.rules import (
    DimensionRule,
    Names,
    operation_name,
    registered_rule,
    rule_of,
)
from moelib.parallel.sharding import mesh_axes_of

# Operations whose result equals their operand, except for its dtype.
ALIASES = (
    "convert_element_type",
    "copy",
    "name",
    "optimization_barrier",
    "reduce_precision",
    "sharding_constraint",
)


class Value(NamedTuple):
    """A variable of a jaxpr."""

    dims: tuple[int, ...]
    is_trained: bool = False  # Whether it depends on a parameter, and has a gradient.
    source: int = -1  # The same for values that are copies or casts of one another.


class Collective(NamedTuple):
    """A collective that a class needs if it is sharded."""

    kind: str  # "all-reduce" or "all-gather".
    num_bytes: float  # Of the whole array, over all executions.


class Analysis:
    """Joins and prices the dimension classes of a jaxpr.

    Args:
        num_shards: Number of shards.
        axis: Mesh axis of the shards.
    """

    def __init__(self, num_shards: int, axis: str) -> None:
        self.num_shards = num_shards
        self.axis = axis
        self.unknown = Counter[str]()  # Operations without a rule.
        self.read: set[int] = set()  # Sources of the operands of operations.
        self._parents: list[int] = []  # Union-find over dimensions.
        self._sizes: list[int] = []
        self._fixed: list[int] = []  # Dimensions that cannot be sharded.
        self._windows: list[int] = []  # Those of convolutions, which are not stored in parts.
        self._values: set[tuple[int, ...]] = set()
        # {(its cause, dimension): collective}; one all-reduce sums all gradients of a value.
        self._collectives: dict[tuple[int, int], Collective] = {}
        self._flops: list[tuple[frozenset[int], float]] = []
        self._ids = itertools.count()  # Of sources and causes.

    # -- Results -------------------------------------------------------------------------------

    def class_of(self, dim: int) -> int:
        """Returns the class of a dimension: one of its members."""
        while self._parents[dim] != dim:
            self._parents[dim] = dim = self._parents[self._parents[dim]]
        return dim

    def unshardable(self) -> dict[int, str]:
        """Returns the classes that cannot be sharded, with the reasons."""
        reason = "it belongs to the batch, a loop or a shard_map"
        found = {self.class_of(dim): reason for dim in self._fixed}
        found |= dict.fromkeys(self.windows(), "a convolution's window lies in or moves along it")
        for dim, size in enumerate(self._sizes):
            if size % self.num_shards:
                reason = f"size {size} is not divisible by {self.num_shards}"
                found.setdefault(self.class_of(dim), reason)
        for classes in self.arrays():
            for each, count in Counter(classes).items():
                if count > 1:
                    found.setdefault(each, "an array has it twice")
        return found

    def windows(self) -> set[int]:
        """Returns the classes that a convolution's window lies in or moves along."""
        return set(map(self.class_of, self._windows))

    def arrays(self) -> set[tuple[int, ...]]:
        """Returns the classes of the dimensions of each value."""
        return {tuple(map(self.class_of, dims)) for dims in self._values}

    def collectives(self) -> dict[int, list[Collective]]:
        """Returns the collectives of each class."""
        merged: dict[int, dict[int, Collective]] = defaultdict(dict)
        for (cause, dim), each in self._collectives.items():
            known = merged[self.class_of(dim)]
            known[cause] = max(each, known.get(cause, each), key=lambda each: each.num_bytes)
        return {each: list(found.values()) for each, found in merged.items()}

    def flops(self) -> Mapping[int, float]:
        """Returns the FLOPs of a step's matrix products that each class divides."""
        total = defaultdict[int, float](float)
        for dims, flops in self._flops:
            for each in set(map(self.class_of, dims)):
                total[each] += flops
        return total

    # -- Values --------------------------------------------------------------------------------

    def new_value(self, variable: Any, *, is_trained: bool = False, fixed: bool = False) -> Value:
        """Returns a value with dimensions of its own; `fixed` ones cannot be sharded."""
        dims = tuple(map(self._new_dim, getattr(variable.aval, "shape", ())))
        if fixed:
            self._fixed.extend(dims)
        self._values.add(dims)
        return Value(dims, is_trained and _is_float(variable), next(self._ids))

    def _new_dim(self, size: int) -> int:
        self._parents.append(len(self._parents))
        self._sizes.append(size)
        return len(self._parents) - 1

    def _join(self, a: Sequence[int], b: Sequence[int]) -> None:
        for x, y in zip(a, b, strict=True):
            self._parents[self.class_of(x)] = self.class_of(y)

    def _join_values(self, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
        """Joins the results of two branches, or of two iterations; returns the first."""
        for x, y in zip(a, b, strict=True):
            self._join(x.dims, y.dims)
        return [
            x._replace(is_trained=x.is_trained or y.is_trained) for x, y in zip(a, b, strict=True)
        ]

    # -- Walk ----------------------------------------------------------------------------------

    def run(self, jaxpr: Any, arguments: Sequence[Value], times: int = 1) -> list[Value]:
        """Joins the dimensions of a jaxpr that runs `times` times; returns its results."""
        rule = lambda eqn, operands: self._equation(eqn, operands, times)
        return evaluate(jaxpr, arguments, rule, self.new_value)

    def _equation(self, eqn: Any, operands: list[Value], times: int) -> list[Value]:
        name = eqn.primitive.name
        if rule := registered_rule(eqn):
            return self._apply(eqn, rule, operands, times)
        nested = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if enter := (nested | {"shard_map": self._shard_map}).get(name):
            return enter(eqn, operands, times)
        if inner := called_by(eqn):
            return self.run(inner, operands, times)
        rule = rule_of(eqn, self.num_shards)
        if rule is None:
            self.unknown[operation_name(eqn)] += 1
            rule = _barrier(eqn)
        results = self._apply(eqn, rule, operands, times)
        if name in ALIASES and len(operands) == 1:
            return [results[0]._replace(source=operands[0].source)]
        if name == "stop_gradient":
            return [each._replace(is_trained=False) for each in results]
        return results

    def _cond(self, eqn: Any, operands: list[Value], times: int) -> list[Value]:
        branches = [inner.jaxpr for inner in inner_jaxprs(eqn)]
        if eqn.params.get("branches_platforms"):  # All compute the same; the last has no kernels.
            branches = branches[-1:]
        results = [self.run(branch, operands[1:], times) for branch in branches]
        for values in zip(*results, strict=True):
            if len(sources := {each.source for each in values}) > 1:
                self.read |= sources  # The result may be any of them.
        return functools.reduce(self._join_values, results)

    def _scan(self, eqn: Any, operands: list[Value], times: int) -> list[Value]:
        """A loop over leading dimensions, which are not sharded."""
        body, length = next(inner_jaxprs(eqn)).jaxpr, eqn.params["length"]
        num_consts, num_carried = num_consts_and_carries(eqn)
        num_fixed = num_consts + num_carried
        is_trained = any(each.is_trained for each in operands)
        arguments = [
            value._replace(
                dims=value.dims[i >= num_fixed :],
                is_trained=value.is_trained or (is_trained and _is_float(variable)),
            )
            for i, (value, variable) in enumerate(zip(operands, body.invars, strict=True))
        ]
        self._values |= {each.dims for each in arguments}
        self._fixed.extend(value.dims[0] for value in operands[num_fixed:])
        results = self.run(body, arguments, times * length)
        self._join_values(arguments[num_consts:num_fixed], results[:num_carried])
        for i in range(num_carried, len(results)):
            self._fixed.append(self._new_dim(length))
            results[i] = results[i]._replace(dims=(self._fixed[-1], *results[i].dims))
        self._values |= {each.dims for each in results}
        return results

    def _while(self, eqn: Any, operands: list[Value], times: int) -> list[Value]:
        num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carried = operands[num_test + num_body :]
        self.run(eqn.params["cond_jaxpr"], [*operands[:num_test], *carried], times)
        results = self.run(eqn.params["body_jaxpr"], operands[num_test:], times)
        return self._join_values(results, carried)

    def _shard_map(self, eqn: Any, operands: list[Value], times: int) -> list[Value]:
        """Joins the dimensions outside and inside, except for those that the function shards.

        A function that shards over `axis` itself decides: its parts are fixed, and arrays enter and
        leave with the shardings that it declares.
        """
        body, params = next(inner_jaxprs(eqn)).jaxpr, eqn.params
        is_manual = self.axis in params["newly_manual_axes"]

        def connect(outer: Value, inner: Value, spec: Any) -> None:
            entries = [*mesh_axes_of(spec), *((),) * (len(outer.dims) - len(spec))]
            for a, b, axes in zip(outer.dims, inner.dims, entries, strict=True):
                if is_manual or axes:
                    self._fixed.extend((b,) if self.axis in axes else (a, b))
                else:
                    self._join([a], [b])

        new = lambda variables, values: [
            self.new_value(variable, is_trained=value.is_trained)._replace(source=value.source)
            for variable, value in zip(variables, values, strict=True)
        ]
        arguments = new(body.invars, operands)
        for each in zip(operands, arguments, eqn.params["in_specs"], strict=True):
            connect(*each)
        inside = self.run(body, arguments, times)
        results = new(eqn.outvars, inside)
        for each in zip(results, inside, eqn.params["out_specs"], strict=True):
            connect(*each)
        return results

    def _apply(
        self, eqn: Any, rule: DimensionRule, operands: list[Value], times: int
    ) -> list[Value]:
        """Joins dimensions of one name, notes the collectives and FLOPs; returns the results."""
        self.read |= {each.source for each in operands}
        is_trained = any(each.is_trained for each in operands)
        results = [self.new_value(v, is_trained=is_trained) for v in eqn.outvars]
        names, variables = (*rule.operands, *rule.results), (*eqn.invars, *eqn.outvars)
        arrays = list(zip(names, (*operands, *results), variables, strict=True))
        shared: dict[Any, int] = {}
        for labels, value, _ in arrays:
            for label, dim in zip(labels, value.dims, strict=True):
                if label not in rule.replicated:
                    self._join([dim], [shared.setdefault(label, dim)])
                if label in rule.windows:
                    self._windows.append(dim)
        self._price(eqn, rule, arrays, shared, times)
        if rule.flops:
            passes = 1 + sum(each.is_trained for each in operands)
            self._flops.append((frozenset(shared.values()), rule.flops * passes * times))
        return results

    def _price(
        self,
        eqn: Any,
        rule: DimensionRule,
        arrays: Sequence[tuple[Names, Value, Any]],
        shared: Mapping[Any, int],
        times: int,
    ) -> None:
        """Notes the collectives of an equation; `shared` has a dimension of each name."""

        def note(kind: str, cause: int, dim: int, num_bytes: float) -> None:
            if num_bytes:
                self._collectives[cause, dim] = Collective(kind, num_bytes * times)

        # Arrays with a name that is needed whole are gathered; of results, the gradients.
        operands = arrays[: len(eqn.invars)]
        results = [each for each in arrays[len(operands) :] if each[1].is_trained]
        for labels, value, variable in (*operands, *results):
            for label, dim in zip(labels, value.dims, strict=True):
                if label in rule.replicated:
                    note("all-gather", next(self._ids), dim, _num_bytes(variable))
        # Results are summed over names that they lack, and so are gradients of operands.
        kept = {label for labels in rule.results for label in labels}
        result_bytes, result = sum(map(_num_bytes, eqn.outvars)), next(self._ids)
        for label, dim in shared.items():
            if label not in kept:
                note("all-reduce", result, dim, result_bytes)
            for labels, value, variable in operands:
                if value.is_trained and label not in labels:
                    note("all-reduce", value.source, dim, _num_bytes(variable))


def _barrier(eqn: Any) -> DimensionRule:
    """An operation that needs its operands whole."""
    operands, results = (
        tuple(tuple((kind, k, i) for i in range(len(v.aval.shape))) for k, v in enumerate(arrays))
        for kind, arrays in (("operand", eqn.invars), ("result", eqn.outvars))
    )
    return DimensionRule(
        operands, results, {name for each in (*operands, *results) for name in each}
    )


def _is_float(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _num_bytes(variable: Any) -> float:
    if isinstance(variable, Literal) or not hasattr(variable.aval, "dtype"):
        return 0.0
    itemsize = getattr(variable.aval.dtype, "itemsize", 4)
    return float(math.prod(variable.aval.shape)) * itemsize
