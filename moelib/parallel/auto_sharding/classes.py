"""Dimension classes of a computation: dimensions that must be sharded together, and their prices.

Every dimension of every value of a jaxpr belongs to one class; a rule of each equation joins
classes. In a feed-forward network {up[1], gate[1], down[0]} and the hidden dimension are one class:
to shard it costs one all-reduce of the output, and one of the input's gradient (Shoeybi et al.,
arXiv:1909.08053). The analysis is that of Alabed et al. (TOAST, arXiv:2508.15010). A price may be
wrong; the sharded computation is right in any case, since the compiler inserts what is missing.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from moelib.core.jaxpr import inner_jaxprs
from moelib.parallel.auto_sharding.rules import (
    DimensionRule,
    operation_name,
    registered_rule,
    rule_of,
)

# Results equal their operand, but for dtype.
ALIASES = (
    "convert_element_type",
    "copy",
    "name",
    "optimization_barrier",
    "reduce_precision",
    "sharding_constraint",
)
_CALLS = (
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "jit",
    "pjit",
    "remat2",
    "checkpoint",
)


class Value(NamedTuple):
    """What is known of a variable of a jaxpr."""

    dims: tuple[int, ...]
    is_trained: bool = False  # Whether it depends on a parameter, and has a gradient.
    source: int = -1  # The same for values that are copies or casts of one another.


class Collective(NamedTuple):
    """A collective that a class needs if it is sharded."""

    kind: str  # "all-reduce" or "all-gather".
    num_bytes: float  # Of the whole array, over all executions.
    operation: str  # The operation that needs it; of a gradient, the one with the sharded operand.


class Analysis:
    """Joins and prices the dimension classes of a jaxpr."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.unknown = Counter[str]()  # Operations without a rule.
        self._parents: list[int] = []  # Union-find over dimensions.
        self._sizes: list[int] = []
        self._fixed: list[int] = []  # Dimensions that cannot be sharded.
        self._values: set[tuple[int, ...]] = set()
        # {(what causes it, dimension): collective}; one all-reduce sums all gradients of a value.
        self._collectives: dict[tuple[Any, int], Collective] = {}
        self._flops: list[tuple[frozenset[int], float]] = []
        self._calls = itertools.count()

    # -- Results -------------------------------------------------------------------------------

    def class_of(self, dim: int) -> int:
        """Returns the class of a dimension: one of its members."""
        while self._parents[dim] != dim:
            self._parents[dim] = dim = self._parents[self._parents[dim]]
        return dim

    def unshardable(self) -> dict[int, str]:
        """Returns the classes that cannot be sharded, with the reasons."""
        found = {self.class_of(dim): "it belongs to the batch or to a loop" for dim in self._fixed}
        for dim, size in enumerate(self._sizes):
            if size % self.num_shards:
                reason = f"size {size} is not divisible by {self.num_shards}"
                found.setdefault(self.class_of(dim), reason)
        for classes in self.arrays():
            for each, count in Counter(classes).items():
                if count > 1:
                    found.setdefault(each, "an array has it twice")
        return found

    def arrays(self) -> Iterable[tuple[int, ...]]:
        """Yields the classes of the dimensions of each value."""
        return {tuple(self.class_of(dim) for dim in dims) for dims in self._values}

    def collectives(self) -> dict[int, list[Collective]]:
        """Returns the collectives of each class."""
        merged: dict[int, dict[Any, Collective]] = defaultdict(dict)
        for (cause, dim), each in self._collectives.items():
            known = merged[self.class_of(dim)]
            if cause not in known or known[cause].num_bytes < each.num_bytes:
                known[cause] = each
        return {each: list(found.values()) for each, found in merged.items()}

    def flops(self) -> Mapping[int, float]:
        """Returns the FLOPs of a step's matrix products that each class divides."""
        total = defaultdict[int, float](float)
        for dims, flops in self._flops:
            for each in {self.class_of(dim) for dim in dims}:
                total[each] += flops
        return total

    # -- Values --------------------------------------------------------------------------------

    def new_value(self, variable: Any, *, is_trained: bool = False, fixed: bool = False) -> Value:
        """Returns a value with dimensions of its own; `fixed` ones cannot be sharded."""
        shape = getattr(variable.aval, "shape", ())
        dims = tuple(self._new_dim(size) for size in shape)
        if fixed:
            self._fixed.extend(dims)
        self._values.add(dims)
        return Value(dims, is_trained and _is_float(variable), next(self._calls))

    def _new_dim(self, size: int) -> int:
        self._parents.append(len(self._parents))
        self._sizes.append(size)
        return len(self._parents) - 1

    def _join(self, a: Sequence[int], b: Sequence[int]) -> None:
        for x, y in zip(a, b, strict=True):
            self._parents[self.class_of(x)] = self.class_of(y)

    # -- Walk ----------------------------------------------------------------------------------

    def run(self, jaxpr: Any, arguments: Sequence[Value], times: int = 1) -> list[Value]:
        """Joins the dimensions of a jaxpr that runs `times` times; returns its results."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        values = dict(zip(jaxpr.invars, arguments, strict=True))
        values |= {variable: self.new_value(variable) for variable in jaxpr.constvars}
        read = lambda v: self.new_value(v) if isinstance(v, Literal) else values[v]
        for eqn in jaxpr.eqns:
            operands = [read(variable) for variable in eqn.invars]
            results = self._equation(eqn, operands, times)
            values |= dict(zip(eqn.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Value], times: int) -> list[Value]:
        name = eqn.primitive.name
        if rule := registered_rule(eqn):
            return self._apply(eqn, rule, operands, times)
        loops = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if enter := (loops | {"shard_map": self._shard_map}).get(name):
            return enter(eqn, operands, times)
        if name in _CALLS:
            for inner in inner_jaxprs(eqn):
                if len(inner.jaxpr.invars) == len(operands):
                    return self.run(inner.jaxpr, operands, times)
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
        for other in results[1:]:
            self._join_values(results[0], other)
        return results[0]

    def _join_values(self, a: Iterable[Value], b: Iterable[Value]) -> None:
        for x, y in zip(a, b, strict=True):
            self._join(x.dims, y.dims)

    def _scan(self, eqn: Any, operands: list[Value], times: int) -> list[Value]:
        """A loop over leading dimensions, which are not sharded."""
        body = next(inner_jaxprs(eqn)).jaxpr
        length = eqn.params["length"]
        num_fixed, num_carried = split_of_scan(eqn)
        is_trained = any(each.is_trained for each in operands)
        arguments = [
            Value(
                value.dims[i >= num_fixed :],
                (is_trained and _is_float(variable)) or value.is_trained,
                value.source,
            )
            for i, (value, variable) in enumerate(zip(operands, body.invars, strict=True))
        ]
        self._values |= {each.dims for each in arguments}
        self._fixed.extend(value.dims[0] for value in operands[num_fixed:])
        results = self.run(body, arguments, times * length)
        carried = arguments[num_fixed - num_carried : num_fixed]
        self._join_values(carried, results[:num_carried])
        outputs = results[:num_carried]
        for value in results[num_carried:]:
            loop = self._new_dim(length)
            self._fixed.append(loop)
            outputs.append(value._replace(dims=(loop, *value.dims)))
        self._values |= {each.dims for each in outputs}
        return outputs

    def _while(self, eqn: Any, operands: list[Value], times: int) -> list[Value]:
        num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carried = operands[num_test + num_body :]
        self.run(eqn.params["cond_jaxpr"], [*operands[:num_test], *carried], times)
        results = self.run(eqn.params["body_jaxpr"], operands[num_test:], times)
        self._join_values(carried, results)
        return results

    def _shard_map(self, eqn: Any, operands: list[Value], times: int) -> list[Value]:
        """Dimensions that the function itself shards are fixed; the others pass through."""
        body = next(inner_jaxprs(eqn)).jaxpr

        def pass_through(outer: Value, inner: Value, split: Any) -> None:
            entries = (*split, *(None,) * (len(outer.dims) - len(split)))
            for a, b, entry in zip(outer.dims, inner.dims, entries, strict=True):
                if entry is None:
                    self._join([a], [b])
                else:
                    self._fixed.extend((a, b))

        arguments = [
            self.new_value(variable, is_trained=value.is_trained)
            for variable, value in zip(body.invars, operands, strict=True)
        ]
        for outer, inner, split in zip(operands, arguments, eqn.params["in_specs"], strict=True):
            pass_through(outer, inner, split)
        inside = self.run(body, arguments, times)
        results = []
        for variable, value, split in zip(
            eqn.outvars, inside, eqn.params["out_specs"], strict=True
        ):
            results.append(self.new_value(variable, is_trained=value.is_trained))
            pass_through(results[-1], value, split)
        return results

    def _apply(
        self, eqn: Any, rule: DimensionRule, operands: list[Value], times: int
    ) -> list[Value]:
        """Joins dimensions of one name, and notes the collectives and FLOPs of an equation."""
        is_trained = any(each.is_trained for each in operands)
        results = [self.new_value(v, is_trained=is_trained) for v in eqn.outvars]
        shared: dict[Any, int] = {}
        names = (*rule.operands, *rule.results)
        for labels, value in zip(names, (*operands, *results), strict=True):
            for label, dim in zip(labels, value.dims, strict=True):
                if label not in rule.replicated:
                    self._join([dim], [shared.setdefault(label, dim)])
        self._note_gathers(eqn, rule, operands, results, times)
        self._note_sums(eqn, rule, operands, shared, times)
        if rule.flops:
            passes = 1 + sum(each.is_trained for each in operands)
            self._flops.append((frozenset(shared.values()), rule.flops * passes * times))
        return results

    def _note_gathers(
        self, eqn: Any, rule: DimensionRule, operands: list[Value], results: list[Value], times: int
    ) -> None:
        """Operands with a name that is needed as a whole are gathered, and results' gradients."""
        backward = [value if value.is_trained else Value(()) for value in results]
        names = (*rule.operands, *rule.results)
        variables = (*eqn.invars, *eqn.outvars)
        for labels, value, variable in zip(names, (*operands, *backward), variables, strict=True):
            for label, dim in zip(labels, value.dims, strict=False):
                if label in rule.replicated and (num_bytes := _num_bytes(variable)):
                    key = ("all-gather", next(self._calls)), dim
                    name = operation_name(eqn)
                    self._collectives[key] = Collective("all-gather", num_bytes * times, name)

    def _note_sums(
        self,
        eqn: Any,
        rule: DimensionRule,
        operands: list[Value],
        shared: dict[Any, int],
        times: int,
    ) -> None:
        """Results are summed over names that they lack, and so are gradients of operands."""
        kept = {label for labels in rule.results for label in labels}
        result_bytes, call = sum(map(_num_bytes, eqn.outvars)), next(self._calls)
        for label, dim in shared.items():
            sums = [] if label in kept else [(("sum", call), result_bytes)]
            sums += [
                (("gradient", value.source), _num_bytes(variable))
                for labels, value, variable in zip(rule.operands, operands, eqn.invars, strict=True)
                if value.is_trained and label not in labels
            ]
            for cause, num_bytes in sums:
                if num_bytes:
                    found = Collective("all-reduce", num_bytes * times, operation_name(eqn))
                    self._collectives[cause, dim] = found


def split_of_scan(eqn: Any) -> tuple[int, int]:
    """Returns the numbers of operands that a scan does not slice, and of those that it carries."""
    body = next(inner_jaxprs(eqn)).jaxpr
    num_fixed = sum(map(_equal_ranks, body.invars, eqn.invars))
    return num_fixed, sum(map(_equal_ranks, body.outvars, eqn.outvars))


def _barrier(eqn: Any) -> DimensionRule:
    """An operation that needs its operands as a whole."""
    operands, results = (
        tuple(
            tuple((kind, k, i) for i in range(len(v.aval.shape))) for k, v in enumerate(variables)
        )
        for kind, variables in (("operand", eqn.invars), ("result", eqn.outvars))
    )
    names = {label for array in (*operands, *results) for label in array}
    return DimensionRule(operands, results, names)


def _equal_ranks(a: Any, b: Any) -> bool:
    return len(a.aval.shape) == len(b.aval.shape)


def _is_float(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _num_bytes(variable: Any) -> float:
    if isinstance(variable, Literal) or not hasattr(variable.aval, "dtype"):
        return 0.0
    itemsize = getattr(variable.aval.dtype, "itemsize", 4)
    return float(math.prod(variable.aval.shape)) * itemsize
