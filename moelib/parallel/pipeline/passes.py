"""A function's forward and backward pass as separate functions, of which later ones keep values.

The backward pass is one function, or two: the gradient of the input, then those of the weights.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from moelib.core.errors import UserError
from moelib.core.jaxpr import inlined, walk
from moelib.parallel.pipeline.bodies import (
    BODIES,
    Operation,
    Piece,
    operations_of,
    run,
    variables,
)
from moelib.parallel.pipeline.buffers import is_entry


class Passes(NamedTuple):
    """Functions that compute the results of a function, and their gradients, together.

    Arrays in params and `same` may be entries. The second results are written into the entries of
    `into`, a tree like them, and are returned as the buffers after it.
    """

    forward: Callable[..., Any]  # (params, x, others, same, into) -> (results, saved).
    backward: Callable[..., Any]  # (params, same, saved, gradients, into) -> (of x, of params).
    of_input: Callable[..., Any]  # (params, same, saved, gradients, into) -> (of x, deferred).
    of_weights: Callable[..., Any]  # (params, same, deferred, into) -> ((), of params).
    saved: Any  # Values of the forward pass for the backward pass, as `jax.ShapeDtypeStruct`s.
    deferred: Any  # Values for the gradients of the weights.


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

    Raises:
        UserError: If the function has a side effect.
    """

    def passes(params: Any, same: Any, gradients: Any, x: Any, others: Any) -> Any:
        run = lambda params, x: fn(params, x, others, same)
        results, vjp, auxiliary = jax.vjp(run, params, x, has_aux=True)
        return *vjp(gradients), (results, auxiliary)

    gradients, _ = jax.eval_shape(fn, params, x, others, same)
    arguments = params, same, gradients, x, others
    closed, shapes = jax.make_jaxpr(passes, return_shape=True)(*arguments)
    flat = inlined(closed)
    if flat.effects:
        names = [x.eqn.primitive.name for x in walk(flat.jaxpr) if x.eqn.effects & flat.effects]
        raise UserError(
            f"mesh axis pipeline: a layer has the side effect {names[-1]}, which a pipeline would "
            "drop or repeat; remove it, such as jax.debug.print, or set pipeline=1."
        )
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    params, same, gradients, x, others = names = _like(arguments, flat.jaxpr.invars)
    of_params, of_x, done = _like(shapes, flat.jaxpr.outvars)
    early, late, results = map(jax.tree.leaves, (of_x, of_params, done))
    again = [*jax.tree.leaves(names[:2]), *constants]
    given = [*again, *jax.tree.leaves(gradients)]
    parts = _parts(operations_of(flat.jaxpr), results, [*late, *early], given, again)
    early += filter(_is_vector, late)
    later = _parts(parts.second, early, late, again, again)
    saved, deferred = parts.kept, later.kept
    function = functools.partial(_function, constants)
    struct = lambda v: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
    before = params, same, saved, gradients
    return Passes(
        function(parts.first, (params, x, others, same), done, saved),
        function(parts.second, before, of_x, of_params),
        function(later.first, before, of_x, deferred),
        function(later.second, (params, same, deferred), (), of_params),
        [struct(v) for v in saved],
        [struct(v) for v in deferred],
    )


def _function(
    constants: Any, operations: Sequence[Operation], inputs: Any, results: Any, written: Any
) -> Callable[..., Any]:
    """Returns a function of values of `inputs` and of entries for `written`."""
    first, last = jax.tree.leaves(results), jax.tree.leaves(written)
    operations = _merged(operations, variables([*first, *last]))
    uses = collections.Counter(v for v in [*first, *last] if not isinstance(v, Literal))
    uses.update(v for each in operations for v in variables(each.inputs))
    stacked = {v for each in operations for v in each.stacked if uses[v] == 1}
    by_loop = [bool(variables([v]) & stacked) for v in last]

    def of(*args: Any) -> Any:
        *given, into = (jax.tree.leaves(each, is_leaf=is_entry) for each in args)
        values = dict(zip(jax.tree.leaves(inputs), itertools.chain(*given), strict=True))
        inside = {v: at for v, at, loop in zip(last, into, by_loop, strict=True) if loop}
        found = run(operations, constants | values, [*first, *last], inside)
        write = lambda x, at, loop: x if loop else at.write(x)
        new = map(write, found[len(first) :], into, by_loop)
        return _like((results, written), [*found[: len(first)], *new])

    return jax.jit(of)


def _merged(operations: Sequence[Operation], results: set[Any]) -> list[Operation]:
    """Returns operations, of which a loop without carries is part of the only one that reads it.

    The values of its turns are then not stacked, unless they are results.
    """
    done = list[Operation]()
    for each in reversed(operations):
        made = set(each.outputs)
        readers = [i for i, other in enumerate(done) if made & variables(other.inputs)]
        if len(readers) == 1 and (loop := _merge(each, done[readers[0]], results)):
            done[readers[0]] = loop
        else:
            done.append(each)
    return done[::-1]


def _merge(first: Operation, second: Operation, results: set[Any]) -> Operation | None:
    """Returns a loop with the turns of both, in which the second reads what the first has made."""
    one, two = first.piece, second.piece
    if not first.turns or first.turns != second.turns or one.carries:
        return None
    num, num_whole = len(one.consts), len(two.consts) + len(two.carries)
    inside = dict(zip(first.outputs, one.returned, strict=True))
    if inside.keys() & variables(second.inputs[:num_whole]):
        return None
    each = list(zip(second.inputs[num_whole:], [*two.each, *two.given], strict=True))
    handed = [Operation([inside[v]], [name], list) for v, name in each if v in inside]
    rest = [(v, name) for v, name in each if v not in inside]
    kept = [v for v in first.outputs if v in results]
    piece = two._replace(
        captured=one.captured | two.captured,
        operations=[*one.operations, *handed, *two.operations],
        consts=[*one.consts, *two.consts],
        each=[*one.each, *one.given, *(name for _, name in rest)],
        given=(),
        made=[*two.made, *map(inside.__getitem__, kept)],
    )
    whole = *first.inputs[:num], *second.inputs[:num_whole]
    inputs = [*whole, *first.inputs[num:], *(v for v, _ in rest)]
    return piece.operation(inputs, [*second.outputs, *kept])


def _like(tree: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


class _Parts(NamedTuple):
    """Operations in two parts, of which the second uses values of the first."""

    first: Sequence[Operation]
    second: Sequence[Operation]
    kept: Sequence[Any]  # Variables that the second part reads and does not compute.


def _parts(
    operations: Sequence[Operation],
    first: Sequence[Any],
    second: Sequence[Any],
    given: Collection[Any],
    params: Collection[Any],
) -> _Parts:
    """Returns the operations that the results `first` need, and the others that `second` need.

    The second part also has operations of the first that need only `params`, which are among the
    variables `given` to it.
    """
    needed, wanted, of_params = variables(first), variables(second), set(params)
    for operation in operations:
        if variables(operation.inputs) <= of_params:
            of_params |= set(operation.outputs)
    parts: tuple[list[Operation], list[Operation]] = ([], [])
    for operation in reversed(operations):
        outputs = set(operation.outputs)
        if not outputs & needed:
            pieces = None, operation
        elif outputs <= of_params:
            pieces = operation, operation
        elif outputs & (wanted - needed) and operation.kind in BODIES:
            pieces = _split(operation, needed, wanted, of_params)
        else:
            pieces = operation, None
        for i, (piece, of) in enumerate(zip(pieces, (needed, wanted), strict=True)):
            if piece is not None and (i == 0 or set(piece.outputs) & wanted):
                parts[i].append(piece)
                of |= variables(piece.inputs)
    known = {v for each in parts[1] for v in each.outputs}.union(given)
    read = [v for inputs in [*(x.inputs for x in parts[1]), second] for v in inputs]
    kept = dict.fromkeys(v for v in read if not isinstance(v, Literal) and v not in known)
    return _Parts(parts[0][::-1], parts[1][::-1], list(kept))


def _is_vector(value: Any) -> bool:
    return value.aval.ndim < 2


def _split(
    operation: Operation, needed: set[Any], wanted: set[Any], of_params: set[Any]
) -> tuple[Operation, Operation | None]:
    """Returns an operation as two: one computes its results in `needed`, the other in `wanted`.

    The first also returns what the second reads.
    """
    eqn = operation.eqn
    body = BODIES[operation.kind](eqn)
    outvars, operations = body.jaxpr.outvars, operations_of(body.jaxpr)
    is_of_params = lambda v: isinstance(v, Literal) or v in of_params
    params = {v for v in [*body.consts, *body.each] if is_of_params(body.operands[v])}
    of = lambda part: [outvars[i] for i in sorted(part)]

    def with_carries(part: set[int], index: int, find: Callable[[], _Parts]) -> _Parts:
        """Adds the carries to a part that its operations read, unless the other part has them."""
        others = own if index and not body.repeats else set()
        while True:
            found = find()
            read = variables([v for x in found[index] for v in x.inputs])
            read = read.union(variables(of(part)), body.tested)
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

    def operation_of(operations: Any, part: set[int], given: Any, made: Any) -> Operation:
        read = variables([v for x in operations for v in x.inputs])
        read = read.union(variables([*of(part), *made]), body.tested)
        piece = Piece(
            body,
            body.captured,
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
        return piece.operation(inputs, outputs)

    first = alone.first if body.repeats else parts.first
    return operation_of(first, own, (), kept), operation_of(parts.second, rest, kept, ())


class _Stacked:
    """A variable of a body, with all of its values."""

    def __init__(self, variable: Any, times: int) -> None:
        aval = variable.aval
        self.aval = aval.update(shape=(times, *aval.shape))
