"""A function's forward and backward pass as separate functions, of which later ones keep values.

The backward pass is one function, or two: the gradient of the input, then those of the weights.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Literal

from moelib.core.jaxpr import (
    bind,
    bind_shard_map,
    inlined,
    name_scope_of,
    num_consts_and_carries,
    shard_map_axes,
)


class Passes(NamedTuple):
    """Functions that compute the results of a function, and their gradients, together."""

    forward: Callable[..., Any]  # (params, x, others, same) -> (results, saved).
    backward: Callable[..., Any]  # (params, same, saved, gradients) -> (gradients of params, of x).
    of_input: Callable[..., Any]  # (params, same, saved, gradients) -> (deferred, gradient of x).
    of_weights: Callable[..., Any]  # (params, same, deferred) -> gradients of params.
    saved: Any  # Values of the forward pass for the backward pass, as `jax.ShapeDtypeStruct`s.
    deferred: Any  # Values for the gradients of the weights.


class _Operation(NamedTuple):
    """An equation of a jaxpr, or a part of one."""

    inputs: Sequence[Any]  # Variables and literals.
    outputs: Sequence[Any]  # Variables.
    run: Callable[[Sequence[Any]], Sequence[Any]]  # Of the values of inputs.
    eqn: Any = None  # None for a part.

    @property
    def kind(self) -> str:
        """The name of its primitive."""
        return "" if self.eqn is None else self.eqn.primitive.name


def split_passes(fn: Callable[..., Any], params: Any, x: Any, others: Any, same: Any) -> Passes:
    """Returns the passes of `fn(params, x, others, same)`, which returns (results, auxiliary ones).

    Operations that the results need belong to the forward pass; of the others, those that the
    gradient of `x` needs to its pass, and the rest to the pass of the weights. None is in two but
    those that need parameters and `same` only, such as gathers of weights. Gradients of vectors,
    such as scales of norms, are sums that take less than what they would keep, and belong to the
    pass of the input. A scan or a `shard_map` becomes two. So does a loop of unknown length, the
    second of which repeats what both need. A conditional is one operation.

    Args:
        fn: The function.
        params: Its parameters, as arrays or `jax.ShapeDtypeStruct`s.
        x: Its input.
        others: Arguments without gradients, of the forward pass.
        same: Arguments without gradients that each pass is given.
    """

    def passes(params: Any, same: Any, gradients: Any, x: Any, others: Any) -> Any:
        run = lambda params, x: fn(params, x, others, same)
        results, vjp, auxiliary = jax.vjp(run, params, x, has_aux=True)
        return *vjp(gradients), (results, auxiliary)

    gradients, _ = jax.eval_shape(fn, params, x, others, same)
    arguments = params, same, gradients, x, others
    closed, shapes = jax.make_jaxpr(passes, return_shape=True)(*arguments)
    flat = inlined(closed)
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    names = _like(arguments, flat.jaxpr.invars)
    of_params, of_x, done = (jax.tree.leaves(x) for x in _like(shapes, flat.jaxpr.outvars))
    again = [*jax.tree.leaves(names[:2]), *constants]
    given = [*again, *jax.tree.leaves(names[2])]
    parts = _parts(_operations(flat.jaxpr), done, [*of_params, *of_x], given, again)
    early = [*of_x, *filter(_is_vector, of_params)]
    later = _parts(parts.second, early, of_params, again, again)

    def function(operations: Any, inputs: Any, outputs: Any, structure: Any) -> Any:
        def run(*args: Any) -> Any:
            values = constants | dict(
                zip(jax.tree.leaves(inputs), jax.tree.leaves(args), strict=True)
            )
            return _like(structure, _run(operations, values, jax.tree.leaves(outputs)))

        return jax.jit(run)

    params, same, gradients, x, others = names
    saved, deferred = parts.kept, later.kept
    struct = lambda v: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
    before = params, same, saved, gradients
    return Passes(
        function(parts.first, (params, x, others, same), (done, saved), (shapes[2], saved)),
        function(parts.second, before, (of_params, of_x), shapes[:2]),
        function(later.first, before, (deferred, of_x), (deferred, shapes[1])),
        function(later.second, (params, same, deferred), of_params, shapes[0]),
        [struct(v) for v in saved],
        [struct(v) for v in deferred],
    )


def _like(tree: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


class _Parts(NamedTuple):
    """Operations in two parts, of which the second uses values of the first."""

    first: Sequence[_Operation]
    second: Sequence[_Operation]
    kept: Sequence[Any]  # Variables that the second part reads and does not compute.


def _parts(
    operations: Sequence[_Operation],
    first: Sequence[Any],
    second: Sequence[Any],
    given: Collection[Any],
    params: Collection[Any],
) -> _Parts:
    """Returns the operations that the results `first` need, and the others that `second` need.

    The second part also has operations of the first that need only `params`, which are among the
    variables `given` to it.
    """
    needed, wanted, of_params = _variables(first), _variables(second), set(params)
    for operation in operations:
        if _variables(operation.inputs) <= of_params:
            of_params |= set(operation.outputs)
    parts: tuple[list[_Operation], list[_Operation]] = ([], [])
    for operation in reversed(operations):
        outputs = set(operation.outputs)
        if not outputs & needed:
            pieces = None, operation
        elif outputs <= of_params:
            pieces = operation, operation
        elif outputs & (wanted - needed) and operation.kind in _BODIES:
            pieces = _split(operation, needed, wanted, of_params)
        else:
            pieces = operation, None
        for i, (piece, of) in enumerate(zip(pieces, (needed, wanted), strict=True)):
            if piece is not None and (i == 0 or set(piece.outputs) & wanted):
                parts[i].append(piece)
                of |= _variables(piece.inputs)
    known = {v for each in parts[1] for v in each.outputs}.union(given)
    read = [v for inputs in [*(x.inputs for x in parts[1]), second] for v in inputs]
    kept = dict.fromkeys(v for v in read if not isinstance(v, Literal) and v not in known)
    return _Parts(parts[0][::-1], parts[1][::-1], list(kept))


def _is_vector(value: Any) -> bool:
    return value.aval.ndim < 2


def _variables(values: Sequence[Any]) -> set[Any]:
    return {v for v in values if not isinstance(v, Literal)}


class _Piece(NamedTuple):
    """A part of a body: its operations, and variables of the body that it reads and returns."""

    operations: Sequence[_Operation]
    consts: Sequence[Any]
    carries: Sequence[Any]
    each: Sequence[Any]
    given: Sequence[Any]  # Values of the other part.
    results: Sequence[int]  # Indices of the body's results, carries first.
    made: Sequence[Any]  # Values for the other part.


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

    def run(self, piece: _Piece, step: Any, known: Any, start: Any, each: Any) -> Any:
        """Returns the carries after a piece, and the other results of all turns."""
        del piece, known
        options = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        return lax.scan(step, start, each, **options)


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
        read = _variables([v for eqn in test.jaxpr.eqns for v in eqn.invars])
        self.tested = {v for v, inside in self._names.items() if inside in read}.union(names[:num])

    def sizes(self) -> tuple[int, int]:
        return self.eqn.params["body_nconsts"], len(self.eqn.outvars)

    def run(self, piece: _Piece, step: Any, known: Any, start: Any, each: Any) -> Any:
        jaxpr = self._test.jaxpr

        def test(carry: Any) -> Any:
            values = known | dict(zip(jaxpr.constvars, self._test.consts, strict=True))
            names = [self._names[v] for v in piece.carries]
            values |= dict(zip(names, carry, strict=True))
            return _run(_operations(jaxpr), values, jaxpr.outvars)[0]

        return lax.while_loop(test, lambda carry: step(carry, each)[0], start), []


class _ShardMap(_Scan):
    """The body of a `shard_map`; a value per device that varies has a new dimension."""

    def sizes(self) -> tuple[int, int]:
        return 0, 0

    def _axes(self, variable: Any) -> tuple[str, ...]:
        manual = shard_map_axes(self.eqn)
        if self.eqn.params["check_vma"]:
            manual = manual & variable.aval.manual_axis_type.varying
        return tuple(axis for axis in self.eqn.params["mesh"].axis_names if axis in manual)

    def times(self, variable: Any) -> int:
        return math.prod(self.eqn.params["mesh"].shape[axis] for axis in self._axes(variable))

    def run(self, piece: _Piece, step: Any, known: Any, start: Any, each: Any) -> Any:
        num, num_results, params = len(piece.each), len(piece.results), self.eqn.params
        specs = lambda variables: [jax.P(self._axes(v)) for v in variables]
        of_inputs = dict(zip(self.each, params["in_specs"], strict=True))

        def local(each: Sequence[Any]) -> Any:
            _, found = step([], [*each[:num], *(x[0] for x in each[num:])])
            return [*found[:num_results], *(x[None] for x in found[num_results:])]

        in_specs = *(of_inputs[v] for v in piece.each), *specs(piece.given)
        out_specs = *(params["out_specs"][i] for i in piece.results), *specs(piece.made)
        return [], bind_shard_map(self.eqn, local, each, in_specs=in_specs, out_specs=out_specs)


_BODIES = {"scan": _Scan, "shard_map": _ShardMap, "while": _While}


def _split(
    operation: _Operation, needed: set[Any], wanted: set[Any], of_params: set[Any]
) -> tuple[_Operation, _Operation | None]:
    """Returns an operation as two: one computes its results in `needed`, the other in `wanted`.

    The first also returns what the second reads.
    """
    eqn = operation.eqn
    body = _BODIES[operation.kind](eqn)
    outvars, operations = body.jaxpr.outvars, _operations(body.jaxpr)
    is_of_params = lambda v: isinstance(v, Literal) or v in of_params
    params = {v for v in [*body.consts, *body.each] if is_of_params(body.operands[v])}
    of = lambda part: [outvars[i] for i in sorted(part)]

    def with_carries(part: set[int], index: int, find: Callable[[], _Parts]) -> _Parts:
        """Adds the carries to a part that its operations read, unless the other part has them."""
        others = own if index and not body.repeats else set()
        while True:
            found = find()
            read = _variables([v for x in found[index] for v in x.inputs])
            read = read.union(_variables(of(part)), body.tested)
            more = {i for i, v in enumerate(body.carries) if v in read} - part - others
            if not more:
                return found
            part |= more

    every = {i for i, v in enumerate(eqn.outvars) if v in wanted}
    own = {i for i, v in enumerate(eqn.outvars) if v in needed}
    own |= {i for i in every if _is_vector(outvars[i])}
    again = lambda part: [
        *body.consts,
        *body.each,
        *(v for i, v in enumerate(body.carries) if i in part),
    ]
    alone = with_carries(
        own, 0, lambda: _parts(operations, of(own), of(every - own), body.jaxpr.invars, params)
    )
    rest = every - own
    if not rest:
        return operation, None
    before = [] if body.repeats else of(own)
    parts = with_carries(rest, 1, lambda: _parts(operations, before, of(rest), again(rest), params))
    kept = [v for v in parts.kept if v not in body.captured]
    stacked = {v: _Stacked(v, body.times(v)) for v in kept}

    def operation_of(operations: Any, part: set[int], given: Any, made: Any) -> _Operation:
        read = _variables([v for x in operations for v in x.inputs])
        read = read.union(_variables([*of(part), *made]), body.tested)
        piece = _Piece(
            operations,
            consts=[v for v in body.consts if v in read],
            carries=[v for i, v in enumerate(body.carries) if i in part],
            each=[v for v in body.each if v in read],
            given=given,
            results=sorted(part),
            made=made,
        )
        names = [*piece.consts, *piece.carries, *piece.each]
        inputs = [*map(body.operands.__getitem__, names), *map(stacked.__getitem__, given)]
        outputs = [*(eqn.outvars[i] for i in piece.results), *map(stacked.__getitem__, made)]
        return _Operation(inputs, outputs, functools.partial(_run_piece, body, piece))

    first = alone.first if body.repeats else parts.first
    return operation_of(first, own, (), kept), operation_of(parts.second, rest, kept, ())


def _run_piece(body: _Scan, piece: _Piece, values: Sequence[Any]) -> list[Any]:
    num, num_carry = len(piece.consts), len(piece.carries)
    known = body.captured | dict(zip(piece.consts, values, strict=False))
    names = [*piece.carries, *piece.each, *piece.given]
    results = [*(body.jaxpr.outvars[i] for i in piece.results), *piece.made]

    def step(carry: Sequence[Any], each: Sequence[Any]) -> Any:
        inside = known | dict(zip(names, [*carry, *each], strict=True))
        found = _run(piece.operations, inside, results)
        return found[:num_carry], found[num_carry:]

    start, each = list(values[num : num + num_carry]), list(values[num + num_carry :])
    with name_scope_of(body.eqn):
        carry, found = body.run(piece, step, known, start, each)
    return [*carry, *found]


class _Stacked:
    """A variable of a body, with all of its values."""

    def __init__(self, variable: Any, times: int) -> None:
        aval = variable.aval
        self.aval = jax.ShapeDtypeStruct((times, *aval.shape), aval.dtype)


def _run(
    operations: Sequence[_Operation], values: dict[Any, Any], results: Sequence[Any]
) -> list[Any]:
    values = dict(values)
    read = lambda v: v.val if isinstance(v, Literal) else values[v]
    for each in operations:
        values |= dict(zip(each.outputs, each.run(list(map(read, each.inputs))), strict=True))
    return list(map(read, results))


def _operations(jaxpr: Any) -> list[_Operation]:
    return [
        _Operation(eqn.invars, eqn.outvars, functools.partial(bind, eqn), eqn) for eqn in jaxpr.eqns
    ]
