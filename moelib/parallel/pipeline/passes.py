"""A function's forward and backward pass as separate functions, of which later ones load values.

The backward pass is one function, or two: the gradient of the input, then those of the weights.

The passes are parts of one trace of `jax.vjp`. Each operation belongs to the first pass whose
results need it, and a value that a later pass reads is saved. A loop over layers is split inside:
of two layers `y = tanh(x @ w)`, the trace and its three passes are, with one loop per line,

    trace        forward loop:  h = x @ w; y = tanh(h)
                 backward loop: dh = dy * (1 - tanh(h)**2); dx = dh @ w.T; dw = x.T @ dh
    forward      h = x @ w; y = tanh(h)                 saves x, h [2, ...]
    of_input     dh = dy * (1 - tanh(h)**2); dx = dh @ w.T    saves dh [2, ...]; x is saved already
    of_weights   dw = x.T @ dh

`w` is not saved: each pass has the parameters. `_BodySplit` finds the parts of a body.
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
    Body,
    BodyPart,
    Operation,
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
    such as scales of norms, are sums that take less than what they would save, and belong to the
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
        def run(params: Any, x: Any) -> Any:
            return fn(params, x, others, same)

        results, vjp, auxiliary = jax.vjp(run, params, x, has_aux=True)
        return *vjp(gradients), (results, auxiliary)

    gradients, _ = jax.eval_shape(fn, params, x, others, same)
    arguments = params, same, gradients, x, others
    closed, shapes = jax.make_jaxpr(passes, return_shape=True)(*arguments)
    flat = inlined(closed)
    _check_effects(flat)
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    # Trees of variables from here on.
    params, same, gradients, x, others = names = _like(arguments, flat.jaxpr.invars)
    of_params, of_x, results = _like(shapes, flat.jaxpr.outvars)
    in_every_pass = [*jax.tree.leaves(names[:2]), *constants]
    leaves_of_x, leaves_of_params = jax.tree.leaves(of_x), jax.tree.leaves(of_params)
    parts = _divided(
        operations_of(flat.jaxpr),
        jax.tree.leaves(results),
        [*leaves_of_params, *leaves_of_x],
        given=[*in_every_pass, *jax.tree.leaves(gradients)],
        params=in_every_pass,
    )
    later = _divided(
        parts.second,
        [*leaves_of_x, *filter(_is_vector, leaves_of_params)],
        leaves_of_params,
        given=in_every_pass,
        params=in_every_pass,
    )
    function = functools.partial(_function, constants)
    before = params, same, parts.saved, gradients
    return Passes(
        function(parts.first, (params, x, others, same), results, parts.saved),
        function(parts.second, before, of_x, of_params),
        function(later.first, before, of_x, later.saved),
        function(later.second, (params, same, later.saved), (), of_params),
        list(map(_struct, parts.saved)),
        list(map(_struct, later.saved)),
    )


def _struct(variable: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)


def _check_effects(closed: Any) -> None:
    if closed.effects:
        names = [x.eqn.primitive.name for x in walk(closed) if x.eqn.effects & closed.effects]
        raise UserError(
            f"mesh axis pipeline: a layer has the side effect {names[-1]}, which a pipeline would "
            "drop or repeat; remove it, such as jax.debug.print, or set pipeline=1."
        )


def _function(
    constants: Any, operations: Sequence[Operation], inputs: Any, results: Any, written: Any
) -> Callable[..., Any]:
    """Returns a jitted function of values of `inputs` and of entries for `written`.

    It returns the values of `results`, and the buffers of `written`: a scan writes a stacked output
    into its buffer if it has no other use.
    """
    returned, last = jax.tree.leaves(results), jax.tree.leaves(written)
    operations = _merged(operations, variables([*returned, *last]))
    uses = collections.Counter(v for v in [*returned, *last] if not isinstance(v, Literal))
    uses.update(v for each in operations for v in variables(each.inputs))
    stacked = {v for each in operations for v in each.stacked if uses[v] == 1}
    by_loop = [bool(variables([v]) & stacked) for v in last]

    def function(*args: Any) -> Any:
        *arguments, into = (jax.tree.leaves(each, is_leaf=is_entry) for each in args)
        values = dict(zip(jax.tree.leaves(inputs), itertools.chain(*arguments), strict=True))
        of_loops = {v: at for v, at, loop in zip(last, into, by_loop, strict=True) if loop}
        arrays = run(operations, constants | values, [*returned, *last], of_loops)
        buffers = [
            x if loop else at.write(x)
            for x, at, loop in zip(arrays[len(returned) :], into, by_loop, strict=True)
        ]
        return _like((results, written), [*arrays[: len(returned)], *buffers])

    return jax.jit(function)


def _like(tree: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


# -- Loops of one pass ---------------------------------------------------------------------------


def _merged(operations: Sequence[Operation], results: set[Any]) -> list[Operation]:
    """Returns operations, with each loop without carries merged into its only reader.

    The values of its iterations are then not stacked, unless they are results.
    """
    merged = list[Operation]()  # Last operation first.
    for each in reversed(operations):
        outputs = set(each.outputs)
        readers = [i for i, other in enumerate(merged) if outputs & variables(other.inputs)]
        if len(readers) == 1 and (loop := _merge(each, merged[readers[0]], results)):
            merged[readers[0]] = loop
        else:
            merged.append(each)
    return merged[::-1]


def _merge(first: Operation, second: Operation, results: set[Any]) -> Operation | None:
    """Returns one loop of two, the second of which reads outputs of the first.

    None if they are no loops of one length, if the first has carries, or if the second reads an
    output of the first as a whole.
    """
    one, two = first.scan, second.scan
    if one is None or two is None or one.carries or one.body.length != two.body.length:
        return None
    num_consts, num_whole = len(one.consts), len(two.consts) + len(two.carries)
    inside = dict(zip(first.outputs, one.returned, strict=True))
    if inside.keys() & variables(second.inputs[:num_whole]):
        return None
    sliced = list(zip(second.inputs[num_whole:], [*two.xs, *two.loads], strict=True))
    copies = [Operation([inside[v]], [name], list) for v, name in sliced if v in inside]
    others = [(v, name) for v, name in sliced if v not in inside]
    also_read = [v for v in first.outputs if v in results]
    part = two._replace(
        captured={**one.captured, **two.captured},
        operations=[*one.operations, *copies, *two.operations],
        consts=[*one.consts, *two.consts],
        xs=[*one.xs, *one.loads, *(name for _, name in others)],
        loads=(),
        saves=[*two.saves, *map(inside.__getitem__, also_read)],
    )
    whole = *first.inputs[:num_consts], *second.inputs[:num_whole]
    inputs = [*whole, *first.inputs[num_consts:], *(v for v, _ in others)]
    return part.operation(inputs, [*second.outputs, *also_read])


# -- Division of operations ----------------------------------------------------------------------


class _Parts(NamedTuple):
    """Operations in two parts, of which the second uses values of the first."""

    first: Sequence[Operation]
    second: Sequence[Operation]
    saved: Sequence[Any]  # Variables that the second part reads, does not compute and is not given.


def _divided(
    operations: Sequence[Operation],
    first_results: Sequence[Any],
    second_results: Sequence[Any],
    *,
    given: Collection[Any],
    params: Collection[Any],
) -> _Parts:
    """Returns the operations that the first results need, and the others that the second need.

    Args:
        operations: Operations of a jaxpr.
        first_results: Variables, or literals, that the first part computes.
        second_results: Those that the second part computes or saved values provide.
        given: Variables that the second part has, whatever the first saves.
        params: Variables among `given`. The second part repeats operations that need only them.
    """
    needed, wanted = variables(first_results), variables(second_results)
    of_params = set(params)
    for operation in operations:
        if variables(operation.inputs) <= of_params:
            of_params |= set(operation.outputs)
    first, second = list[Operation](), list[Operation]()  # Last operation first.
    for operation in reversed(operations):
        outputs = set(operation.outputs)
        early, late = operation, None
        if not outputs & needed:
            early, late = None, operation
        elif outputs <= of_params:
            late = operation
        elif outputs & (wanted - needed) and operation.kind in BODIES:
            early, late = _split(operation, needed, wanted, of_params)
        if early is not None:
            first.append(early)
            needed |= variables(early.inputs)
        if late is not None and set(late.outputs) & wanted:
            second.append(late)
            wanted |= variables(late.inputs)
    known = {v for each in second for v in each.outputs}.union(given)
    read = [v for each in second for v in each.inputs]
    saved = dict.fromkeys(
        v for v in [*read, *second_results] if not isinstance(v, Literal) and v not in known
    )
    return _Parts(first[::-1], second[::-1], list(saved))


def _is_vector(variable: Any) -> bool:
    return variable.aval.ndim < 2


def _split(
    operation: Operation, needed: set[Any], wanted: set[Any], of_params: set[Any]
) -> tuple[Operation, Operation | None]:
    """Returns an operation with a body as two: of its results in `needed`, and in `wanted`.

    The first also returns the values that the second loads. There is no second if the first
    computes all results.
    """
    eqn = operation.eqn
    body = BODIES[operation.kind](eqn)
    in_wanted = {i for i, v in enumerate(eqn.outvars) if v in wanted}
    in_first = {i for i, v in enumerate(eqn.outvars) if v in needed}
    in_first |= {i for i in in_wanted if _is_vector(body.jaxpr.outvars[i])}
    split = _BodySplit(body, in_first, in_wanted, of_params)
    if not split.second_results:
        return operation, None
    return split.operations()


class _BodySplit:
    """A body in two parts, each with the results that it returns and the carries that it reads.

    A carry of the first part that the second reads is saved in each iteration, so that the second
    does not compute it again. A body that cannot save (`Body.repeats`) computes it in both.

    Attributes:
        first_results: Indices of the results that the first part computes, carries included.
        second_results: Indices of the results that the second part computes.
    """

    def __init__(
        self, body: Body, first_results: set[int], wanted: set[int], of_params: set[Any]
    ) -> None:
        self._body = body
        self._operations = operations_of(body.jaxpr)
        operands = {v: body.operands[v] for v in [*body.consts, *body.xs]}
        self._params = {v for v, x in operands.items() if isinstance(x, Literal) or x in of_params}
        self.first_results = first_results
        first = self._first_part(wanted)
        self.second_results = wanted - first_results
        parts = self._second_part() if self.second_results else first
        self._first = first.first if body.repeats else parts.first
        self._second = parts.second
        self._saved = [v for v in parts.saved if v not in body.captured]

    def _first_part(self, wanted: set[int]) -> _Parts:
        """Returns the parts, after the carries that the first reads are among its results."""
        while True:
            parts = _divided(
                self._operations,
                self._variables(self.first_results),
                self._variables(wanted - self.first_results),
                given=self._body.jaxpr.invars,
                params=self._params,
            )
            carries = self._carries_read(parts.first, self.first_results)
            if carries <= self.first_results:
                return parts
            self.first_results |= carries

    def _second_part(self) -> _Parts:
        """Returns the parts, after the carries that only the second reads are among its results."""
        body = self._body
        while True:
            carries = [v for i, v in enumerate(body.carries) if i in self.second_results]
            parts = _divided(
                self._operations,
                [] if body.repeats else self._variables(self.first_results),
                self._variables(self.second_results),
                given=[*body.consts, *body.xs, *carries],
                params=self._params,
            )
            more = self._carries_read(parts.second, self.second_results)
            if not body.repeats:
                more -= self.first_results
            if more <= self.second_results:
                return parts
            self.second_results |= more

    def _variables(self, results: set[int]) -> list[Any]:
        return [self._body.jaxpr.outvars[i] for i in sorted(results)]

    def _read(self, operations: Sequence[Operation], returned: Sequence[Any]) -> set[Any]:
        """Returns the variables of the body that a part reads."""
        inputs = [v for each in operations for v in each.inputs]
        return variables([*inputs, *returned]) | self._body.always_read

    def _carries_read(self, operations: Sequence[Operation], results: set[int]) -> set[int]:
        """Returns the indices of the carries that a part reads."""
        read = self._read(operations, self._variables(results))
        return {i for i, v in enumerate(self._body.carries) if v in read}

    def operations(self) -> tuple[Operation, Operation]:
        """Returns both parts as operations; they share a new variable for each saved value."""
        outside = {v: _Saved(v, self._body.num_values(v)) for v in self._saved}
        first = self._operation(self._first, self.first_results, outside, saves=self._saved)
        return first, self._operation(self._second, self.second_results, outside, loads=self._saved)

    def _operation(
        self,
        operations: Sequence[Operation],
        results: set[int],
        outside: dict[Any, Any],
        *,
        loads: Sequence[Any] = (),
        saves: Sequence[Any] = (),
    ) -> Operation:
        body = self._body
        read = self._read(operations, [*self._variables(results), *saves])
        part = BodyPart(
            body,
            body.captured,
            operations,
            consts=[v for v in body.consts if v in read],
            carries=[v for i, v in enumerate(body.carries) if i in results],
            xs=[v for v in body.xs if v in read],
            results=sorted(results),
            loads=loads,
            saves=saves,
        )
        operands = [body.operands[v] for v in [*part.consts, *part.carries, *part.xs]]
        outputs = [body.eqn.outvars[i] for i in part.results]
        return part.operation(
            [*operands, *(outside[v] for v in loads)], [*outputs, *(outside[v] for v in saves)]
        )


class _Saved:
    """A variable for all values of a variable of a body."""

    def __init__(self, variable: Any, num_values: int) -> None:
        aval = variable.aval
        self.aval = aval.update(shape=(num_values, *aval.shape))
