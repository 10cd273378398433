"""Operations of a jaxpr: equations, and parts of the bodies of loops and of `shard_map`.

Values may be entries of buffers: a scan reads a slice of them in each iteration, and writes its
stacked results into them in place.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from moelib.core.jaxpr import (
    bind,
    bind_scan,
    bind_shard_map,
    evaluate,
    name_scope_of,
    num_consts_and_carries,
)
from moelib.parallel.pipeline.buffers import Entry, is_entry, read


class Operation(NamedTuple):
    """An equation of a jaxpr, or a part of one that has a body."""

    inputs: Sequence[Any]  # Variables and literals.
    outputs: Sequence[Any]  # Variables.
    run: Callable[..., Sequence[Any]]  # Function of the inputs, and entries for stacked outputs.
    eqn: Any = None  # None for a part of an equation.
    part: "BodyPart | None" = None  # The body of a scan, or a part of any body.

    @property
    def kind(self) -> str:
        """The name of its primitive; "" for a part of an equation."""
        return "" if self.eqn is None else self.eqn.primitive.name

    @property
    def scan(self) -> "BodyPart | None":
        """The body of a scan, or its part; None if there is no iteration."""
        return self.part if self.part is not None and self.part.body.length else None

    @property
    def stacked(self) -> Sequence[Any]:
        """The outputs of a scan that have one value per iteration."""
        return self.outputs[len(self.scan.carries) :] if self.scan else ()


class BodyPart(NamedTuple):
    """A part of a body: operations that compute some of its results.

    Variables are those of the body. If a body has two parts, the first saves values in each
    iteration, or on each device, which the second reads there.
    """

    body: "Body"
    captured: Mapping[Any, Any]  # Values of constants, by variable.
    operations: Sequence[Operation]
    consts: Sequence[Any]  # Variables that have the same value in each iteration.
    carries: Sequence[Any]  # Variables that an iteration passes to the next.
    xs: Sequence[Any]  # Variables that have one value per iteration or device.
    results: Sequence[int]  # Indices of the body's results that this part computes, carries first.
    loads: Sequence[Any] = ()  # Variables whose values the first part has saved.
    saves: Sequence[Any] = ()  # Variables whose values the second part loads.

    def operation(self, inputs: Any, outputs: Any, eqn: Any = None) -> Operation:
        """Returns the part as an operation on variables outside of the body."""
        return Operation(inputs, outputs, functools.partial(self.body.run, self), eqn, self)

    @property
    def returned(self) -> list[Any]:
        """The variables that an iteration returns: results, then saved values."""
        return [*(self.body.jaxpr.outvars[i] for i in self.results), *self.saves]

    def iteration(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> Any:
        """Returns the carries after an iteration, and its other results and saved values."""
        names = [*self.consts, *self.carries, *self.xs, *self.loads]
        values = dict(zip(names, [*consts, *carry, *xs], strict=True))
        results = run(self.operations, {**self.captured, **values}, self.returned)
        return results[: len(carry)], results[len(carry) :]


class Body:
    """The body of an equation, and the operands that its variables stand for.

    The operands of a part are those of its constants, carries and `xs`, then loaded values.
    """

    # Whether the second part repeats operations of the first, which cannot save values for it.
    repeats = False
    length = 0  # Iterations of a scan; 0 for other bodies.

    def __init__(self, eqn: Any, jaxpr: Any, num_consts: int, num_carries: int) -> None:
        self.eqn, self.jaxpr = eqn, getattr(jaxpr, "jaxpr", jaxpr)
        captured = getattr(jaxpr, "consts", ())
        self.captured = dict(zip(self.jaxpr.constvars, captured, strict=True))
        names, num_whole = list(self.jaxpr.invars), num_consts + num_carries
        self.consts = names[:num_consts]
        self.carries = names[num_consts:num_whole]
        self.xs = names[num_whole:]
        self.operands = dict(zip(names, eqn.invars[-len(names) :] if names else (), strict=True))
        self.always_read = set[Any]()  # Variables that every part reads.

    def num_values(self, variable: Any) -> int:
        """Returns the number of values that a saved variable has, one per iteration or device."""
        raise NotImplementedError

    def run(
        self, part: BodyPart, operands: Sequence[Any], into: Sequence[Entry | None] = ()
    ) -> Any:
        """Returns the carries after the last iteration of a part, and its other results.

        Stacked results with an entry in `into` are written there; the buffer after the writes is
        returned in their place.
        """
        raise NotImplementedError


class ScanBody(Body):
    """The body of a scan."""

    def __init__(self, eqn: Any) -> None:
        super().__init__(eqn, eqn.params["jaxpr"], *num_consts_and_carries(eqn))
        self.length = eqn.params["length"]

    @override
    def num_values(self, variable: Any) -> int:
        del variable
        return self.length

    @override
    def run(
        self, part: BodyPart, operands: Sequence[Any], into: Sequence[Entry | None] = ()
    ) -> Any:
        num_consts, num_whole = len(part.consts), len(part.consts) + len(part.carries)
        consts, start = read(operands[:num_consts]), read(operands[num_consts:num_whole])
        xs = operands[num_whole:]
        into = into or [None] * (len(part.returned) - len(part.carries))

        def step(state: Any, inputs: Any) -> Any:
            (carry, buffers), (i, arrays) = state, inputs
            slices = [
                x.inside(i).read() if is_entry(x) else array
                for x, array in zip(xs, arrays, strict=True)
            ]
            carry, results = part.iteration(consts, carry, slices)
            buffers = [
                entry and entry.inside(i, buffer).write(result)
                for entry, buffer, result in zip(into, buffers, results, strict=True)
            ]
            stacked = [
                None if entry else result for entry, result in zip(into, results, strict=True)
            ]
            return (carry, buffers), stacked

        arrays = [None if is_entry(x) else x for x in xs]
        indices = jnp.arange(self.length)
        first = start, [entry and entry.array for entry in into]
        with name_scope_of(self.eqn):
            (carry, buffers), stacked = bind_scan(self.eqn, step, first, (indices, arrays))
        pairs = zip(buffers, stacked, strict=True)
        return [*carry, *(array if buffer is None else buffer for buffer, array in pairs)]


class WhileBody(Body):
    """The body of a loop of unknown length, which cannot save one value per iteration.

    Each part is a loop of its own with the same test. The constants of the test are among those of
    the body; its carries have names of their own.
    """

    repeats = True

    def __init__(self, eqn: Any) -> None:
        super().__init__(
            eqn, eqn.params["body_jaxpr"], eqn.params["body_nconsts"], len(eqn.outvars)
        )
        self._test, num_consts = eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"]
        test = self._test.jaxpr
        consts, carries = test.invars[:num_consts], test.invars[num_consts:]
        self.consts = [*self.consts, *consts]
        self.operands |= zip(consts, eqn.invars[:num_consts], strict=True)
        self._in_test = dict(zip(self.carries, carries, strict=True))
        tested = variables([*test.outvars, *(v for each in test.eqns for v in each.invars)])
        self.always_read = {*consts, *(v for v, name in self._in_test.items() if name in tested)}

    @override
    def run(self, part: BodyPart, operands: Sequence[Any], into: Any = ()) -> Any:
        num_consts = len(part.consts)
        consts, start = operands[:num_consts], operands[num_consts:]

        def test(carry: Any) -> Any:
            values = dict(zip(part.consts, consts, strict=True))
            values |= zip(map(self._in_test.get, part.carries), carry, strict=True)
            # The test does not read the carries that this part lacks.
            return evaluate(self._test, list(map(values.get, self._test.jaxpr.invars)), bind)[0]

        def step(carry: Any) -> Any:
            return part.iteration(consts, carry, ())[0]

        with name_scope_of(self.eqn):
            return list(lax.while_loop(test, step, list(start)))


class ShardMapBody(Body):
    """The body of a `shard_map`; saved values that vary over devices get a leading dimension."""

    def __init__(self, eqn: Any) -> None:
        super().__init__(eqn, eqn.params["jaxpr"], num_consts=0, num_carries=0)

    def _axes(self, variable: Any) -> tuple[str, ...]:
        """Returns the mesh axes over which a variable may vary."""
        manual = self.eqn.params["newly_manual_axes"]
        if self.eqn.params["check_vma"]:
            manual = manual & variable.aval.manual_axis_type.varying
        return tuple(axis for axis in self.eqn.params["mesh"].axis_names if axis in manual)

    @override
    def num_values(self, variable: Any) -> int:
        return math.prod(self.eqn.params["mesh"].shape[axis] for axis in self._axes(variable))

    @override
    def run(self, part: BodyPart, operands: Sequence[Any], into: Any = ()) -> Any:
        num_xs, num_results, params = len(part.xs), len(part.results), self.eqn.params

        def local(shards: Sequence[Any]) -> Any:
            _, results = part.iteration(
                (), (), [*shards[:num_xs], *(x[0] for x in shards[num_xs:])]
            )
            return [*results[:num_results], *(x[None] for x in results[num_results:])]

        of_xs = dict(zip(self.xs, params["in_specs"], strict=True))
        of_loads = [jax.P(self._axes(v)) for v in part.loads]
        of_saves = [jax.P(self._axes(v)) for v in part.saves]
        in_specs = *(of_xs[v] for v in part.xs), *of_loads
        out_specs = *(params["out_specs"][i] for i in part.results), *of_saves
        with name_scope_of(self.eqn):
            return bind_shard_map(self.eqn, local, operands, in_specs=in_specs, out_specs=out_specs)


BODIES = {"scan": ScanBody, "shard_map": ShardMapBody, "while": WhileBody}


def run(
    operations: Sequence[Operation],
    values: Mapping[Any, Any],
    results: Sequence[Any],
    into: Mapping[Any, Entry] | None = None,
) -> list[Any]:
    """Returns the values of variables.

    Args:
        operations: Operations that compute them, in order.
        values: Known values by variable: arrays, or entries of buffers.
        results: The variables, or literals.
        into: Entries for stacked outputs of scans, by variable.
    """
    values, into = dict(values), into or {}

    def value(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for operation in operations:
        operands = list(map(value, operation.inputs))
        if operation.scan:
            outputs = operation.run(operands, list(map(into.get, operation.stacked)))
        else:
            outputs = operation.run(read(operands))
        values |= zip(operation.outputs, outputs, strict=True)
    return read(list(map(value, results)))


def operations_of(jaxpr: Any) -> list[Operation]:
    """Returns the equations of a jaxpr; scans read and write entries."""
    return [_scan(eqn) if eqn.primitive.name == "scan" else _equation(eqn) for eqn in jaxpr.eqns]


def _equation(eqn: Any) -> Operation:
    return Operation(eqn.invars, eqn.outvars, functools.partial(bind, eqn), eqn)


def _scan(eqn: Any) -> Operation:
    body = ScanBody(eqn)
    part = BodyPart(
        body,
        body.captured,
        operations_of(body.jaxpr),
        body.consts,
        body.carries,
        body.xs,
        results=range(len(eqn.outvars)),
    )
    return part.operation(eqn.invars, eqn.outvars, eqn)


def variables(values: Sequence[Any]) -> set[Any]:
    """Returns the variables among variables and literals."""
    return {v for v in values if not isinstance(v, Literal)}
