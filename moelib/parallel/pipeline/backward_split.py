"""The backward pass of a function in two parts: gradients of its inputs, then of its weights."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from moelib.core.jaxpr import bind, inlined, num_consts_and_carries


class SplitBackward(NamedTuple):
    """Two functions that compute a backward pass together."""

    of_input: Callable[..., Any]  # (params, x, others, gradients) -> (gradient of x, kept).
    of_weights: Callable[..., Any]  # (params, kept) -> gradients of params.
    kept: Any  # What the first hands to the second, as `jax.ShapeDtypeStruct`s.


class _Operation(NamedTuple):
    """An equation of a jaxpr, or a part of one."""

    inputs: Sequence[Any]  # Variables and literals.
    outputs: Sequence[Any]  # Variables.
    run: Callable[[Sequence[Any]], Sequence[Any]]  # Of the values of inputs.
    scan: Any = None  # The equation, if it is a scan.


def split_backward(fn: Callable[..., Any], params: Any, x: Any, *others: Any) -> SplitBackward:
    """Returns the backward pass of `fn(params, x, *others)` in two parts.

    Operations that the gradient of `x` needs belong to the first part, the others to the second;
    none is in both. Gradients of vectors, such as scales of norms, are sums that take less than
    what they would keep, and belong to the first. A scan becomes two, other loops are one
    operation.

    Args:
        fn: The function.
        params: Its parameters, as arrays or `jax.ShapeDtypeStruct`s.
        x: Its input.
        *others: Arguments without gradients.
    """

    def backward(params: Any, x: Any, others: Any, gradients: Any) -> Any:
        _, vjp = jax.vjp(lambda params, x: fn(params, x, *others), params, x)
        return vjp(gradients)

    arguments = params, x, others, jax.eval_shape(fn, params, x, *others)
    closed, (of_params, of_x) = jax.make_jaxpr(backward, return_shape=True)(*arguments)
    flat = inlined(closed)
    jaxpr, num_params = flat.jaxpr, len(jax.tree.leaves(of_params))
    given = jaxpr.invars[:num_params]  # To the second part again.
    results = jaxpr.outvars
    early = [v for v in results[:num_params] if _is_vector(v)]
    first = [*results[num_params:], *early]
    parts = _parts(_operations(jaxpr), first, results[:num_params], given)
    constants = dict(zip(jaxpr.constvars, flat.consts, strict=True))
    kept = [v for v in parts.kept if v not in constants]

    def of_input(params: Any, x: Any, others: Any, gradients: Any) -> Any:
        values = jax.tree.leaves((params, x, others, gradients))
        values = constants | dict(zip(jaxpr.invars, values, strict=True))
        found = _run(parts.first, values, [*results[num_params:], *kept])
        num = len(found) - len(kept)
        return jax.tree.unflatten(jax.tree.structure(of_x), found[:num]), found[num:]

    def of_weights(params: Any, values: Sequence[Any]) -> Any:
        arrays = dict(zip([*given, *kept], [*jax.tree.leaves(params), *values], strict=True))
        found = _run(parts.second, constants | arrays, results[:num_params])
        return jax.tree.unflatten(jax.tree.structure(of_params), found)

    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept]
    return SplitBackward(of_input, of_weights, structs)


class _Parts(NamedTuple):
    """Operations in two parts, of which the second uses values of the first."""

    first: Sequence[_Operation]
    second: Sequence[_Operation]
    kept: Sequence[Any]  # Variables that the second part reads and does not compute.


def _parts(
    operations: Sequence[_Operation], first: Sequence[Any], second: Sequence[Any], given: Any
) -> _Parts:
    """Returns the operations that the results `first` need, and the others that `second` need."""
    needed, wanted = _variables(first), _variables(second)
    parts: tuple[list[_Operation], list[_Operation]] = ([], [])
    for operation in reversed(operations):
        outputs = set(operation.outputs)
        if outputs & needed and outputs & (wanted - needed) and operation.scan is not None:
            pieces = _split_scan(operation, needed, wanted)
        else:
            pieces = (operation, None) if outputs & needed else (None, operation)
        for i, (piece, of) in enumerate(zip(pieces, (needed, wanted), strict=True)):
            if piece is not None and (i == 0 or set(piece.outputs) & wanted):
                parts[i].append(piece)
                of |= _variables(piece.inputs)
    known = {v for each in parts[1] for v in each.outputs}.union(given)
    kept = dict.fromkeys(
        v for each in [*(x.inputs for x in parts[1]), second] for v in each if _is_kept(v, known)
    )
    return _Parts(parts[0][::-1], parts[1][::-1], list(kept))


def _is_vector(value: Any) -> bool:
    return value.aval.ndim < 2


def _is_kept(value: Any, known: set[Any]) -> bool:
    return not isinstance(value, Literal) and value not in known


def _variables(values: Sequence[Any]) -> set[Any]:
    return {v for v in values if not isinstance(v, Literal)}


def _split_scan(
    operation: _Operation, needed: set[Any], wanted: set[Any]
) -> tuple[_Operation, _Operation | None]:
    """Returns a scan as two: one computes its results in `needed`, the other those in `wanted`.

    The first also returns, for each iteration, what the second reads.
    """
    eqn = operation.scan
    num_consts, num_carry = num_consts_and_carries(eqn)
    num_fixed = num_consts + num_carry
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    flat = inlined(eqn.params["jaxpr"])
    body, constants = flat.jaxpr, dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    operations = _operations(body)
    carries = body.invars[num_consts:num_fixed]
    of = lambda part: [body.outvars[i] for i in sorted(part)]

    def with_carries(part: set[int], operations: Callable[[], Any], others: set[int]) -> _Parts:
        """Adds the carries to a part that its operations read, unless the other part has them."""
        while True:
            found = operations()
            used = found.second if others else found.first
            read = _variables([v for x in used for v in x.inputs]) | _variables(of(part))
            more = {i for i, v in enumerate(carries) if v in read} - part - others
            if not more:
                return found
            part |= more

    early = {i for i, v in enumerate(eqn.outvars) if v in wanted and _is_vector(body.outvars[i])}
    own = early | {i for i, v in enumerate(eqn.outvars) if v in needed}
    with_carries(own, lambda: _parts(operations, of(own), [], ()), set())
    rest = {i for i, v in enumerate(eqn.outvars) if i not in own and v in wanted}
    if not rest:
        return operation, None
    again = lambda: {v for i, v in enumerate(carries) if i in rest}.union(
        body.invars[:num_consts], body.invars[num_fixed:]
    )
    parts = with_carries(rest, lambda: _parts(operations, of(own), of(rest), again()), own)
    kept = [v for v in parts.kept if v not in constants]
    split = [[i for i in sorted(part) if i < num_carry] for part in (own, rest)]
    ys = [[i for i in sorted(part) if i >= num_carry] for part in (own, rest)]
    stacked = [_Stacked(v, options["length"]) for v in kept]

    def piece(part: int, given: Sequence[Any], made: Sequence[Any]) -> _Operation:
        """Returns a scan that also reads `given`, and returns `made`, of each iteration."""
        own_operations = (parts.first, parts.second)[part]
        own_carries = [carries[i] for i in split[part]]
        results = [*of(split[part]), *of(ys[part]), *made]
        read = _variables([v for x in own_operations for v in x.inputs]) | _variables(results)
        of_eqn = dict(zip(body.invars, eqn.invars, strict=True))
        fixed = [v for v in body.invars[:num_consts] if v in read]
        names = [*(v for v in body.invars[num_fixed:] if v in read), *given]

        def run(values: Sequence[Any]) -> list[Any]:
            known = constants | dict(zip(fixed, values, strict=False))
            num = len(own_carries)
            start, xs = values[len(fixed) :][:num], values[len(fixed) + num :]

            def iteration(carry: list[Any], xs: list[Any]) -> Any:
                values = dict(zip([*own_carries, *names], [*carry, *xs], strict=True))
                found = _run(own_operations, known | values, results)
                return found[:num], found[num:]

            carry, found = jax.lax.scan(iteration, list(start), list(xs), **options)
            return [*carry, *found]

        inputs = [of_eqn[v] for v in [*fixed, *own_carries, *names] if v in of_eqn]
        outputs = [eqn.outvars[i] for i in [*split[part], *ys[part]]]
        if given:
            inputs += stacked
        return _Operation(inputs, [*outputs, *(stacked if made else ())], run)

    return piece(0, (), kept), piece(1, kept, ())


class _Stacked:
    """A variable of a loop's body, of all iterations."""

    def __init__(self, variable: Any, length: int) -> None:
        aval = variable.aval
        self.aval = jax.ShapeDtypeStruct((length, *aval.shape), aval.dtype)


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
        _Operation(
            eqn.invars,
            eqn.outvars,
            functools.partial(bind, eqn),
            eqn if eqn.primitive.name == "scan" else None,
        )
        for eqn in jaxpr.eqns
    ]
