"""Operations of a jaxpr, whole or in part: of equations, and of the bodies of some of them.

Values may be entries of buffers, of which a scan reads a slice per turn, and into which it writes
its stacked results in place.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from moelib.core.jaxpr import (
    bind,
    bind_shard_map,
    name_scope_of,
    num_consts_and_carries,
)
from moelib.parallel.pipeline.buffers import Entry, is_entry, read


class Piece(NamedTuple):
    """A part of a body: its operations, and variables of the body that it reads and returns."""

    body: "_Scan"
    captured: Mapping[Any, Any]  # Values of variables.
    operations: Sequence["Operation"]
    consts: Sequence[Any]
    carries: Sequence[Any]
    each: Sequence[Any]
    given: Sequence[Any]  # Values of the other part.
    results: Sequence[int]  # Indices of the body's results, carries first.
    made: Sequence[Any]  # Values for the other part.

    @property
    def returned(self) -> list[Any]:
        """All that it returns."""
        return [*(self.body.jaxpr.outvars[i] for i in self.results), *self.made]

    def operation(self, inputs: Any, outputs: Any, eqn: Any = None) -> "Operation":
        """Returns it as an operation on values from outside of the body."""
        return Operation(inputs, outputs, functools.partial(self.body.run, self), eqn, self)

    def turn(self, consts: Sequence[Any], carry: Sequence[Any], each: Sequence[Any]) -> Any:
        """Returns the carries after a turn, and its other results."""
        names = [*self.consts, *self.carries, *self.each, *self.given]
        values = dict(zip(names, [*consts, *carry, *each], strict=True))
        found = run(self.operations, {**self.captured, **values}, self.returned)
        return found[: len(carry)], found[len(carry) :]


class Operation(NamedTuple):
    """An equation of a jaxpr, or a part of one."""

    inputs: Sequence[Any]  # Variables and literals.
    outputs: Sequence[Any]  # Variables.
    run: Callable[..., Sequence[Any]]  # Of the values of inputs, and the entries of stacked ones.
    eqn: Any = None  # None for a part.
    piece: Any = None  # Of a body, if it has one.

    @property
    def kind(self) -> str:
        """The name of its primitive."""
        return "" if self.eqn is None else self.eqn.primitive.name

    @property
    def turns(self) -> int:
        """The number of turns of a scan, otherwise 0."""
        is_scan = self.piece is not None and type(self.piece.body) is _Scan
        return self.piece.body.eqn.params["length"] if is_scan else 0

    @property
    def stacked(self) -> Sequence[Any]:
        """The outputs of a scan that have a value per turn."""
        return self.outputs[len(self.piece.carries) :] if self.turns else ()


class _Scan:
    """The body of a scan: variables are constants, carries, and others with one value per turn."""

    repeats = False  # Whether the second part repeats what both need.

    def __init__(self, eqn: Any, body: Any = None) -> None:
        self.eqn, body = eqn, body or eqn.params["jaxpr"]
        self.jaxpr = getattr(body, "jaxpr", body)
        captured = getattr(body, "consts", ())
        self.captured = dict(zip(self.jaxpr.constvars, captured, strict=True))
        num_consts, self.num_carry = self.sizes()
        num, names = num_consts + self.num_carry, list(self.jaxpr.invars)
        self.consts, self.carries, self.each = (
            names[:num_consts],
            names[num_consts:num],
            names[num:],
        )
        self.operands = dict(zip(names, eqn.invars[len(eqn.invars) - len(names) :], strict=True))
        self.tested = set[Any]()  # Variables that every part reads.

    def sizes(self) -> tuple[int, int]:
        """Returns the numbers of constants and carries."""
        return num_consts_and_carries(self.eqn)

    def times(self, variable: Any) -> int:
        """Returns the number of values that a variable has."""
        del variable
        return self.eqn.params["length"]

    def run(self, piece: Piece, operands: Sequence[Any], into: Sequence[Entry | None] = ()) -> Any:
        """Returns the carries after a piece, and the other results of all turns.

        Those with an entry in `into` are written there, and returned as the buffer after it.
        """
        num, num_whole = len(piece.consts), len(piece.consts) + len(piece.carries)
        consts, start = read(operands[:num]), read(operands[num:num_whole])
        each, length = operands[num_whole:], self.eqn.params["length"]
        into = into or [None] * (len(piece.returned) - len(piece.carries))

        def step(state: Any, given: Any) -> Any:
            (carry, buffers), (i, arrays) = state, given
            value = lambda x, array: x.inside(i).read() if is_entry(x) else array
            carry, made = piece.turn(consts, carry, list(map(value, each, arrays)))
            after = lambda at, array, x: at and at.inside(i, array).write(x)
            rest = [None if at else x for at, x in zip(into, made, strict=True)]
            return (carry, list(map(after, into, buffers, made))), rest

        first = start, [at and at.array for at in into]
        arrays = [None if is_entry(x) else x for x in each]
        options = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        with name_scope_of(self.eqn):
            (carry, buffers), made = lax.scan(step, first, (jnp.arange(length), arrays), **options)
        return [*carry, *(x if a is None else a for a, x in zip(buffers, made, strict=True))]


class _While(_Scan):
    """The body of a loop of unknown length, which cannot keep a value per turn."""

    repeats = True

    def __init__(self, eqn: Any) -> None:
        super().__init__(eqn, eqn.params["body_jaxpr"])
        test, num = eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"]
        self._test, names = test, list(test.jaxpr.invars)
        self._names = dict(zip(self.carries, names[num:], strict=True))
        self.consts += names[:num]
        self.operands |= dict(zip(names[:num], eqn.invars[:num], strict=True))
        inputs = [v for eqn in test.jaxpr.eqns for v in eqn.invars]
        read = variables([*inputs, *test.jaxpr.outvars])
        self.tested = {v for v, inside in self._names.items() if inside in read}.union(names[:num])

    def sizes(self) -> tuple[int, int]:
        return self.eqn.params["body_nconsts"], len(self.eqn.outvars)

    def run(self, piece: Piece, operands: Sequence[Any], into: Any = ()) -> Any:
        jaxpr, num = self._test.jaxpr, len(piece.consts)
        known = self.captured | dict(zip(piece.consts, operands, strict=False))

        def test(carry: Any) -> Any:
            inside = known | dict(zip(jaxpr.constvars, self._test.consts, strict=True))
            names = [self._names[v] for v in piece.carries]
            inside |= dict(zip(names, carry, strict=True))
            return run(operations_of(jaxpr), inside, jaxpr.outvars)[0]

        step = lambda carry: piece.turn(operands[:num], carry, ())[0]
        with name_scope_of(self.eqn):
            return list(lax.while_loop(test, step, list(operands[num:])))


class _ShardMap(_Scan):
    """The body of a `shard_map`; a value per device that varies has a new dimension."""

    def sizes(self) -> tuple[int, int]:
        return 0, 0

    def _axes(self, variable: Any) -> tuple[str, ...]:
        manual = self.eqn.params["newly_manual_axes"]
        if self.eqn.params["check_vma"]:
            manual = manual & variable.aval.manual_axis_type.varying
        return tuple(axis for axis in self.eqn.params["mesh"].axis_names if axis in manual)

    def times(self, variable: Any) -> int:
        return math.prod(self.eqn.params["mesh"].shape[axis] for axis in self._axes(variable))

    def run(self, piece: Piece, operands: Sequence[Any], into: Any = ()) -> Any:
        num, num_results, params = len(piece.each), len(piece.results), self.eqn.params
        specs = lambda variables: [jax.P(self._axes(v)) for v in variables]
        of_inputs = dict(zip(self.each, params["in_specs"], strict=True))

        def local(each: Sequence[Any]) -> Any:
            own = [*each[:num], *(x[0] for x in each[num:])]
            _, found = piece.turn((), (), own)
            return [*found[:num_results], *(x[None] for x in found[num_results:])]

        in_specs = *(of_inputs[v] for v in piece.each), *specs(piece.given)
        out_specs = *(params["out_specs"][i] for i in piece.results), *specs(piece.made)
        with name_scope_of(self.eqn):
            return bind_shard_map(self.eqn, local, operands, in_specs=in_specs, out_specs=out_specs)


BODIES = {"scan": _Scan, "shard_map": _ShardMap, "while": _While}


def run(
    operations: Sequence[Operation],
    values: Mapping[Any, Any],
    results: Sequence[Any],
    into: Mapping[Any, Entry] | None = None,
) -> list[Any]:
    """Returns results, given values or entries of them; `into` has entries of stacked ones."""
    values, into = dict(values), into or {}
    value = lambda v: v.val if isinstance(v, Literal) else values[v]
    for each in operations:
        operands = list(map(value, each.inputs))
        if each.turns:
            found = each.run(operands, list(map(into.get, each.stacked)))
        else:
            found = each.run(read(operands))
        values |= dict(zip(each.outputs, found, strict=True))
    return read(list(map(value, results)))


def operations_of(jaxpr: Any) -> list[Operation]:
    """Returns the equations of a jaxpr."""
    return [
        _scan(eqn)
        if eqn.primitive.name == "scan"
        else Operation(eqn.invars, eqn.outvars, functools.partial(bind, eqn), eqn)
        for eqn in jaxpr.eqns
    ]


def _scan(eqn: Any) -> Operation:
    body, results = _Scan(eqn), range(len(eqn.outvars))
    parts = operations_of(body.jaxpr), body.consts, body.carries, body.each
    return Piece(body, body.captured, *parts, (), results, ()).operation(
        eqn.invars, eqn.outvars, eqn
    )


def variables(values: Sequence[Any]) -> set[Any]:
    """Returns those that are no literals."""
    return {v for v in values if not isinstance(v, Literal)}
